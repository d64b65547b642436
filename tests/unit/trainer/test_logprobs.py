"""Log-probs, entropy and argmax of a head against float64 over the whole vocabulary, values and gradients."""

from __future__ import annotations

import pytest
import torch

from vime.trainer.megatron.logprobs import Head, score_rows

VOCAB, COLUMNS, ROWS, HIDDEN = 11, 16, 7, 5
IDENTITY = torch.eye(COLUMNS)


def inputs(dtype=torch.float32):
    """Hidden states, the weight of a head with padding columns, targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(COLUMNS, HIDDEN, generator=generator) * 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def head(weight, *, temperature=1.0, chunk_rows=3):
    return Head(weight, vocab=VOCAB, temperature=temperature, chunk_rows=chunk_rows)


def reference(hidden, weight, targets, temperature):
    """Float64 and all logits at once, padding columns cut off."""
    log_p = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(dim=1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)


def combined(log_probs, entropy):
    scale = torch.linspace(0.5, 2.0, ROWS, dtype=log_probs.dtype)
    return (log_probs * scale - 0.3 * entropy * scale.flip(0)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_values_and_gradients_match_float64(temperature, chunk_rows):
    hidden, weight, targets = inputs()
    scores = score_rows(hidden, targets, head(weight, temperature=temperature, chunk_rows=chunk_rows))
    combined(scores.log_probs, scores.entropy).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = reference(*wide, targets, temperature)
    combined(*theirs).backward()
    for a, b in zip((scores.log_probs, scores.entropy), theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-6)
    for ours, other in zip((hidden, weight), wide, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=0, atol=1e-5)
    assert weight.grad is not None
    assert (weight.grad[VOCAB:] == 0).all()


def test_gradient_of_log_probs_alone_is_the_target_minus_the_softmax():
    logits = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.arange(ROWS)
    score_rows(logits, targets, head(IDENTITY)).log_probs.sum().backward()
    expected = torch.zeros(ROWS, COLUMNS)
    expected[:, :VOCAB] = torch.nn.functional.one_hot(targets, VOCAB) - logits.detach()[:, :VOCAB].softmax(1)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-6)


class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def test_no_tensor_holds_all_logits():
    """300 rows over 100 columns in chunks of 10: nothing is larger than the inputs or a chunk, forward and backward."""
    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    with Shapes() as seen:
        scores = score_rows(hidden, torch.zeros(300, dtype=torch.long), Head(weight, 100, 1.0, 10), greedy=True)
        (scores.log_probs + scores.entropy).sum().backward()
    assert seen.largest == 300 * 4
    assert hidden.grad is not None


def test_inputs_are_not_written_to():
    hidden, weight, targets = inputs()
    before = hidden.detach().clone(), weight.detach().clone()
    scores = score_rows(hidden, targets, head(weight, chunk_rows=100))
    combined(scores.log_probs, scores.entropy).backward()
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_large_logits_and_lower_precision_stay_finite(chunk_rows):
    hidden, weight, targets = inputs(torch.bfloat16)
    scores = score_rows(hidden * 1000, targets, head(weight, chunk_rows=chunk_rows))
    combined(scores.log_probs, scores.entropy).backward()
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    for values in (scores.log_probs, scores.entropy, hidden.grad, weight.grad):
        assert torch.isfinite(values).all()


def test_chunks_of_lower_precision_add_up_in_float32():
    """A thousand equal parts of 2^-9 beside one of 1: in bfloat16 each would vanish in the sum."""
    hidden = torch.full((1001, 1), 2.0**-9, dtype=torch.bfloat16)
    hidden[0] = 1.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = score_rows(hidden, torch.zeros(1001, dtype=torch.long), Head(weight, 2, 1.0, 1))
    scores.log_probs.sum().backward()
    # Both ids are equally likely, so each row's slope is a half: (1 + 1000 / 512) / 2.
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[1.4766], [-1.4766]]), rtol=2e-3, atol=0)


def test_no_rows_are_no_error():
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(COLUMNS, HIDDEN, requires_grad=True)
    score_rows(hidden, torch.zeros(0, dtype=torch.long), head(weight)).log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_nan_hidden_states_stay_visible():
    hidden, weight, targets = inputs()
    with torch.no_grad():
        hidden[2, 3] = float("nan")
    scores = score_rows(hidden, targets, head(weight))
    assert torch.isnan(scores.log_probs).nonzero()[:, 0].tolist() == [2]


def test_greedy_takes_the_lowest_id_among_equals_and_no_padding():
    logits = torch.zeros(3, COLUMNS)
    logits[0, 4] = 1.0
    logits[1, [2, 6]] = 1.0
    logits[2, VOCAB] = 9.0
    for targets, hits in (([4, 6, 0], [True, False, True]), ([3, 2, 1], [False, True, False])):
        scores = score_rows(logits, torch.tensor(targets), head(IDENTITY, chunk_rows=2), greedy=True)
        assert scores.greedy is not None
        assert scores.greedy.tolist() == hits
    assert score_rows(logits, torch.tensor([4, 6, 0]), head(IDENTITY)).greedy is None
