"""Arguments of an engine's server: the platform's, the user's, sleep's and vime's own, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError, Errors
from vime.facts.engine import RELEASES, EngineFeatures
from vime.facts.process import Parallel, VllmDefaults
from vime.planning.plan import EngineArg

GATE = "vime.weights.gate.Gate"
_NONE: Mapping[str, Any] = {}

ENGINE_NEEDS: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": "vime"},
    "middleware": [GATE],
}
"""Arguments that vime cannot do without in any release: log-probs after temperature, its own weights, its gate."""

EXPERTS_ARGS: Mapping[str, Any] = {"enable_return_routed_experts": True}
"""Arguments with which an engine tells the experts of every token."""

TOKEN_FLAGS = frozenset(features.token_flag for features in RELEASES if features.token_flag is not None)

OWNED_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "model_tag": "model.path",
    "served_model_name": "nothing: vime names the model itself",
    "dtype": "model.dtype",
    "host": "nothing: vime chooses where engines listen",
    "port": "nothing: vime takes free ports",
    "uds": "nothing: vime chooses where engines listen",
    "api_key": "nothing: vime makes a key for every run",
    "seed": "run.seed",
    "tensor_parallel_size": "topology roles.<rollout>.parallel.tp",
    "pipeline_parallel_size": "topology roles.<rollout>.parallel.pp",
    "data_parallel_size": "topology roles.<rollout>.parallel.dp",
    "headless": "topology roles.<rollout>",
    "grpc": "nothing: vime speaks HTTP to its engines",
    "api_server_count": "nothing: the gate is held by one server process",
    "config": "rollout.vllm: write the arguments there",
}
"""vLLM arguments that vime sets itself, and the vime key to use for them."""

_NEEDED_KEYS: Mapping[str, str] = {
    "enable_scale_out": "nothing: samples travel as tokens",
    "tokens_only": "nothing: samples travel as tokens",
    "logprobs_mode": "nothing: training needs log-probs after temperature",
    "weight_transfer_config": "topology sync",
    "middleware": "nothing: vime's gate is the middleware",
    **dict.fromkeys(EXPERTS_ARGS, "trainer.routing_replay: rollout"),
}


def engine_needs(features: EngineFeatures) -> dict[str, Any]:
    """`ENGINE_NEEDS`, and the flag of the token-in, token-out route where the release has one."""
    flag = {features.token_flag: True} if features.token_flag is not None else {}
    return {**flag, **ENGINE_NEEDS}


def merge_engine_args(
    defaults: VllmDefaults, user: Mapping[str, Any], needed: Mapping[str, Any], *, chosen: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    """Platform defaults under what the plan chose under the user's section under `needed` (by sleep).

    A null of the user removes what is below it.

    Raises ConfigError for a key that vime owns, naming the vime key to use; several are reported together.
    """
    refuse_owned(user, {**OWNED_KEYS, **_NEEDED_KEYS})
    merged = {**defaults.args, **chosen, **{key.replace("-", "_"): value for key, value in user.items()}, **needed}
    return {key: value for key, value in merged.items() if value is not None}


def engine_args(
    defaults: VllmDefaults,
    user: Mapping[str, Any],
    needed: Mapping[str, Any],
    *,
    platform: str,
    chosen: Mapping[str, Any] = _NONE,
    experts: bool = False,
) -> tuple[EngineArg, ...]:
    """The arguments of `merge_engine_args`, each with its origin and the value that it replaced; with `experts` those of
    `EXPERTS_ARGS` too. Raises as that does.
    """
    replay = EXPERTS_ARGS if experts else _NONE
    merged = merge_engine_args(defaults, user, {**needed, **replay}, chosen=chosen)
    given = {key.replace("-", "_"): value for key, value in user.items()}
    layers = (("sleep", needed), ("replay", replay), ("user", given), ("plan", chosen), (f"platform {platform}", defaults.args))
    found: list[EngineArg] = []
    for name, value in merged.items():
        holders = [(origin, layer[name]) for origin, layer in layers if name in layer]
        replaced = next((old for _, old in holders[1:] if old is not None and old != value), None)
        found.append(EngineArg(name, value, holders[0][0], replaced))
    return tuple(found)


def owned_args(parallel: Parallel, dtype: str, features: EngineFeatures) -> dict[str, tuple[Any, str]]:
    """What vime sets itself and a plan knows, with where it comes from."""
    own: dict[str, tuple[Any, str]] = {"dtype": (dtype, "model")}
    for name, size in (("tensor", parallel.tp), ("pipeline", parallel.pp), ("data", parallel.dp)):
        if size > 1:
            own[f"{name}_parallel_size"] = (size, "topology")
    if parallel.ep > 1:
        own["enable_expert_parallel"] = (True, "topology")
    return own | {name: (value, "vime") for name, value in engine_needs(features).items()}


def refuse_owned(keys: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raise ConfigError for each key that vime sets itself."""
    errors = [
        ConfigError(f"rollout.vllm.{key} is set by vime", fix=f"use {owned[name]}")
        for key in keys
        if (name := key.replace("-", "_").removeprefix("no_")) in owned
    ]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Errors(errors)
