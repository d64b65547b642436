"""Adam, its learning-rate schedule, and one checked update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vime.config.schema import OptimizerSection
from vime.errors import TrainerError
from vime.facts.process import Factory
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.wrapping import Wrapped

_ops: Any = torch
"""The list-wise operations are public by use, not by export."""


def use_fused_adam(factory: Factory | None) -> None:
    """Let megatron-core build the platform's fused Adam, as it builds Apex's or TransformerEngine's where those exist."""
    if factory is None:
        return
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    plain: Any = optimizer
    distributed: Any = distrib_optimizer
    plain.Adam = distributed.Adam = factory.load()
    plain.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    distributed.USING_TE_OPTIMIZER = False


def use_list_operations() -> None:
    """Let megatron-core take norms and scale gradients list by list, where neither Apex nor TransformerEngine does.

    Its own stand-in brings every gradient's norm to the host by itself, which waits for the device hundreds of times.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    module: Any = clip_grads
    if module.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        module.l2_norm_impl = list_norm
    if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        module.multi_tensor_scale_impl = list_scale


def list_norm(_chunk: int, _flag: Any, lists: Sequence[Sequence[Tensor]], _per_tensor: bool) -> tuple[Tensor, None]:
    """Apex's `multi_tensor_l2norm` -> ([1] on the tensors' device, None)."""
    norms = torch.stack(_ops._foreach_norm(list(chain.from_iterable(lists))))
    return torch.linalg.vector_norm(norms).view(1), None


def list_scale(_chunk: int, _flag: Any, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Apex's `multi_tensor_scale`: the second list becomes the first times `scale`; they may be the same tensors."""
    sources, targets = (list(tensors) for tensors in lists)
    if any(s.data_ptr() != t.data_ptr() for s, t in zip(sources, targets, strict=True)):
        _ops._foreach_copy_(targets, sources)
    _ops._foreach_mul_(targets, scale)


def build_optimizer(section: OptimizerSection, *, model: Model, wrapped: Wrapped) -> Any:
    """megatron-core's distributed optimizer over the wrapped model.

    Its moments exist from the start, so that a checkpoint before the first update is whole and memory is known. Raises
    TrainerError where there is no other Adam than torch's.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=wrapped.overlaps,
    )
    optimizer: Any = get_megatron_optimizer(config, wrapped.chunks)
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False):
            _check_counts(part.optimizer)
            part.init_state_fn(part.optimizer, part.config)
    return optimizer


def _check_counts(adam: Any) -> None:
    """Raise TrainerError for torch's own Adam, megatron-core's last resort.

    It counts updates for each parameter: with moments that are there already it finds no count, and megatron-core does not
    load such counts from a checkpoint.
    """
    if type(adam) in (torch.optim.Adam, torch.optim.AdamW):
        raise TrainerError(
            "the platform names no Adam, and torch's own does not fit megatron-core's distributed optimizer",
            fix="install TransformerEngine or Apex for the trainer, or set optimizer in the platform's vime_megatron_adapt",
        )


def build_scheduler(section: OptimizerSection, *, optimizer: Any, num_steps: int, updates_per_step: int) -> Any:
    """Warm-up, then constant, linear or cosine; counts optimizer updates. Update k (from 1) uses the schedule's value at k.

    `warmup_steps` and `decay_steps` are steps of the run, each of `updates_per_step` updates. Raises TrainerError when
    the warm-up does not end before the decay does, or when `min_lr` is above `lr`. On resume the settings given here win;
    only the count is restored.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warmup, decay = section.warmup_steps * updates_per_step, (section.decay_steps or num_steps) * updates_per_step
    if section.min_lr > section.lr:
        raise TrainerError(f"min_lr {section.min_lr} is above lr {section.lr}", fix="lower trainer.optimizer.min_lr")
    if section.decay == "constant":
        decay = max(decay, warmup + 1)
    if warmup >= decay:
        raise TrainerError(
            f"the warm-up of {section.warmup_steps} steps does not end before the decay ({decay // updates_per_step} steps)",
            fix="lower trainer.optimizer.warmup_steps or raise decay_steps",
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=section.decay,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


@torch.no_grad()
def update(optimizer: Any, scheduler: Any) -> tuple[float, float]:
    """One update with the reduced gradients in place -> (global gradient norm before clipping, learning rate used).

    Raises TrainerError, on every rank and before any weight changes, when the norm is not finite.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise TrainerError(
            f"the gradient norm is {norm}; no weight was changed", fix="lower the learning rate or check the data"
        )
    scheduler.step(1)
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm, float(optimizer.param_groups[0]["lr"])
