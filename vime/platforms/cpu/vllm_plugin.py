"""What vLLM needs on a host to serve reinforcement learning. Runs inside vLLM's own processes.

vLLM loads `register` from its `vllm.general_plugins` group. It does nothing unless vime started the process
(`VIME_ENGINE=1`) and vLLM resolved its CPU platform. Every fix names what it changes, why, and when it can go; a fix
whose target is gone in another vLLM release says so in one warning and is left out. Written against vLLM 0.32.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from vime.platforms.cpu import affinity

logger = logging.getLogger(__name__)

MIN_GEMM_ROWS = 4
"""Products of fewer rows take another path in the host's BLAS and sum in another order."""

_PR_SET_PDEATHSIG = 1
_MARK = "_vime_fix"
_fork_hooks_installed = False


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to call again."""
    if os.environ.get("VIME_ENGINE") != "1":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    affinity.bind()
    die_with_parent()
    start_workers_by_fork()
    keep_linear_weights()
    repack_experts_on_reload()
    roll_back_discarded_samples()
    return_routed_experts()
    if os.environ.get("VIME_CPU_SHARED_PREFILL", "1") == "1":
        share_prefill()


def die_with_parent() -> None:
    """Let the kernel end a forked engine core when its API server goes.

    Why: an API server that is killed leaves its engine core behind, silently. The hook is set here because plugins are
    not run again in a forked child. Goes when vLLM's engine core watches its parent.
    """
    global _fork_hooks_installed
    if _fork_hooks_installed or not sys.platform.startswith("linux"):
        return
    _fork_hooks_installed = True
    libc = ctypes.CDLL(None)
    parent = [os.getpid()]

    def remember() -> None:
        parent[0] = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent[0]:
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=arm)


def start_workers_by_fork() -> None:
    """Fork engine cores and workers instead of spawning them.

    Why: the CPU platform forces `spawn` after reading the environment, and every spawned process imports torch and vLLM
    again (6 to 10 s each). Goes when `VLLM_WORKER_MULTIPROC_METHOD` is respected on a host.
    """

    def make(original: Any) -> Any:
        def check_and_update_config(cls: Any, vllm_config: Any) -> None:
            original.__func__(cls, vllm_config)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

        return classmethod(check_and_update_config)

    _patch("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", make)


def keep_linear_weights() -> None:
    """Use plain matrix products for linear layers, equal bit for bit alone and in a batch.

    Why: with oneDNN every `layer.weight` is packed away (no in-place update, no checksum, a tied output head that keeps
    old weights) and its primitive cache grows with every new batch size. Plain products of fewer than `MIN_GEMM_ROWS`
    rows are padded, because they would round differently from the same rows in a larger batch.
    `VIME_CPU_ONEDNN=1` keeps oneDNN, and then the tied head is packed again after each update. Goes when vLLM re-packs
    tied weights and bounds the cache.
    """
    if os.environ.get("VIME_CPU_ONEDNN") == "1":
        from vime.weights.vllm_ext import post_update_hooks

        if after_update not in post_update_hooks:
            post_update_hooks.append(after_update)
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cpu_unquantized_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
            rows = x.shape[0]
            if rows >= MIN_GEMM_ROWS or x.dim() != 2:
                return original(layer, x, weight, bias)
            padded = x.new_zeros((MIN_GEMM_ROWS, x.shape[1]))
            padded[:rows] = x
            return original(layer, padded, weight, bias)[:rows]

        return cpu_unquantized_gemm

    ops = importlib.import_module("vllm._custom_ops")
    if not hasattr(ops, "_supports_onednn"):
        _absent("vllm._custom_ops", "_supports_onednn")
        return
    ops._supports_onednn = False  # pyright: ignore[reportAttributeAccessIssue]
    _patch("vllm.model_executor.layers.utils", "cpu_unquantized_gemm", make)


def after_update(model: Any, model_config: Any) -> None:
    """Pack a tied output head again after an update of the weights; nothing to do with oneDNN off.

    Why: `lm_head.weight` is the embedding's tensor, but its oneDNN pack is a copy that a reload does not refresh.
    """
    if os.environ.get("VIME_CPU_ONEDNN") != "1":
        return
    head = getattr(model, "lm_head", None)
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    if tied and head is not None and hasattr(layers, "dispatch_cpu_unquantized_gemm"):
        layers.dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def repack_experts_on_reload() -> None:
    """Run the host's expert packing on every reload of a mixture-of-experts layer.

    Why: `_setup_kernel` takes a second call for an update under captured graphs and skips the packing, so the engine
    answers 200 and serves wrong weights. There are no graphs on a host. Goes when vLLM packs on reload.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _setup_kernel(self: Any, *args: Any, **named: Any) -> Any:
            self.moe_kernel = None
            return original(self, *args, **named)

        return _setup_kernel

    module = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    _patch(module, "UnquantizedFusedMoEMethod._setup_kernel", make)


