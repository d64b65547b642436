"""What a model's own weight loader does with a set of tensor names, found out without touching the model.

Every parameter's loader is replaced for a moment by one that runs the original on a parameter without storage, so that
shapes are checked by the loaders themselves, and notes which parameter was filled how far. No vLLM import: the engine's
extension passes what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vime.errors import WeightSyncError
from vime.weights.manifest import short_list
from vime.weights.transports.base import Manifest

Loader = Callable[..., Any]
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(slots=True)
class Fill:
    """What reached one parameter: elements copied, the tensors that came, and each call's arguments."""

    name: str
    numel: int
    copied: int = 0
    tensors: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    """One loader call that can be repeated with new data: `loader(param, tensor, *args, **kwargs)`."""

    loader: Loader
    param: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(slots=True)
class LoadPlan:
    """`calls[name]` repeats the loader's work for a tensor; None where it changed the tensor before its loader saw it."""

    fills: Mapping[int, Fill]
    calls: dict[str, list[Call] | None]
    untouched: tuple[str, ...]

    @property
    def replayable(self) -> bool:
        return all(calls is not None for calls in self.calls.values())


def plan_load(
    model: torch.nn.Module, load_weights: LoadWeights, manifest: Manifest, meta_params: Mapping[int, torch.Tensor]
) -> LoadPlan:
    """Run `load_weights` on storage-less tensors of the manifest.

    `meta_params` maps `id(parameter)` to its storage-less twin in checkpoint format. Raises WeightSyncError naming
    unknown tensors, tensors of a wrong shape, parameters that nothing fills and fused parameters filled in part.
    """
    recorder = _Recorder(model, meta_params)
    with recorder.installed():
        try:
            load_weights(recorder.feed(manifest))
        except Exception as error:
            faults = recorder.find_faults(load_weights, manifest)
            raise WeightSyncError(
                f"the engine's model cannot take {len(faults)} of {len(manifest.tensors)} tensors: "
                + short_list([f"{name} ({why})" for name, why in faults], 4)
                if faults
                else f"the engine's model cannot take this set of tensors: {error}",
                fix="compare the names and shapes with the checkpoint the engine was started from",
            ) from None
    return recorder.plan(manifest)


def check_plan(plan: LoadPlan, manifest: Manifest, *, may_skip: Callable[[str], bool], whole_model: bool = True) -> None:
    """Raise WeightSyncError unless every tensor lands somewhere and every parameter is filled.

    `may_skip(name)` allows tensors that the loader leaves out on purpose (a tied head). `whole_model=False` (pipeline
    stages) allows tensors of other stages.
    """
    fix = "send the names and the whole set of the Hugging Face checkpoint"
    lost = [name for name in plan.untouched if not may_skip(name)]
    if len(plan.untouched) == len(manifest.tensors):
        raise WeightSyncError(f"none of {len(manifest.tensors)} tensors matches a parameter: {short_list(lost)}", fix=fix)
    if whole_model and lost:
        raise WeightSyncError(f"{len(lost)} tensors match no parameter and would be skipped: {short_list(lost)}", fix=fix)
    if empty := [f.name for f in plan.fills.values() if not f.calls]:
        raise WeightSyncError(f"no tensor fills {len(empty)} parameters: {short_list(empty)}", fix=fix)
    if partial := [f"{f.name} (only {short_list(sorted(f.tensors), 3)})" for f in plan.fills.values() if _is_partial(f)]:
        raise WeightSyncError(f"fused parameters would be filled in part: {short_list(partial, 3)}", fix=fix)


def _is_partial(fill: Fill) -> bool:
    """A parameter assembled from parts must be full; one that a single call fills may end in padding."""
    return any(fill.calls) and fill.copied < fill.numel


class _Recorder:
    def __init__(self, model: torch.nn.Module, meta_params: Mapping[int, torch.Tensor]) -> None:
        self._params = dict(model.named_parameters())
        self._meta = meta_params
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._current = ""
        self._reset()

    def _reset(self) -> None:
        self._fills = {id(p): Fill(name, _load_numel(self._meta.get(id(p), p))) for name, p in self._params.items()}
        self._calls: dict[str, list[Call] | None] = {}

    def feed(self, manifest: Manifest, only: Sequence[int] | None = None) -> Iterable[tuple[str, torch.Tensor]]:
        for index in only if only is not None else range(len(manifest.tensors)):
            spec = manifest.tensors[index]
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            self._names[id(tensor)] = self._current = spec.name
            self._alive.append(tensor)
            yield spec.name, tensor

    @contextmanager
    def installed(self) -> Any:
        originals: list[tuple[torch.Tensor, Loader | None]] = []
        try:
            for param in self._params.values():
                original = getattr(param, "weight_loader", None)
                originals.append((param, original))
                param.weight_loader = self._recording(param, original or _copy)  # type: ignore[attr-defined]
            yield
        finally:
            for param, original in originals:
                if original is None:
                    del param.weight_loader  # type: ignore[attr-defined]
                else:
                    param.weight_loader = original  # type: ignore[attr-defined]

    def _recording(self, param: torch.Tensor, original: Loader) -> Loader:
        fill = self._fills[id(param)]

        def load(target: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            meta = self._meta.get(id(param))
            if meta is None:
                meta = param.data.to("meta")
            with _CountCopies() as counter:
                result = original(meta, tensor, *args, **kwargs)
            name = self._names.get(id(tensor), "")
            replay = bool(name) or _same_layout(tensor, self._alive[-1])
            name = name or self._current
            self._note(fill.name, name, counter.copied, args, kwargs)
            self._add_call(name, Call(original, param, args, kwargs) if replay and target is param else None, tensor)
            return result

        return load

    def _note(self, param: str, name: str, copied: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        fill = next(f for f in self._fills.values() if f.name == param)
        fill.copied += copied
        fill.tensors.add(name)
        fill.calls.append(repr((args, sorted(kwargs.items()))) if args or kwargs else "")

    def _add_call(self, name: str, call: Call | None, tensor: torch.Tensor) -> None:
        calls = self._calls.setdefault(name, [])
        if call is None or calls is None:
            self._calls[name] = None
            return
        if (shard := getattr(tensor, "shard_id", None)) is not None:
            call.kwargs = {**call.kwargs, "__shard_id__": shard}
        calls.append(call)

    def find_faults(self, load_weights: LoadWeights, manifest: Manifest) -> list[tuple[str, str]]:
        """The tensors that fail, each with the first line of its error, by halving the set."""
        faults: list[tuple[str, str]] = []
        todo = [list(range(len(manifest.tensors)))]
        while todo:
            part = todo.pop()
            try:
                load_weights(self.feed(manifest, part))
            except Exception as error:
                if len(part) == 1:
                    faults.append((manifest.tensors[part[0]].name, _reason(error)))
                else:
                    todo += [part[len(part) // 2 :], part[: len(part) // 2]]
        return faults

    def plan(self, manifest: Manifest) -> LoadPlan:
        untouched = tuple(t.name for t in manifest.tensors if t.name not in self._calls)
        return LoadPlan(fills=self._fills, calls=self._calls, untouched=untouched)
