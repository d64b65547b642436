"""A Hugging Face folder to megatron-core's `torch_dist` format and back, a few tensors at a time.

The model is built without memory: it says which tensors there are and how they are cut. What is read lives until it is
written; a file is the unit of both. A conversion that was interrupted goes on behind the last whole file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vime.errors import ConfigError
from vime.models.registry import family_of, read_config
from vime.trainer.megatron import parallel
from vime.trainer.megatron.checkpoint import parts_of
from vime.trainer.megatron.folders import CarriedTensors, Folder, FolderWriter, cut_by_bytes, write_small_files
from vime.trainer.megatron.model import Model, build_model
from vime.trainer.megatron.weights_view import Entry, WeightsView
from vime.trainer.runtime import DeviceRuntime
from vime.trainer.setup import TrainerSetup
from vime.weights.manifest import short_list

Report = Callable[[int, int, str], None]
"""(bytes done, bytes in total, what was written last)."""

BATCH_BYTES = 2**30
"""Read and written at once, unless one tensor is larger."""
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state", "random")
"""Beginnings of names in a checkpoint that hold no weights."""
_JOURNAL = "conversion.json"
_SHOWN = 4


class Conversion:
    """One rank on the host with a model that has no memory.

    Raises ConfigError for a folder whose config cannot be used. `close` ends it.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        self._setup = setup
        hf_config = read_config(setup.model_path)
        runtime: DeviceRuntime = setup.runtime.bootstrap.build()
        parallel.start_process_group(setup, runtime)
        try:
            axes = parallel.start_model_parallel(setup)
            parallel.seed_everything(setup.seed, runtime)
            with torch.device("meta"):
                self._model: Model = build_model(
                    setup, axes=axes, family=family_of(hf_config), hf_config=hf_config, device=torch.device("meta")
                )
            self._view = WeightsView(self._model, axes)
        except BaseException:
            parallel.stop_process_group()
            raise

    def close(self) -> None:
        """Leave the process group."""
        parallel.stop_process_group()

    # ---- to megatron-core

    def to_torch_dist(self, out: Path, report: Report) -> None:
        """Write `out` from the model folder. Raises ConfigError for missing, unknown or misshapen tensors."""
        from megatron.core import dist_checkpointing
        from torch.distributed.checkpoint.api import CheckpointException

        from vime.trainer.megatron.convert_files import LazySave

        folder = Folder(self._setup.model_path)
        folder.check_names(self._model.family.table, self._model.shape)
        entries = dict(self._named_entries())
        for entry in entries.values():
            self._view.shard_of(entry, folder.without_data)
        self._begin(out, source=self._setup.model_path)

        def read(name: str) -> Tensor:
            return self._view.shard_of(entries[name], folder.read).to(entries[name].param.dtype)

        strategy = LazySave(read, self._sharded(), report=report, batch_bytes=BATCH_BYTES)
        try:
            dist_checkpointing.save({"model": self._state()}, str(out), strategy, content_metadata=_content())
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from error
        (out / _JOURNAL).unlink()

    def _named_entries(self) -> Iterator[tuple[str, Entry]]:
        return ((entry.local_name, entry) for entry in self._view.entries())

    def _sharded(self) -> dict[str, Any]:
        """How the model's tensors are cut, by local name."""
        found = self._state()
        return {name: found[name] for name, _ in self._named_entries()}

    def _state(self) -> dict[str, Any]:
        """The same, with what megatron-core's modules keep beside tensors."""
        return self._model.bare.sharded_state_dict(metadata=_content())

    def _begin(self, out: Path, *, source: Path) -> None:
        """Take an empty folder, or one that the same conversion began. Raises ConfigError for any other."""
        about = {
            "from": str(source.resolve()),
            "folder": str(self._setup.model_path.resolve()),
            "model": dataclasses.asdict(self._model.shape),
            "dtype": self._setup.dtype,
        }
        text = json.dumps(about, sort_keys=True)
        journal = out / _JOURNAL
        if journal.is_file() and journal.read_text(encoding="utf-8") == text:
            return
        if out.is_dir() and any(out.iterdir()):
            what = "another conversion" if journal.is_file() else "something else"
            raise ConfigError(f"{out} holds {what}", fix="name an empty folder, or remove that one")
        out.mkdir(parents=True, exist_ok=True)
        journal.write_text(text, encoding="utf-8")

    # ---- from megatron-core

    def to_hf(self, checkpoint: Path, out: Path, report: Report) -> None:
        """Write `out` from a checkpoint, with the small files of the model folder.

        Raises ConfigError for a checkpoint that is of another model.
        """
        from vime.trainer.megatron.convert_files import CheckpointReader

        sharded, entries = self._sharded(), dict(self._named_entries())
        _check_checkpoint(checkpoint, sharded)
        self._begin(out, source=checkpoint)
        carried = CarriedTensors(self._setup.model_path, self._model.shape)
        sizes = {spec.name: spec.nbytes for spec in self._view.manifest().tensors} | carried.sizes()
        reader, writer, total, done = CheckpointReader(checkpoint), FolderWriter(out, sizes), sum(sizes.values()), 0
        own = [name for name, entry in entries.items() if not entry.is_copy]
        for names in cut_by_bytes(own, lambda name: entries[name].param.nbytes, BATCH_BYTES):
            wanted = [n for n in names if not all(writer.has(hf) for hf in _hf_names(entries[n]))]
            loaded = reader.read({n: sharded[n] for n in wanted})
            for name in names:
                if name in loaded:
                    for hf_name, tensor in self._view.parts_of(entries[name], loaded.pop(name)):
                        writer.put(hf_name, tensor)
                done += sum(sizes[hf_name] for hf_name in _hf_names(entries[name]))
            report(done, total, names[-1])
        for name, tensor in carried.read():
            if not writer.has(name):
                writer.put(name, tensor)
            done += sizes[name]
            report(done, total, name)
        writer.finish()
        write_small_files(out, self._setup.model_path, hf_config={**self._model.hf_config}, dtype=self._setup.dtype)
        (out / _JOURNAL).unlink()


def _hf_names(entry: Entry) -> list[str]:
    return [name for group in entry.groups for name in group]


def _check_checkpoint(checkpoint: Path, sharded: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the checkpoint holds the model's tensors, in its shapes, and no other weights."""
    from megatron.core import dist_checkpointing

    if not (checkpoint / "metadata.json").is_file():
        raise ConfigError(f"{checkpoint} is no complete torch_dist checkpoint", fix="name the folder with metadata.json")
    there: Any = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    weights = {name: tensor for name, tensor in there.items() if not name.startswith(NOT_WEIGHTS)}
    expected = {part.key: part for cut in sharded.values() for part in parts_of(cut)}
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    for what, names in (("lacks", missing), ("holds tensors that the model has not:", unknown)):
        if names:
            raise ConfigError(
                f"{checkpoint} {what} {short_list(names, _SHOWN)}",
                fix="give the folder of the model that the checkpoint was made from (--model)",
            )
    for name, part in expected.items():
        found = tuple(weights[name].global_shape)
        if found != tuple(part.global_shape) and not part.allow_shape_mismatch:
            raise ConfigError(
                f"{checkpoint}: {name} has shape {found}, the model's is {tuple(part.global_shape)}",
                fix="give the folder of the model that the checkpoint was made from (--model)",
            )


def _content() -> dict[str, Any]:
    return {"singleton_local_shards": False}
