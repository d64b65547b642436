"""A full set of weights as one flat host buffer: what host_shm shares and what collective sends from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from vime.errors import WeightSyncError
from vime.weights.fingerprint import digest
from vime.weights.transports.base import Manifest, NamedTensors, TensorSpec


def view_of(buffer: Any, spec: TensorSpec, start: int = 0) -> Any:
    """The tensor `spec` inside a flat uint8 buffer whose first byte is byte `start` of the segment; no copy."""
    import torch

    begin = spec.offset - start
    return buffer[begin : begin + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def host_buffer(nbytes: int, *, page_locked: bool) -> Any:
    """A uint8 tensor on the host; pageable where no more can be page-locked, since slow copies are better than none."""
    import torch

    if page_locked:
        with suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


class FlatImage:
    """Writes named tensors to their places in a flat uint8 buffer of `manifest.nbytes`."""

    def __init__(self, manifest: Manifest, buffer: Any) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self._views = {spec.name: view_of(buffer, spec) for spec in manifest.tensors}

    def write(
        self, weights: NamedTensors, *, fingerprint: bool, digest_of: Callable[[Any], str] | None = None
    ) -> Mapping[str, Any]:
        """Copy every tensor; return `{"tensors": count}` and, if asked, `"digests"` of the sources.

        `digest_of` computes them; by default `vime.weights.fingerprint.digest` does.

        Raises WeightSyncError for a tensor that the manifest lacks or describes otherwise, or that comes twice.
        """
        digests: dict[str, str] = {}
        written: set[str] = set()
        for name, tensor in weights:
            tensor = tensor.detach()
            check_spec(self._views.get(name), name, tensor, again=name in written)
            self._views[name].copy_(tensor)
            written.add(name)
            if fingerprint:
                # The host's digest reads through numpy, which must not get hold of a parameter's own storage.
                digests[name] = digest_of(tensor) if digest_of else digest(tensor.clone())
        info: dict[str, Any] = {"tensors": len(written)}
        if fingerprint:
            info["digests"] = digests
        return info


def check_spec(place: Any, name: str, tensor: Any, *, again: bool) -> None:
    """Raise WeightSyncError unless `tensor` fits its place and comes for the first time."""
    if place is None:
        raise WeightSyncError(f"tensor {name} is not in the manifest", fix="send the tensors the manifest was built from")
    if again:
        raise WeightSyncError(f"tensor {name} was sent twice in one update", fix="yield each tensor once")
    if (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
        raise WeightSyncError(
            f"tensor {name} is {tensor.dtype}{list(tensor.shape)}, its manifest entry {place.dtype}{list(place.shape)}",
            fix="build the manifest from the tensors that are sent",
        )
