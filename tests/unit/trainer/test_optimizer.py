"""The learning-rate schedule, value by value."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vime.config.schema import OptimizerSection
from vime.errors import TrainerError
from vime.platforms.cpu import host_facade


def rates(section, *, num_steps, updates_per_step=1, count=None):
    host_facade.install()
    from vime.trainer.megatron.optimizer import build_scheduler

    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    scheduler = build_scheduler(section, optimizer=optimizer, num_steps=num_steps, updates_per_step=updates_per_step)
    values = []
    for _ in range(count or num_steps * updates_per_step):
        scheduler.step(1)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_the_first_update_of_a_warm_up_already_learns():
    assert rates(OptimizerSection(lr=1.0, warmup_steps=4), num_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_minimum():
    values = rates(OptimizerSection(lr=1.0, min_lr=0.2, decay="linear", warmup_steps=1), num_steps=5, count=6)
    assert values == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_over_its_own_steps():
    values = rates(OptimizerSection(lr=1.0, decay="cosine", decay_steps=4), num_steps=9, count=4)
    assert values == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4)])


def test_steps_are_counted_in_updates():
    assert rates(OptimizerSection(lr=1.0, warmup_steps=2), num_steps=2, updates_per_step=2) == [0.25, 0.5, 0.75, 1.0]


def test_a_constant_rate_may_warm_up_longer_than_the_run():
    assert rates(OptimizerSection(lr=1.0, warmup_steps=10), num_steps=2) == [0.1, 0.2]


def test_impossible_schedules_are_refused():
    with pytest.raises(TrainerError, match="does not end before"):
        rates(OptimizerSection(lr=1.0, decay="linear", warmup_steps=5), num_steps=5)
    with pytest.raises(TrainerError, match="min_lr"):
        rates(OptimizerSection(lr=0.1, min_lr=0.2), num_steps=5)


def test_norms_and_scales_of_lists_replace_megatrons_own_and_no_other(monkeypatch):
    host_facade.install()
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    from vime.trainer.megatron.optimizer import list_norm, list_scale, use_list_operations

    def apexs(*_args):
        raise AssertionError("not called")

    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", apexs)
    use_list_operations()
    assert clip_grads.l2_norm_impl is list_norm
    assert clip_grads.multi_tensor_scale_impl is apexs
    tensors = [torch.tensor([2.0, 3.0]), torch.tensor([[6.0]])]
    norm, _ = list_norm(0, None, [tensors], False)
    assert norm.tolist() == [7.0]
    copies = [torch.zeros(2), torch.zeros(1, 1)]
    list_scale(0, None, [tensors, copies], 0.5)
    assert [t.flatten().tolist() for t in copies] == [[1.0, 1.5], [3.0]]
    assert tensors[0].tolist() == [2.0, 3.0]
    list_scale(0, None, [tensors, tensors], 2.0)
    assert [t.flatten().tolist() for t in tensors] == [[4.0, 6.0], [12.0]]


def test_an_adam_that_counts_for_each_parameter_is_refused_before_the_first_step(worker_of, setup_of, tmp_path, monkeypatch):
    """megatron-core's choice where a platform names none and neither Apex nor TransformerEngine is there."""
    host_facade.install()
    from megatron.core import optimizer

    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", True)
    adaptation = replace(setup_of(tmp_path).adaptation, optimizer=None)
    with pytest.raises(TrainerError, match="names no Adam") as caught:
        worker_of(adaptation=adaptation)
    assert "vime_megatron_adapt" in str(caught.value.fix)
