"""One deliberate fault a time in the sound platform, with the checks that must catch it and no others."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sound_platform as sound

from vime.errors import PluginError
from vime.facts.bindings import RayBinding
from vime.facts.diagnosis import Check, Match, Severity
from vime.facts.memory import EngineSleep, NullMemory, Tag, TagSemantics
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import EnvMode, EnvValue, Factory, Override, RoleKind
from vime.facts.transports import Precondition, Relation, Side, TransferCost
from vime.hooks import PluginInfo, hookimpl
from vime.platforms.lineage import Platform, Plugin
from vime.testing.conformance import Machine, Subject, plain_host

HERE = Path(__file__).resolve().parent


@contextmanager
def pretended(devices: str) -> Iterator[Mapping[str, str]]:
    yield {sound.VARIABLE: devices}


TWO = Machine("two", "synthetic", lambda: pretended("2"), 2)
NONE = Machine("none", "synthetic", lambda: pretended("0"), 0, matches=False, readable=False)
MACHINES = (TWO, NONE)


@dataclass(frozen=True)
class Fault:
    """`hooks` replace implementations, `change` alters the subject. `caught_by` are exactly the checks that must fail."""

    name: str
    caught_by: tuple[str, ...]
    hooks: Mapping[str, Callable[..., Any]] | None = None
    change: Callable[[Subject], None] | None = None


def subject(folder: Path, hooks: Mapping[str, Callable[..., Any]] | None = None, **named: Any) -> Subject:
    """The sound platform, with some of its implementations replaced."""
    namespace = SimpleNamespace(**{n: v for n, v in vars(sound).items() if n.startswith("vime_") or n == "VIME_PLUGIN"})
    for name, function in (hooks or {}).items():
        setattr(namespace, name, hookimpl(function))
    platform = Platform.of(namespace)
    return Subject(platform, namespace, MACHINES, (plain_host(),), folder=folder, **named)


LIMITS: Mapping[tuple[str, ...], Mapping[str, float]] = {("C09",): {"budget_s": 0.3}, ("C11",): {"refusal_s": 0.2}}
"""Shorter limits where a fault is to be slow."""


def planted(fault: Fault, folder: Path) -> Subject:
    made = subject(folder, fault.hooks, **LIMITS.get(fault.caught_by, {}))
    if fault.change:
        fault.change(made)
    return made


# ---- ways to plant


def amend(hook: str, **fields: Any) -> Mapping[str, Callable[..., Any]]:
    """The hook's own answer with other fields."""
    return through(hook, lambda answer: replace(answer, **fields))


def through(hook: str, change: Callable[[Any], Any]) -> Mapping[str, Callable[..., Any]]:
    """The hook's own answer, changed."""
    original = getattr(sound, hook)

    @functools.wraps(original)
    def changed(*arguments: Any) -> Any:
        return change(original(*arguments))

    return {hook: changed}


def with_rule(name: str, value: str, why: str = "because", **named: Any) -> Mapping[str, Callable[..., Any]]:
    return through("vime_process_env", lambda rules: {**rules, name: EnvValue(value, why, **named)})


def with_offers(change: Callable[[Any, Any, Any], Any]) -> Mapping[str, Callable[..., Any]]:
    """Every offer of the platform's own, changed by (offer, edge, side); None leaves it out."""

    def vime_transports(edge: Any, side: Any) -> Any:
        return [new for offer in sound.offers(edge, side) if (new := change(offer, edge, side)) is not None]

    return {"vime_transports": vime_transports}


def link(**fields: Any) -> Mapping[str, Callable[..., Any]]:
    return with_offers(lambda offer, edge, side: replace(offer, **fields) if offer.protocol == "sound_link" else offer)


def link_engine(target: str) -> Mapping[str, Callable[..., Any]]:
    def change(offer: Any, edge: Any, side: Any) -> Any:
        mine = offer.protocol == "sound_link" and side is Side.ENGINE
        return replace(offer, factory=Factory(target)) if mine else offer

    return with_offers(change)


