"""The engine's half inside vLLM: one weight-transfer backend `vime` that dispatches by protocol id.

Loaded through vLLM's general plugins; does nothing in a vLLM process that vime did not start (`VIME_ENGINE=1`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from vime.errors import VimeError, WeightSyncError
from vime.facts.process import Factory
from vime.weights.fingerprint import check_digest
from vime.weights.load_plan import plan_load
from vime.weights.manifest import check_same_manifest, manifest_from_json, short_list, unpack_manifest
from vime.weights.transports.base import EngineHalf, Manifest, NamedTensors
from vime.weights.vllm_platform import check_platform

BACKEND = "vime"
HALVES_ENV = "VIME_ENGINE_HALVES"
"""JSON `{protocol: {"target": "module:callable", "options": {}}}`: halves of platform plugins, set at the engine's start."""

PostUpdateHook = Callable[[torch.nn.Module, Any], None]

post_update_hooks: list[PostUpdateHook] = []
"""Called with (model, model_config) after every finished update, for state that vLLM derives from weights only once."""

_halves: dict[str, Factory] = {
    "host_shm": Factory("vime.weights.transports.host_shm:HostShmEngine"),
    "collective": Factory("vime.weights.transports.collective:CollectiveEngine"),
    "disk": Factory("vime.weights.transports.disk:DiskEngine"),
}


def register() -> None:
    """vLLM's plugin hook; may be called any number of times and in every process of a server.

    Raises EngineError where vLLM resolved another platform than the run's, before it loads a model.
    """
    if os.environ.get("VIME_ENGINE") != "1":
        return
    check_platform()
    from vllm.v1.worker.worker_base import WorkerBase

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "vime.weights.vllm_ext", "VimeWeightTransferEngine")
    worker_class: Any = WorkerBase
    worker_class.vime_weights = vime_weights


def vime_weights(worker: Any, step: str, payload: dict[str, Any]) -> dict[str, Any]:
    """A worker method for collective calls: `init` or a whole `update`. Answers `{"error": text}`, or `{"seconds": {}}` and in
    `bytes` what this worker holds by tag.

    Errors are values, because vLLM's multiprocess executor stops reading at the first worker that raises and takes what
    the others still answer for the results of the next call. Only the first data-parallel replica's values come back, so
    the others have to raise.
    """
    from vllm.config import set_current_vllm_config

    try:
        # vLLM 0.26 calls a worker's methods without its configuration, which processing a loaded layer may ask for.
        with set_current_vllm_config(worker.vllm_config):
            return {"seconds": _STEPS[step](worker, payload), "bytes": _held_bytes(worker)}
    except Exception as error:
        if worker.parallel_config.data_parallel_index:
            raise
        _log().exception("weight %s failed", step)
        return {"error": str(error) if isinstance(error, VimeError) else f"{type(error).__name__}: {error}"[:600]}


def _init_step(worker: Any, payload: dict[str, Any]) -> dict[str, float]:
    began = time.perf_counter()
    worker.init_weight_transfer_engine(payload)
    return {"init": time.perf_counter() - began}


def _update_step(worker: Any, payload: dict[str, Any]) -> dict[str, float]:
    times = [time.perf_counter()]
    try:
        worker.start_weight_update()
    except RuntimeError as error:
        if "already active" not in str(error):
            raise
        worker.finish_weight_update()
        worker.start_weight_update()
    times.append(time.perf_counter())
    worker.update_weights(payload)
    times.append(time.perf_counter())
    worker.finish_weight_update()
    times.append(time.perf_counter())
    return {phase: times[i + 1] - times[i] for i, phase in enumerate(("start", "update", "finish"))}


def _held_bytes(worker: Any) -> dict[str, int]:
    """Bytes of the tensors of model and cache, each storage once, whether or not they have memory at the moment."""
    runner = worker.model_runner
    model = [*runner.model.parameters(), *runner.model.buffers()]
    return {"engine_weights": _storage_bytes(model), "kv": _storage_bytes(_tensors_in(getattr(runner, "kv_caches", ())))}


def _tensors_in(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        yield from _tensors_in(tuple(nested.values()))
    elif isinstance(nested, (list, tuple)):
        for one in nested:
            yield from _tensors_in(one)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}.values())


_STEPS: dict[str, Callable[[Any, dict[str, Any]], dict[str, float]]] = {"init": _init_step, "update": _update_step}


def register_half(protocol: str, half: Factory) -> None:
    """Make a further engine half known; a platform's own vLLM plugin calls this."""
    _halves[protocol] = half


def half_for(protocol: str) -> Factory:
    """The factory of a protocol's engine half. Raises WeightSyncError listing the known ones."""
    given = {p: Factory(h["target"], h.get("options", {})) for p, h in json.loads(os.environ.get(HALVES_ENV, "{}")).items()}
    known = {**_halves, **given}
    if protocol not in known:
        raise WeightSyncError(
            f"this engine has no half for transport {protocol}; it knows {', '.join(sorted(known))}",
            fix="start the engine with the platform plugin that offers it",
        )
    return known[protocol]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`manifest`: rows as in `vime.weights.manifest`, or packed. `rank_offset`: workers of the engines before this one; on its
    host, where a transport has an offer for each host.
    """

    protocol: str
    manifest: list[list[Any]] | str
    info: dict[str, Any] = field(default_factory=dict)
    rank_offset: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the trainer's `stage` returned, merged over its ranks."""

    staged: dict[str, Any] = field(default_factory=dict)


class VimeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. Option `in_place` (of the transport offer) asks to skip vLLM's layerwise reload where that is exact."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._accepted: Manifest | None = None
        self._half: EngineHalf | None = None
        self._in_place = False
        self._reloading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        told = init_info.manifest
        rows = unpack_manifest(told) if isinstance(told, str) else told
        manifest = manifest_from_json(rows)
        factory = half_for(init_info.protocol)
        if self._accepted is None:
            self._check(manifest)
            self._accepted = manifest
        else:
            check_same_manifest(self._accepted, manifest)
        self._in_place = bool(init_info.options.get("in_place")) and _live_parameters_are_used(self.model)
        self.shutdown()
        half: EngineHalf = factory.build()
        pc = self.parallel_config
        half.connect(
            {
                **init_info.info,
                "manifest": rows,
                "rank_offset": init_info.rank_offset,
                "worker_rank": pc.data_parallel_index * pc.world_size + pc.rank,
            }
        )
        self._half = half

    def start_weight_update(self) -> None:
        if self._half is None:
            raise WeightSyncError("update before initialisation", fix="call init_weight_transfer_engine first")
        if not self._in_place:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._reloading = True
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one full update; on any failure leave the model whole enough for the next one."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        except BaseException as error:
            self._abandon()
            if isinstance(error, VimeError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"loading failed: {type(error).__name__}: {error}"[:600], fix="publish again") from error

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._half is not None
        assert self._accepted is not None
        received: set[str] = set()
        arriving = self._half.receive(update_info.staged)
        try:
            _load(self.model, self._verified(arriving, update_info.staged.get("digests"), received))
        finally:
            if isinstance(arriving, Generator):
                arriving.close()
        if missing := [t.name for t in self._accepted.tensors if t.name not in received]:
            raise WeightSyncError(f"{len(missing)} tensors did not arrive: {short_list(missing)}", fix="publish again")

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Abstract in vLLM 0.26, gone in 0.32. vime's trainers send by their own halves."""
        raise WeightSyncError("this backend only receives", fix="send with vime.weights.protocol.Publisher")

    def finish_weight_update(self) -> None:
        self._finalize()
        for hook in post_update_hooks:
            hook(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._half is not None:
            self._half.close()
            self._half = None

    def _check(self, manifest: Manifest) -> None:
        plan = plan_load(self.model, lambda weights: _load(self.model, weights), manifest, _checkpoint_twins(self.model))
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        plan.check(
            may_skip=lambda name: tied and name == "lm_head.weight",
            whole_model=self.parallel_config.pipeline_parallel_size == 1,
            all_filled=self.model_config.quantization is None,
            derived=_derived_parameters(self.model),
        )

    def _verified(
        self, tensors: NamedTensors, digests: Mapping[str, str] | None, received: set[str]
    ) -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors:
            if digests is not None:
                check_digest(digests, name, tensor)
            received.add(name)
            yield name, tensor

    def _finalize(self) -> None:
        if self._reloading:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def _abandon(self) -> None:
        """Give every layer its storage back. The weights are mixed, so the engine must not serve until the next update."""
        try:
            self._finalize()
        except Exception:  # noqa: BLE001 (the first error is the one to report)
            _log().exception("restoring layers after a failed weight update")


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    loader: Any = model
    loader.load_weights(weights)


def _checkpoint_twins(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Storage-less parameters in checkpoint format: kernels may have packed or emptied the live ones."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    twins: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        recorded, _ = get_layerwise_info(layer).restore_metadata
        for name, param in layer.named_parameters(recurse=False):
            if name in recorded:
                twins[id(param)] = _unsanitized(recorded[name], layer)
    return twins


def _derived_parameters(model: torch.nn.Module) -> set[str]:
    """Parameters that appeared after loading, such as the absorbed projections of latent attention; none where vLLM did not
    record what a checkpoint holds.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    recorded = {prefix: get_layerwise_info(layer).restore_metadata[0] for prefix, layer in model.named_modules()}
    if not any(recorded.values()):
        return set()
    split = ((name, *name.rpartition(".")[::2]) for name, _ in model.named_parameters())
    return {name for name, layer, own in split if own not in recorded[layer] and own not in SKIP_TENSORS}


def _unsanitized(twin: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    return restore_layer_refs(twin, layer)


def _live_parameters_are_used(model: torch.nn.Module) -> bool:
    """Plain dense layers whose live parameters have the checkpoint's shape: writing into them is the whole update."""
    twins = _checkpoint_twins(model)
    same = all(
        id(p) in twins and (p.shape, p.dtype, p.stride()) == (twins[id(p)].shape, twins[id(p)].dtype, twins[id(p)].stride())
        for p in model.parameters()
    )
    methods = {type(m).__name__ for layer in model.modules() if (m := getattr(layer, "quant_method", None)) is not None}
    derived = any(_derives_from_weights(layer) for layer in model.modules())
    return same and not derived and methods <= {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


def _derives_from_weights(layer: torch.nn.Module) -> bool:
    """Layers that vLLM lets compute something once all weights are loaded: MLA's absorbed projections, and sinks in another
    type. Plain attention only sets scales there, which are buffers and survive both updates and sleep.
    """
    if not hasattr(layer, "process_weights_after_loading"):
        return False
    return type(layer).__name__ != "Attention" or getattr(getattr(layer, "impl", None), "sinks", None) is not None


def _log() -> Any:
    from vllm.logger import init_logger

    return init_logger("vime.weights")
