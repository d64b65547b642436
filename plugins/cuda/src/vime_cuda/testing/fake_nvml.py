"""A fake NVML beneath the real `pynvml`: its functions take the ctypes arguments that the library's take.

The profile of a machine says what each function answers; its keys are NVML's names without `nvmlDeviceGet`. What a profile
leaves out is NotSupported, a value `ERR NAME` is the error NVML_ERROR_NAME, and functions under `absent` are not in the
library at all, as in an older driver. A function that the fake itself does not know raises UnknownCall, so that new
questions are answered on purpose.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vime.platforms.host import parse_cpulist
from vime_cuda import probe
from vime_cuda.inventory import ORIGIN_VARIABLE

PROFILES = Path(__file__).parent / "profiles"
_HANDLES = 0x1000
_SUCCESS = 0


class UnknownCall(AssertionError):
    """Somebody called a function that the fake does not know."""


class _Answered(Exception):
    """An NVML return code instead of an answer."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class _Function:
    """What `getattr(library, name)` gives: callable, with the attributes that ctypes functions let callers set."""

    name: str
    body: Callable[..., None]
    calls: list[str]
    restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(self.name)
        try:
            self.body(*arguments)
        except _Answered as answered:
            return answered.code
        return _SUCCESS


@dataclass
class FakeNvml:
    """The library object. `calls` lists the functions called, in order; `unknown` those it has no answer for."""

    profile: Mapping[str, Any]
    nvml: Any
    calls: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    started: int = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.profile.get("absent", ()):
            raise AttributeError(name)
        if name == "nvmlErrorString":
            return lambda code: f"NVML error {code}".encode()
        body = _FUNCTIONS.get(name)
        if body is None:
            self.unknown.append(name)
            raise UnknownCall(f"the fake NVML has no {name}; teach it in vime_cuda.testing.fake_nvml")
        return _Function(name, lambda *arguments: body(self, *arguments), self.calls)

    # ---- what the functions need

    def code(self, name: str) -> int:
        return getattr(self.nvml, f"NVML_ERROR_{name}")

    def fail(self, name: str) -> None:
        raise _Answered(self.code(name))

    def running(self) -> None:
        if not self.started:
            self.fail("UNINITIALIZED")

    def value(self, found: Any) -> Any:
        """A profile's value; absent ones and `ERR NAME` are the library's return codes."""
        if found is None:
            self.fail("NOT_SUPPORTED")
        if isinstance(found, str) and found.startswith("ERR "):
            self.fail(found.removeprefix("ERR "))
        return found

    def device(self, handle: Any) -> Mapping[str, Any]:
        self.running()
        position = (ctypes.cast(handle, ctypes.c_void_p).value or 0) - _HANDLES
        if not 0 <= position < len(self.profile["devices"]):
            self.fail("INVALID_ARGUMENT")
        return self.profile["devices"][position]

    def answer(self, handle: Any, key: str) -> Any:
        return self.value(self.device(handle).get(key))


# ---- the library's functions: (library, ctypes arguments...) -> None, or _Answered


def _init(lib: FakeNvml, _flags: Any) -> None:
    if error := lib.profile.get("init"):
        lib.value(error)
    lib.started += 1


def _shutdown(lib: FakeNvml) -> None:
    lib.running()
    lib.started -= 1


def _system_text(key: str) -> Callable[..., None]:
    def body(lib: FakeNvml, buffer: Any, _size: Any) -> None:
        lib.running()
        buffer.value = str(lib.value(lib.profile.get(key))).encode()

    return body


def _system_number(key: str) -> Callable[..., None]:
    def body(lib: FakeNvml, out: Any) -> None:
        lib.running()
        out._obj.value = lib.value(lib.profile.get(key))

    return body


def _count(lib: FakeNvml, out: Any) -> None:
    lib.running()
    out._obj.value = len(lib.profile["devices"])


def _handle(lib: FakeNvml, index: Any, out: Any) -> None:
    lib.running()
    if index.value >= len(lib.profile["devices"]):
        lib.fail("INVALID_ARGUMENT")
    lib.value(lib.profile["devices"][index.value].get("Handle", "there"))
    ctypes.c_void_p.from_buffer(out._obj).value = _HANDLES + index.value