def devices(change: Callable[[Any], Any]) -> Mapping[str, Callable[..., Any]]:
    return through("vime_inventory", lambda node: replace(node, devices=tuple(map(change, node.devices))))


def sleep(**fields: Any) -> Mapping[str, Callable[..., Any]]:
    """The deep sleep with other fields; the pause stays."""
    return through("vime_engine_sleep", lambda answer: replace(answer, **fields) if answer.level else answer)


def rate(quantity: Quantity) -> Mapping[str, Callable[..., Any]]:
    return {"vime_perf_model": lambda inventory: PerfTable({"host_link": quantity})}


def memory(target: str) -> Mapping[str, Callable[..., Any]]:
    return amend("vime_memory_backend", factory=Factory(target))


def tag(which: Tag, semantics: TagSemantics | None) -> Mapping[str, Callable[..., Any]]:
    tags = {t: s for t, s in {**sound.MEMORY.tags, which: semantics}.items() if s is not None}
    return amend("vime_memory_backend", tags=tags)


def doctor(*checks: Check) -> Mapping[str, Callable[..., Any]]:
    return {"vime_doctor_checks": lambda ctx: checks}


def written(source: str, name: str) -> Callable[[Subject], None]:
    """Let the plugin come from a module of its own, on the path of child processes: the sound one and more source."""

    def change(made: Subject) -> None:
        (made.folder / f"{name}.py").write_text(f"{Path(sound.__file__).read_text()}\n{source}")
        made.module = name
        made.search_path = (str(made.folder), str(HERE))

    return change


def distribution(metadata: str) -> Callable[[Subject], None]:
    """Let the plugin come from an installed distribution with this metadata."""

    def change(made: Subject) -> None:
        info = made.folder / "sound_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sound-dist\nVersion: 1.0\n{metadata}")
        sys.path.append(str(made.folder))
        made.distribution = "sound-dist"

    return change


def namespace(**members: Any) -> Callable[[Subject], None]:
    """Let the plugin's own object have other members than those that were registered."""

    def change(made: Subject) -> None:
        for name, value in members.items():
            setattr(made.namespace, name, value)

    return change


# ---- implementations that misbehave


def rising(hook: str, make: Callable[[Any, int], Any]) -> Mapping[str, Callable[..., Any]]:
    numbers = count()
    return through(hook, lambda answer: make(answer, next(numbers)))


def acting(hook: str, act: Callable[[], object]) -> Mapping[str, Callable[..., Any]]:
    def change(answer: Any) -> Any:
        act()
        return answer

    return through(hook, change)


def needs_vendor_facts(inventory: Any) -> PerfTable:
    return PerfTable({"host_link": Quantity(1e9 * inventory.vendor["devices"], "bytes/s", Provenance.DERIVED, "per device")})


def slow_to_refuse(ctx: Any) -> Match | None:
    match = sound.vime_probe(ctx)
    if match is None:
        time.sleep(0.25)
    return match


def careless_inventory(ctx: Any) -> Any:
    facts = ctx.recording or {
        "devices": int(ctx.env[sound.VARIABLE]) // len(ctx.env[sound.VARIABLE].strip("0")),
        "driver": "1.0",
    }
    return sound.node(facts)


def forgetful_replay(ctx: Any) -> Any:
    node = sound.vime_inventory(ctx)
    return replace(node, driver=None) if ctx.recording is not None else node


def fixless_inventory(ctx: Any) -> Any:
    try:
        return sound.vime_inventory(ctx)
    except PluginError as error:
        raise PluginError(error.what) from None


def lenient_inventory(ctx: Any) -> Any:
    return sound.node(ctx.recording or {"devices": int(ctx.env[sound.VARIABLE]), "driver": "1.0"})


def loose_equality(request: Any) -> Any:
    rules = dict(sound.vime_process_env(request))
    value = "1" if request.kind is RoleKind.TRAINER else "0"
    return {**rules, "SOUND_ORDER": replace(rules["SOUND_ORDER"], value=value)}


