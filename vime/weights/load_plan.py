"""What a model's own weight loader does with a set of tensor names, found out without touching the model.

Every parameter's loader is replaced for a moment by one that runs the original on a parameter without storage, so the
loaders themselves check the shapes, and that notes how far each parameter would be filled. No vLLM import: the engine's
extension passes what only it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

FIX = "send the whole set of tensors under the names of the Hugging Face checkpoint that the engine was started from"


@dataclass(slots=True)
class Fill:
    """What would reach one parameter: elements copied, tensors by name, calls that bring a part of it only."""

    name: str
    numel: int
    copied: int = 0
    parts: int = 0
    tensors: set[str] = field(default_factory=set)

    @property
    def is_partial(self) -> bool:
        """A parameter made of parts must be full; one filled by a single tensor may end in padding."""
        return self.parts > 0 and self.copied < self.numel


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One fill a parameter; `untouched` are the tensors that the loader leaves out without an error."""

    fills: tuple[Fill, ...]
    untouched: tuple[str, ...]
    num_tensors: int

    def check(
        self,
        *,
        may_skip: Callable[[str], bool],
        whole_model: bool = True,
        all_filled: bool = True,
        derived: Collection[str] = (),
    ) -> None:
        """Raise WeightSyncError unless every tensor lands somewhere and every parameter is filled.

        `may_skip(name)` allows tensors that are left out on purpose (a tied head). `whole_model=False` (pipeline
        stages) allows tensors that belong to other stages, `all_filled=False` parameters that no checkpoint holds.
        `derived` are parameters that the engine computes from others once those are loaded.
        """
        lost = [name for name in self.untouched if not may_skip(name)]
        if len(self.untouched) == self.num_tensors:
            raise WeightSyncError(f"none of the {self.num_tensors} tensors matches a parameter: {short_list(lost)}", fix=FIX)
        if whole_model and lost:
            raise WeightSyncError(f"{len(lost)} tensors match no parameter and would be skipped: {short_list(lost)}", fix=FIX)
        if all_filled and (empty := [f.name for f in self.fills if not f.tensors and f.name not in derived]):
            raise WeightSyncError(f"no tensor fills {len(empty)} of the parameters: {short_list(empty)}", fix=FIX)
        if partial := [f"{f.name} has only {short_list(sorted(f.tensors), 3)}" for f in self.fills if f.is_partial]:
            raise WeightSyncError(f"fused parameters would be filled in part: {short_list(partial, 3)}", fix=FIX)


def plan_load(
    model: torch.nn.Module, load_weights: LoadWeights, manifest: Manifest, twins: Mapping[int, torch.Tensor]
) -> LoadPlan:
    """Run `load_weights` on storage-less tensors of the manifest.

    `twins` maps `id(parameter)` to its storage-less twin in checkpoint format, loader included: kernels may have replaced
    the live one by an empty tensor. Other parameters are their own model.
    Raises WeightSyncError naming the tensors that are unknown or have a wrong shape.
    """
    recorder = _Recorder(model, twins)
    with recorder.installed():
        try:
            load_weights(recorder.feed(manifest.tensors))
        except Exception as error:  # a model's loader may raise anything
            faults = recorder.find_faults(load_weights, manifest)
            if not faults:
                raise WeightSyncError(
                    f"the engine's model cannot take this set of tensors: {_reason(error)}", fix=FIX
                ) from error
            listed = short_list([f"{name} ({why})" for name, why in faults], 4)
            raise WeightSyncError(
                f"the engine's model cannot take {len(faults)} of {len(manifest.tensors)} tensors: {listed}", fix=FIX
            ) from error
    untouched = tuple(t.name for t in manifest.tensors if t.name not in recorder.touched)
    return LoadPlan(fills=tuple(recorder.fills.values()), untouched=untouched, num_tensors=len(manifest.tensors))


class _Recorder:
    def __init__(self, model: torch.nn.Module, twins: Mapping[int, torch.Tensor]) -> None:
        self._params = dict(model.named_parameters())
        self._twins = {id(p): twins[id(p)] if id(p) in twins else _twin(p) for p in self._params.values()}
        self.fills = {name: Fill(name, _numel_to_load(self._twins[id(p)])) for name, p in self._params.items()}
        self.touched: set[str] = set()
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._current = ""

    def feed(self, specs: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            self._alive.append(tensor)
            self._names[id(tensor)] = self._current = spec.name
            yield spec.name, tensor

    @contextmanager
    def installed(self) -> Iterator[None]:
        originals = {name: getattr(param, "weight_loader", None) for name, param in self._params.items()}
        try:
            for name, param in self._params.items():
                vars_of: Any = param
                twins_own = getattr(self._twins[id(param)], "weight_loader", None)
                vars_of.weight_loader = self._recording(name, twins_own or originals[name] or _plain_copy)
            yield
        finally:
            for name, param in self._params.items():
                vars_of = param
                if originals[name] is None:
                    del vars_of.weight_loader
                else:
                    vars_of.weight_loader = originals[name]

    def _recording(self, param: str, original: Loader) -> Loader:
        fill, twin = self.fills[param], self._twins[id(self._params[param])]
        signature = inspect.signature(original)

        def load(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            target, loaded, *rest = bound.arguments
            tensor, bound.arguments[target] = bound.arguments[loaded], twin
            with _CountCopies() as counter:
                result = original(*bound.args, **bound.kwargs)
            name = self._names.get(id(tensor), self._current)
            fill.copied += counter.copied
            fill.parts += bool(rest)
            fill.tensors.add(name)
            self.touched.add(name)
            return result

        return load

    def find_faults(self, load_weights: LoadWeights, manifest: Manifest) -> list[tuple[str, str]]:
        """The tensors that fail, each with the first line of its error, by halving the set."""
        faults: list[tuple[str, str]] = []
        todo = [manifest.tensors]
        while todo:
            part = todo.pop()
            try:
                load_weights(self.feed(part))
            except Exception as error:  # noqa: BLE001 (any failure of a model's loader is a finding here)
                if len(part) == 1:
                    faults.append((part[0].name, _reason(error)))
                else:
                    todo += [part[len(part) // 2 :], part[: len(part) // 2]]
        return faults


class _CountCopies(TorchDispatchMode):
    """Counts the elements that `copy_` writes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


def _twin(param: torch.Tensor) -> torch.Tensor:
    """Without storage, with the attributes by which a loader finds its part of a fused parameter."""
    twin: Any = param.data.to("meta")
    twin.__dict__ = vars(param).copy()
    return twin


def _plain_copy(param: torch.Tensor, tensor: torch.Tensor) -> None:
    if param.shape != tensor.shape:
        raise ValueError(f"shape {list(tensor.shape)} instead of {list(param.shape)}")
    param.data.copy_(tensor)


def _numel_to_load(param: torch.Tensor) -> int:
    return int(getattr(param, "weight_loader_numel", param.numel()))


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else "wrong shape" if isinstance(error, AssertionError) else type(error).__name__
