"""Hugging Face folders: full tensors in, by name, and out, file by file."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.base import NameTable, is_carried, unknown_names
from vime.weights.manifest import short_list

T = TypeVar("T")

TensorSource = Callable[[str, tuple[int, ...]], Tensor]
"""(Hugging Face name, full shape) -> tensor."""

MAX_SHARD_BYTES = 4 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_SHOWN = 5


class Folder:
    """The tensors of a folder's safetensors, one file or several. Raises ConfigError for a missing file."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        index = directory / "model.safetensors.index.json"
        where: dict[str, str] = {}
        if index.is_file():
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = sorted({directory / file for file in where.values()} or directory.glob("*.safetensors"))
        if not paths or not all(path.is_file() for path in paths):
            raise ConfigError(f"{directory} lacks its safetensors", fix="set model.path to a complete model folder")
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in paths:
            opened: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._files)

    def read(self, name: str, shape: tuple[int, ...] = ()) -> Tensor:
        """A tensor; `shape` is not looked at. Raises ConfigError for one that is not there."""
        if name not in self._files:
            raise ConfigError(f"{self._directory} has no tensor {name}", fix="set model.path to a complete model folder")
        return self._files[name].get_tensor(name)

    def without_data(self, name: str, _shape: tuple[int, ...]) -> Tensor:
        """A tensor's stand-in without storage. Raises ConfigError for one that is not there."""
        if name not in self._files:
            self.read(name)
        return torch.empty(self._files[name].get_slice(name).get_shape(), device="meta")

    def nbytes(self, name: str) -> int:
        """Of a tensor, which is not read."""
        part = self._files[name].get_slice(name)
        return math.prod(part.get_shape()) * _WIDTHS[part.get_dtype()]

    def check_names(self, table: NameTable, shape: ModelShape) -> None:
        """Raise ConfigError for tensors that the family does not know: the model would be trained without them."""
        unknown = unknown_names(self.names, table, shape)
        if unknown:
            raise ConfigError(
                f"{self._directory} holds tensors that are no parameters of {shape.family} with {shape.layers} layers: "
                f"{short_list(unknown, _SHOWN)}",
                fix="check architectures and sizes in config.json; if the model has them, extend the family in vime/models/",
            )


_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of safetensors' types."""


def folder_source(model_dir: Path, table: NameTable, shape: ModelShape) -> TensorSource:
    """Read tensors from the safetensors of a folder.

    Raises ConfigError for a missing file or tensor, and for tensors of unknown names.
    """
    folder = Folder(model_dir)
    folder.check_names(table, shape)
    return folder.read


def drawn_source(seed: int, *, std: float) -> TensorSource:
    """Draw tensors: zeros for biases, ones for other vectors (norms), else normal with deviation `std`.

    Layouts do not change what is drawn.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * std

    return draw


class CarriedTensors:
    """Tensors of a folder's layers for multi-token prediction, which nothing trains; none where the folder has no weights."""

    def __init__(self, model_path: Path, shape: ModelShape) -> None:
        there = bool(shape.frozen_layers) and any(model_path.glob("*.safetensors"))
        self._folder = Folder(model_path) if there else None
        self._names = tuple(name for name in self._folder.names if is_carried(name, shape)) if self._folder else ()

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: self._folder.nbytes(name) for name in self._names} if self._folder else {}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of `sizes`."""
        for name in self._names if self._folder else ():
            assert self._folder is not None
            yield name, self._folder.read(name)


class FolderWriter:
    """Safetensors of at most `MAX_SHARD_BYTES`, each written as soon as its tensors are there, in any order.

    A file appears under its name when it is whole. `sizes` are the bytes of all tensors that will come, by name.
    """

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._directory, self._total = directory, sum(sizes.values())
        self.files = shard_names(sizes)
        """File of every tensor."""
        self._counts = Counter(self.files.values())
        self._pending: dict[str, dict[str, Tensor]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether a tensor's file is written, now or by an earlier writer of the same tensors."""
        return (self._directory / self.files[name]).is_file()

    def put(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is copied."""
        from safetensors.torch import save_file

        file = self.files[name]
        self._pending.setdefault(file, {})[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if len(self._pending[file]) == self._counts[file]:
            partial = self._directory / f"{file}.partial"
            save_file(self._pending.pop(file), partial, metadata={"format": "pt"})
            partial.replace(self._directory / file)

    def finish(self) -> None:
        """Write the index where there are several files."""
        if len(self._counts) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self.files}
            text = json.dumps(index, indent=2) + "\n"
            (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def cut_by_bytes(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in order, in parts of at most `limit` bytes; a larger item is a part of its own."""
    part: list[T] = []
    used = 0
    for item in items:
        size = nbytes(item)
        if part and used + size > limit:
            yield part
            part, used = [], 0
        part.append(item)
        used += size
    if part:
        yield part


def shard_names(sizes: Mapping[str, int]) -> dict[str, str]:
    """File of every tensor: in order, cut at `MAX_SHARD_BYTES`."""
    shards = list(cut_by_bytes(sizes, sizes.__getitem__, MAX_SHARD_BYTES))
    if len(shards) == 1:
        return dict.fromkeys(shards[0], "model.safetensors")
    return {name: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, names in enumerate(shards, 1) for name in names}


def write_small_files(directory: Path, model_path: Path, *, hf_config: dict[str, Any], dtype: str) -> None:
    """config.json with the weights' type, and every file of `model_path` that holds no weights."""
    for path in model_path.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, directory / path.name)
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    config = {**hf_config, key: dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
