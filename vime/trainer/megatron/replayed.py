"""Routing replay of the actor: whose experts its passes take.

The experts of an update's passes are prescribed (`vime.trainer.megatron.replay`): those that the engine chose while it sampled,
or those that the routers chose in the pass for old log-probs. Routers that differ from the sampler in a few near ties would
otherwise give a token another log-prob than it was sampled with (Ma et al. 2025, arXiv:2510.11370). Every other pass, and every
pass of another role, leaves the choice to the routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vime.data.routing import Routing, cyclic_ids
from vime.errors import ConfigError, TrainerError
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.packing import Pack
from vime.trainer.megatron.parallel import Axes
from vime.trainer.megatron.replay import RoutingReplay, id_type, routers_of, sequence_part, stage_part
from vime.types import TrainSample

Part = tuple[Sequence[TrainSample], Pack]
"""A micro-batch's samples in the order of their pack."""

DIFFERING = "routing_replay_differing"
"""Share of pairs of a token and a layer whose router would have chosen other experts than the prescribed ones."""

_KEY = "trainer.routing_replay"


@dataclass(frozen=True, slots=True)
class PackExperts:
    """The experts of a pack's rows, on the host: of the rows that this rank's routers see, its part of the sequence.

    `by_piece[n]` [rows, layers, top_k] are those of piece n of the model; a piece without experts has no entry. Rows that are
    `real` [rows] hold a token whose experts somebody chose.
    """

    by_piece: Mapping[int, Tensor]
    real: Tensor


class OwnChoice:
    """The routers choose in every pass."""

    def check(self, samples: Sequence[TrainSample]) -> None:
        """Raise TrainerError for a sample of a micro-batch whose experts are needed and are not there, or do not fit."""

    def given(self, samples: Sequence[TrainSample], pack: Pack) -> Pack:
        """The pack, with what its samples prescribe; they have passed `check`."""
        return pack

    def scored(self, parts: Sequence[Part], run: Callable[[list[Pack]], list[Any]]) -> tuple[list[Part], list[Any]]:
        """What `run` makes of the parts' packs before an update, and the parts with what that prescribes to the update."""
        return list(parts), run([pack for _, pack in parts])

    @contextmanager
    def passing(self, piece: int, pack: Pack) -> Iterator[None]:
        """A forward pass of the pack through a piece of the model."""
        yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """An update, after which nothing is prescribed, whatever became of it."""
        yield

    def counted(self) -> dict[str, float]:
        """Metrics of an update's passes, by the part of their name after `train/`; a collective over all ranks."""
        return {}


class _Replay(OwnChoice):
    """Packs have their experts prescribed."""

    def __init__(self, model: Model, axes: Axes) -> None:
        """Raises ConfigError for a model without experts, TrainerError for fused routers."""
        if not model.shape.experts:
            raise ConfigError(f"{model.family.name} has no experts", where=_KEY, fix="remove the key")
        self._routing = Routing.of(model.shape)
        self._pieces = {n: RoutingReplay(bare) for n, bare in enumerate(model.chunks) if routers_of(bare)}
        self._split = (axes.tp_rank, axes.tp_size if model.config.sequence_parallel else 1)

    @contextmanager
    def passing(self, piece: int, pack: Pack) -> Iterator[None]:
        replay = self._pieces.get(piece)
        if replay is None or pack.experts is None:
            yield
            return
        replay.prescribe(pack.experts.by_piece[piece], real=pack.experts.real)
        try:
            yield
        finally:
            replay.release()

    @contextmanager
    def updating(self) -> Iterator[None]:
        try:
            yield
        finally:
            for replay in self._pieces.values():
                replay.clear()

    def counted(self) -> dict[str, float]:
        counts = torch.zeros(2, dtype=torch.long)
        for replay in self._pieces.values():
            counts += torch.tensor(replay.finish())
        dist.all_reduce(counts)
        differing, pairs = counts.tolist()
        return {DIFFERING: differing / pairs} if pairs else {}

    def _real(self, samples: Sequence[TrainSample], pack: Pack) -> Tensor:
        """[this rank's rows] Rows with a token, but for the last ones of samples, which no pass of an engine ever had."""
        ends = torch.tensor([len(s.prompt_ids) + len(s.response_ids) for s in samples], dtype=torch.long).cumsum(0) - 1
        return self._part((pack.origin >= 0) & ~torch.isin(pack.origin, ends))

    def _part(self, rows: Tensor) -> Tensor:
        """Those of a pack's rows [rows, ...] that the routers see."""
        rank, size = self._split
        return sequence_part(rows, rank=rank if size > 1 else 0, size=size)


