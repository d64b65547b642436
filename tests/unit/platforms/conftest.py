"""Plugins to test with: as modules built in place, and as distributions (dist-info directories) on the path."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime.facts.capabilities import Capabilities
from vime.facts.inventory import Device, NodeInventory
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Relation

HEAD = """
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec
from vime.facts.diagnosis import Check, Match, RecordedFixture, Severity
from vime.facts.inventory import Device, DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, NullMemory
from vime.facts.perf import PerfTable
from vime.facts.process import EnvMode, EnvValue, Factory, MegatronAdaptation, TrainerRuntime, VllmDefaults
from vime.facts.transports import Side, TransferCost, TransportOffer
from vime.hooks import PluginInfo, hookimpl
"""

REQUIRED = """
@hookimpl
def vime_inventory(ctx):
    return NodeInventory("host", NAME, "x86_64", (Device(0, "u0", NAME, 2**30),), 1, 2**30)
@hookimpl
def vime_capabilities(inventory):
    return Capabilities(NAME, ("float32",), "float32")
@hookimpl
def vime_ray_binding(inventory):
    return RayBinding(NAME)
@hookimpl
def vime_trainer_runtime(request):
    return TrainerRuntime(Factory("acme.runtime:Runtime"), NAME)
@hookimpl
def vime_collective(request, group):
    return CollectiveSpec(NAME, 60.0, ("sum",))
"""

Build = Callable[..., types.ModuleType]
Install = Callable[..., Path]


def source_of(name: str, body: str, *, parent: str, complete: bool) -> str:
    info = f'NAME = "{name}"\nVIME_PLUGIN = PluginInfo(NAME, parent="{parent}")\n'
    return HEAD + info + (REQUIRED if complete else "") + textwrap.dedent(body)


@pytest.fixture
def build() -> Build:
    """`build(name, body, parent=, complete=)`: a plugin module; `complete` adds an answer to every required hook."""

    def make(name: str, body: str = "", *, parent: str = "base", complete: bool = True) -> types.ModuleType:
        module = types.ModuleType(f"plugin_{name}")
        exec(compile(source_of(name, body, parent=parent, complete=complete), f"<{name}>", "exec"), module.__dict__)
        return module

    return make


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(name, ...)`: a distribution on `sys.path` that provides a plugin; nothing is really installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("VIME_PLUGINS", raising=False)
    made: list[str] = []

    def make(
        name: str,
        body: str = "",
        *,
        parent: str = "base",
        complete: bool = True,
        api: str | None = ">=1.0,<2",
        distribution: str | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
    ) -> Path:
        owner = distribution or f"{name}-plugin"
        module = f"{owner.replace('-', '_')}_{name}"
        made.append(module)
        (site / f"{module}.py").write_text(source_of(name, body, parent=parent, complete=complete))
        info = site / f"{owner.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        words = "" if api is None else f"Keywords: hardware,vime-hooks{api},fast\n"
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: {version}\n{words}{needs}")
        points = info / "entry_points.txt"
        known = points.read_text() if points.exists() else "[vime.plugins]\n"
        points.write_text(f"{known}{name} = {module}\n")
        importlib.invalidate_caches()
        return site / f"{module}.py"

    yield make
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def inventory() -> NodeInventory:
    return NodeInventory("host", "acme", "x86_64", (Device(0, "u0", "acme", 2**30),), 1, 2**30)


Request = Callable[..., RoleRequest]


@pytest.fixture
def request_for(inventory: NodeInventory) -> Request:
    """`request_for(kind, tp=, threads=, inventory=)`: a role's request."""

    def make(
        kind: RoleKind = RoleKind.TRAINER, *, tp: int = 1, threads: int = 1, node: NodeInventory = inventory
    ) -> RoleRequest:
        slots = tuple(Slot(0, index) for index in range(tp))
        return RoleRequest(
            role="actor" if kind is RoleKind.TRAINER else "rollout",
            kind=kind,
            placement=RolePlacement("actor", slots),
            inventories=(node,),
            capabilities=Capabilities("cpu", ("float32",), "float32", collectives=("gloo",)),
            parallel=Parallel(tp=tp),
            dtype="float32",
            threads=threads,
        )

    return make


@pytest.fixture
def edge_for(request_for: Request) -> Callable[[Relation], Edge]:
    def make(relation: Relation) -> Edge:
        return Edge(request_for(RoleKind.TRAINER), request_for(RoleKind.ENGINE), relation, 4 * 2**20)

    return make
