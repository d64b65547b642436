"""A fake of the Python package amdsmi that answers from a profile, put into `sys.modules` for a block.

Names, parameters, enumerations, exceptions and shapes of answers are those of amdsmi 7.0.2. It behaves: nothing answers
before `amdsmi_init`, initialisations are counted, a handle of another session and a thing that is no handle are errors, and a
function that the fake does not have is an AttributeError, as in an older package. Calls are recorded.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml

from vime_rocm import probe
from vime_rocm.inventory import ORIGIN
from vime_rocm.process import CUDA, HIP, ROCR

PROFILES = Path(__file__).parent / "profiles"
STATUS = {
    1: "AMDSMI_STATUS_INVAL - Invalid parameters",
    2: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
    3: "AMDSMI_STATUS_NOT_YET_IMPLEMENTED - Feature not yet implemented",
    6: "AMDSMI_STATUS_DRM_ERROR - Error when called libdrm",
    10: "AMDSMI_STATUS_NO_PERM - Permission Denied",
    32: "AMDSMI_STATUS_NOT_INIT - Device not initialized",
    34: "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded",
    40: "AMDSMI_STATUS_NO_DATA - No data was found for given input",
}
INVALID, UNSUPPORTED, NOT_INIT = 1, 2, 32
NAME = "amdsmi"


class AmdSmiInitFlags(IntEnum):
    INIT_ALL_PROCESSORS = 0xFFFFFFFF
    INIT_AMD_CPUS = 1
    INIT_AMD_GPUS = 2
    INIT_AMD_APUS = 3
    INIT_NON_AMD_CPUS = 4
    INIT_NON_AMD_GPUS = 8


class AmdSmiMemoryType(IntEnum):
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiLinkType(IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_XGMI = 2
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_NOT_APPLICABLE = 3
    AMDSMI_LINK_TYPE_UNKNOWN = 4


class AmdSmiException(Exception):
    """Base of the package's errors."""


class AmdSmiLibraryException(AmdSmiException):
    """What the library answered, by its status code."""

    def __init__(self, err_code: int) -> None:
        self.err_code = abs(err_code)
        super().__init__(self.err_code)
        self.err_info = STATUS.get(self.err_code, "AMDSMI_STATUS_UNKNOWN_ERROR - An unknown error occurred")

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"

    def get_error_info(self, detailed: bool = True) -> str:
        return self.err_info if detailed else self.err_info.split(" - ")[0]

    def get_error_code(self) -> int:
        return self.err_code


class AmdSmiParameterException(AmdSmiException):
    """An argument of a wrong type."""

    def __init__(self, receivedValue: object, expectedType: type, msg: str | None = None) -> None:
        super().__init__(msg)
        self.err_code = None
        self.err_msg = msg or f"Invalid parameter:\nActual type: {type(receivedValue)}\nExpected type: {expectedType}"

    def __str__(self) -> str:
        return self.err_msg


class Handle(ctypes.c_void_p):
    """What the package calls a processor handle: a pointer."""