def roll_back_discarded_samples() -> None:
    """Give a seeded request its random state back when the token of an unfinished prefill chunk is thrown away.

    Why: the runner rewinds such generators by offset, which host generators do not have: the first seeded request whose
    prefill is split ends the engine. Goes when vLLM rewinds host generators by state.
    """

    def discarded(runner: Any) -> Iterable[int]:
        batch = runner.input_batch
        if not batch.generators:
            return ()
        rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        return [int(row) for row in rows if int(row) in batch.generators]

    def make_sample(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _sample(self: Any, *args: Any, **named: Any) -> Any:
            generators = self.input_batch.generators
            saved = {row: generators[row].get_state() for row in discarded(self)}
            output = original(self, *args, **named)
            for row, state in saved.items():
                generators[row].set_state(state)
            return output

        return _sample

    def make_bookkeeping(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _bookkeeping_sync(self: Any, *args: Any, **named: Any) -> Any:
            generators = self.input_batch.generators
            hidden = {row: generators.pop(row) for row in discarded(self)}
            try:
                return original(self, *args, **named)
            finally:
                generators.update(hidden)

        return _bookkeeping_sync

    module = "vllm.v1.worker.cpu_model_runner"
    needed = ("_sample", "_bookkeeping_sync")
    runner = getattr(importlib.import_module(module), "CPUModelRunner", None)
    missing = [name for name in needed if not hasattr(runner, name)]
    if missing:
        _absent(module, f"CPUModelRunner.{missing[0]}")
        return
    _patch(module, "CPUModelRunner._sample", make_sample)
    _patch(module, "CPUModelRunner._bookkeeping_sync", make_bookkeeping)


def share_prefill() -> None:
    """Compute equal prompts that enter a step together once; `VIME_CPU_SHARED_PREFILL=0` leaves it out.

    Why: a fifth of a rollout's processor time goes into prompts that siblings have in common. Goes when vLLM's prefix
    cache shares prompts shorter than a block.
    """
    from vime.platforms.cpu import shared_prefill

    module = "vllm.model_executor.layers.attention.attention"
    if _patch(module, "Attention.forward", shared_prefill.make_attention_forward):
        _patch("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._model_forward", shared_prefill.make_model_forward)


def return_routed_experts() -> None:
    """Let `--enable-return-routed-experts` work with the host's runner; nothing changes for an engine without the flag.

    Why: the flag is refused on a host, since only the other runner drives the connector that returns the ids. All parts
    or none: a flag that is accepted by a runner that returns nothing would be silent. Goes when vLLM's V1 runner drives it.
    """
    from vime.platforms.cpu import routed_experts as parts

    try:
        connector = importlib.import_module(parts.CONNECTOR)
        runner = importlib.import_module(parts.RUNNER).CPUModelRunner
    except (ImportError, AttributeError):
        _absent(parts.CONNECTOR, "get_aux_output_connector")
        return
    needed = [(connector, "get_aux_output_connector"), *((runner, name) for name in parts.RUNNER_PARTS)]
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    if missing:
        _absent(parts.RUNNER, missing[0])
        return
    if _patch(parts.CONFIG, parts.VERIFY, parts.make_verify):
        for name, make in parts.RUNNER_PARTS.items():
            _patch(parts.RUNNER, f"CPUModelRunner.{name}", make)


def _patch(module: str, path: str, make: Callable[[Any], Any]) -> bool:
    """Replace `module.path` by `make(original)`, once; warn, leave it and return False where it is absent."""
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        _absent(module, path)
        return False
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    original = getattr(owner, name, None)
    if original is None:
        _absent(module, path)
        return False
    if not getattr(original, _MARK, False):
        replacement = make(original)
        setattr(getattr(replacement, "__func__", replacement), _MARK, True)
        setattr(owner, name, replacement)
    return True


def _absent(module: str, path: str) -> None:
    logger.warning("vime: this vLLM has no %s.%s; the fix that needs it is left out", module, path)
