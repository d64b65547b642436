"""One platform: a plugin, its parents and the typed questions that the core asks them.

Every lineage has its own plugin manager, so that two platforms of one run cannot answer for each other. Parents are
registered first: the leaf answers first, None falls through to its parent, a wrapper amends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pluggy

from vime.errors import PluginError
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.diagnosis import Check, DoctorContext, Match, ProbeContext, RecordedFixture, Severity
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import EnvValue, MegatronAdaptation, RoleRequest, TrainerRuntime, VllmDefaults
from vime.facts.transports import Edge, Side, TransportOffer
from vime.hooks.markers import PROJECT, PluginInfo
from vime.hooks.specs import RULES, VimeSpecs
from vime.platforms import base, merge
from vime.platforms.strict import HookError, Implementation, attributed, implementations
from vime.platforms.trace import TRACE_VARIABLE, HookCall, OnCall, append_to

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A loaded plugin: who it is, where it comes from, its checked hooks."""

    info: PluginInfo
    distribution: str
    version: str
    hooks: tuple[Implementation, ...]

    @classmethod
    def of(cls, namespace: object, *, distribution: str = "", version: str = "") -> Plugin:
        """Check a module or object that carries `VIME_PLUGIN`. Raises PluginError."""
        info = getattr(namespace, "VIME_PLUGIN", None)
        if not isinstance(info, PluginInfo):
            raise PluginError(
                f"{getattr(namespace, '__name__', namespace)!r} has no VIME_PLUGIN",
                fix="add `VIME_PLUGIN = PluginInfo(name, parent=...)` from vime.hooks",
            )
        return cls(info, distribution, version, implementations(info.name, namespace))

    @property
    def name(self) -> str:
        return self.info.name


class _Registered:
    """What pluggy sees of a plugin: one attribute per guarded hook."""

    def __init__(self, plugin: Plugin) -> None:
        for implementation in plugin.hooks:
            setattr(self, implementation.hook, implementation.call)


