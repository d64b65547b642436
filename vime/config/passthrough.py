"""Checks the sections that are handed on to vLLM, vllm-router and megatron-core against those packages' own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.config.manifest import Argument, Manifest, manifest_of
from vime.errors import ConfigError, VimeError
from vime.yamltree import Entries, Node, Scalar, Value, did_you_mean, nearest, plain

_NO_LORA = "vime trains full weights only; merge the adapter into the model and give its folder as `model.path`"
_PLACED = "vime starts every engine itself; use `engines` and `parallel` in the topology"

VLLM_OWNED: Mapping[str, str] = {
    "model": "use `model.path`",
    "model_tag": "use `model.path`",
    "tokenizer": "use `model.path`; the tokenizer lies in the model's folder",
    "served_model_name": "vime names the served model itself",
    "dtype": "use `model.dtype`; trainer and engine must agree",
    "seed": "use `run.seed`",
    "tensor_parallel_size": "use `roles.<rollout role>.parallel.tp` in the topology",
    "pipeline_parallel_size": "use `roles.<rollout role>.parallel.pp` in the topology",
    "data_parallel_size": "use `roles.<rollout role>.parallel.dp` in the topology",
    "enable_expert_parallel": "use `roles.<rollout role>.parallel.ep` in the topology",
    "data_parallel_address": _PLACED,
    "data_parallel_backend": _PLACED,
    "data_parallel_external_lb": _PLACED,
    "data_parallel_hybrid_lb": _PLACED,
    "data_parallel_rank": _PLACED,
    "data_parallel_rpc_port": _PLACED,
    "data_parallel_size_local": _PLACED,
    "data_parallel_start_rank": _PLACED,
    "device_ids": _PLACED,
    "distributed_executor_backend": _PLACED,
    "headless": _PLACED,
    "api_server_count": _PLACED,
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "master_addr": _PLACED,
    "master_port": _PLACED,
    "host": "engines listen on the loopback address only",
    "port": "vime picks free ports",
    "uds": "engines listen on the loopback address only",
    "grpc": "vime speaks HTTP to its engines",
    "grpc_port": "vime speaks HTTP to its engines",
    "api_key": "vime makes a key for its own processes",
    "config": "write the arguments into `rollout.vllm`",
    "enable_sleep_mode": "use `share` in the topology",
    "enable_return_routed_experts": "use `trainer.routing_replay: rollout`",
    "enable_scale_out": "vime sets it in every release that has it",
    "tokens_only": "vime always talks in tokens",
    "logprobs_mode": "vime always asks for processed log-probs: raw ones ignore the temperature",
    "weight_transfer_config": "use `sync` in the topology",
    "enable_lora": _NO_LORA,
    "lora_modules": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
}

ROUTER_OWNED: Mapping[str, str] = {
    "worker_urls": "vime tells the router about its engines",
    "host": "the router listens on the loopback address only",
    "port": "vime picks a free port",
    "prometheus_port": "vime picks a free port",
    "prometheus_host": "the router listens on the loopback address only",
    "api_key": "vime makes a key for its own processes",
    "service_discovery": "vime tells the router about its engines",
    "mini_lb": "use the full router",
    "vllm_pd_disaggregation": "use `stage` of a rollout role in the topology",
    "prefill_urls": "use `stage` of a rollout role in the topology",
    "decode_urls": "use `stage` of a rollout role in the topology",
    "request_timeout_secs": "use `rollout.request_timeout_s`",
    "worker_startup_timeout_secs": "use `rollout.start_timeout_s`",
}

_SHAPE = "the model's shape comes from config.json in `model.path`"
_RECOMPUTE = "use `trainer.recompute`"

MEGATRON_OWNED: Mapping[str, str] = {
    "tensor_model_parallel_size": "use `roles.actor.parallel.tp` in the topology",
    "pipeline_model_parallel_size": "use `roles.actor.parallel.pp` in the topology",
    "context_parallel_size": "use `roles.actor.parallel.cp` in the topology",
    "expert_model_parallel_size": "use `roles.actor.parallel.ep` in the topology",
    "expert_tensor_parallel_size": "use `roles.actor.parallel.etp` in the topology",
    "bf16": "use `model.dtype`",
    "fp16": "use `model.dtype`",
    "params_dtype": "use `model.dtype`",
    "pipeline_dtype": "use `model.dtype`",
    "num_layers": _SHAPE,
    "hidden_size": _SHAPE,
    "num_attention_heads": _SHAPE,
    "num_query_groups": _SHAPE,
    "kv_channels": _SHAPE,
    "ffn_hidden_size": _SHAPE,
    "num_moe_experts": _SHAPE,
    "moe_ffn_hidden_size": _SHAPE,
    "moe_router_topk": _SHAPE,
    "moe_layer_freq": _SHAPE,
    "moe_shared_expert_intermediate_size": _SHAPE,
    "normalization": _SHAPE,
    "qk_layernorm": _SHAPE,
    "layernorm_epsilon": _SHAPE,
    "gated_linear_unit": _SHAPE,
    "add_bias_linear": _SHAPE,
    "add_qkv_bias": _SHAPE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _RECOMPUTE,
    "recompute_num_layers": _RECOMPUTE,
    "calculate_per_token_loss": "use `algorithm.loss_mean`",
    "deterministic_mode": "use `run.deterministic`",
    "variable_seq_lengths": "vime always packs sequences of any length",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One pass-through section: where it stands, which package reads it, which of its keys vime sets itself."""

    path: tuple[str, ...]
    package: str
    owned: Mapping[str, str]


