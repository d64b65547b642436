"""What processes need: the request a runtime hook gets, environment, factories, engine and trainer adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vime.facts.capabilities import Capabilities
from vime.facts.inventory import NodeInventory


@dataclass(frozen=True, slots=True)
class Factory:
    """Code by name, built in the process that owns it: `module:callable`, called with `options` as keywords."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **extra: Any) -> Any:
        """Import and call the target. Raises ImportError or AttributeError with the target's name."""
        return self.load()(**self.options, **extra)

    def load(self) -> Any:
        """Import the target and return it uncalled."""
        import importlib

        module, _, name = self.target.partition(":")
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value


class RoleKind(StrEnum):
    """Who a process is."""

    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of the parallel axes of one role (an engine's `dp` is inside the engine).

    `vpp` is no axis of devices: it is the number of pieces in which a rank holds its pipeline stage.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    vpp: int = 1

    @property
    def devices(self) -> int:
        """Devices that one model replica set uses: tp x pp x cp x dp."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class Slot:
    """One device of the plan: node position, device position on the node."""

    node: int
    device: int


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """Where a role's ranks (or an engine's workers) sit, in rank order."""

    role: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """What every runtime hook gets: one role's place and needs, never the configuration.

    `shared_with` are the roles that use the same devices; `residency` is `park` or `resident` (None before the
    plan has decided). `software` maps a package to its version in the role's own interpreter.
    """

    role: str
    kind: RoleKind
    placement: RolePlacement
    inventories: tuple[NodeInventory, ...]
    capabilities: Capabilities
    parallel: Parallel
    dtype: str
    shared_with: tuple[str, ...] = ()
    residency: str | None = None
    fp8: str | None = None
    deterministic: bool = False
    software: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    """Host threads the process may use for computation."""


class EnvMode(StrEnum):
    """default: the user's value wins. require: another value is an error. forbid: this value is an error.

    Two modes are for variables that hold a comma list of `option:value`, from the user or from the machine's own
    environment: `option` puts one in (in place of another value of it), `without` takes the named option out. The other
    options stay.
    """

    DEFAULT = "default"
    REQUIRE = "require"
    FORBID = "forbid"
    OPTION = "option"
    WITHOUT = "without"


@dataclass(frozen=True, slots=True)
class EnvValue:
    """One environment rule. `scope` is `process`, or `both_equal` where trainer and engine must agree.

    `protocols` are the weight transports for which they must, where it is not all of them.
    """

    value: str
    why: str
    mode: EnvMode = EnvMode.DEFAULT
    scope: str = "process"
    protocols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerRuntime:
    """The trainer process's device side.

    `bootstrap` is built before megatron-core is imported and returns an object with the methods of
    `vime.trainer.runtime.DeviceRuntime` (device, seed, memory, RNG, synchronise).
    """

    bootstrap: Factory
    device_type: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Override:
    """A Megatron setting that the platform forces, and why."""

    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class MegatronAdaptation:
    """Pieces of the trainer that depend on the hardware.

    Factories build classes or callables: `norm` and `core_attention` replace spec modules, `optimizer` is a fused
    Adam with Apex's contract. None keeps megatron-core's own. `overrides` go over the derived transformer config.
    `fp8_recipe` names the scaling recipe that is native to the hardware. `limits` are known faults, as
    `condition -> what happens`.
    """

    norm: Factory | None = None
    core_attention: Factory | None = None
    optimizer: Factory | None = None
    transformer_engine: bool = False
    overrides: Mapping[str, Override] = field(default_factory=dict)
    checkpoint_formats: tuple[str, ...] = ("torch_dist",)
    async_save: bool = False
    fp8_recipe: str | None = None
    limits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VllmDefaults:
    """How an engine is launched on this hardware; the user's `vllm:` section wins over `args`.

    `args` are vLLM argument names with underscores. `launch` is the module run by `python -m`. `entry_points` are names
    in vLLM's plugin groups that must load. `expected_platform` is the class that vLLM must resolve.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, EnvValue] = field(default_factory=dict)
    launch: str | None = None
    entry_points: tuple[str, ...] = ()
    expected_platform: str | None = None
