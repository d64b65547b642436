"""From a Hugging Face config to a megatron-core model on this rank."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vime.errors import ConfigError, TrainerError
from vime.facts.model import ModelShape
from vime.facts.process import MegatronAdaptation
from vime.models.base import Family
from vime.trainer.megatron.attention import block_spec
from vime.trainer.megatron.experts import (
    UNSUPPORTED,
    balance_values,
    check_experts,
    expert_values,
    freeze_routers,
    mark_expert,
    use_token_shares,
)
from vime.trainer.megatron.parallel import Axes
from vime.trainer.megatron.rotary import scale_frequencies, use_pack_tables
from vime.trainer.setup import TrainerSetup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

VOCAB_MULTIPLE = 8
"""Every rank's share of the padded vocabulary is a multiple of this."""

OWNED = {
    "num_layers": "config.json",
    "hidden_size": "config.json",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "tensor_model_parallel_size": "the topology's parallel.tp",
    "pipeline_model_parallel_size": "the topology's parallel.pp",
    "virtual_pipeline_model_parallel_size": "the topology's parallel.vpp",
    "context_parallel_size": "the topology's parallel.cp",
    "expert_model_parallel_size": "the topology's parallel.ep",
    "expert_tensor_parallel_size": "the topology's parallel.etp",
    "num_moe_experts": "config.json",
    "moe_router_topk": "config.json",
    "moe_ffn_hidden_size": "config.json",
    "moe_layer_freq": "config.json",
    "recompute_granularity": "trainer.recompute",
    "calculate_per_token_loss": "algorithm.loss_mean",
}
"""Fields that have another home: trainer.megatron may not set them."""

_ADVICE = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    "megatron.core.dist_checkpointing.serialization": "Overwriting old incomplete",
}
"""Loggers and beginnings of what megatron-core says to its callers; nobody who runs vime can act on it."""

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Without a plan that decides, nothing is recomputed.
    "auto": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


