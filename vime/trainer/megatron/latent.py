"""Multi-head latent attention over packs, with the modules and names of megatron-core's own.

megatron-core 0.16 builds it from plain parts only where TransformerEngine is installed, and there is one fault: under tensor
parallelism every rank turns the shared rotary part of the key for its own heads, and the gradients of that part are never
added up. Its arithmetic for one rank is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def latent_attention() -> Any:
    """The class that stands in for megatron-core's `MLASelfAttention`."""
    from megatron.core.transformer import multi_latent_attention as theirs

    module: Any = theirs
    # Without TransformerEngine the names stand for no classes, at which the constructor fails.
    module.HAVE_TE = module.HAVE_TE and isinstance(module.TELinear, type)
    return _attention_class(module)


class EqualWidths(torch.nn.Module):
    """Core attention for values that are narrower than queries: kernels want one width, so values are filled up with zeros.

    Without a kernel torch would keep every attention weight until the backward pass.
    """

    def __init__(self, core: torch.nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """query and key [tokens, heads, dim], value [tokens, heads, width] -> [tokens, heads * width]."""
        width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
        if missing <= 0:
            return self.core(query, key, value, *args, **options)
        out = self.core(query, key, torch.nn.functional.pad(value, (0, missing)), *args, **options)
        return out.view(*query.shape)[..., :width].flatten(1)


def _attention_class(module: Any) -> Any:
    from megatron.core.models.common.embeddings import apply_rotary_pos_emb
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    class PackedLatentAttention(module.MLASelfAttention):
        """Queries, keys and values of one pack; everything else is megatron-core's."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.core_attention = EqualWidths(self.core_attention)

        def get_query_key_value_tensors(
            self,
            hidden_states: Tensor,
            key_value_states: Tensor | None = None,
            position_ids: Tensor | None = None,
            packed_seq_params: Any = None,
            **_options: Any,
        ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            """hidden_states [tokens (/ tp), 1, hidden] -> query and key [tokens, heads / tp, plain + rotary], value
            [tokens, heads / tp, value], compressed query and key [tokens (/ tp), rank].
            """
            config = self.config
            q_latent = hidden_states.squeeze(1)
            if config.q_lora_rank is not None:
                q_latent = self.q_layernorm(self._to_sequence(self._whole(self.linear_q_down_proj, hidden_states)))
            kv, k_rotary = self._whole(self.linear_kv_down_proj, hidden_states).split(
                [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
            )
            kv_latent = self.kv_layernorm(self._to_sequence(kv))
            up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
            heads = self.num_attention_heads_per_partition
            query = up(q_latent)[0].unflatten(-1, (heads, self.q_head_dim))
            plain, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
            both = self.linear_kv_up_proj(kv_latent)[0].unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
            key, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
            # Every rank has other heads, all of which use this part.
            shared = copy_to_tensor_model_parallel_region(k_rotary, group=self.pg_collection.tp).unsqueeze(1)
            turned, shared = (self._turned(part, hidden_states, packed_seq_params) for part in (turned, shared))
            query = torch.cat((plain, turned), dim=-1)
            key = torch.cat((key, shared.expand(-1, heads, -1)), dim=-1)
            return query, key, value.contiguous(), q_latent, kv_latent

        def _whole(self, projection: Any, hidden: Tensor) -> Tensor:
            """A compressed vector of every token, put together from the ranks' columns: [tokens, rank]."""
            return gather_from_tensor_model_parallel_region(projection(hidden)[0], group=self.pg_collection.tp).squeeze(1)

        def _to_sequence(self, latent: Tensor) -> Tensor:
            """This rank's tokens of [tokens, rank] under sequence parallelism."""
            if not self.config.sequence_parallel:
                return latent
            return scatter_to_sequence_parallel_region(latent, group=self.pg_collection.tp)

        def _turned(self, part: Tensor, hidden: Tensor, packed: Any) -> Tensor:
            """part [tokens, heads, rotary], turned by each token's position in its segment."""
            longest = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
            found, mscale = self.rotary_pos_emb(longest, packed_seq=True), 1.0
            if self.config.rope_type == "yarn":
                found, mscale = found
            return apply_rotary_pos_emb(
                part,
                found,
                config=self.config,
                cu_seqlens=packed.cu_seqlens_q,
                mscale=mscale,
                cp_group=self.pg_collection.cp,
            )

    return PackedLatentAttention
