"""The layer specification: megatron-core's own modules, with the pieces that a platform replaces."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from vime.errors import TrainerError
from vime.facts.process import MegatronAdaptation
from vime.trainer.megatron.latent import latent_attention


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) with Hugging Face's order of operations.

    Works in float32, rounds to the input's type and then multiplies by the weight. Under sequence parallelism every rank
    sees a part of the tokens; the weight says so, and its gradient is summed over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        return _RmsNorm.apply(hidden, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and one factor a row; autograd would keep float32 copies of the input besides."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, factor)
        return weight * (wide * factor).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x f and g the gradient times the weight: dx = f (g - n mean(g n)), dw = the sum of the gradient times n."""
        hidden, weight, factor = ctx.saved_tensors
        grad, normed = grads[0].float(), hidden.float() * factor
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        slope = grad * weight.float()
        slope -= normed * (slope * normed).mean(-1, keepdim=True)
        return slope.mul_(factor).to(hidden.dtype), weight_grad, None


def block_spec(config: Any, adaptation: MegatronAdaptation, *, vp_stage: int | None = None) -> Any:
    """The decoder's specification for this pipeline stage, or for one piece of it.

    Raises TrainerError when nothing can attend to packed sequences, or not to those that several ranks share.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if adaptation.core_attention is None and not adaptation.transformer_engine:
        raise TrainerError(
            "the platform names no core attention, and megatron-core's own does not take packed sequences",
            fix="set core_attention in the platform's vime_megatron_adapt",
        )
    attention = None if adaptation.core_attention is None else adaptation.core_attention.load()
    if config.context_parallel_size > 1 and attention is not None and not getattr(attention, "splits_sequences", False):
        raise TrainerError(
            f"{attention.__name__} does not split sequences over cp {config.context_parallel_size}",
            fix="set the training role's parallel.cp to 1",
        )
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=adaptation.transformer_engine,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    pieces = _replacements(adaptation)
    if config.multi_latent_attention:
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention

        pieces[MLASelfAttention] = latent_attention()
    return _replace(spec, pieces)


def _replacements(adaptation: MegatronAdaptation) -> dict[Any, Any]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    pieces: dict[Any, Any] = {}
    if adaptation.norm is not None:
        pieces[WrappedTorchNorm] = adaptation.norm.load()
    if adaptation.core_attention is not None:
        pieces[DotProductAttention] = adaptation.core_attention.load()
    return pieces


def _replace(spec: Any, pieces: dict[Any, Any]) -> Any:
    """A copy of a specification tree (dataclasses, lists, classes) with some classes replaced."""
    if isinstance(spec, type):
        return pieces.get(spec, spec)
    if isinstance(spec, list):
        return [_replace(item, pieces) for item in spec]
    if dataclasses.is_dataclass(spec):
        changed = {f.name: _replace(getattr(spec, f.name), pieces) for f in dataclasses.fields(spec)}
        return dataclasses.replace(cast(Any, spec), **changed)
    return spec
