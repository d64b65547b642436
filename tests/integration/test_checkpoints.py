"""Checkpoints written while training goes on, and training that goes on from them: in the layout that wrote them bit for
bit, in others with the same tensors and the same losses to five digits.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from test_trainer_layouts import launch

from vime.data.snapshot import latest_snapshot, load_snapshot
from vime.data.written import collect_notes, note_path
from vime.testing.tiny_models import FamilySizes, make_tiny

from live_runs import alive, comparable, descendants, rows, run, start, steps, wait_for, write_run

VOCAB = 320
SMALL: FamilySizes = {"hidden": 32, "ffn": 32, "init_std": 0.1, "max_positions": 64}
FAMILIES: dict[str, tuple[str, FamilySizes]] = {
    "dense": ("qwen2", {**SMALL, "layers": 4, "tied": False, "head_dim": 8}),
    "tied": ("llama", {**SMALL, "layers": 2}),
    "experts": ("glm4_moe", {**SMALL, "layers": 2, "qk_norm": True}),
    "latent": ("deepseek_v3", {**SMALL, "layers": 2, "kv_rank": 32, "q_rank": 32, "head_dim": 32}),
}
"""The first layer of `experts` and `latent` is dense, so the first of two pipeline stages has no experts."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in known:
            family, sizes = FAMILIES[kind]
            known[kind] = tmp_path_factory.mktemp(kind)
            make_tiny(known[kind], family, **sizes)
        return known[kind]

    return of


@pytest.fixture(scope="module")
def written(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[Any]]]:
    """(kind, layout, settings) -> a checkpoint after the first of three steps, written late, and what the ranks saw."""
    known: dict[str, tuple[Path, list[Any]]] = {}

    def of(kind: str, parallel: dict[str, int], **settings: Any) -> tuple[Path, list[Any]]:
        key = f"{kind} {sorted(parallel.items())} {sorted(settings.items())}"
        if key not in known:
            folder = tmp_path_factory.mktemp(kind)
            job = {"vocab": VOCAB, "parallel": parallel, "save": str(folder / "checkpoint"), "save_at": 1, **settings}
            results = launch(folder / "run", model_of(kind), **job, background=True)
            known[key] = folder / "checkpoint", results
        return known[key]

    return of


