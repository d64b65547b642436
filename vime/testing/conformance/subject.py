"""What checks look at: a loaded platform, its machines, and the requests that a run would make of them."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from vime.errors import PluginError
from vime.facts.inventory import DeviceProfile, FabricDomain, NodeInventory, Tri
from vime.facts.model import ModelShape
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Hosts, Relation
from vime.platforms.base import BASE
from vime.platforms.discovery import PluginPolicy, discover
from vime.platforms.lineage import Platform, Plugin
from vime.platforms.probe import ENTRY_POINT_GROUP
from vime.testing.conformance.machine import Machine
from vime.testing.conformance.registry import NotRun

_Item = TypeVar("_Item")

DENSE = ModelShape("qwen3", 4, 128, 4, 2, 32, 384, 320, True, 830_000, 512)
SPARSE = ModelShape(
    "qwen3_moe", 4, 128, 4, 2, 32, 384, 320, False, 2_500_000, 512, experts=8, experts_per_token=2, expert_ffn=96
)
MODELS = (DENSE, SPARSE)
"""Shapes of a dense model and of a mixture of experts, for hooks that ask for one."""

RESIDENCIES = ("park", "resident")
_EDGE_BYTES = 400_000_000


@dataclass(frozen=True)
class Case:
    """A node to ask about: one of the plugin's machines, or a nominal one made from a profile."""

    name: str
    inventory: NodeInventory
    nominal: bool
    machine: Machine | None = None
    profile: DeviceProfile | None = None


@dataclass(frozen=True)
class Asked:
    """A request and what it is about, for messages."""

    about: str
    request: RoleRequest


@dataclass(frozen=True)
class AskedEdge:
    """An edge and what it is about, for messages."""

    about: str
    edge: Edge