def _text(key: str) -> Callable[..., None]:
    def body(lib: FakeNvml, handle: Any, buffer: Any, _size: Any) -> None:
        buffer.value = str(lib.answer(handle, key)).encode()

    return body


def _number(key: str) -> Callable[..., None]:
    def body(lib: FakeNvml, handle: Any, out: Any) -> None:
        out._obj.value = int(lib.answer(handle, key))

    return body


def _pair(key: str) -> Callable[..., None]:
    def body(lib: FakeNvml, handle: Any, first: Any, second: Any) -> None:
        first._obj.value, second._obj.value = lib.answer(handle, key)

    return body


def _fields(key: str) -> Callable[..., None]:
    """Fill a structure's fields of the same names."""

    def body(lib: FakeNvml, handle: Any, out: Any) -> None:
        _fill(out._obj, lib.answer(handle, key))

    return body


def _fill(structure: Any, values: Mapping[str, Any]) -> None:
    for name, _kind in structure._fields_:
        value = values.get(name)
        if value is None or name == "version":
            continue
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, list):
            getattr(structure, name)[:] = value
        elif isinstance(getattr(structure, name), bytes) and isinstance(value, int):
            setattr(structure, name, bytes([value]))
        else:
            setattr(structure, name, value)


def _fabric(lib: FakeNvml, handle: Any, out: Any) -> None:
    """Refuses a newer structure than the driver's, which the recorded `version` names."""
    found = lib.answer(handle, "FabricV")
    if out._obj.version > found.get("version", 0x3000028):
        lib.fail("ARGUMENT_VERSION_MISMATCH")
    _fill(out._obj, found)


def _affinity(lib: FakeNvml, handle: Any, size: int, out: Any) -> None:
    for position, word in enumerate(lib.answer(handle, "CpuAffinity")[:size]):
        out._obj[position] = word


def _link(lib: FakeNvml, handle: Any, link: int, out: Any, *, key: str) -> None:
    links = lib.answer(handle, "NvLink")
    if link >= len(links):
        lib.fail("INVALID_ARGUMENT")
    found = lib.value(links[link])
    out._obj.value = lib.value(found.get(key))


def _peer(lib: FakeNvml, first: Any, second: Any, capability: int, out: Any) -> None:
    a, b = lib.device(first)["Index"], lib.device(second)["Index"]
    names = {int(lib.nvml.NVML_P2P_CAPS_INDEX_NVLINK): "nvlink", 0: "read"}
    found = lib.value(lib.profile.get("p2p"))
    pair = found[a][b] if isinstance(found, list) else found
    out._obj.value = lib.value(pair.get(names[capability]))


def _field_values(lib: FakeNvml, handle: Any, count: Any, out: Any) -> None:
    found = lib.device(handle).get("Fields", {})
    for entry in out._obj[: count.value]:
        value = found.get(entry.fieldId)
        entry.nvmlReturn = _SUCCESS if value is not None else lib.code("NOT_SUPPORTED")
        entry.value.uiVal = value or 0


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "nvmlInitWithFlags": _init,
    "nvmlShutdown": _shutdown,
    "nvmlSystemGetDriverVersion": _system_text("driver"),
    "nvmlSystemGetNVMLVersion": _system_text("nvml"),
    "nvmlSystemGetCudaDriverVersion_v2": _system_number("cuda"),
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _handle,
    "nvmlDeviceGetName": _text("Name"),
    "nvmlDeviceGetUUID": _text("UUID"),
    "nvmlDeviceGetCudaComputeCapability": _pair("CudaComputeCapability"),
    "nvmlDeviceGetMemoryInfo": _fields("MemoryInfo"),
    "nvmlDeviceGetPciInfo_v3": _fields("PciInfo"),
    "nvmlDeviceGetMigMode": _pair("MigMode"),
    "nvmlDeviceGetCurrPcieLinkGeneration": _number("CurrPcieLinkGeneration"),
    "nvmlDeviceGetCurrPcieLinkWidth": _number("CurrPcieLinkWidth"),
    "nvmlDeviceGetMaxPcieLinkGeneration": _number("MaxPcieLinkGeneration"),
    "nvmlDeviceGetMaxPcieLinkWidth": _number("MaxPcieLinkWidth"),
    "nvmlDeviceGetNumaNodeId": _number("NumaNodeId"),
    "nvmlDeviceGetPersistenceMode": _number("PersistenceMode"),
    "nvmlDeviceGetAddressingMode": lambda lib, handle, out: setattr(out._obj, "value", lib.answer(handle, "AddressingMode")),
    "nvmlDeviceGetC2cModeInfoV": _fields("C2cModeInfoV"),
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetGpuFabricInfo": _fields("FabricV"),
    "nvmlDeviceGetPlatformInfo": _fields("PlatformInfo"),
    "nvmlDeviceGetCpuAffinity": _affinity,
    "nvmlDeviceGetNvLinkState": lambda *a: _link(*a, key="state"),
    "nvmlDeviceGetNvLinkVersion": lambda *a: _link(*a, key="version"),
    "nvmlDeviceGetP2PStatus": _peer,
    "nvmlDeviceGetFieldValues": _field_values,
}


