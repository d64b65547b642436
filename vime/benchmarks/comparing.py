"""What the comparisons of layouts with one process share: axes in a word, a plan of a trainer alone, relative differences."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.config.schema import Config
    from vime.planning.plan import Plan

JUDGED = ("train/loss", "train/grad_norm")
_AXIS = re.compile(r"(tp|pp|vpp|cp|dp|ep|etp)([1-9][0-9]*)")


def axes_in(text: str) -> dict[str, int]:
    """`tp2-cp2` -> {"tp": 2, "cp": 2}; nothing for a text that is no layout."""
    found = [_AXIS.fullmatch(part) for part in text.split("-")]
    return {match[1]: int(match[2]) for match in found if match} if all(found) else {}


def world_of(axes: Mapping[str, int]) -> int:
    """Ranks of a layout."""
    return axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1) * axes.get("dp", 1)


def trainer_plan(words: Mapping[str, Any], path: Path, *, model: Path, platform: Any, node: Any) -> tuple[Config, Plan]:
    """(configuration, plan) of a trainer alone on one node, from a run file's sections, which are written to `path`.

    Raises the plan's own error for what a run would refuse.
    """
    import yaml

    from vime.config.load import load_config
    from vime.models.registry import read_shape
    from vime.planning import make
    from vime.planning.needs import needs_from
    from vime.topology.load import load_topology

    path.write_text(yaml.safe_dump(dict(words)))
    loaded = load_config(path)
    topology = load_topology(loaded.topology_source, platform=platform.name)
    pools = frozenset(topology.topology.pools)
    plan = make.make_plan(
        topology,
        model=read_shape(model),
        needs=replace(needs_from(loaded.config), samples=False),  # the samples are given
        platforms={platform.name: platform},
        inventories=dict.fromkeys(pools, (node,)),
        here=make.Here(dict(os.environ), pools),
    )
    return loaded.config, plan


def free_ports(count: int) -> list[int]:
    """Different ones: each process group needs its own."""
    from vime.rollout.ports import lease_port

    leases = [lease_port() for _ in range(count)]
    for lease in leases:
        lease.release()
    return [lease.port for lease in leases]


def relative(value: float, floor: float) -> float:
    """|difference| over the larger of both; infinity where one is not a number."""
    found = abs(value - floor) / max(abs(value), abs(floor), 1e-30)
    return found if found == found else float("inf")
