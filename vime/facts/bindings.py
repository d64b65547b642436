"""How the scheduler and the processes name devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RayBinding:
    """Names that Ray and the vendor runtime use for a device.

    `resource` is the Ray resource of one device. `visible_env` are the variables that mask devices, the first of them the
    one that is believed; all of them get the same list. `noset_env` stop Ray from setting them, `unset_env` must not be
    set beside them. `id_kind` says what the entries of a mask are: `index` or `uuid`. `full_node_mask` is set where an
    importer of device memory must see all devices of the node, its own first. `labels` are for the node in Ray.
    """

    resource: str
    visible_env: tuple[str, ...] = ()
    noset_env: tuple[str, ...] = ()
    unset_env: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    id_kind: str = "index"
    full_node_mask: bool = False
    virtual: bool = False
