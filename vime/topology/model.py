"""A topology as a typed tree (`vime.topology/v1`): what hardware there is and who sits where.

Pools are supply, roles are demand, `share` says who takes turns on the same devices, `sync` how weights travel.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from vime.yamltree import Bytes, Count, Duration, Section

SCHEMA = "vime.topology/v1"

MAX_DEVICES = 100_000
"""More than any cluster has; a larger number is a slip of the pen."""

EXTERNAL = "external"
"""The pool of engines that run already; it has no devices and is not written under `pools`."""

Text = Annotated[str, Field(min_length=1)]
ByteSize = Annotated[Bytes, WithJsonSchema({"type": ["integer", "string"], "description": "Bytes, or a size such as 512MiB."})]
TimeSpan = Annotated[
    Duration, WithJsonSchema({"type": ["number", "string"], "description": "Seconds, or a duration such as 90s or 20m."})
]
Variables = Annotated[
    dict[str, str],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
]
"""Values are text, whatever they look like."""
Size = Annotated[Count, Field(le=MAX_DEVICES)]
Part = Literal["all", "half"]
"""How much of its pool a role takes, where the file does not know the hardware."""


class Domain(Section):
    """Groups of nodes that reach each other at scale-up speed."""

    kind: Literal["node", "fabric"] = "node"
    segment_nodes: Size = Field(default=1, description="Nodes of one domain.")
    require: Literal["strict", "prefer", "off"] = Field(default="prefer", description="Whether groups may cross domains.")


class Select(Section):
    """Which machines of a cluster belong to a pool."""

    labels: dict[str, str] = Field(default_factory=dict, description="Node labels that must match.")
    hosts: tuple[Text, ...] = Field(default=(), description="Host names; empty: any.")


class NodeGroup(Section):
    """Some equal nodes of an uneven pool."""

    count: Size = 1
    devices: Size


class Pool(Section):
    """Physical supply of one platform."""

    platform: Text = Field(default="auto", description="Name of a platform plugin; `auto` is filled by --platform.")
    device: Text | None = Field(default=None, description="Nominal device, for a plan without the machine.")
    nodes: Size | Annotated[tuple[NodeGroup, ...], Field(min_length=1)] = Field(
        default=1, description="Number of nodes, or a list of {count, devices} where they differ."
    )
    devices_per_node: Size | None = Field(
        default=None, description="Checked against the platform; on a host, how many slots to make (null: as many as needed)."
    )
    domain: Domain | None = None
    select: Select = Select()
    interpreter: Text | None = Field(default=None, description="Python of this pool's processes; null: the one that runs vime.")
    rates: dict[Text, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="What you measured on these machines, over the platform's: rates of the plan, and of transports by name.",
    )


class Axes(Section):
    """Sizes of the parallel axes of a role (of each engine, for a rollout role)."""

    tp: Size = Field(default=1, description="Tensor parallel.")
    pp: Size = Field(default=1, description="Pipeline parallel.")
    cp: Size = Field(default=1, description="Context parallel.")
    ep: Size = Field(default=1, description="Expert parallel.")
    etp: Size = Field(default=1, description="Tensor parallel inside an expert.")
    dp: Size | None = Field(default=None, description="Data parallel; null: what the devices leave.")
    vpp: Size = Field(default=1, description="Train only: virtual pipeline, the pieces of a stage on each rank; needs pp.")


class EngineGroup(Section):
    """Some equal engines of a role whose engines differ."""

    count: Size = 1
    parallel: Axes | None = Field(default=None, description="null: the role's.")


class Role(Section):
    """Demand: a training role, or a set of engines."""

    kind: Literal["train", "rollout"]
    task: Literal["actor", "critic", "reference", "teacher"] | None = Field(
        default=None, description="Train only; null: what the role's name says, else `actor`, or `reference` if it is frozen."
    )
    pool: Text | None = Field(default=None, description="null: the only pool, or that of `like`; `external` with endpoints.")
    like: Text | None = Field(default=None, description="Takes pool, devices and parallel of another role.")
    devices: Size | Part | None = Field(
        default=None, description="null: what parallel and engines need; `all` or `half`: of the pool's devices."
    )
    engines: Size | Annotated[tuple[EngineGroup, ...], Field(min_length=1)] = Field(
        default=1,
        description="Rollout only: how many engines, or a list of {count, parallel} where they differ; with a part of the "
        "pool, as many as fit.",
    )
    parallel: Axes = Axes()
    optimizer: bool | None = Field(
        default=None, description="Train only: false for a frozen role; null: true for an actor and a critic, else false."
    )
    stage: Literal["prefill", "decode"] | None = Field(default=None, description="Rollout only: half of a split engine.")
    endpoints: tuple[Text, ...] = Field(default=(), description="Rollout only: URLs of engines that run already.")


class Share(Section):
    """Roles that use the same devices."""

    roles: Annotated[tuple[Text, ...], Field(min_length=2)]
    mode: Literal["time"] = Field(default="time", description="In turns.")
    residency: Literal["auto", "park", "resident"] = Field(
        default="auto", description="park: leave the device between turns; resident: stay; auto: stay if everything fits."
    )


class Sync(Section):
    """How weights travel along one edge."""

    source: Text = Field(alias="from", description="A training role.")
    target: Text = Field(alias="to", description="A rollout role.")
    prefer: tuple[Text, ...] = Field(default=(), description="Transport protocols to try first, in order.")
    forbid: tuple[Text, ...] = ()
    require: tuple[Text, ...] = Field(default=(), description="Only these.")
    buffer: Annotated[ByteSize, Field(ge=1)] = Field(default=512 * 2**20, description="Bytes sent at once.")


class Limits(Section):
    """Bounds that the plan keeps."""

    host_pinned_per_node: ByteSize | None = Field(default=None, description="null: the node's memory.")
    device_reserve: ByteSize = Field(default=0, description="Device memory that stays free.")
    start_timeout: TimeSpan | None = Field(default=None, description="Deadline for all processes to start.")


class Env(Section):
    """Environment variables of the user's; they win over a platform's defaults."""

    trainer: Variables = Field(default_factory=dict)
    engine: Variables = Field(default_factory=dict)


class Topology(Section):
    """A whole topology file."""

    schema_: Literal["vime.topology/v1"] = Field(default=SCHEMA, alias="schema")
    name: Text = "inline"
    description: str = ""
    pools: Annotated[dict[str, Pool], Field(min_length=1)]
    roles: Annotated[dict[str, Role], Field(min_length=1)]
    share: tuple[Share, ...] = ()
    sync: tuple[Sync, ...] = ()
    limits: Limits = Limits()
    env: Env = Env()


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a topology file as it is written, for editors and other checkers."""
    found = Topology.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **found}
