"""Routers of megatron-core under prescribed experts: the same bits, a gradient, the right micro-batch under recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vime.errors import TrainerError
from vime.testing.tiny_models import make_tiny_qwen3_moe
from vime.trainer.megatron.replay import RouterChoice, RoutingReplay, sequence_part, stage_part

ROWS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Any:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("routed") / "model", hidden=32, ffn=24, vocab_size=320)


@pytest.fixture
def bare(worker_of, folder) -> Any:
    return worker_of(folder, from_scratch_seed=None)._model.bare.train()


def layers_of(bare: Any) -> list[Any]:
    return [layer.mlp for layer in bare.decoder.layers]


def through(bare: Any, hidden: Tensor, *, recompute: bool = False) -> Tensor:
    """The expert layers one after the other, around each a residual."""
    from megatron.core.tensor_parallel.random import checkpoint

    for mlp in layers_of(bare):
        hidden = hidden + (checkpoint(lambda x, mlp=mlp: mlp(x)[0], False, hidden) if recompute else mlp(hidden)[0])
    return hidden


def gradients(bare: Any) -> list[Tensor]:
    found = []
    for param in (p for mlp in layers_of(bare) for p in mlp.parameters()):
        kept = param.main_grad if getattr(param, "main_grad", None) is not None else param.grad
        assert kept is not None
        found.append(kept.clone())
        kept.zero_()
    return found


def inputs(seed: int) -> Tensor:
    return torch.randn(ROWS, 1, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_replay_of_ones_own_record_is_equal_bit_for_bit(bare) -> None:
    replay, hidden = RoutingReplay(bare), inputs(1)
    with replay.recording() as passes:
        plain = through(bare, hidden)
    plain.square().sum().backward()
    expected = gradients(bare)
    (ids,) = passes
    assert ids.shape == (ROWS, 2, 2)
    assert replay.layers == (0, 1)
    replay.prescribe(ids)
    again = through(bare, hidden)
    assert torch.equal(again, plain)
    again.square().sum().backward()
    assert all(map(torch.equal, gradients(bare), expected))
    assert replay.finish() == (0, 2 * ROWS)
    assert torch.equal(through(bare, hidden), plain)


def test_other_experts_change_the_output_and_only_real_rows_count(bare) -> None:
    replay, hidden = RoutingReplay(bare), inputs(2)
    with replay.recording() as passes, torch.no_grad():
        plain = through(bare, hidden)
    real = torch.arange(ROWS) < 10
    replay.prescribe((passes[0] + 1) % 8, real=real)
    assert not torch.equal(through(bare, hidden), plain)
    differing, rows = replay.finish()
    assert rows == 20
    assert 10 <= differing <= 20


def alone(bare: Any, replay: RoutingReplay, jobs: list[tuple[Tensor, Tensor]], *, recompute: bool) -> list[Tensor]:
    """Gradients of micro-batches (input, ids), each forward and backward before the next."""
    for hidden, ids in jobs:
        replay.prescribe(ids)
        through(bare, hidden, recompute=recompute).square().sum().backward()
    assert replay.finish()[1] == len(jobs) * 2 * ROWS
    return gradients(bare)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_passes_repeat_their_own_micro_batch(bare, recompute: bool) -> None:
    """Two micro-batches under way at once, as between the stages of a pipeline. Recompute adds up in another order."""
    replay = RoutingReplay(bare)
    jobs = [(inputs(n), torch.rand(ROWS, 2, 8, generator=torch.Generator().manual_seed(n)).topk(2).indices) for n in range(3)]
    kept = alone(bare, replay, jobs, recompute=False)
    expected = alone(bare, replay, jobs, recompute=recompute)
    outputs = []
    for number, (hidden, ids) in enumerate(jobs):
        replay.prescribe(ids)
        outputs.append(through(bare, hidden, recompute=recompute).square().sum())
        if number:
            outputs[number - 1].backward()
    outputs[-1].backward()
    found = gradients(bare)
    assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, kept, rtol=1e-5, atol=1e-6)
    assert replay.finish()[1] == 3 * 2 * ROWS


def test_a_prescribed_expert_outside_of_the_routers_choice_has_a_weight_and_a_gradient() -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    class Router(torch.nn.Module):
        layer_number = 1

    for options in ({"use_pre_softmax": True}, {"score_function": "sigmoid"}):
        choice = RouterChoice(Router())
        choice.target = torch.tensor([[3]])
        logits = torch.tensor([[4.0, 1.0, 0.0, -1.0]], requires_grad=True)
        probs, chosen = topk_routing_with_score_function(logits, 1, router_replay=choice, **options)  # type: ignore[arg-type]
        assert chosen.tolist() == [[False, False, False, True]]
        assert 0 < float(probs[0, 3].detach()) < 1
        probs.sum().backward()
        assert logits.grad is not None
        assert float(logits.grad[0, 3]) > 0
        assert choice.differing[0].tolist() == [1, 1]


def test_what_does_not_fit_is_refused(bare, worker_of) -> None:
    replay = RoutingReplay(bare)
    with pytest.raises(TrainerError, match="3 layers, but 2 are here"):
        replay.prescribe(torch.zeros(ROWS, 3, 2))
    replay.prescribe(torch.arange(2).expand(ROWS - 1, 2, 2))
    with pytest.raises(TrainerError, match="for 16 tokens"):
        through(bare, inputs(6))
    replay.clear()
    replay.prescribe(torch.arange(2).expand(ROWS, 2, 2))
    with torch.no_grad():
        through(bare, inputs(6))
    with pytest.raises(TrainerError, match="not repeated"):
        replay.finish()
    with pytest.raises(TrainerError, match="no layer"):
        RoutingReplay(worker_of()._model.bare)


def test_parts_of_a_sequence_and_of_the_layers() -> None:
    ids = torch.arange(24).view(6, 2, 2)
    assert torch.equal(torch.cat([sequence_part(ids, rank=r, size=3) for r in range(3)]), ids)
    with pytest.raises(TrainerError, match="do not divide"):
        sequence_part(ids, rank=0, size=4)
    assert torch.equal(stage_part(ids, here=(3,), moe_layers=(1, 3)), ids[:, 1:])