@dataclass(eq=False)
class Subject:
    """A platform under test.

    Args:
        platform: the lineage.
        namespace: the leaf's own module or object, with `VIME_PLUGIN` and the hook implementations.
        machines: where its answers are looked at. `foreign`: where its probe must say no.
        device: the hardware is here; checks that need it run.
        folder: for files that checks write.
        module: the importable module of the plugin, for checks in a child process; None for an object in memory.
        distribution: the installed distribution, for checks of its metadata; None for an object in memory.
        search_path: further folders from which a child process imports.
        budget_s: how long all hooks together may take for one node. `refusal_s`: how long a probe may take to say no.
    """

    platform: Platform
    namespace: object
    machines: tuple[Machine, ...]
    foreign: tuple[Machine, ...] = ()
    device: bool = False
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    module: str | None = None
    distribution: str | None = None
    search_path: tuple[str, ...] = ()
    budget_s: float = 2.0
    refusal_s: float = 1.0

    @property
    def name(self) -> str:
        return self.platform.name

    def ask(self, hook: str, *arguments: Any) -> Any:
        """The platform's answer. Raises NotRun where the hook fails: that it must answer is a check of its own (C05)."""
        try:
            return getattr(self.platform, hook.removeprefix("vime_"))(*arguments)
        except PluginError as error:
            raise NotRun(f"{hook} does not answer ({error.what}); C05 reports it") from error

    # ---- nodes

    @cached_property
    def usable(self) -> tuple[Machine, ...]:
        """Machines whose devices roles can be placed on; the hardware first where it is."""
        found = [machine for machine in self.machines if machine.usable]
        return tuple(sorted(found, key=lambda machine: machine.origin != "hardware"))

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every usable machine that can be read, and a nominal node of every profile."""
        return (*self._real_cases(), *self._nominal_cases())

    @cached_property
    def real(self) -> tuple[Case, ...]:
        """Machines only. Raises NotRun where there is none."""
        return _some((case for case in self.cases if not case.nominal), "no machine of the plugin can be read; C12 reports it")

    @cached_property
    def nominal(self) -> tuple[Case, ...]:
        """Profiles only. Raises NotRun where there is none."""
        return _some((case for case in self.cases if case.nominal), "the platform has no nominal devices")

    def _real_cases(self) -> Iterator[Case]:
        for machine in self.usable:
            with machine.installed() as ctx:
                try:
                    inventory = self.platform.inventory(ctx)
                except PluginError:
                    continue
            if inventory.devices:
                yield Case(f"machine {machine.name}", inventory, nominal=False, machine=machine)

    def _nominal_cases(self) -> Iterator[Case]:
        try:
            profiles = self.platform.profiles()
        except PluginError:
            return
        for profile in profiles:
            yield Case(f"profile {profile.name}", nominal_node(profile), nominal=True, profile=profile)

    # ---- requests

    def requests(self, kind: RoleKind | None = None, *, cases: Iterable[Case] | None = None) -> Iterator[Asked]:
        """Requests of trainers and engines of every case: alone, and sharing devices, parked or resident, tp 1 and 2."""
        kinds = RoleKind if kind is None else (kind,)
        for case in self.cases if cases is None else cases:
            for one in kinds:
                for tp in sizes(case.inventory):
                    yield Asked(f"{case.name}, {one} tp={tp}", self.request(case, one, tp=tp))
                    for residency in RESIDENCIES:
                        about = f"{case.name}, {one} tp={tp}, residency {residency}"
                        yield Asked(about, self.request(case, one, tp=tp, residency=residency))

    def request(
        self, case: Case, kind: RoleKind, *, tp: int = 1, residency: str | None = None, first: int = 0, node: int = 0
    ) -> RoleRequest:
        """One role on `tp` devices of a node. With `residency` it shares them with the other role."""
        nodes = (case.inventory,) if node == 0 else (case.inventory, neighbour(case.inventory))
        capabilities = self.ask("vime_capabilities", case.inventory)
        name, other = ("actor", "rollout") if kind is RoleKind.TRAINER else ("rollout", "actor")
        return RoleRequest(
            role=name,
            kind=kind,
            placement=RolePlacement(name, tuple(Slot(node, first + index) for index in range(tp))),
            inventories=nodes,
            capabilities=capabilities,
            parallel=Parallel(tp=tp),
            dtype=capabilities.default_dtype,
            shared_with=() if residency is None else (other,),
            residency=residency,
            software=case.inventory.software.get(str(kind), {}),
            threads=1,
        )

    def edges(self, *, cases: Iterable[Case] | None = None) -> Iterator[AskedEdge]:
        """Weight flows of every case: over one device set, also on two hosts, inside a node, inside a fabric domain, across the
        network.
        """
        for case in self.cases if cases is None else cases:
            for relation in relations(case.inventory):
                yield AskedEdge(f"{case.name}, {relation}", self.edge(case, relation))
            yield AskedEdge(f"{case.name}, {Relation.SAME_DEVICE} on two hosts", self.edge_on_two_hosts(case))

    def edge(self, case: Case, relation: Relation) -> Edge:
        """A trainer and an engine of one device each, so near to each other."""
        residency = "park" if relation is Relation.SAME_DEVICE else None
        trainer = self.request(case, RoleKind.TRAINER, residency=residency)
        far = relation in (Relation.SAME_DOMAIN, Relation.NETWORK)
        first = 1 if relation is Relation.SAME_NODE else 0
        engine = self.request(case, RoleKind.ENGINE, residency=residency, first=first, node=1 if far else 0)
        if far:
            trainer = replace(trainer, inventories=engine.inventories)
        if relation is Relation.NETWORK:
            trainer, engine = (replace(r, inventories=tuple(map(without_fabric, r.inventories))) for r in (trainer, engine))
        return Edge(trainer, engine, relation, _EDGE_BYTES)

    def edge_on_two_hosts(self, case: Case) -> Edge:
        """A rank and an engine that share a device, and once more on a second host."""
        near = self.edge(case, Relation.SAME_DEVICE)
        slots, nodes = (Slot(0, 0), Slot(1, 0)), (case.inventory, neighbour(case.inventory))
        placement = RolePlacement(near.trainer.role, slots)
        trainer = replace(near.trainer, placement=placement, inventories=nodes, parallel=Parallel(dp=2))
        return replace(near, trainer=trainer, engine=replace(near.engine, inventories=nodes), hosts=Hosts.EACH)


def _some(items: Iterable[_Item], reason: str) -> tuple[_Item, ...]:
    found = tuple(items)
    if not found:
        raise NotRun(reason)
    return found


def sizes(inventory: NodeInventory) -> tuple[int, ...]:
    """Tensor-parallel sizes that a node can hold, out of 1 and 2."""
    return (1, 2) if len(inventory.devices) >= 2 else (1,)


def relations(inventory: NodeInventory) -> tuple[Relation, ...]:
    """How near two roles on such nodes can be."""
    several = len(inventory.devices) >= 2
    fabric = inventory.fabric is not None and inventory.fabric.usable is Tri.YES
    return (
        Relation.SAME_DEVICE,
        *([Relation.SAME_NODE] if several else []),
        *([Relation.SAME_DOMAIN] if fabric else []),
        Relation.NETWORK,
    )


def neighbour(inventory: NodeInventory) -> NodeInventory:
    """A second node of the same kind, in the same fabric domain where there is one."""
    devices = tuple(replace(device, uuid=f"{device.uuid}-b") for device in inventory.devices)
    return replace(inventory, hostname=f"{inventory.hostname}-b", devices=devices)


def without_fabric(inventory: NodeInventory) -> NodeInventory:
    """The node outside every usable fabric domain."""
    if inventory.fabric is None:
        return inventory
    none = FabricDomain(inventory.fabric.id, inventory.fabric.clique, Tri.NO, "the check puts a network between the nodes")
    return replace(inventory, fabric=none)


def nominal_node(profile: DeviceProfile) -> NodeInventory:
    """One node as a plan makes it from a profile; two slots where the topology decides."""
    from vime.topology.model import Pool
    from vime.topology.profiles import nominal_nodes
    from vime.yamltree import Where, from_value

    tree = from_value({}, Where("conformance kit", 0))
    return nominal_nodes("nominal", Pool(platform=profile.platform), profile, demand=2, tree=tree)[0]


def load_subject(
    name: str, *, machines: Sequence[Machine] = (), foreign: Sequence[Machine] = (), device: bool = False, folder: Path
) -> Subject:
    """A platform through real discovery, allowed by its name; or a plugin that is not installed, by its module's name.

    Raises PluginError with the reason where it does not load.
    """
    found = discover(PluginPolicy.read(platform=name))
    installed = name in {row.name for row in found.status}
    if not installed and (module := _module(name)) is not None:
        plugin = Plugin.of(module)
        above = () if plugin.info.parent == BASE else found.platform(plugin.info.parent).plugins
        platform, value, distribution = Platform((*above, plugin)), name, None
    else:
        platform, row = found.platform(name), found.row(name)
        module, value, distribution = EntryPoint(name, row.module, ENTRY_POINT_GROUP).load(), row.module, row.distribution
    return Subject(
        platform=platform,
        namespace=module,
        machines=tuple(machines),
        foreign=tuple(foreign),
        device=device,
        folder=folder,
        module=value.partition(":")[0],
        distribution=distribution,
    )


def _module(name: str) -> ModuleType | None:
    """The module of that name; None where there is none. Raises PluginError where it does not import."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
    except ModuleNotFoundError:
        return None
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        what = f"module {name} does not import: {type(error).__name__}: {error}"
        raise PluginError(what, fix="mend the import; no library of a vendor belongs there") from error
