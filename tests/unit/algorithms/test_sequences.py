"""Reductions over samples of different length."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.algorithms.sequences import Sequences


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 6), max_size=5), data=st.data())
def test_reductions_equal_loops_over_samples(sizes, data):
    values = torch.tensor(data.draw(st.lists(st.floats(0, 5), min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.float64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.bool)
    sequences = Sequences.of(sizes)
    rows, masks = values.split(sizes), mask.split(sizes)
    assert torch.allclose(sequences.sum(values), torch.stack([r.sum() for r in rows]) if sizes else torch.zeros(0).double())
    assert sequences.max(values).tolist() == [r.max().item() if len(r) else 0.0 for r in rows]
    means = [r[m].mean().item() if m.any() else 0.0 for r, m in zip(rows, masks, strict=True)]
    assert torch.allclose(sequences.mean(values, mask), torch.tensor(means, dtype=torch.float64))
    spread = sequences.spread(torch.arange(len(sizes)))
    assert spread.tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]
    assert [r.tolist() for r in sequences.split(values)] == [r.tolist() for r in rows]
    assert sequences.last.tolist() == [i == size - 1 for size in sizes for i in range(size)]


def test_gradients_pass_and_masked_values_do_not():
    values = torch.tensor([1.0, float("nan"), 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    sequences = Sequences.of([3, 1])
    sequences.spread(sequences.mean(values, mask)).sum().backward()
    assert values.grad.tolist() == [1.5, 0.0, 1.5, 1.0]
