"""Adam for a host with the contract that megatron-core's distributed optimizer expects of a fused Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ops: Any = torch
"""The list-wise operations are public by use, not by export."""


class HostFusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980); decay is decoupled with `adam_w_mode` (Loshchilov & Hutter, arXiv:1711.05101).

    The step count is an int in the parameter group and a parameter's state is exactly `exp_avg` and `exp_avg_sq`
    (float32, the parameter's shape): distributed checkpoints save and restore that layout.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": options.get("bias_correction", True)})
        self._decoupled = bool(options.get("adam_w_mode", True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads: list[Any] = [p.grad for p in params]
        means, squares = self._moments(params)
        beta1, beta2 = group["betas"]
        decay, lr = group["weight_decay"], group["lr"]
        if decay and not self._decoupled:
            grads = _ops._foreach_add(grads, params, alpha=decay)
        _ops._foreach_lerp_(means, grads, 1.0 - beta1)
        _ops._foreach_mul_(squares, beta2)
        _ops._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        correct1, correct2 = 1.0, 1.0
        if group["bias_correction"]:
            correct1, correct2 = 1.0 - beta1 ** group["step"], 1.0 - beta2 ** group["step"]
        divisors = _ops._foreach_sqrt(squares)
        _ops._foreach_div_(divisors, correct2**0.5)
        _ops._foreach_add_(divisors, group["eps"])
        if decay and self._decoupled:
            _ops._foreach_mul_(params, 1.0 - lr * decay)
        _ops._foreach_addcdiv_(params, means, divisors, -lr / correct1)

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for param in params:
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        return [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]
