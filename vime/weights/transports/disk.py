"""Weights through safetensors files in a directory that both sides see. Slow, works everywhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import WeightSyncError
from vime.weights.fingerprint import digest
from vime.weights.manifest import manifest_from_json, manifest_to_json
from vime.weights.transports.base import Manifest, NamedTensors, TransferContext
from vime.weights.transports.flat import check_spec

PROTOCOL = "disk"
KEPT_VERSIONS = 2
"""The version before stays while an engine may still map it."""


class DiskTrainer:
    """The trainer's half: one complete file a rank and version, visible only under its final name."""

    streams = False

    def __init__(
        self,
        *,
        run_id: str,
        manifest: Manifest,
        directory: Path | str,
        rank: int = 0,
    ) -> None:
        self._manifest = manifest
        self._root = Path(directory) / f"vime-{run_id}-weights"
        self._rank = rank
        self._root.mkdir(parents=True, exist_ok=True)

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        return {"protocol": PROTOCOL, "manifest": manifest_to_json(self._manifest), "info": {"root": str(self._root)}}

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> DiskTrainer:
        keywords = {"directory": context.directory, **options}
        return cls(run_id=context.run_id, manifest=context.manifest, rank=context.rank, **keywords)

    def connect(self) -> None:
        """The engines need no handshake: they read the directory."""

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        import torch
        from safetensors.torch import save_file

        specs = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in self._manifest.tensors}
        tensors: dict[str, Any] = {}
        for name, tensor in weights:
            check_spec(specs.get(name), name, tensor, again=name in tensors)
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        folder = self._root / f"v{version}"
        folder.mkdir(exist_ok=True)
        final = folder / f"rank-{self._rank}.safetensors"
        temporary = final.with_suffix(f".{os.getpid()}.part")
        try:
            save_file(tensors, temporary)
            os.replace(temporary, final)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WeightSyncError(
                f"cannot write {final}: {error.strerror}", fix="free space on the weights directory"
            ) from None
        self._prune(keep=folder)
        info: dict[str, Any] = {"version": version, "tensors": len(tensors), "files": {n: str(final) for n in tensors}}
        if fingerprint:
            info["digests"] = {name: digest(tensor) for name, tensor in tensors.items()}
        return info

    def stream(self, weights: NamedTensors) -> None:
        """Nothing travels while the engines receive."""

    def keep(self, weights: NamedTensors) -> None:
        """Engines that start later read what `stage` wrote."""

    def close(self) -> None:
        """Rank 0 removes the directory; calling it again does nothing."""
        if self._rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)

    def _prune(self, keep: Path) -> None:
        if self._rank:
            return
        others = sorted((p for p in self._root.iterdir() if p != keep), key=lambda p: p.stat().st_mtime)
        for old in others[: max(0, len(others) - KEPT_VERSIONS + 1)]:
            shutil.rmtree(old, ignore_errors=True)


class DiskEngine:
    """The engine's half: opens the files of an update and yields their tensors, memory-mapped."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        self._manifest = manifest_from_json(info["manifest"])
        if not Path(info["root"]).is_dir():
            raise WeightSyncError(
                f"the weights directory {info['root']} is not visible here", fix="put it on a file system that both sides mount"
            )

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        from safetensors import SafetensorError, safe_open

        assert self._manifest is not None
        files: Mapping[str, str] = info["files"]
        handles: dict[str, Any] = {}
        for spec in self._manifest.tensors:
            if (path := files.get(spec.name)) is None:
                raise WeightSyncError(f"no file holds tensor {spec.name}", fix="publish again")
            try:
                if path not in handles:
                    handles[path] = safe_open(path, framework="pt", device="cpu")
                yield spec.name, handles[path].get_tensor(spec.name)
            except (OSError, SafetensorError) as error:
                raise WeightSyncError(f"cannot read tensor {spec.name} from {path}: {error}", fix="publish again") from None

    def close(self) -> None:
        self._manifest = None
