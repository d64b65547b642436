"""How engines join a transport: each gets the offer of its host and its number among the workers there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vime.errors import WeightSyncError
from vime.weights.control import EngineControl
from vime.weights.hosts import ANYWHERE
from vime.weights.manifest import pack_manifest, short_list
from vime.weights.waits import all_of


class Offering(Protocol):
    """The trainer's half over all ranks, as far as it makes offers and waits for who takes them."""

    @property
    def by_host(self) -> bool:
        """Whether engines get their weights from ranks on their own host, so that each host has an offer of its own."""
        ...

    async def init_info(self, receivers: Mapping[str, int]) -> Mapping[str, Mapping[str, Any]]:
        """Offers by host for so many engine workers by host; of `ANYWHERE` alone unless `by_host`.

        Hosts without a rank are missing; there may be more hosts than were asked for.
        """
        ...

    async def connect(self) -> None: ...


async def join(link: Offering, engines: Sequence[EngineControl], options: Mapping[str, Any]) -> int:
    """Initialise the engines' halves while the trainer's wait for them -> bytes of the weights.

    The manifest, which all offers have in common, is packed once for all engines. Raises WeightSyncError, before any engine is
    initialised, naming those on whose host no rank is.
    """
    sizes = await all_of([e.world_size() for e in engines])
    hosts = await all_of([e.host() for e in engines]) if link.by_host else [ANYWHERE] * len(engines)
    receivers: dict[str, int] = {}
    offsets: list[int] = []
    for host, size in zip(hosts, sizes, strict=True):
        offsets.append(receivers.get(host, 0))
        receivers[host] = offsets[-1] + size
    offers = await link.init_info(receivers)
    alone = [e.name for e, host in zip(engines, hosts, strict=True) if host not in offers]
    if alone:
        raise WeightSyncError(
            f"no trainer rank is on the host of {short_list(alone)}",
            fix="place engines beside ranks, let containers of a machine share memory and process ids, or forbid the transport",
        )
    rows = offers[hosts[0]]["manifest"] if hosts else []
    shared = {"manifest": pack_manifest(rows), "options": dict(options)}
    placed = zip(engines, hosts, offsets, strict=True)
    calls = [engine.init({**offers[host], **shared, "rank_offset": offset}) for engine, host, offset in placed]
    await all_of([*calls, link.connect()])
    return sum(row[4] for row in rows)
