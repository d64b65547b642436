"""Where trainer and engines of a measured run sit on one node: on the same devices in turn, or on devices of their own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vime.benchmarks.engines import Planned
from vime.errors import ConfigError
from vime.planning.assume import parse_words
from vime.planning.masks import process_mask
from vime.planning.plan import pool_of

KINDS = ("shared", "apart")
ACTOR, ROLLOUT = "actor", "rollout"


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that say which role has which devices."""
    add = parser.add_argument
    add("--layout", choices=KINDS, default="shared", help="shared devices in turn, or apart on disjoint halves (shared)")
    add("--actor-devices", type=int, metavar="N", help="of the trainer (shared: all; apart: half of them)")
    add("--actor-tp", type=int, default=1, metavar="N", help="tensor parallel size of the trainer (1)")
    add("--actor-ep", type=int, default=1, metavar="N", help="expert parallel size of the trainer (1)")
    add("--engines", type=int, metavar="N", help="(one over all devices that are left to engines)")
    add("--engine-tp", type=int, metavar="N", help="tensor parallel size of an engine (what the devices leave)")
    add("--max-staleness", type=int, default=0, metavar="N", help="steps by which samples may lag behind (0)")
    add("--transport", metavar="NAME", help="the only way for weights (the plan's choice)")
    add("--rate", nargs="+", metavar="NAME=NUMBER", default=[], help="measured here, for the plan: `rates` of the pool")


@dataclass(frozen=True)
class Layout:
    """Sizes of both roles; `devices` is how many the node must have."""

    kind: str
    devices: int
    actor_devices: int
    actor_tp: int = 1
    actor_ep: int = 1
    engines: int = 1
    engine_tp: int = 1

    @property
    def shared(self) -> bool:
        return self.kind == "shared"

    def told(self) -> dict[str, Any]:
        return asdict(self)


def layout_of(args: argparse.Namespace, node: Any) -> Layout:
    """The words' layout on a node; a host gets as many slots as it needs.

    Raises ConfigError where roles that are apart need more devices than there are, or sizes do not fit their role.
    """
    shared, engines = args.layout == "shared", (args.engines or 1) * (args.engine_tp or 1)
    asked = args.actor_devices or args.actor_tp * args.actor_ep
    needed = max(asked, engines) if shared else asked + engines
    total = needed if node.virtual else len(node.devices)
    actor = args.actor_devices or (total if shared else total - engines if node.virtual else max(1, total // 2))
    left = actor if shared else total - actor
    engine_tp = args.engine_tp or max(1, left // (args.engines or 1))
    number = args.engines or max(1, left // engine_tp)
    layout = Layout(args.layout, total, actor, args.actor_tp, args.actor_ep, number, engine_tp)
    if actor > total or actor % layout.actor_tp or number * engine_tp > left or layout.actor_ep > actor:
        sizes = ", ".join(f"{name} {value}" for name, value in layout.told().items())
        what = f"the layout does not fit ({sizes}): {left} devices are left to engines"
        raise ConfigError(what, where="command line", fix="lower the sizes, or use a node with more devices")
    return layout


def one_each(kind: str, node: Any) -> Layout:
    """A trainer rank and an engine of one device each, on the same one or on two. Raises ConfigError where two are missing."""
    one = {"actor_devices": 1, "actor_tp": 1, "actor_ep": 1, "engines": 1, "engine_tp": 1}
    return layout_of(argparse.Namespace(layout=kind, **one), node)


def topology(
    layout: Layout,
    residency: str,
    *,
    virtual: bool,
    transport: str | None = None,
    name: str | None = None,
    rates: Sequence[str] = (),
) -> dict[str, Any]:
    """One node of a platform; on a host as many slots as the layout needs. `rates` are NAME=NUMBER words for its plan."""
    slots = {"nodes": 1, "devices_per_node": layout.devices} if virtual else {}
    share = [{"roles": [ACTOR, ROLLOUT], "mode": "time", "residency": residency}] if layout.shared else []
    axes = {"tp": layout.actor_tp, "ep": layout.actor_ep}
    return {
        "schema": "vime.topology/v1",
        "name": name or f"{residency if layout.shared else layout.kind}-on-one-node",
        "pools": {"node": {"platform": "auto", **slots, "rates": parse_words(rates, option="--rate", example="gather=3e8")}},
        "roles": {
            ACTOR: {"kind": "train", "devices": layout.actor_devices, "parallel": axes},
            ROLLOUT: {"kind": "rollout", "engines": layout.engines, "parallel": {"tp": layout.engine_tp}},
        },
        "share": share,
        "sync": [{"from": ACTOR, "to": ROLLOUT, "require": [transport] if transport else []}],
    }


def mask_over(planned: Planned, positions: Sequence[int]) -> Mapping[str, str]:
    """The visible-device variables of a process that sees these positions of the trainer's node; empty on a host."""
    actor = planned.plan.actor
    pool = pool_of(planned.plan.pools, actor.pool)
    entries = pool.entries[actor.request.placement.slots[0].node] if pool.entries else ()
    return process_mask(pool.binding, entries, positions)