SECTIONS: tuple[Section, ...] = (
    Section(("rollout", "vllm"), "vllm", VLLM_OWNED),
    Section(("rollout", "router"), "vllm-router", ROUTER_OWNED),
    Section(("trainer", "megatron"), "megatron-core", MEGATRON_OWNED),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A section with its values read as the package's types, what is wrong with it, and which manifest was used."""

    entries: Entries
    errors: tuple[VimeError, ...]
    manifest: Manifest


def check(section: Section, entries: Entries, *, manifest: Manifest | None = None) -> Checked:
    """Check the names and simple types of a section's keys."""
    known = manifest or manifest_of(section.package)
    values: dict[str, Node] = {}
    errors: list[VimeError] = []
    for key, node in entries.entries.items():
        where, path = str(entries.keys.get(key, node.where)), ".".join((*section.path, key))
        name = known.aliases.get(key, key)
        if name in section.owned:
            errors.append(ConfigError(f"`{path}` is set by vime", where=where, fix=section.owned[name]))
        elif key not in known.arguments:
            what = f"unknown key `{path}`: {known.package} {known.version} has no such argument"
            errors.append(ConfigError(what, where=where, fix=_suggest(key, known, section)))
        else:
            value, problem = _typed(node, known.arguments[key])
            values[key] = value
            if problem is not None:
                errors.append(ConfigError(f"`{path}`: {problem}", where=where, fix=_type_fix(known.arguments[key])))
    return Checked(Entries(entries.where, values, entries.keys), tuple(errors), known)


def _suggest(key: str, manifest: Manifest, section: Section) -> str:
    if key in manifest.aliases:
        return f"write `{manifest.aliases[key]}`"
    near = nearest(key, manifest.arguments)
    if near is not None and near in section.owned:
        return section.owned[near]
    return did_you_mean(key, manifest.arguments, what="arguments")


def _typed(node: Node, argument: Argument) -> tuple[Node, str | None]:
    """The value as the argument's type; a text such as `on` is a boolean only where a flag is wanted."""
    value = plain(node)
    if value is None:
        return node, None
    match argument.kind:
        case "flag":
            word = value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
            problem = None if word is not None else f"expected true or false, got {value!r}"
        case "int" | "float":
            word, problem = _as_number(value, whole=argument.kind == "int")
        case "choice":
            word = value
            listed = ", ".join(argument.choices)
            problem = None if str(value) in argument.choices else f"expected one of {listed}; got {value!r}"
        case "text":
            word = node.text if isinstance(node, Scalar) and not isinstance(value, bool) else value
            problem = None if isinstance(word, str) else f"expected text, got {word!r}"
        case _:
            return node, None
    return (Value(node.where, word), None) if problem is None else (node, problem)


_TRUTH = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


def _as_number(value: Any, *, whole: bool) -> tuple[Any, str | None]:
    wanted = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value, f"expected {wanted}, got {value!r}"
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value, f"expected {wanted}, got {value!r}"
    if not whole:
        return number, None
    return (int(number), None) if number.is_integer() else (value, f"expected {wanted}, got {value!r}")


def _type_fix(argument: Argument) -> str:
    if argument.kind == "text":
        return "write it in quotes"
    return f"give a value of kind `{argument.kind}`"