_INTERLEAVED: dict[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""How pieces of a virtual pipeline exchange tensors. In one batch of sends and receives, two stages, each of which is both the
one before and the one after the other, pair them wrongly, and megatron-core does not notice."""


def torch_dtype(name: str) -> torch.dtype:
    """Raises ConfigError for a type that the trainer cannot train in."""
    if name not in DTYPES:
        raise ConfigError(f"the trainer cannot train in {name}", fix=f"set model.dtype to one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def transformer_values(setup: TrainerSetup, family: Family, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the transformer config that is not left at megatron-core's default.

    Later layers win: vime's own, the family's, `trainer.megatron`, the platform's overrides. Raises ConfigError for keys
    of `trainer.megatron` that megatron-core does not know or that vime owns, TrainerError for experts that do not divide.
    """
    shape = family.shape(hf_config)
    values = {**_own_values(setup), **expert_values(shape, setup.parallel), **family.transformer_values(hf_config)}
    values |= balance_values(setup.trainer.megatron) | checked_passthrough(setup.trainer.megatron)
    values |= {name: override.value for name, override in setup.adaptation.overrides.items()}
    check_experts(shape, setup.parallel, values)
    check_interleaved(setup.parallel.vpp, values)
    activation = values.get("activation_func")
    if isinstance(activation, str):
        values["activation_func"] = getattr(torch.nn.functional, activation)
    return values


def check_interleaved(vpp: int, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings under which a virtual pipeline would mix up its tensors."""
    wrong = [name for name, value in _INTERLEAVED.items() if vpp > 1 and values.get(name) is not value]
    if wrong:
        raise ConfigError(
            f"trainer.megatron.{wrong[0]} is {values.get(wrong[0])}, with which the pieces of a pipeline stage (vpp {vpp}) may "
            "get each other's tensors",
            fix=f"remove {' and '.join(wrong)} from trainer.megatron, or vpp from the topology",
        )


def checked_passthrough(section: Mapping[str, Any]) -> dict[str, Any]:
    """`trainer.megatron` as it is, or a ConfigError naming every key that cannot be set there."""
    import difflib

    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = []
    for key in section:
        if key in OWNED:
            problems.append(f"trainer.megatron.{key} is set by {OWNED[key]}")
        elif key in UNSUPPORTED:
            problems.append(f"trainer.megatron.{key} is not supported: {UNSUPPORTED[key]}")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(f"trainer.megatron.{key} is no field of megatron-core's transformer config{hint}")
    if problems:
        raise ConfigError("; ".join(problems), fix="correct or remove these keys")
    return dict(section)


def _own_values(setup: TrainerSetup) -> dict[str, Any]:
    parallel, dtype = setup.parallel, torch_dtype(setup.dtype)
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights are read or drawn afterwards; their memory is taken where it will be used.
        "use_cpu_initialization": setup.runtime.device_type == "cpu",
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "variable_seq_lengths": parallel.pp > 1,
        **(_INTERLEAVED | {"virtual_pipeline_model_parallel_size": parallel.vpp} if parallel.vpp > 1 else {}),
        "moe_token_dispatcher_type": "alltoall",
        **_RECOMPUTE[setup.trainer.recompute],
    }


def padded_vocab(vocab: int, tp: int) -> int:
    """The smallest size that gives every tensor-parallel rank the same multiple of `VOCAB_MULTIPLE`."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def check_divisible(shape: ModelShape, axes: Axes) -> None:
    """Raise TrainerError naming the numbers when an axis does not divide the model."""
    for name, size in _split_by_tp(shape):
        if size % axes.tp_size:
            raise TrainerError(f"{size} {name} do not divide into tp {axes.tp_size}", fix=f"choose a tp that divides {size}")
    if shape.layers % axes.pp_size:
        raise TrainerError(
            f"{shape.layers} layers do not divide into pp {axes.pp_size}", fix=f"choose a pp that divides {shape.layers}"
        )
    if (layers := shape.layers // axes.pp_size) % axes.vpp_size:
        raise TrainerError(
            f"{layers} layers of a pipeline stage do not divide into vpp {axes.vpp_size}",
            fix=f"choose a vpp that divides {layers}",
        )


def _split_by_tp(shape: ModelShape) -> Iterator[tuple[str, int]]:
    yield "attention heads", shape.heads
    yield "key-value heads", shape.kv_heads
    yield "MLP columns", shape.ffn
    yield "columns of the shared expert", shape.shared_ffn
    if shape.latent is not None:
        yield "entries of the compressed key", shape.latent.kv_rank + shape.latent.rotary
        yield "entries of the compressed query", shape.latent.q_rank


class RowSelect:
    """Stands in for the output layer: hands on the hidden states of the rows that predict a target.

    The head itself runs with the loss, in chunks (`vime.trainer.megatron.logprobs`), so that logits of a whole micro-batch
    never exist. `rows` is set for each micro-batch, None keeps every row.
    """

    def __init__(self, axes: Axes, *, sequence_parallel: bool) -> None:
        self.rows: Tensor | None = None
        self._group = axes.tp_group if sequence_parallel else None

    def __call__(self, hidden: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, None]:
        """hidden [tokens (/ tp), 1, hidden] -> [rows, 1, hidden], no bias; takes the arguments of the output layer."""
        if self._group is not None:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            # The head's gradient is summed over the ranks already, so each takes its own part of it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._group)
        return (hidden if self.rows is None else hidden.index_select(0, self.rows)), None


@dataclasses.dataclass(frozen=True)
class Model:
    """This rank's part of the policy.

    `chunks` are megatron-core's modules, unwrapped: one, or with a virtual pipeline a stage's pieces in the order of their
    layers. `select` is None before the last stage.
    """

    chunks: tuple[Any, ...]
    config: Any
    family: Family
    shape: ModelShape
    hf_config: Mapping[str, Any]
    select: RowSelect | None

    @property
    def bare(self) -> Any:
        """The last piece, which on the last stage ends in the head."""
        return self.chunks[-1]

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows [columns, hidden] of the output layer's weight; on the last stage."""
        if self.bare.share_embeddings_and_output_weights:
            return self.bare.shared_embedding_or_output_weight()
        return self.bare.output_layer.weight


def build_model(
    setup: TrainerSetup, *, axes: Axes, family: Family, hf_config: Mapping[str, Any], device: torch.device
) -> Model:
    """The model with undefined weights. Raises ConfigError or TrainerError when it does not fit the layout."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    use_pack_tables()
    use_token_shares()
    _leave_out_advice()
    shape, rotary = family.shape(hf_config), family.rotary(hf_config)
    check_divisible(shape, axes)
    config = _transformer_config(transformer_values(setup, family, hf_config))
    pieces = axes.vpp_size
    chunks = tuple(
        GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, setup.adaptation, vp_stage=piece if pieces > 1 else None),
            vocab_size=padded_vocab(shape.vocab, axes.tp_size),
            max_sequence_length=shape.max_positions,
            pre_process=axes.is_first_stage and piece == 0,
            post_process=axes.is_last_stage and piece == pieces - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=rotary.percent,
            rotary_base=int(rotary.base) if rotary.base.is_integer() else rotary.base,  # type: ignore[arg-type]
            parallel_output=True,
            vp_stage=piece if pieces > 1 else None,
        ).to(device)
        for piece in range(pieces)
    )
    for bare in chunks:
        _mark_parameters(bare, family)
        scale_frequencies(bare, rotary)
        if setup.trainer.freeze_router:
            freeze_routers(bare, family)
    select = _replace_head(chunks[-1], axes, config) if axes.is_last_stage else None
    return Model(chunks, config, family, shape, hf_config, select)


def _transformer_config(values: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    return kind(**values)


def _mark_parameters(bare: Any, family: Family) -> None:
    """Say which parameters tensor parallelism splits and which are experts.

    megatron-core marks sharded parameters only while it draws weights.
    Without the mark a sharded parameter counts as a copy, and gradient norms leave out all ranks but the first.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for name, param in bare.named_parameters():
        row, _ = family.table.to_hf(name)
        if row.is_expert:
            mark_expert(param)
        if row.tp_dim is not None and not hasattr(param, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(param, is_parallel=True, dim=row.tp_dim, stride=1)


def _replace_head(bare: Any, axes: Axes, config: Any) -> RowSelect:
    select = RowSelect(axes, sequence_parallel=config.sequence_parallel)
    bare.output_layer.forward = select
    return select


def _leave_out_advice() -> None:
    for name, beginning in _ADVICE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(beginning))


class _Without(logging.Filter):
    """Drops messages that begin in one way."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


def adaptation_notes(adaptation: MegatronAdaptation) -> tuple[str, ...]:
    """One line for every setting that the platform forces."""
    return tuple(f"{name} = {override.value!r}: {override.why}" for name, override in adaptation.overrides.items())