def content_of(checkpoint: Path) -> tuple[Any, dict[str, Any]]:
    """A reader, and all that a checkpoint holds by name."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(str(checkpoint))
    return reader, reader.read_metadata().state_dict_metadata


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, whatever layout wrote it; rows that pad a vocabulary are left out."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, named = content_of(checkpoint)
    entries = {name: entry for name, entry in named.items() if hasattr(entry, "size")}
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load(found, storage_reader=reader, no_dist=True)
    return {name: tensor[:VOCAB] if "embedding" in name or "output_layer" in name else tensor for name, tensor in found.items()}


def test_a_checkpoint_written_late_goes_on_bit_for_bit(model_of, written, tmp_path: Path) -> None:
    """Two pipeline stages of which only the second has experts, whose optimizer counts its updates on that stage alone."""
    checkpoint, whole = written("experts", {"pp": 2})
    sums = collect_notes(checkpoint, [note_path(checkpoint, rank) for rank in (0, 1)])
    assert set(sums) == {"__0_0.distcp", "__1_0.distcp"}
    resumed = launch(tmp_path / "run", model_of("experts"), vocab=VOCAB, parallel={"pp": 2}, load=str(checkpoint))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["metrics"] == theirs["metrics"][1:]
        assert ours["digests"] == theirs["digests"]


ONE, TP, PP, DP = {"tp": 1}, {"tp": 2}, {"pp": 2}, {"dp": 2}
EP, ETP, ALL = {"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2, "dp": 2, "ep": 2}
CHANGES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("dense", ONE, TP),
    ("dense", TP, ONE),
    ("dense", PP, ONE),
    ("dense", DP, ONE),
    ("dense", {"tp": 2, "pp": 2}, DP),
    ("dense", {"pp": 2, "vpp": 2}, TP),
    ("dense", {"cp": 2}, PP),
    ("tied", TP, PP),
    ("tied", PP, TP),
    ("experts", ONE, TP),
    ("experts", TP, ONE),
    ("experts", PP, ONE),
    ("experts", DP, ONE),
    ("experts", EP, ONE),
    ("experts", ONE, EP),
    ("experts", ETP, PP),
    ("experts", ALL, TP),
    ("latent", EP, DP),
    ("latent", PP, EP),
]


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{axis}{size}" for axis, size in value.items())


@pytest.mark.parametrize("before", [PP, pytest.param(ONE, marks=pytest.mark.slow)], ids=named)
def test_training_that_has_gone_on_before_goes_on_again_bit_for_bit(before, model_of, written, tmp_path: Path) -> None:
    """On two pipeline stages, of which the first never counts an update of experts but was loaded with a count of them."""
    checkpoint, _ = written("experts", before)
    job = {"vocab": VOCAB, "parallel": PP}
    saved = tmp_path / "saved"
    once = launch(tmp_path / "once", model_of("experts"), **job, load=str(checkpoint), save=str(saved), save_at=2)
    twice = launch(tmp_path / "twice", model_of("experts"), **job, load=str(saved))
    for ours, theirs in zip(twice, once, strict=True):
        assert ours["metrics"] == theirs["metrics"][1:]
        assert ours["digests"] == theirs["digests"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), CHANGES, ids=named)
def test_every_tensor_goes_over_into_another_layout(kind, before, after, model_of, written, tmp_path: Path) -> None:
    """Weights and optimizer, bit for bit; then two steps with the losses and norms of the layout that wrote it."""
    checkpoint, whole = written(kind, before)
    again = tmp_path / "again"
    job = {"vocab": VOCAB, "parallel": after, "load": str(checkpoint), "save_loaded": str(again)}
    resumed, *_ = launch(tmp_path / "run", model_of(kind), **job)
    expected, got = tensors(checkpoint), tensors(again)
    assert expected.keys() == got.keys()
    assert sum(name.startswith("optimizer.") for name in got) >= 2 * sum(not name.startswith("optimizer.") for name in got) > 0
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    for ours, theirs in zip(resumed["metrics"], whole[0]["metrics"][1:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), [("dense", TP, PP), ("experts", EP, ONE)], ids=named)
def test_sixteen_bits_go_over_with_their_main_weights(kind, before, after, model_of, written, tmp_path: Path) -> None:
    checkpoint, _ = written(kind, before, dtype="bfloat16")
    again = tmp_path / "again"
    job = {"vocab": VOCAB, "parallel": after, "load": str(checkpoint), "save_loaded": str(again), "dtype": "bfloat16"}
    launch(tmp_path / "run", model_of(kind), **job, steps=1)
    expected, got = tensors(checkpoint), tensors(again)
    assert {tensor.dtype for tensor in got.values()} >= {torch.bfloat16, torch.float32}
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "then", "words"),
    [
        (
            "experts",
            {"freeze_router": True},
            {},
            r"lacks what this run trains: .*mlp\.router\.weight(.|\n)*freeze_router: true",
        ),
        (
            "experts",
            {"freeze_router": True},
            {"parallel": PP},
            r"lacks what this run trains: .*router(.|\n)*freeze_router: true",
        ),
        (
            "dense",
            {"dtype": "bfloat16"},
            {},
            r"of a model in bfloat16, this run's is in float32(.|\n)*set model.dtype: bfloat16",
        ),
        ("tied", {}, {"kind": "dense"}, r"of another model: .*layers 2 \(this run's: 4\)(.|\n)*set model.path to the folder"),
        ("dense", {"task": "critic"}, {}, r"of another model: parameters \d+"),
    ],
    ids=["trained-after-frozen", "on-one-stage-only", "type", "model", "role"],
)
def test_what_cannot_go_on_says_what_to_write(kind, first, then, words, model_of, tmp_path: Path) -> None:
    job = {"vocab": VOCAB, "parallel": ONE, "steps": 1}
    launch(tmp_path / "first", model_of(kind), **job, **first, save=str(tmp_path / "checkpoint"), save_at=1)
    job |= {name: value for name, value in then.items() if name != "kind"}
    with pytest.raises(AssertionError, match=words):
        launch(tmp_path / "then", model_of(then.get("kind", kind)), **job, load=str(tmp_path / "checkpoint"))


# ---- whole runs

SECTIONS: dict[str, Any] = {
    "checkpoint": {"every": 2, "keep": 1, "keep_every": 4, "asynchronous": True, "export_every": 3},
    "schedule": {"num_steps": 6},
}


def grid(**parallel: int) -> dict[str, Any]:
    """Trainer and engine share a host's slots."""
    devices = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.pop("dp", 1)
    return {
        "schema": "vime.topology/v1",
        "name": "grid",
        "pools": {"host": {"platform": "cpu", "device": "cpu"}},
        "roles": {
            "actor": {"kind": "train", "pool": "host", "devices": devices, "parallel": parallel},
            "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
        },
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run on TP 2 x PP 2, its checkpoints written while it trains."""
    folder = tmp_path_factory.mktemp("finished")
    run(write_run(folder, topology=grid(tp=2, pp=2), **SECTIONS))
    return folder


def copied(finished: Path, folder: Path, **sections: Any) -> Path:
    """The run as it was after its end, to go on with."""
    for name in ("model", "prompts.jsonl"):
        (folder / name).symlink_to(finished / name)
    shutil.copytree(finished / "run", folder / "run")
    return write_run(folder, **{"topology": grid(tp=2, pp=2), **SECTIONS, **sections})


@pytest.mark.slow
def test_what_an_asynchronous_run_leaves(finished: Path) -> None:
    """Checkpoints that are whole to the last byte, with every rank's part, and exports beside them."""
    folder = finished / "run"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert sorted(path.name for path in (folder / "exports").iterdir()) == ["step-00000003", "step-00000006"]
    snapshot = load_snapshot(folder / "checkpoints" / "step-00000004")
    assert set(snapshot.state) == {"buffer", "evaluated", "metrics_position", "counts"}
    here = {path.name for path in (snapshot.path / "trainer").iterdir()}
    assert here == {".metadata", "common.pt", "metadata.json", *(f"__{rank}_0.distcp" for rank in range(4))}
    _, names = content_of(snapshot.path / "trainer")
    assert {name for name in names if name.startswith("random/")} == {f"random/shard_{rank}_4" for rank in range(4)}
    saves = [row for row in rows(folder) if row.kind == "save"]
    assert [row.step for row in saves] == [2, 4, 6]
    waited, whole = ([row.metrics[f"perf/{name}_time"] for row in saves] for name in ("save_model", "save_write"))
    assert all(0.0 < (short or 0.0) <= (long or 0.0) for short, long in zip(waited, whole, strict=True))
    last, model = (load_file(path / "model.safetensors") for path in (folder / "exports" / "step-00000006", folder / "model"))
    assert all((last[name] == model[name]).all() for name in model)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["copied", "written", "whole"])
