"""Adam in one kernel per list of tensors, with the contract that megatron-core's distributed optimizer expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vime.errors import TrainerError

_ops: Any = torch
"""The fused kernels are public by use (`torch.optim.AdamW(fused=True)`), not by export."""


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980); decay is decoupled with `adam_w_mode` (Loshchilov & Hutter, arXiv:1711.05101).

    The step count is an int in the parameter group and a parameter's state is exactly `exp_avg` and `exp_avg_sq`
    (float32, the parameter's shape): distributed checkpoints save and restore that layout. Raises TrainerError for
    parameters that are not float32 and for Adam without bias correction, which the kernel does not have.
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
        if not options.get("bias_correction", True):
            raise TrainerError("the fused Adam always corrects its bias", fix="set bias_correction to true")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})
        self._kernel = _ops._fused_adamw_ if options.get("adam_w_mode", True) else _ops._fused_adam_
        self._step_tensors: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
                by_device: dict[torch.device, list[Tensor]] = {}
                for param in params:
                    by_device.setdefault(param.device, []).append(param)
                for device, own in by_device.items():
                    self._update(group, own, device)

    def _update(self, group: dict[str, Any], params: list[Tensor], device: torch.device) -> None:
        means, squares = self._moments(params)
        beta1, beta2 = group["betas"]
        count = self._step_tensors.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        count.fill_(group["step"])
        self._kernel(
            params,
            [p.grad.to(torch.float32) for p in params if p.grad is not None],
            means,
            squares,
            [],
            [count] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for param in params:
            if param.dtype != torch.float32:
                raise TrainerError(
                    f"the fused Adam updates float32 tensors, got {param.dtype}",
                    fix="let the distributed optimizer keep float32 main parameters",
                )
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        return [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]
