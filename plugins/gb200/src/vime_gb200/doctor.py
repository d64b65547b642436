"""What usually goes wrong on a tray. Everything is read from the inventory, so that a recording gives the same findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.facts.inventory import NodeInventory, Tri
from vime_gb200 import fabric
from vime_gb200.inventory import DEVICES_PER_TRAY, NUMACTL
from vime_gb200.process import CLIQUE_LIMIT, RANKS_PER_CLIQUE

_ATS = 2
_ADDRESSING: Mapping[int, str] = {0: "none", 1: "HMM", 2: "ATS"}
_CDMM_DRIVER = Version("580")
_NEEDED: Mapping[str, tuple[str, ...]] = {"trainer": ("torch", "megatron-core"), "engine": ("vllm", "torch")}


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings of this platform; cuda's come beside them."""
    devices: Sequence[fabric.Facts] = ctx.inventory.vendor.get("devices") or ()
    yield _devices(ctx.inventory)
    if devices:
        yield from _registration(devices)
        yield _tray(devices)
        yield _channels(ctx.inventory.vendor.get("imex_channels"))
        yield _addressing(ctx.inventory, devices)
    yield _fabric(ctx.inventory)
    yield _memory_nodes(ctx.inventory)
    yield from _numactl(ctx.inventory)
    yield from _wheels(ctx.inventory)
    yield from _environment(ctx)
    yield from _hints(ctx.inventory)


def _ok(name: str, finding: str) -> Check:
    return Check(f"gb200.{name}", Severity.OK, finding)


def _devices(node: NodeInventory) -> Check:
    count = len(node.devices)
    if count == DEVICES_PER_TRAY:
        return _ok("devices", f"{count} devices: a whole tray")
    fix = f"give the container every device of the tray, and write `devices_per_node: {DEVICES_PER_TRAY}` in the topology"
    return Check("gb200.devices", Severity.WARNING, f"{count} devices, a tray has {DEVICES_PER_TRAY}", fix)


def _registration(devices: Sequence[fabric.Facts]) -> Iterator[Check]:
    """One finding per device: its state and health."""
    for device in devices:
        name = f"fabric-{device['index']}"
        terms = [term for term in fabric.device_terms(device) if term.holds is not Tri.YES]
        if not terms:
            yield _ok(name, f"device {device['index']} is in clique {fabric.clique_of(device)} of {fabric.domain_id(device)}")
            continue
        severity = Severity.ERROR if any(term.holds is Tri.NO for term in terms) else Severity.WARNING
        what = f"device {device['index']}: " + "; ".join(term.text for term in terms)
        fix = "see `nvidia-smi -q -i INDEX` under Fabric; check that NVLink Subnet Manager and Fabric Manager run on the rack"
        yield Check(f"gb200.{name}", severity, what, fix.replace("INDEX", str(device["index"])))


def _tray(devices: Sequence[fabric.Facts]) -> Check:
    mixed = next((term.text for term in fabric.tray_terms(devices, None) if term.name == "tray"), None)
    if mixed is None:
        return _ok("cliques", "the devices of this tray name one domain at most")
    fix = "move the whole tray into one partition of the rack's NVLink fabric, then reset the devices"
    return Check("gb200.cliques", Severity.ERROR, mixed, fix)


def _channels(channels: Sequence[str] | None) -> Check:
    if channels:
        return _ok("imex", f"IMEX channels: {', '.join(channels[:4])}")
    what = "no IMEX channel under /dev/nvidia-caps-imex-channels: device memory cannot be shared with other trays"
    if channels is None:
        what = "IMEX channels could not be looked for"
    fix = (
        "load the driver with NVreg_CreateImexChannel0=1 and start nvidia-imex (channels are gone after a reboot); on "
        "Kubernetes use a ComputeDomain of the DRA driver and leave the IMEX service off"
    )
    return Check("gb200.imex", Severity.WARNING if channels is None else Severity.ERROR, what, fix)


def _fabric(node: NodeInventory) -> Check:
    domain = node.fabric
    if domain is None:
        return Check(
            "gb200.fabric", Severity.WARNING, "the inventory names no fabric domain", "record it again with this plugin"
        )
    if domain.usable is Tri.YES:
        return _ok("fabric", f"domain {domain.id}, clique {domain.clique}: {domain.reason}")
    word = "cannot be used" if domain.usable is Tri.NO else "is not known to work"
    what = f"NVLink between trays {word}, plans count the network: {domain.reason}"
    severity = Severity.ERROR if domain.usable is Tri.NO else Severity.WARNING
    return Check("gb200.fabric", severity, what, "mend what the findings gb200.fabric-N, gb200.cliques and gb200.imex name")


