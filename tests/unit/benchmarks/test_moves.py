"""Bytes between processes and a parked trainer: every lost or altered byte is found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.benchmarks import moves
from vime.benchmarks.sync import ON_HOST
from vime.errors import EngineError
from vime.facts.process import Factory
from vime.memory.storages import StorageMemory, bytes_of
from vime.weights.transports.device_ipc import DeviceIpcTrainer

SIZES: moves.Sizes = (("a.weight", (40, 3)), ("b.norm", (7,)), ("c.weight", (5, 5)))
WHERE = moves.Where("cpu", "bfloat16")


class Altering(DeviceIpcTrainer):
    """Changes one element of one tensor of the second version on its way."""

    def stage(self, weights: Iterable[tuple[str, Any]], *, version: str, fingerprint: bool) -> Any:
        self._alters = version == "0.2"
        return super().stage(weights, version=version, fingerprint=fingerprint)

    def stream(self, weights: Any) -> None:
        super().stream(weights if isinstance(weights, tuple) else self._altered(weights))

    def keep(self, weights: Any) -> None:
        super().keep(self._altered(weights))

    def _altered(self, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        for name, tensor in weights:
            if name == "c.weight" and self._alters:
                tensor = tensor.clone()
                tensor[4, 4] += 1
            yield name, tensor


class Forgetful(StorageMemory):
    """Brings zeros back."""

    def restore(self, storage: torch.UntypedStorage, copy: Any) -> None:
        bytes_of(storage).zero_()


def test_a_seed_gives_the_same_bits_and_another_seed_others() -> None:
    one, again, other = WHERE.drawn(SIZES, 1), WHERE.drawn(SIZES, 1), WHERE.drawn(SIZES, 2)
    assert all(torch.equal(one[name], again[name]) for name, _ in SIZES)
    assert not any(torch.equal(one[name], other[name]) for name, _ in SIZES)
    assert {name: tuple(t.shape) for name, t in one.items()} == dict(SIZES)
    assert abs(float(one["b.norm"].float().mean()) - 1) < 0.1


def test_sizes_are_those_of_every_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, 3)}, str(tmp_path / "model-1.safetensors"))
    save_file({"b": torch.zeros(4)}, str(tmp_path / "model-2.safetensors"))
    assert moves.sizes_of(tmp_path) == (("a", (2, 3)), ("b", (4,)))


def test_copies_count_the_bytes_of_all_tensors() -> None:
    found = moves.copies(WHERE, SIZES)
    assert found["bytes"] == 2 * (120 + 7 + 25)
    assert found["on_device_bytes_per_s"] == pytest.approx(found["bytes"] / found["on_device_s"])
    assert min(found["to_host_s"], found["from_host_s"]) > 0


def test_parking_keeps_every_bit_and_losing_them_is_found() -> None:
    kept = moves.park(WHERE, SIZES, Factory("vime.memory.storages:StorageMemory"), 2)
    assert kept["ok"]
    assert len(kept["later"]) == 2
    lost = moves.park(WHERE, SIZES, Factory(f"{__name__}:Forgetful"), 2)
    assert not lost["ok"]
    assert "3 tensors came back changed" in lost["error"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_transfer_compares_what_arrived_bit_by_bit(kept: bool) -> None:
    """What was altered is told, and only that: the versions before and after it arrived whole."""
    altering = Factory(f"{__name__}:Altering", ON_HOST[0].options)
    found = moves.transfer(WHERE, SIZES, (altering, ON_HOST[1]), kept=kept, repeats=2)
    assert [row["different"] for row in (found["first"], *found["later"])] == [[], ["c.weight"], []]
    assert not found["ok"]
    assert not found["bits_equal"]
    assert "1 tensors arrived changed: ['c.weight']" in found["error"]


def test_a_receiver_that_ends_tells_what_it_printed(tmp_path: Path) -> None:
    peer = moves.Peer(tmp_path, {}, {"PYTHONHASHSEED": "no number"})
    with pytest.raises(EngineError, match=r"ended with 1: (.|\n)*PYTHONHASHSEED must be"):
        peer.ask("check", seed=1)
    peer.close()