def lone_equality(request: Any) -> Any:
    """Nobody sets the variable, so that the values of both ends agree."""
    lone = {"SOUND_LANES": EnvValue("0", "both ends cut lanes alike", EnvMode.FORBID, scope="both_equal")}
    return {**sound.vime_process_env(request), **(lone if request.kind is RoleKind.TRAINER else {})}


def on_its_own_lane(offer: Any, edge: Any, side: Any) -> Any:
    if offer.protocol != "sound_link":
        return offer
    return replace(offer, factory=replace(offer.factory, options={"lane": list(Side).index(side)}))


def where_devices_are_shared(offer: Any, edge: Any, side: Any) -> Any:
    """Asks how near the roles are where it should ask whether they are on one host."""
    near = edge.relation in (Relation.SAME_DEVICE, Relation.SAME_NODE)
    return replace(offer, preconditions=(Precondition(near, "both ends must be near each other"),))


def failing_doctor(ctx: Any) -> Any:
    return [Check("sound.first", Severity.OK, f"the first device is {ctx.inventory.devices[0].name}")]


def forgotten_stub() -> None:
    """A hook without its marker."""


def registers_elsewhere(made: Subject) -> None:
    source = "import sys\nassert not hasattr(sys, 'sound_was_here'), 'registered twice'\nsys.sound_was_here = True\n"
    written(source, "sound_registering")(made)


def reluctant_parent(made: Subject) -> None:
    parent = SimpleNamespace(VIME_PLUGIN=PluginInfo("elder"))
    parent.vime_process_env = hookimpl(
        lambda request: {"SOUND_GRAPHS": EnvValue("0", "graphs fail on every machine of this kind", EnvMode.REQUIRE)}
    )
    child = SimpleNamespace(**vars(made.namespace))
    child.vime_process_env = hookimpl(lambda request: {"SOUND_GRAPHS": EnvValue("1", "graphs are quicker", EnvMode.REQUIRE)})
    made.platform = Platform((Plugin.of(parent), Plugin.of(child)))


RANGE = "Keywords: vime-hooks>=1.0,<2\n"
NEEDS = "Requires-Dist: vime>=0.1,<1\n"
FAR = Relation.NETWORK
UNKNOWN = Provenance.UNKNOWN
SPEC = Provenance.SPEC
STAYS = TagSemantics(frees=False, preserves=True)