class RolloutReplay(_Replay):
    """Every pass with the actor's samples takes the engine's experts."""

    def check(self, samples: Sequence[TrainSample]) -> None:
        routing = self._routing
        for index, sample in enumerate(samples):
            ids, name = sample.routed_experts, f"sample {index} of the micro-batch"
            if ids is None:
                raise TrainerError(
                    f"{name} has no expert ids",
                    where=_KEY,
                    fix="check that every engine runs with enable_return_routed_experts, or set the key to trainer or none",
                )
            shape = (len(sample.prompt_ids) + len(sample.response_ids), len(routing.moe_layers), routing.top_k)
            if ids.shape != shape:
                raise TrainerError(
                    f"{name} has expert ids of shape {ids.shape}, not {shape} (tokens, layers with experts, experts a token)",
                    where=_KEY,
                    fix="check that the engine serves this model, and that the rollout function keeps a row for every token",
                )
            if ids.max() >= routing.experts:
                raise TrainerError(f"{name} names expert {ids.max()} of {routing.experts}", where=_KEY)

    def given(self, samples: Sequence[TrainSample], pack: Pack) -> Pack:
        routing, held = self._routing, pack.origin >= 0
        given = np.concatenate([self._filler(0), *(s.routed_experts for s in samples if s.routed_experts is not None)])
        known = torch.from_numpy(given).to(id_type(routing.experts))
        whole = known.new_empty(len(held), *known.shape[1:])
        whole[held] = known[pack.origin[held]]
        whole[~held] = torch.from_numpy(self._filler(int((~held).sum()))).to(known.dtype)
        own = self._part(whole)
        pieces = {n: stage_part(own, here=replay.layers, moe_layers=routing.moe_layers) for n, replay in self._pieces.items()}
        return replace(pack, experts=PackExperts(pieces, self._real(samples, pack)))

    def _filler(self, count: int) -> Any:
        """Ids [count, layers, top_k] of rows of padding."""
        routing = self._routing
        return cyclic_ids(count, layers=len(routing.moe_layers), top_k=routing.top_k, experts=routing.experts)


class TrainerReplay(_Replay):
    """An update takes the experts that the routers chose in its pass for old log-probs, where it has one."""

    _chosen: dict[int, list[Tensor]] | None = None
    """Ids of the passes so far by piece, while they are recorded."""

    def scored(self, parts: Sequence[Part], run: Callable[[list[Pack]], list[Any]]) -> tuple[list[Part], list[Any]]:
        chosen = self._chosen = {n: [] for n in self._pieces}
        try:
            results = run([pack for _, pack in parts])
        finally:
            self._chosen = None

        def prescribed(index: int, samples: Sequence[TrainSample], pack: Pack) -> Pack:
            pieces = {n: passes[index] for n, passes in chosen.items()}
            return replace(pack, experts=PackExperts(pieces, self._real(samples, pack)))

        return [(samples, prescribed(i, samples, pack)) for i, (samples, pack) in enumerate(parts)], results

    @contextmanager
    def passing(self, piece: int, pack: Pack) -> Iterator[None]:
        if self._chosen is None or piece not in self._pieces:
            with super().passing(piece, pack):
                yield
            return
        with self._pieces[piece].recording() as passes:
            yield
        self._chosen[piece] += passes


def replay_of(kind: str, model: Model, axes: Axes) -> OwnChoice:
    """What `trainer.routing_replay` says. Raises ConfigError for a model without experts."""
    kinds: dict[str, Callable[[Model, Axes], OwnChoice]] = {"trainer": TrainerReplay, "rollout": RolloutReplay}
    return kinds[kind](model, axes) if kind in kinds else OwnChoice()
