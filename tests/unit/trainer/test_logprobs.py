"""Log-probs and entropy against float64 over the whole vocabulary, values and gradients."""

from __future__ import annotations

import pytest
import torch

from vime.trainer.megatron.logprobs import is_greedy, log_probs_and_entropy

VOCAB, COLUMNS, ROWS = 11, 16, 7


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, COLUMNS, generator=generator) * 3).to(dtype)
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def reference(logits, targets, temperature):
    """Float64, padding columns cut off."""
    log_p = (logits[:, :VOCAB].double() / temperature).log_softmax(dim=1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)


def combined(log_probs, entropy):
    scale = torch.linspace(0.5, 2.0, ROWS, dtype=log_probs.dtype)
    return (log_probs * scale - 0.3 * entropy * scale.flip(0)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_values_and_gradients_match_float64(temperature, chunk_rows):
    logits, targets = inputs()
    logits.requires_grad_()
    ours = log_probs_and_entropy(logits, targets, vocab=VOCAB, temperature=temperature, chunk_rows=chunk_rows)
    combined(*ours).backward()
    wide = logits.detach().double().requires_grad_()
    theirs = reference(wide, targets, temperature)
    combined(*theirs).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-6)
    assert wide.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=0, atol=2e-6)
    assert (logits.grad[:, VOCAB:] == 0).all()


def test_gradient_of_log_probs_alone():
    logits, targets = inputs()
    logits.requires_grad_()
    log_probs, _ = log_probs_and_entropy(logits, targets, vocab=VOCAB, temperature=1.0, chunk_rows=2)
    log_probs.sum().backward()
    expected = torch.nn.functional.one_hot(targets, COLUMNS) - torch.cat(
        [logits[:, :VOCAB].softmax(1), torch.zeros(ROWS, COLUMNS - VOCAB)], dim=1
    )
    torch.testing.assert_close(logits.grad, expected.detach(), rtol=0, atol=1e-6)


def test_logits_are_not_written_to():
    logits, targets = inputs()
    before = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(before, targets, vocab=VOCAB, temperature=1.0, chunk_rows=3)
    combined(log_probs, entropy).backward()
    assert torch.equal(before.detach(), logits)


def test_large_logits_and_lower_precision_stay_finite():
    logits, targets = inputs(torch.bfloat16)
    logits = (logits * 1000).requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, targets, vocab=VOCAB, temperature=1.0, chunk_rows=3)
    combined(log_probs, entropy).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_no_rows_are_no_error():
    logits = torch.zeros(0, COLUMNS, requires_grad=True)
    log_probs, _ = log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.long), vocab=VOCAB, temperature=1.0, chunk_rows=4)
    log_probs.sum().backward()
    assert logits.grad is not None


def test_nan_logits_stay_visible():
    logits, targets = inputs()
    logits[2, 3] = float("nan")
    log_probs, _ = log_probs_and_entropy(logits, targets, vocab=VOCAB, temperature=1.0, chunk_rows=4)
    assert torch.isnan(log_probs).nonzero()[:, 0].tolist() == [2]


def test_greedy_takes_the_lowest_id_among_equals_and_no_padding():
    logits = torch.zeros(3, COLUMNS)
    logits[0, 4] = 1.0
    logits[1, [2, 6]] = 1.0
    logits[2, VOCAB] = 9.0
    assert is_greedy(logits, torch.tensor([4, 6, 0]), vocab=VOCAB).tolist() == [True, False, True]
    assert is_greedy(logits, torch.tensor([3, 2, 1]), vocab=VOCAB).tolist() == [False, True, False]