FAULTS: tuple[Fault, ...] = (
    # loading
    Fault("imports a library that computes", ("C01",), change=written("import numpy\n", "sound_heavy")),
    Fault(
        "imports a package nobody asked for",
        ("C01",),
        change=written("import pluggy, _pytest\n", "sound_alien"),
    ),
    Fault("prints at import", ("C01",), change=written("print('hello')\n", "sound_loud")),
    Fault("does not import", ("C01", "C04"), change=written("raise OSError('no driver')\n", "sound_broken")),
    Fault("has another name than its entry point", ("C02",), change=namespace(VIME_PLUGIN=PluginInfo("noise"))),
    Fault("names no parent", ("C02",), change=namespace(VIME_PLUGIN=PluginInfo("sound", parent=""))),
    Fault("is written for another hook API", ("C02",), change=distribution(f"Keywords: vime-hooks>=7,<8\n{NEEDS}")),
    Fault("states no range of the hook API", ("C02",), change=distribution(f"Keywords: accelerator\n{NEEDS}")),
    Fault("states what is no range of the hook API", ("C02",), change=distribution(f"Keywords: vime-hooks>=new\n{NEEDS}")),
    Fault("states a range without an end", ("C02",), change=distribution(f"Keywords: vime-hooks>=1.0\n{NEEDS}")),
    Fault("does not require vime", ("C02",), change=distribution(f"{RANGE}Requires-Dist: rich\n")),
    Fault("requires another vime", ("C02",), change=distribution(f"{RANGE}Requires-Dist: vime>=99\n")),
    Fault("has an unmarked hook", ("C03",), change=namespace(vime_telemetry=forgotten_stub)),
    Fault("cannot be imported again", ("C04",), change=registers_elsewhere),
    # all answers
    Fault("needs facts that nominal nodes lack", ("C05",), {"vime_perf_model": needs_vendor_facts}),
    Fault("contradicts its parent", ("C05",), change=reluctant_parent),
    Fault("leaves a required hook unanswered", ("C05",), through("vime_ray_binding", lambda _: None)),
    Fault("gives a field another type", ("C06",), amend("vime_ray_binding", labels={"sound": 3})),
    Fault(
        "hands over an object",
        ("C06",),
        through("vime_vllm_defaults", lambda a: replace(a, args={"additional_config": object})),
    ),
    Fault("counts its calls", ("C07",), rising("vime_vllm_defaults", lambda a, n: replace(a, args={"block_size": n}))),
    Fault("changes the environment", ("C08",), acting("vime_ray_binding", lambda: os.environ.update(SOUND_CHANGED="1"))),
    Fault("imports torch to tell what a node can do", ("C08",), acting("vime_perf_model", lambda: __import__("torch"))),
    Fault("starts a process to tell what a node can do", ("C08",), acting("vime_perf_model", lambda: os.system("true"))),
    Fault("takes its time", ("C09",), acting("vime_profiles", lambda: time.sleep(0.35))),
    # discovery
    Fault("does not know its own machine", ("C10",), through("vime_probe", lambda _: None)),
    Fault("gives no reason for a match", ("C10",), through("vime_probe", lambda m: m and replace(m, reason=""))),
    Fault("has a negative specificity", ("C10",), through("vime_probe", lambda m: m and replace(m, specificity=-1))),
    Fault("takes every machine", ("C11",), through("vime_probe", lambda _: Match("sound", 10, "surely"))),
    Fault("is slow to refuse", ("C11",), {"vime_probe": slow_to_refuse}),
    Fault("misses a device", ("C12",), through("vime_inventory", lambda n: replace(n, devices=n.devices[:1], links=()))),
    Fault("gives two devices one id", ("C12",), devices(lambda d: replace(d, uuid="SOUND"))),
    Fault("knows no memory size", ("C12",), devices(lambda d: replace(d, memory_bytes=0))),
    Fault("has an empty health", ("C12",), devices(lambda d: replace(d, health=""))),
    Fault("has an empty partition", ("C12",), devices(lambda d: replace(d, partition=""))),
    Fault("places a device at an absent memory node", ("C12",), devices(lambda d: replace(d, numa_node=7))),
    Fault("says another platform", ("C12",), through("vime_inventory", lambda n: replace(n, platform="noise"))),
    Fault("lets an error of its library out", ("C13",), {"vime_inventory": careless_inventory}),
    Fault("refuses without a next step", ("C13",), {"vime_inventory": fixless_inventory}),
    Fault("finds nothing and says nothing", ("C13",), {"vime_inventory": lenient_inventory}),
    Fault("replays less than it recorded", ("C14",), {"vime_inventory": forgetful_replay}),
    Fault("calls a recording real", ("C14",), amend("vime_fixture", origin="real")),
    Fault("records another platform", ("C14",), amend("vime_fixture", platform="noise")),
    # planning
    Fault("has two profiles of one name", ("C15",), {"vime_profiles": lambda: (sound.PROFILE, sound.PROFILE)}),
    Fault(
        "has a profile without devices", ("C15",), {"vime_profiles": lambda: (replace(sound.PROFILE, devices_per_node=None),)}
    ),
    Fault(
        "has a profile without architecture", ("C15",), {"vime_profiles": lambda: (replace(sound.PROFILE, device_arch=None),)}
    ),
    Fault("has a profile without a source", ("C15",), {"vime_profiles": lambda: (replace(sound.PROFILE, provenance=""),)}),
    Fault("has no profile", ("C15",), {"vime_profiles": lambda: ()}),
    Fault("defaults to a dtype that it lacks", ("C16",), amend("vime_capabilities", default_dtype="bfloat16")),
    Fault("does not say why it has no 8-bit recipe", ("C16",), amend("vime_capabilities", absent={"ipc": "none"})),
    Fault("names no mask variable", ("C17",), amend("vime_ray_binding", visible_env=())),
    Fault("lets Ray set its masks", ("C17",), amend("vime_ray_binding", resource="GPU")),
    Fault("numbers devices in an unknown way", ("C17",), amend("vime_ray_binding", id_kind="bus")),
    Fault("names no resource", ("C17",), {"vime_ray_binding": lambda inventory: RayBinding("", ("A",), ("B",))}),
    Fault("sets and unsets one variable", ("C17",), amend("vime_ray_binding", unset_env=("SOUND_VISIBLE",))),
    # environment
    Fault("has a rule without a why", ("C18",), with_rule("SOUND_X", "1", why=" ")),
    Fault("names no variable", ("C18",), with_rule("SOUND X", "1")),
    Fault("puts in an option without a value", ("C18",), with_rule("SOUND_X", "expandable", mode=EnvMode.OPTION)),
    Fault("takes out an option with its value", ("C18",), with_rule("SOUND_X", "expandable:True", mode=EnvMode.WITHOUT)),
    Fault("forbids what its engine is launched with", ("C19",), with_rule("SOUND_LOG", "0", mode=EnvMode.FORBID)),
    Fault("gives both ends different values", ("C20",), {"vime_process_env": loose_equality}),
    Fault("tells one end alone what both must share", ("C20",), {"vime_process_env": lone_equality}),
    Fault(
        "binds both ends for a transport that nobody offers",
        ("C20",),
        with_rule("SOUND_LANES", "0", mode=EnvMode.FORBID, scope="both_equal", protocols=("sound_lnk",)),
    ),
    # collectives
    Fault("names no backend that torch reads", ("C21",), amend("vime_collective", backend="cpu:gloo;sound:ring")),
    Fault("names a backend that the node lacks", ("C21",), amend("vime_collective", backend="cpu:gloo,sound:ring")),
    Fault("has no time for a collective", ("C21",), amend("vime_collective", timeout_s=0.0)),
    Fault("has no reduce operation", ("C21",), amend("vime_collective", reduce_ops=())),
    Fault(
        "promises a reduce operation that the host lacks", ("C22",), amend("vime_collective", reduce_ops=("sum", "premul_sum"))
    ),
    # trainer
    Fault("names a runtime that is absent", ("C23",), amend("vime_trainer_runtime", bootstrap=Factory("sound_pieces:Absent"))),
    Fault(
        "names a runtime without a generator",
        ("C23",),
        amend("vime_trainer_runtime", bootstrap=Factory("sound_pieces:RuntimeWithoutGenerator")),
    ),
    Fault(
        "gives its runtime an option that it lacks",
        ("C23",),
        amend("vime_trainer_runtime", bootstrap=Factory("sound_pieces:Runtime", {"volume": 3})),
    ),
    Fault("runs on another device type", ("C23",), amend("vime_trainer_runtime", device_type="meta")),
    Fault(
        "names a piece in a module that is absent", ("C24",), amend("vime_megatron_adapt", norm=Factory("sound_absent:Norm"))
    ),
    Fault(
        "forces a setting that megatron lacks",
        ("C24",),
        amend("vime_megatron_adapt", overrides={"loudness": Override(1, "why")}),
    ),
    Fault(
        "forces a setting without a why",
        ("C24",),
        amend("vime_megatron_adapt", overrides={"apply_rope_fusion": Override(False, "")}),
    ),
    Fault("chooses a recipe that the node lacks", ("C24",), amend("vime_megatron_adapt", fp8_recipe="blockwise")),
    # engine
    Fault("gives vLLM an unknown argument", ("C25",), amend("vime_vllm_defaults", args={"eager_enforce": True})),
    Fault("gives vLLM a value of another kind", ("C25",), amend("vime_vllm_defaults", args={"enforce_eager": "yes"})),
    Fault("leaves vime out of vLLM's plugins", ("C25",), amend("vime_vllm_defaults", entry_points=("sound",))),
    Fault("expects no platform of vLLM", ("C25",), amend("vime_vllm_defaults", expected_platform=None)),
    Fault("frees memory by a mere pause", ("C28",), sleep(level=0, args={})),
    Fault(
        "passes arguments for a mere pause",
        ("C28",),
        through("vime_engine_sleep", lambda a: a if a.level else replace(a, args={"enable_sleep_mode": True})),
    ),
    Fault("keeps weights that deep sleep drops", ("C28",), sleep(level=2)),
    Fault("keeps a cache that sleep drops", ("C28",), sleep(tags={Tag.ENGINE_WEIGHTS: sound.MOVES, Tag.KV: sound.MOVES})),
    Fault(
        "says nothing about the cache",
        ("C28",),
        {"vime_engine_sleep": lambda request: EngineSleep(1, {Tag.ENGINE_WEIGHTS: sound.MOVES})},
    ),
    # memory
    Fault("says nothing about gradients", ("C26", "C27"), tag(Tag.GRADS, None)),
    Fault("does not say why activations stay", ("C26",), tag(Tag.ACTIVATIONS, STAYS)),
    Fault("gives no reason for staying", ("C26",), {"vime_memory_backend": lambda request: NullMemory("")}),
    Fault("names a memory without its methods", ("C26", "C27"), memory("sound_pieces:Norm")),
    Fault("forgets what it parks", ("C27",), memory("sound_pieces:ForgetfulMemory")),
    Fault("moves a tag before it refuses another", ("C27",), memory("sound_pieces:HastyMemory")),
    Fault("frees nothing when it parks", ("C27",), memory("sound_pieces:IdleMemory")),
    # transports
    Fault(
        "offers a half on one side only",
        ("C29",),
        with_offers(lambda o, e, s: o if s is Side.TRAINER or o.protocol != "sound_link" else None),
    ),
    Fault("puts two halves on different lanes", ("C29",), with_offers(on_its_own_lane)),
    Fault("names a half without its methods", ("C30", "C32"), link_engine("sound_pieces:HalfWithoutReceive")),
    Fault("does not say why an offer fails", ("C30",), link(preconditions=(Precondition(False, ""),))),
    Fault("has a rate without a source", ("C30",), link(cost=TransferCost(1e9, provenance="unknown"))),
    Fault("takes negative time", ("C30",), link(cost=TransferCost(1e9, fixed_s=-1.0, provenance="spec"))),
    Fault("shares host memory across the network", ("C31",), with_offers(lambda o, e, s: replace(o, preconditions=()))),
    Fault("takes shared devices for one host", ("C31",), with_offers(where_devices_are_shared)),
    Fault("loses a tensor on the way", ("C32",), link_engine("sound_pieces:LosingEngine")),
    Fault("changes a tensor on the way", ("C32",), link_engine("sound_pieces:ChangingEngine")),
    # rates, doctor
    Fault("knows a rate from nowhere", ("C33",), rate(Quantity(1e9, "bytes/s", SPEC))),
    Fault("measures in another unit", ("C33",), rate(Quantity(1e9, "GB/s", SPEC, "data sheet"))),
    Fault("gives an unknown rate a number", ("C33",), rate(Quantity(1e9, "bytes/s", UNKNOWN, "guess"))),
    Fault("has a warning without a fix", ("C34",), doctor(Check("sound.x", Severity.WARNING, "something is odd"))),
    Fault("speaks in another's name", ("C34",), doctor(Check("noise.x", Severity.OK, "all is well"))),
    Fault("fails on a node without devices", ("C34",), {"vime_doctor_checks": failing_doctor}),
    Fault("finds nothing at all", ("C34",), doctor()),
    Fault(
        "finds other things each time",
        ("C34",),
        rising("vime_doctor_checks", lambda a, n: [replace(c, id=f"sound.{n}") for c in a]),
    ),
)