def _addressing(node: NodeInventory, devices: Sequence[fabric.Facts]) -> Check:
    """Address translation by the processor (ATS), and whether device memory is a memory node of the host or kept apart."""
    modes = {mode for device in devices if (mode := device.get("addressing_mode")) is not None}
    if not modes:
        fix = "update the driver, or see `nvidia-smi -q` under Addressing Mode"
        return Check("gb200.addressing", Severity.INFO, "the driver does not tell the addressing mode", fix)
    if modes != {_ATS}:
        told = ", ".join(_ADDRESSING.get(mode, f"code {mode}") for mode in sorted(modes))
        what = f"addressing mode {told}, expected ATS: processors and devices do not share page tables"
        return Check("gb200.addressing", Severity.WARNING, what, "update the driver; see `nvidia-smi -q` under Addressing Mode")
    own = sorted({number for device in devices if (number := device.get("memory_numa_node")) is not None})
    if not own:
        return _ok("addressing", "ATS; device memory is no memory node of the host (CDMM)")
    what = f"ATS; device memory is memory node {', '.join(map(str, own))} of the host"
    if not _newer(node.vendor.get("driver")):
        return _ok("addressing", what)
    fix = (
        "load the driver with NVreg_CoherentGPUMemoryMode=driver (CDMM), so that the kernel places nothing there; host code "
        "that reads device memory then needs GDRCopy"
    )
    return Check("gb200.addressing", Severity.INFO, f"{what}: the kernel may place host pages in it", fix)


def _newer(driver: str | None) -> bool:
    """Whether the driver has CDMM."""
    try:
        return Version(driver or "") >= _CDMM_DRIVER
    except InvalidVersion:
        return False


def _memory_nodes(node: NodeInventory) -> Check:
    homeless = [device.index for device in node.devices if device.numa_node is None]
    if not homeless:
        return _ok("numa", "every device knows the memory node of its Grace")
    what = (
        f"the Grace of device {', '.join(map(str, homeless))} is unknown: processes are not bound, and copies to the other "
        "Grace take about three times as long"
    )
    fix = "let the container see /sys/devices/system/node and all processors of the tray (cpuset)"
    return Check("gb200.numa", Severity.WARNING, what, fix)


def _numactl(node: NodeInventory) -> Iterator[Check]:
    found = node.vendor.get(NUMACTL)
    if found is True:
        yield _ok("numactl", "numactl is installed: vLLM binds its workers")
    elif found is False:
        what = "numactl is not installed: vLLM's workers are not bound to their Grace"
        yield Check("gb200.numactl", Severity.WARNING, what, "apt-get install numactl; run containers with --cap-add SYS_NICE")


def _wheels(node: NodeInventory) -> Iterator[Check]:
    """Packages that a role cannot run without: on aarch64 an installer may find no wheel, or one without device code."""
    for role, names in _NEEDED.items():
        present: Mapping[str, str] = node.software.get(role, {})
        missing = [name for name in names if name not in present]
        if missing:
            what = f"this node cannot be a {role}: {', '.join(missing)} not installed"
            fix = "install wheels for aarch64 that are built with CUDA; those for x86-64 do not run here"
            yield Check(f"gb200.wheels-{role}", Severity.WARNING, what, fix)
        else:
            yield _ok(f"wheels-{role}", ", ".join(f"{name} {present[name]}" for name in names))
    if "vllm" in node.software.get("engine", {}) and "vllm-router" not in node.software.get("router", {}):
        what = "vllm-router is not installed: some of its releases have wheels for x86-64 only"
        yield Check("gb200.wheels-router", Severity.WARNING, what, "run the router on another node, or build it from source")


def _environment(ctx: DoctorContext) -> Iterator[Check]:
    env: Mapping[str, Any] = ctx.env
    if env.get("NCCL_CUMEM_ENABLE") == "0":
        what = "NCCL_CUMEM_ENABLE=0: NCCL leaves NVLink between trays unused and does not say so"
        yield Check("gb200.cumem", Severity.ERROR, what, "unset NCCL_CUMEM_ENABLE for trainer and engine alike")
    usable = ctx.inventory.fabric.usable if ctx.inventory.fabric else Tri.UNKNOWN
    if env.get("NCCL_MNNVL_ENABLE") == "0" and usable is Tri.YES:
        what = "NCCL_MNNVL_ENABLE=0 although the fabric is fine: traffic between trays goes over the network"
        fix = f"unset NCCL_MNNVL_ENABLE, unless a communicator has more than {RANKS_PER_CLIQUE} ranks in one clique"
        yield Check("gb200.mnnvl", Severity.WARNING, what, fix)
    if env.get("NCCL_MNNVL_ENABLE") == "1" and usable is Tri.NO:
        what = "NCCL_MNNVL_ENABLE=1 although the fabric cannot be used: NCCL ends with an error"
        yield Check("gb200.mnnvl", Severity.ERROR, what, "unset NCCL_MNNVL_ENABLE")


def _hints(node: NodeInventory) -> Iterator[Check]:
    """What no reading shows on a healthy tray."""
    if node.fabric is not None and node.fabric.usable is Tri.YES:
        condition, effect = CLIQUE_LIMIT
        fix = f"keep groups at {RANKS_PER_CLIQUE} ranks of one clique, or set NCCL_MNNVL_ENABLE=0 in env.trainer and env.engine"
        yield Check("gb200.clique-size", Severity.INFO, f"{condition}: {effect}", fix)
    what = (
        "`nvidia-smi topo -m` shows every network card as SYS from every device of a tray: the distance does not say which "
        "card is near"
    )
    fix = "choose cards by memory node (/sys/class/net/NAME/device/numa_node), and leave NCCL_NET_GDR_LEVEL=SYS"
    yield Check("gb200.network-cards", Severity.INFO, what, fix)
