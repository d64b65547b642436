"""The device side of a trainer process, as a platform provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class DeviceRuntime(Protocol):
    """Built by the factory that `vime_trainer_runtime` names, before megatron-core is imported."""

    device_type: str

    def set_device(self, local_index: int) -> None: ...

    def seed(self, seed: int) -> None: ...

    def rng_state(self) -> Any:
        """The device generator's state; picklable."""
        ...

    def set_rng_state(self, state: Any) -> None: ...

    def synchronize(self) -> None: ...

    def memory(self) -> Mapping[str, int]:
        """Bytes: `allocated`, `reserved`, `free`, `total` (whatever the platform knows)."""
        ...

    def empty_cache(self) -> None: ...


@runtime_checkable
class BindsHost(Protocol):
    """What a runtime may do besides: keep the process on the processors next to its device."""

    def bind_host(self, node_device: int) -> None:
        """Called before `set_device`. `node_device` is the device's place in its node's inventory, whatever is masked."""
        ...


@runtime_checkable
class BindsSockets(Protocol):
    """What a runtime may do besides: keep the collectives of its device on one network interface."""

    def bind_sockets(self, interface: str) -> None:
        """Called before the process group starts, with the loopback interface where all ranks are on this machine."""
        ...
