"""A table of broken topologies: what each one is told, to the letter, and that the table knows every rule.

A case says what it is checked against under `given`: a model, the facts of the made-up platform `acme`, machines, needs.
`python tests/unit/topology/test_broken.py` writes what is said into the table; read the difference before you keep it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vime.errors import Errors, VimeError
from vime.facts.inventory import DeviceProfile, FabricDomain, NodeInventory, Tri
from vime.facts.memory import EngineSleep, NullMemory, Tag
from vime.facts.model import ModelShape
from vime.facts.process import EnvMode, EnvValue
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.plans import BIG
from vime.testing.platforms import GIB, STAYS, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology
from vime.topology.rules import NOTES, RULES

BROKEN = Path(__file__).parent / "broken"
MOE = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=64)
WIDE = replace(MOE, heads=64, kv_heads=8, experts=64, layers=16)
MODELS = {"tiny": TINY_MODEL, "big": BIG, "moe": MOE, "wide": WIDE}


@dataclass
class Acme(FakePlatform):
    """Discrete devices; with `domain_devices` their scale-up domains may span nodes."""

    domain_devices: int | None = None
    visible: str = "ACME_VISIBLE"

    def profile(self, name: str = "acme-80g") -> DeviceProfile:
        return replace(super().profile(name), domain_devices=self.domain_devices)

    def ray_binding(self, inventory: NodeInventory) -> Any:
        return replace(super().ray_binding(inventory), visible_env=(self.visible,), noset_env=("NOSET",))


@dataclass(frozen=True)
class Case:
    """A topology, what it is checked against, and what is said."""

    name: str
    topology: str
    says: str
    given: Mapping[str, Any] = field(default_factory=dict)


def read_cases() -> list[Case]:
    """Every case of every file, in order."""
    return [Case(**case) for path in sorted(BROKEN.glob("*.yaml")) for case in yaml.safe_load(path.read_text())]


def check(case: Case, folder: Path) -> Plan:
    """Load and plan. Raises what is wrong."""
    given, path = case.given, folder / "t.yaml"
    path.write_text(case.topology)
    loaded = load_topology(path, platform=given.get("use", "auto"))
    platforms = {"acme": _acme(given.get("acme", {})), "slots": FakePlatform(name="slots", virtual=True, devices_per_node=None)}
    nodes = {pool: tuple(_node(**node) for node in listed) for pool, listed in given.get("nodes", {}).items()}
    env = given.get("env", {})
    return make_plan(
        loaded,
        model=_model(given),
        needs=PlanNeeds(**given.get("needs", {})),
        platforms=platforms,
        inventories=nodes,
        here=Here(env, frozenset(nodes)) if env else Here(),
    )


def _model(given: Mapping[str, Any]) -> ModelShape:
    return MODELS[given.get("model", "tiny")]


def _acme(said: Mapping[str, Any]) -> Acme:
    fields = dict(said)
    if "memory_gib" in fields:
        fields["memory_bytes"] = fields.pop("memory_gib") * GIB
    if fields.pop("stuck", False):
        fields |= {"backend": NullMemory("no memory saver"), "sleep": EngineSleep(0, {Tag.KV: STAYS})}
    rules = {
        name: EnvValue(rule["value"], rule["why"], EnvMode(rule.get("mode", "default")), rule.get("scope", "process"))
        for name, rule in fields.pop("rules", {}).items()
    }
    if "offers" in fields:
        fields["offers"] = tuple((name, 1.0, tuple(sides)) for name, sides in fields["offers"].items())
    return Acme(rules=rules, **fields)


def _node(host: str, devices: int = 8, **facts: Any) -> NodeInventory:
    node = FakePlatform(name=facts.get("platform", "acme")).node(host, devices)
    for key in ("arch", "driver"):
        if key in facts:
            node = replace(node, **{key: facts[key]})
    if "fabric" in facts:
        name, clique, usable = facts["fabric"]
        node = replace(node, fabric=FabricDomain(name, str(clique), Tri(usable), facts.get("reason", "as it was read")))
    changed = {key: facts[key] for key in ("partition", "health") if key in facts}
    return replace(node, devices=(replace(node.devices[0], **changed), *node.devices[1:])) if changed else node


CASES = read_cases()
_ID = re.compile(r"\b([EW]\d{3}) ")


def told(case: Case, folder: Path) -> str:
    """The whole message, or the notes of a plan that goes on."""
    try:
        plan = check(case, folder)
    except VimeError as error:
        return str(error).replace(f"{folder}/", "")
    return "\n".join(note for note in plan.notes if not note.startswith("W281 ") or "W281" in case.says)


def ids(text: str) -> set[str]:
    return set(_ID.findall(text))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_topology_is_told_what_is_wrong(case: Case, tmp_path: Path) -> None:
    assert told(case, tmp_path) == case.says.rstrip("\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_error_has_an_id_and_a_next_step(case: Case, tmp_path: Path) -> None:
    try:
        check(case, tmp_path)
    except VimeError as error:
        for one in error.errors if isinstance(error, Errors) else (error,):
            assert re.match(r"[EW]\d{3} ", one.what), one.what
            assert one.what[:4] in RULES
            assert one.fix or one.what.startswith("E103 `")


def test_the_table_is_large_and_has_every_rule() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    met = set().union(*(ids(case.says) for case in CASES))
    assert met == {*RULES, *NOTES}


class _Block(str):
    """Text that is written as a block."""


class _Flow(dict[str, Any]):
    """A mapping that is written in one line."""


def _flow(value: Any) -> Any:
    return _Flow({key: _flow(part) for key, part in value.items()}) if isinstance(value, dict) else value


def write_cases() -> None:
    """Write every case with the message that it gets."""
    dumper = yaml.SafeDumper
    dumper.add_representer(_Block, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", str(text), style="|"))
    dumper.add_representer(_Flow, lambda d, data: d.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True))
    for path in sorted(BROKEN.glob("*.yaml")):
        blocks = []
        for case in (Case(**found) for found in yaml.safe_load(path.read_text())):
            with tempfile.TemporaryDirectory() as folder:
                says = _Block(told(case, Path(folder)) + "\n")
            given = {"given": _flow(dict(case.given))} if case.given else {}
            written = {"name": case.name, **given, "topology": _Block(case.topology), "says": says}
            blocks.append(yaml.dump([written], Dumper=dumper, sort_keys=False, width=120))
        path.write_text("\n".join(blocks))


if __name__ == "__main__":
    write_cases()