# ---- profiles


def load_profile(name: str) -> dict[str, Any]:
    """A profile by name. `like` names another whose entries it changes, `device` holds what all devices have in common."""
    found = _written(name)
    common = found.pop("device", {})
    found["devices"] = [_merged(_merged(common, d), {"Index": i}) for i, d in enumerate(found.get("devices", []))]
    return found


def _written(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    other = found.pop("like", None)
    return found if other is None else _merged(_written(other), found)


def _merged(below: Any, above: Any) -> Any:
    """Mappings by key, lists of devices by position; anything else is replaced."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        keys = dict.fromkeys((*below, *above))
        return {k: _merged(below[k], above[k]) if k in below and k in above else above.get(k, below.get(k)) for k in keys}
    if _mappings(below) and _mappings(above):
        tail = below[len(above) :] + above[len(below) :]
        return [_merged(a, b) for a, b in zip(below, above, strict=False)] + tail
    return above


def _mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def host_facts(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile's host in the form of `vime.platforms.host.read_host`."""
    found = profile["host"]
    numa = [{**node, "cpus": list(parse_cpulist(str(node["cpus"])))} for node in found["numa"]]
    software = {role: dict(names) for role, names in found.get("software", {}).items()}
    return {
        "hostname": found["hostname"],
        "arch": found["arch"],
        "cpus": sorted(cpu for node in numa for cpu in node["cpus"]),
        "memory_bytes": found["memory_bytes"],
        "numa": numa,
        "software": {"trainer": {}, "engine": {}, "router": {}, **software},
    }


# ---- in place of the library


@contextlib.contextmanager
def installed(profile: Mapping[str, Any]) -> Iterator[FakeNvml | None]:
    """Put the fake beneath `pynvml` and the profile's host beneath `vime_cuda.probe` for the block.

    Yields the library, None where the profile says `library: missing`: then `pynvml`'s own loading runs and fails.
    """
    nvml: Any = importlib.import_module("pynvml")
    before = (nvml.nvmlLib, nvml._nvmlLib_refcount, nvml.CDLL, probe.surroundings, dict(nvml._nvmlGetFunctionPointer_cache))
    library = None if profile.get("library") == "missing" else FakeNvml(profile, nvml)
    nvml.nvmlLib, nvml._nvmlLib_refcount = library, 0
    nvml._nvmlGetFunctionPointer_cache.clear()
    if library is None:
        nvml.CDLL = _no_library
    numa_of = dict(profile.get("pci_numa", {}))
    probe.surroundings = probe.Surroundings(
        read_host=lambda _software: host_facts(profile),
        imex_channels=lambda: profile.get("imex_channels"),
        pci_numa_node=numa_of.get,
    )
    try:
        yield library
    finally:
        nvml.nvmlLib, nvml._nvmlLib_refcount, nvml.CDLL, probe.surroundings, cache = before
        nvml._nvmlGetFunctionPointer_cache.clear()
        nvml._nvmlGetFunctionPointer_cache.update(cache)


def _no_library(name: str, *_arguments: Any, **_named: Any) -> Any:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


@contextlib.contextmanager
def machine(name: str) -> Iterator[Mapping[str, str]]:
    """The named profile as this machine; yields the environment to probe with."""
    profile = load_profile(name)
    hidden = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    env = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("NCCL_")}
    with installed(profile):
        yield {**env, ORIGIN_VARIABLE: str(profile["origin"])}
