"""Lets megatron-core run on a host.

megatron-core names its accelerator literally, through `torch.cuda` and `device="cuda"`. Instead of changing torch for the
whole process, every `megatron.core` module gets a stand-in for its module global `torch`: it hands out torch's own
attributes, except that the accelerator namespace is a host device and that factories place "cuda" tensors on the host.
Two tensor methods are reached by no module global, `Tensor.cuda` and `Tensor.type`; they are wrapped and act differently
only when megatron-core itself calls them. Ray, transformers and everything else in the process see torch unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGE = "megatron.core"
HOST = torch.device("cpu")

_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm", "Generator"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)


class _HostEvent:
    """A timing event: work on a host is done when the call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._at = 0.0

    def record(self, _stream: object = None) -> None:
        self._at = time.perf_counter()

    def wait(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._at - self._at) * 1e3


class _HostStream:
    """The one queue of a host, always empty."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = HOST

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self, event: _HostEvent | None = None) -> _HostEvent:
        event = event or _HostEvent()
        event.record()
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *_exc: object) -> None: ...


class _Generators(Sequence[torch.Generator]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


class _Ranges(ModuleType):
    """Profiler ranges that mark nothing."""

    def __init__(self) -> None:
        super().__init__(f"{__name__}.nvtx")

    def range_push(self, *_args: object, **_kwargs: object) -> int:
        return 0

    def range_pop(self) -> int:
        return 0

    @contextlib.contextmanager
    def range(self, *_args: object, **_kwargs: object) -> Iterator[None]:
        yield


class _HostDevice(ModuleType):
    """What megatron-core takes for `torch.cuda`: one device, the host."""

    Event = _HostEvent
    Stream = _HostStream

    def __init__(self) -> None:
        super().__init__(f"{__name__}.device")
        self.nvtx = _Ranges()
        self.random = self
        self.default_generators = _Generators()
        self._stream = _HostStream()

    def current_device(self) -> torch.device:
        return HOST

    def set_device(self, _device: object) -> None: ...

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_capability(self, _device: object = None) -> tuple[int, int]:
        return (0, 0)

    def get_device_name(self, _device: object = None) -> str:
        return "host"

    def get_device_properties(self, _device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name="host", major=0, minor=0, total_memory=0, multi_processor_count=1)

    def synchronize(self, _device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, _device: object = None) -> _HostStream:
        return self._stream

    default_stream = current_stream

    def stream(self, _stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    device = stream

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: object = None) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, _device: object = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def memory_stats(self, _device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, _device: object = None) -> None: ...

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        return (0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _is_accelerator(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory, updated=())
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_accelerator(kwargs.get("device")):
            kwargs["device"] = HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


class _DeviceMeta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        named = args[0] if args else kwargs.get("type", kwargs.get("device"))
        return HOST if _is_accelerator(named) else torch.device(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceMeta):
    """`torch.device`, with the accelerator's name meaning the host."""


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class _TorchStandIn(ModuleType):
    """Torch as megatron-core sees it. Attributes are copied on first use, so that later uses cost nothing."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _HostDevice()
        self.device = _Device
        self.autocast = _autocast
        for name in _FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if not name.startswith("__"):
            self.__dict__[name] = value
        return value


STAND_IN = _TorchStandIn()


def _mend_random(module: ModuleType) -> None:
    """RNG states are read and set below the namespace that the stand-in replaces."""

    def read(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def write(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    vars(module).update(_get_cuda_rng_state=read, _set_cuda_rng_state=write)
    logging.getLogger(module.__name__).addFilter(lambda r: "CPU RNG state changed within GPU RNG context" not in r.getMessage())


def _mend_jit(module: ModuleType) -> None:
    """The fuser needs a C++ compiler on a host; without it the same functions run as they are."""
    vars(module)["disable_jit_fuser"]()


def _mend_moe(module: ModuleType) -> None:
    """A name that is bound only where TransformerEngine imports, but read everywhere."""
    vars(module).setdefault("te_general_gemm", None)


def _mend_dispatcher(module: ModuleType) -> None:
    """Split sizes are turned into numbers only for tensors that lie on an accelerator."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    vars(module)["maybe_move_tensor_to_cpu"] = to_host


_MENDS: dict[str, Callable[[ModuleType], None]] = {
    f"{PACKAGE}.jit": _mend_jit,
    f"{PACKAGE}.tensor_parallel.random": _mend_random,
    f"{PACKAGE}.transformer.moe.moe_utils": _mend_moe,
    f"{PACKAGE}.transformer.moe.token_dispatcher": _mend_dispatcher,
}


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def _adapt(module: ModuleType) -> None:
    if vars(module).get("torch") is torch:
        vars(module)["torch"] = STAND_IN
    if mend := _MENDS.get(module.__name__):
        mend(module)


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then adapts the module: decorators and base classes have seen the real torch."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_ours(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _called_by_megatron() -> bool:
    return _is_ours(sys._getframe(2).f_globals.get("__name__", ""))


def _wrap_tensor_methods() -> None:
    real_type, real_move = torch.Tensor.type, torch.Tensor.cuda

    @functools.wraps(real_type)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real_type(self, *args, **kwargs)
        if isinstance(name, str) and name.startswith("torch.") and _called_by_megatron():
            return "torch.cuda." + name.removeprefix("torch.").removeprefix("cuda.")
        return name

    @functools.wraps(real_move)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else real_move(self, *args, **kwargs)

    tensor_type: Any = torch.Tensor
    tensor_type.type, tensor_type.cuda = type_name, move


def _quiet() -> None:
    """A host lacks the fused packages on purpose; what megatron-core says about that repeats in every rank and step."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+_tensor` is deprecated")


@functools.cache
def install() -> None:
    """Adapt megatron-core, now and whatever of it is imported later. Repeating it does nothing."""
    _quiet()
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if _is_ours(name) and isinstance(module, types.ModuleType):
            _adapt(module)
    _wrap_tensor_methods()
