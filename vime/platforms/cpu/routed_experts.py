"""Experts that each token was routed to, returned by vLLM's runner for hosts. Runs inside vLLM's own processes.

vLLM's connector for such outputs captures, keeps and delivers the ids; only the runner has to drive it, and of the runners
in vLLM 0.32 the one for hosts (V1) does not. What is here asks the connector before a step which requests run, hands it the
step's batch after the forward pass, and takes its rows after sampling. `vllm_plugin.return_routed_experts` installs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

CONNECTOR = "vllm.distributed.aux_output_connector.worker"
CONFIG = "vllm.config.vllm"
RUNNER = "vllm.v1.worker.cpu_model_runner"
VERIFY = "VllmConfig._verify_aux_output_compatibility"

_HELD = "_vime_aux_connector"
_PENDING = "_vime_aux_pending"


def make_verify(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Leave out the demand for the other runner, which platforms outside of vLLM are free of; all other checks stay."""

    @functools.wraps(original)
    def _verify_aux_output_compatibility(self: Any) -> None:
        from vllm.platforms import current_platform

        owner, name = type(current_platform), "is_out_of_tree"
        own = owner.__dict__.get(name)
        setattr(owner, name, lambda _platform: True)
        try:
            original(self)
        finally:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    return _verify_aux_output_compatibility


def make_initialize_kv_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the connector beside the cache whose blocks its rows follow; a cache for profiling has none."""

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **named: Any) -> Any:
        result = original(self, kv_cache_config, *args, **named)
        profiling = bool(named.get("is_profiling", args[0] if args else False))
        if self.vllm_config.aux_output_config.enabled and not profiling and getattr(self, _HELD, None) is None:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            setattr(self, _HELD, get_aux_output_connector(self.model, self.vllm_config, kv_cache_config))
        return result

    return initialize_kv_cache


def make_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the connector of the step, and give it the batch whose rows the forward pass captured."""

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        connector = getattr(self, _HELD, None)
        if connector is None:
            return original(self, scheduler_output, *args, **named)
        setattr(self, _PENDING, None)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = original(self, scheduler_output, *args, **named)
        if scheduler_output.total_num_scheduled_tokens > 0:
            setattr(self, _PENDING, connector.prepare_output(batch_view(self.input_batch, scheduler_output)))
        return result

    return execute_model


def batch_view(batch: Any, scheduler_output: Any) -> SimpleNamespace:
    """A step's batch as the connector reads it: requests in row order, where each one's rows start, its tokens before them."""
    requests = list(batch.req_ids)
    counts = [scheduler_output.num_scheduled_tokens[request] for request in requests]
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )


def make_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Put the step's rows into the runner's output. A rank that returns no output has no rows pending."""

    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **named: Any) -> Any:
        output = original(self, *args, **named)
        pending = getattr(self, _PENDING, None)
        if pending is None or output is None:
            return output
        setattr(self, _PENDING, None)
        sampled = output.sampled_token_ids
        rows = [len(sampled[output.req_id_to_index[request]]) if sampled else 0 for request in pending.request_ids]
        pending.enqueue_cpu_copy(np.array(rows, dtype=np.int64), np.zeros(len(rows), dtype=np.int64))
        output.aux_output_connector_output = pending.process_output()
        return output

    return sample_tokens


RUNNER_PARTS: dict[str, Callable[[Any], Any]] = {
    "initialize_kv_cache": make_initialize_kv_cache,
    "execute_model": make_execute_model,
    "sample_tokens": make_sample_tokens,
}
"""Methods of the runner and what replaces each."""