def _typed(value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise AmdSmiParameterException(value, kind)


class FakeLibrary:
    """The package's functions over a machine. Each public method is a function of the fake module.

    Args:
        machine: a profile, see `profiles/`.
    """

    def __init__(self, machine: Mapping[str, Any]) -> None:
        self._machine = machine
        self._devices: Sequence[Mapping[str, Any]] = expand_devices(machine["devices"])
        self._links: Mapping[str, Any] = machine.get("links", {})
        self._users = 0
        self._session = 0

    # ---- life

    def amdsmi_init(self, flag: AmdSmiInitFlags = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
        _typed(flag, AmdSmiInitFlags)
        if code := self._machine.get("init_error"):
            raise AmdSmiLibraryException(code)
        self._users += 1
        if self._users == 1:
            self._session += 1

    def amdsmi_shut_down(self) -> None:
        self._initialised()
        self._users -= 1

    def amdsmi_get_processor_handles(self) -> list[Handle]:
        self._initialised()
        return [Handle(self._address(index)) for index in range(len(self._devices))]

    def amdsmi_get_rocm_version(self) -> tuple[bool, str]:
        """Needs no initialisation: another library answers."""
        version = self._machine.get("rocm")
        return (True, version) if version else (False, "Could not find librocm-core.so")

    # ---- one device

    def amdsmi_get_gpu_asic_info(self, processor_handle: Handle) -> dict[str, Any]:
        device = self._device(processor_handle, "amdsmi_get_gpu_asic_info")
        return {
            "market_name": device.get("name") or "N/A",
            "vendor_id": device.get("vendor_id", "0x1002"),
            "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
            "subvendor_id": "0x1002",
            "device_id": device["device_id"],
            "rev_id": "0x00",
            "asic_serial": device["serial"],
            "oam_id": device.get("oam", "N/A"),
            "num_compute_units": device.get("compute_units", "N/A"),
            "target_graphics_version": device["arch"],
            "subsystem_id": device["device_id"],
        }

    def amdsmi_get_gpu_enumeration_info(self, processor_handle: Handle) -> dict[str, Any]:
        device = self._device(processor_handle, "amdsmi_get_gpu_enumeration_info")
        hip = device.get("hip_id", "N/A")
        render = 128 + device["number"]
        return {
            "drm_render": render,
            "drm_card": device["number"],
            "hsa_id": device["number"],
            "hip_id": hip,
            "hip_uuid": f"GPU-{device['uuid']}",
        }

    def amdsmi_get_gpu_kfd_info(self, processor_handle: Handle) -> dict[str, Any]:
        device = self._device(processor_handle, "amdsmi_get_gpu_kfd_info")
        return {"kfd_id": 1000 + device["number"], "node_id": 2 + device["number"], "current_partition_id": device["part"]}

    def amdsmi_get_gpu_device_uuid(self, processor_handle: Handle) -> str:
        return self._device(processor_handle, "amdsmi_get_gpu_device_uuid")["uuid"]

    def amdsmi_get_gpu_device_bdf(self, processor_handle: Handle) -> str:
        return self._device(processor_handle, "amdsmi_get_gpu_device_bdf")["bdf"]

    def amdsmi_get_gpu_memory_total(self, processor_handle: Handle, mem_type: AmdSmiMemoryType) -> int:
        _typed(mem_type, AmdSmiMemoryType)
        return self._device(processor_handle, "amdsmi_get_gpu_memory_total")["memory_bytes"]

    def amdsmi_get_gpu_driver_info(self, processor_handle: Handle) -> dict[str, str]:
        self._device(processor_handle, "amdsmi_get_gpu_driver_info")
        return {"driver_name": "amdgpu", "driver_version": self._machine["driver"], "driver_date": "N/A"}

    def amdsmi_get_gpu_compute_partition(self, processor_handle: Handle) -> str:
        return self._device(processor_handle, "amdsmi_get_gpu_compute_partition", "compute_partition")["compute_partition"]

    def amdsmi_get_gpu_memory_partition(self, processor_handle: Handle) -> str:
        return self._device(processor_handle, "amdsmi_get_gpu_memory_partition", "memory_partition")["memory_partition"]

    def amdsmi_topo_get_numa_node_number(self, processor_handle: Handle) -> int:
        return self._device(processor_handle, "amdsmi_topo_get_numa_node_number")["numa_node"]

    # ---- pairs

    def amdsmi_topo_get_link_type(self, processor_handle_src: Handle, processor_handle_dst: Handle) -> dict[str, int]:
        kind, hops = self._path(processor_handle_src, processor_handle_dst, "amdsmi_topo_get_link_type")
        return {"hops": hops, "type": int(kind)}

    def amdsmi_topo_get_p2p_status(self, processor_handle_src: Handle, processor_handle_dst: Handle) -> dict[str, Any]:
        """`type` is a C integer, not a Python one, as in the package."""
        kind, _ = self._path(processor_handle_src, processor_handle_dst, "amdsmi_topo_get_p2p_status")
        names = ("is_iolink_coherent", "is_iolink_atomics_32bit", "is_iolink_atomics_64bit", "is_iolink_dma")
        able = dict.fromkeys((*names, "is_iolink_bi_directional"), 1)
        return {"type": ctypes.c_uint32(int(kind)), "cap": able}

    def amdsmi_is_P2P_accessible(self, processor_handle_src: Handle, processor_handle_dst: Handle) -> bool:
        self._path(processor_handle_src, processor_handle_dst, "amdsmi_is_P2P_accessible")
        ends = [self._number(processor_handle_src), self._number(processor_handle_dst)]
        return sorted(ends) not in self._links.get("not_accessible", [])

    # ---- behind the functions

    def _initialised(self) -> None:
        if not self._users:
            raise AmdSmiLibraryException(NOT_INIT)

    def _address(self, index: int) -> int:
        return 0x10000 * self._session + 0x100 + index

    def _number(self, handle: object) -> int:
        _typed(handle, Handle)
        self._initialised()
        index = (getattr(handle, "value", None) or 0) - self._address(0)
        if not 0 <= index < len(self._devices):
            raise AmdSmiLibraryException(INVALID)
        return index

    def _device(self, handle: object, query: str, needs: str | None = None) -> Mapping[str, Any]:
        device = self._devices[self._number(handle)]
        if code := device.get("errors", {}).get(query):
            raise AmdSmiLibraryException(code)
        if needs is not None and device.get(needs) is None:
            raise AmdSmiLibraryException(UNSUPPORTED)
        return device

    def _path(self, one: object, other: object, query: str) -> tuple[AmdSmiLinkType, int]:
        first, second = self._device(one, query), self._device(other, query)
        if first["chip"] == second["chip"]:
            return AmdSmiLinkType.AMDSMI_LINK_TYPE_INTERNAL, 0
        if not self._links.get("xgmi"):
            return AmdSmiLinkType.AMDSMI_LINK_TYPE_PCIE, 2
        return AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI, 1


def expand_devices(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The devices of a profile: each group is `count` chips with `parts` devices on each, numbered through the node.

    What the package gives partitions of a chip in common is so here: the UUID and the memory are the chip's, and the part's
    number is in the function of the bus address. `each` changes single devices, by number.
    """
    devices: list[dict[str, Any]] = []
    chips = 0
    for group in groups:
        shared = {name: value for name, value in group.items() if name not in ("count", "parts", "numa", "each")}
        for local in range(group["count"]):
            chip, parts = chips + local, group.get("parts", 1)
            for part in range(parts):
                number = len(devices)
                device = shared | {
                    "number": number,
                    "chip": chip,
                    "part": part,
                    "hip_id": number,
                    "oam": chip,
                    "serial": f"0x{0xA1B2C3D4E5F60000 + chip:016X}",
                    "uuid": f"{chip:02x}ff{group['device_id'][2:]}-0000-1000-80e5-f6{chip:010x}",
                    "bdf": f"0000:{0x05 + 0x10 * chip:02x}:00.{part}",
                    "numa_node": local * group.get("numa", 1) // group["count"],
                }
                devices.append(device | group.get("each", {}).get(number, {}))
        chips += group["count"]
    return devices


def load_profile(name: str) -> dict[str, Any]:
    """A profile by file name without its ending."""
    return yaml.safe_load((PROFILES / f"{name}.yaml").read_text())


class FakeModule(ModuleType):
    """The module that `import amdsmi` gives; `calls` lists (function, positional arguments after the handles)."""

    def __init__(self, machine: Mapping[str, Any]) -> None:
        super().__init__(NAME)
        self.__version__ = machine.get("amdsmi", "7.0.2")
        self.calls: list[str] = []
        library, missing = FakeLibrary(machine), set(machine.get("missing_functions", ()))
        for name in dir(library):
            if name.startswith("amdsmi_") and name not in missing:
                setattr(self, name, self._recorded(name, getattr(library, name)))
        for exported in (
            AmdSmiInitFlags,
            AmdSmiMemoryType,
            AmdSmiLinkType,
            AmdSmiException,
            AmdSmiLibraryException,
            AmdSmiParameterException,
        ):
            setattr(self, exported.__name__, exported)

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return call


class _BrokenImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports as the real package does where the ROCm library beneath it is missing: it prints, then raises KeyError."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(NAME, self) if fullname == NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> NoReturn:
        print("Unable to find libamd_smi.so library try installing amd-smi-lib from your package manager")
        raise KeyError("libamd_smi.so")


@contextmanager
def installed(profile: str | Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Put a profile's machine in place for the block and yield the environment to probe with.

    The host's part is the profile's too, so that inventories are the same wherever the tests run.
    """
    machine = load_profile(profile) if isinstance(profile, str) else profile
    env = {name: value for name, value in os.environ.items() if name not in (HIP, CUDA, ROCR, "TMPDIR")}
    env |= {ORIGIN: machine["origin"], **machine.get("env", {})}
    host_facts = {"software": {}, **machine.get("host", {})}
    finder = _BrokenImport()
    with ExitStack() as undo:
        undo.callback(_restore_module, sys.modules.pop(NAME, None))
        if machine.get("import_error"):
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
        else:
            sys.modules[NAME] = FakeModule(machine)
        undo.enter_context(_replaced(probe, "read_host", lambda: copy.deepcopy(host_facts)))
        undo.enter_context(_replaced(probe, "read_mounts", lambda: machine.get("mounts", "")))
        yield env


def _restore_module(before: ModuleType | None) -> None:
    sys.modules.pop(NAME, None)
    if before is not None:
        sys.modules[NAME] = before


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[[], Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)
