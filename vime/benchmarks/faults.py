"""Faults for drills, planted in an engine's processes from outside: one tensor altered, on its way or once it is loaded.

A vLLM general plugin that the run's environment names (`plant`); an engine of a run that was not planted never sees it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

PLUGIN = "vime_drill"
FAULT_ENV = "VIME_DRILL_FAULT"
"""JSON `{"kind": "transit" | "loaded", "update": N, "tensor": name ending}`; updates count from 1."""

Kind = Literal["transit", "loaded"]


def plant(folder: Path, kind: Kind, *, update: int, tensor: str) -> dict[str, str]:
    """Make the plugin known to Python under `folder`; returns the variables of a run whose engines shall have the fault."""
    info = folder / f"{PLUGIN}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:register\n")
    search = [str(folder), *(path for path in [os.environ.get("PYTHONPATH", "")] if path)]
    plugins = [name for name in [os.environ.get("VLLM_PLUGINS", ""), PLUGIN] if name]
    fault = json.dumps({"kind": kind, "update": update, "tensor": tensor})
    return {"PYTHONPATH": os.pathsep.join(search), "VLLM_PLUGINS": ",".join(plugins), FAULT_ENV: fault}


def register() -> None:
    """vLLM's plugin hook, called in every process of a server, perhaps more than once."""
    if FAULT_ENV not in os.environ or os.environ.get("VIME_ENGINE") != "1":
        return
    from vime.weights import vllm_ext

    fault = json.loads(os.environ[FAULT_ENV])
    if fault["kind"] == "loaded":
        if spoil_loaded not in vllm_ext.post_update_hooks:
            vllm_ext.post_update_hooks.append(spoil_loaded)
    elif not getattr(vllm_ext.half_for, "spoils", False):
        vllm_ext.half_for = spoiling(vllm_ext.half_for)


_updates = {"loaded": 0, "transit": 0}


def due(kind: Kind) -> str | None:
    """Count an update; the ending of the tensor to spoil in this one, or None."""
    fault = json.loads(os.environ[FAULT_ENV])
    _updates[kind] += 1
    return fault["tensor"] if (fault["kind"], fault["update"]) == (kind, _updates[kind]) else None


def spoil_loaded(model: Any, *_: Any) -> None:
    """After an update: add 0.5 to a live parameter. The bytes arrived whole, so only the probe can see it."""
    if (ending := due("loaded")) is not None:
        next(param for name, param in model.named_parameters() if name.endswith(ending)).data.add_(0.5)


def spoiling(half_for: Any) -> Any:
    """`vllm_ext.half_for` whose halves turn one bit of one tensor while it arrives."""

    def found(protocol: str) -> Any:
        return _Factory(half_for(protocol))

    found.spoils = True  # pyright: ignore[reportFunctionMemberAccess]
    return found


class _Factory:
    """A factory with everything of the real one, but for what it builds."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def build(self, *args: Any, **options: Any) -> Any:
        return _Half(self._inner.build(*args, **options))


class _Half:
    """An engine half with everything of the real one, but for `receive`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        import torch

        ending, arriving = due("transit"), self._inner.receive(info)
        try:
            for name, tensor in arriving:
                if ending is not None and name.endswith(ending):
                    ending, spoiled = None, tensor.clone().contiguous()
                    spoiled.view(-1).view(torch.uint8)[0] ^= 1
                    yield name, spoiled
                else:
                    yield name, tensor
        finally:
            if hasattr(arriving, "close"):
                arriving.close()
