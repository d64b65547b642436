"""A full set of weights as one flat buffer, and weights that are read in the order of the manifest.

host_shm shares such a buffer; transports that stream keep one on the host for engines that start later (`HostCopy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


class HostCopy:
    """The weights that were published last, on the host, for engines that start later.

    It has content from the end of a whole `write` to the beginning of the next one, so a copy that failed is never sent.
    `allocate(nbytes)` makes the buffer, a uint8 tensor, when it is needed for the first time.
    """

    def __init__(self, manifest: Manifest, allocate: Callable[[int], Any]) -> None:
        self._manifest, self._allocate = manifest, allocate
        self._image: FlatImage | None = None
        self._is_whole = False

    def write(self, weights: NamedTensors) -> None:
        """Copy `weights`. Raises WeightSyncError unless they are all of the manifest's tensors."""
        self._is_whole = False
        if self._image is None:
            self._image = FlatImage(self._manifest, self._allocate(self._manifest.nbytes))
        written = self._image.write(weights, fingerprint=False)["tensors"]
        if written != len(self._manifest.tensors):
            raise WeightSyncError(
                f"{written} of {len(self._manifest.tensors)} tensors came to be kept", fix="keep every tensor of the manifest"
            )
        self._is_whole = True

    @property
    def buffer(self) -> Any:
        """The flat bytes, uint8 [manifest.nbytes]. Raises WeightSyncError where nothing whole is kept."""
        if self._image is None or not self._is_whole:
            raise WeightSyncError("no published weights are kept", fix="publish first")
        return self._image.buffer

    def drop(self) -> None:
        """Give the memory up."""
        self._image, self._is_whole = None, False


def asks_for_copy(weights: NamedTensors) -> bool:
    """Whether `stream` was given `()`: send what is kept. An iterator that ends at once is not that but an error."""
    return isinstance(weights, tuple) and not weights


def in_order(weights: NamedTensors, manifest: Manifest) -> Iterator[tuple[TensorSpec, Any]]:
    """(spec, tensor) of every tensor. Raises WeightSyncError unless they come as the manifest lists them."""
    import torch

    due = iter(manifest.tensors)
    for name, tensor in weights:
        spec = next(due, None)
        if spec is None or spec.name != name:
            raise WeightSyncError(
                f"tensor {name} came where {spec.name if spec else 'nothing'} was due", fix="send tensors in manifest order"
            )
        place = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        check_spec(place, name, tensor, again=False)
        yield spec, tensor.detach()
    if (missing := next(due, None)) is not None:
        raise WeightSyncError(f"tensor {missing.name} was due and did not come", fix="send every tensor of the manifest")


def bytes_of(tensor: Any) -> Any:
    """A tensor's bytes in row-major order, uint8 [nbytes], on its own device; no copy of a contiguous one."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def stage_in_place(
    weights: NamedTensors, manifest: Manifest, *, version: str, digest_of: Callable[[Any], str] | None
) -> Mapping[str, Any]:
    """What `stage` answers where the weights are sent from where they are: digests if asked, else nothing is read.

    Raises WeightSyncError unless the tensors that are read come as the manifest lists them.
    """
    info: dict[str, Any] = {"version": version, "tensors": len(manifest.tensors)}
    if digest_of is not None:
        info["digests"] = {spec.name: digest_of(tensor) for spec, tensor in in_order(weights, manifest)}
    return info


def exhaust(weights: Iterable[Any]) -> None:
    """Take part in gathering: for other ranks what is left may be a collective, which has to end."""
    for _ in weights:
        pass


class FlatImage:
    """Writes named tensors to their places in a flat uint8 buffer of `manifest.nbytes`."""

    def __init__(self, manifest: Manifest, buffer: Any) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self._views = {spec.name: view_of(buffer, spec) for spec in manifest.tensors}

    def write(self, weights: NamedTensors, *, fingerprint: bool) -> Mapping[str, Any]:
        """Copy every tensor; return `{"tensors": count}` and, if asked, `"digests"` of the sources.

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
                digests[name] = own_digest(tensor)
        info: dict[str, Any] = {"tensors": len(written)}
        if fingerprint:
            info["digests"] = digests
        return info


def own_digest(tensor: Any) -> str:
    """The host's digest of a clone: it reads through numpy, which must not get hold of a parameter's own storage."""
    return digest(tensor.clone())


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