def test_a_run_killed_while_it_saves_goes_on_bit_for_bit(finished: Path, tmp_path: Path, moment: str) -> None:
    """TP 2 x PP 2: when the state is being copied, when a rank has written, and in the step after that."""
    for name in ("model", "prompts.jsonl"):
        (tmp_path / name).symlink_to(finished / name)
    path = write_run(tmp_path, topology=grid(tp=2, pp=2), **SECTIONS)
    process = start(path)
    folder = tmp_path / "run" / "checkpoints"
    signs = {"copied": ".partial-step-00000004-*", "written": ".partial-step-00000004-*/trainer/.written-*"}
    pattern, whole = signs.get(moment, "step-00000004"), folder / "step-00000004"
    wait_for(lambda: any(folder.glob(pattern)) or whole.exists(), timeout_s=240, what="a save")
    time.sleep(0.2 if moment == "whole" else 0.0)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not list(alive(family)), timeout_s=15, what="the end of all processes")
    found = latest_snapshot(folder)
    assert found is not None
    assert (found.step, found.warnings) in [(4, ()), *([(2, ())] if moment != "whole" else [])]
    run(path, "--resume")
    assert [row.data["resumed_from"] for row in rows(tmp_path / "run") if row.kind == "run"][-1] == found.step
    assert comparable(tmp_path / "run") == comparable(finished / "run")
    expected, got = (load_file(d / "run" / "model" / "model.safetensors") for d in (finished, tmp_path))
    assert all((expected[name] == got[name]).all() for name in expected)
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_an_altered_checkpoint_is_skipped_for_the_one_before(finished: Path, tmp_path: Path) -> None:
    """One bit of one rank's file; the run says so, and does again what was lost, bit for bit."""
    path = copied(finished, tmp_path)
    shutil.rmtree(tmp_path / "run" / "model")
    victim = tmp_path / "run" / "checkpoints" / "step-00000006" / "trainer" / "__2_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    run(path, "--resume")
    events = [row.data for row in rows(tmp_path / "run") if row.kind == "event"]
    (skipped,) = [event["message"] for event in events if event["name"] == "checkpoint_skipped"]
    assert "step-00000006: the content of trainer/__2_0.distcp differs" in skipped
    assert "skipped a torn checkpoint" in (tmp_path / "out.log").read_text()
    assert comparable(tmp_path / "run") == comparable(finished / "run")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 1}, {"pp": 2, "dp": 2}], ids=named)
def test_a_run_goes_on_in_another_layout(finished: Path, tmp_path: Path, parallel: dict[str, int]) -> None:
    """From its fourth step. The first step after that has the same weights, so the same answers and the same loss."""
    path = copied(finished, tmp_path, topology=grid(**parallel))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    run(path, "--resume")
    expected, got = steps(finished / "run")[5], steps(tmp_path / "run")[5]
    assert got.data["groups"] == expected.data["groups"]
    for name in ("rollout/raw_reward", "rollout/response_len/mean"):
        assert got.metrics[name] == expected.metrics[name]
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-8), name
    assert max(steps(tmp_path / "run")) == 6
