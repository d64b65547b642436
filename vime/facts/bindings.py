"""How the scheduler and the processes name devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RayBinding:
    """Names that Ray and the vendor runtime use for a device.

    `resource` is the Ray resource of one device. `visible_env` are the variables that mask devices, `noset_env` those
    that stop Ray from setting them. `id_kind` is `index` or `uuid`. `full_node_mask` is set where an importer of
    device memory must see all devices of the node, its own first.
    """

    resource: str
    visible_env: tuple[str, ...] = ()
    noset_env: tuple[str, ...] = ()
    unset_env: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    id_kind: str = "index"
    full_node_mask: bool = False
    virtual: bool = False