class Platform:
    """A lineage and the questions it answers; the only place that calls hooks.

    Args:
        plugins: parents first, ending with the platform itself; `base` is put in front when it is missing.

    Raises PluginError when a required hook has no implementation above `base`.
    """

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        if not plugins or plugins[0].name != base.BASE:
            plugins = (Plugin.of(base, distribution="vime"), *plugins)
        self.plugins = tuple(plugins)
        self._check_required()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(VimeSpecs)
        self._registered = {plugin.name: _Registered(plugin) for plugin in self.plugins}
        for plugin in self.plugins:
            self._manager.register(self._registered[plugin.name], name=plugin.name)
        if trace := os.environ.get(TRACE_VARIABLE):
            self.monitor(append_to(trace))

    @classmethod
    def of(cls, *namespaces: object) -> Platform:
        """A platform from modules or objects with `VIME_PLUGIN`, parents first: for tests and the conformance kit."""
        return cls([Plugin.of(namespace) for namespace in namespaces])

    def _check_required(self) -> None:
        answered = {hook.hook for plugin in self.plugins for hook in plugin.hooks if not hook.wrapper}
        missing = [name for name, rule in RULES.items() if rule.required and name not in answered]
        if missing:
            raise PluginError(
                f"nothing in {' -> '.join(self.lineage)} implements {', '.join(missing)}, which every platform must answer",
                where=f"plugin {self.name}, hook {missing[0]}",
                fix=f"implement {', '.join(missing)} in {self.name}, or name a parent that does",
            )

    def __repr__(self) -> str:
        return f"Platform({' -> '.join(self.lineage)})"

    @property
    def name(self) -> str:
        return self.plugins[-1].name

    @property
    def lineage(self) -> tuple[str, ...]:
        """Names from the platform itself up to `base`."""
        return tuple(plugin.name for plugin in reversed(self.plugins))

    def monitor(self, on_call: OnCall) -> None:
        """Call `on_call` after every hook call of this platform."""

        def before(hook: str, _impls: Sequence[Any], arguments: Mapping[str, Any]) -> None:
            pass

        def after(outcome: pluggy.Result[Any], hook: str, impls: Sequence[Any], arguments: Mapping[str, Any]) -> None:
            error = outcome.exception
            on_call(
                HookCall(
                    platform=self.name,
                    hook=hook,
                    arguments=dict(arguments),
                    plugins=tuple(impl.plugin_name for impl in impls),
                    answer=None if error else outcome.get_result(),
                    error=f"{type(error).__name__}: {error}" if error else None,
                )
            )

        self._manager.add_hookcall_monitoring(before, after)

    # ---- device discovery

    def probe(self, ctx: ProbeContext) -> tuple[Match, ...]:
        """Matches of the lineage, parents first, asked in this process. A probe that raises is logged and left out."""
        matches: list[Match] = []
        for plugin in self._implementers("vime_probe"):
            try:
                matches += self._alone(plugin, "vime_probe", ctx=ctx)
            except PluginError as error:
                _log.warning("%s", error)
        return tuple(matches)

    def inventory(self, ctx: ProbeContext) -> NodeInventory:
        return self._first("vime_inventory", NodeInventory, ctx=ctx)

    def profiles(self) -> tuple[DeviceProfile, ...]:
        return merge.merge_profiles(self._all("vime_profiles"))

    def capabilities(self, inventory: NodeInventory) -> Capabilities:
        return self._first("vime_capabilities", Capabilities, inventory=inventory)

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return self._first("vime_ray_binding", RayBinding, inventory=inventory)

    # ---- process

    def process_env(self, request: RoleRequest) -> Mapping[str, EnvValue]:
        """One rule per variable, merged parents first. Raises PluginError where rules of the lineage contradict."""
        return merge.merge_env(self._all("vime_process_env", request=request), where=self._where("vime_process_env"))

    def trainer_runtime(self, request: RoleRequest) -> TrainerRuntime:
        return self._first("vime_trainer_runtime", TrainerRuntime, request=request)

    def megatron_adapt(self, request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
        return self._first("vime_megatron_adapt", MegatronAdaptation, request=request, model=model)

    def vllm_defaults(self, request: RoleRequest) -> VllmDefaults:
        layers = self._all("vime_vllm_defaults", request=request)
        return merge.merge_defaults(layers, where=self._where("vime_vllm_defaults"))

    # ---- collective backends

    def collective(self, request: RoleRequest, group: GroupRequest) -> CollectiveSpec:
        return self._first("vime_collective", CollectiveSpec, request=request, group=group)

    # ---- memory offload

    def memory_backend(self, request: RoleRequest) -> MemoryBackend | NullMemory:
        return cast(MemoryBackend | NullMemory, self._first("vime_memory_backend", object, request=request))

    def engine_sleep(self, request: RoleRequest) -> EngineSleep:
        return self._first("vime_engine_sleep", EngineSleep, request=request)

    # ---- weight-transfer kernels

    def transports(self, edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
        """This side's half offers, one per protocol, the leaf's first; a child's replaces its parent's."""
        layers = self._all("vime_transports", edge=edge, side=side)
        return merge.merge_offers(layers, side, where=self._where("vime_transports"))

    # ---- planning

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        return self._first("vime_perf_model", PerfTable, inventory=inventory)

    # ---- diagnosis

    def doctor_checks(self, ctx: DoctorContext) -> tuple[Check, ...]:
        """Findings of the lineage, parents first. A plugin whose checks raise yields one error finding instead."""
        checks: list[Check] = []
        for plugin in self._implementers("vime_doctor_checks"):
            try:
                checks += [check for part in self._alone(plugin, "vime_doctor_checks", ctx=ctx) for check in part]
            except PluginError as error:
                fix = error.fix or f"mend or update plugin {plugin}"
                checks.append(Check(f"{plugin}.doctor", Severity.ERROR, f"the checks of {plugin} failed: {error.what}", fix))
        return tuple(checks)

    def fixture(self, ctx: ProbeContext) -> RecordedFixture | None:
        """A recording for replay, None where the platform makes none."""
        return self._call("vime_fixture", ctx=ctx)

    # ---- calling

    def _where(self, hook: str) -> str:
        return f"platform {self.name}, hook {hook}"

    def _call(self, hook: str, **arguments: Any) -> Any:
        try:
            return getattr(self._manager.hook, hook)(**arguments)
        except HookError:
            raise
        except Exception as error:
            raise attributed(self.name, hook, error) from error

    def _first(self, hook: str, kind: type[_Answer], **arguments: Any) -> _Answer:
        """The answer of a *first* hook; `kind` only narrows the type, the guard has checked it."""
        answer = self._call(hook, **arguments)
        if answer is None:
            raise PluginError(
                f"nobody answered: every implementation in {' -> '.join(self.lineage)} returned None",
                where=self._where(hook),
                fix=f"let {self.name} answer {hook} for these arguments",
            )
        return cast(_Answer, answer)

    def _all(self, hook: str, **arguments: Any) -> list[Any]:
        """Contributions to an *all* hook, parents first (pluggy lists the leaf first)."""
        return list(reversed(self._call(hook, **arguments)))

    def _implementers(self, hook: str) -> list[str]:
        return [p.name for p in self.plugins if any(own.hook == hook for own in p.hooks)]

    def _alone(self, plugin: str, hook: str, **arguments: Any) -> list[Any]:
        """Ask one plugin of the lineage only. Raises PluginError naming it."""
        others = [shown for name, shown in self._registered.items() if name != plugin]
        try:
            return self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        except HookError:
            raise
        except Exception as error:
            raise attributed(plugin, hook, error) from error
