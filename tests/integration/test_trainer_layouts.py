"""Every layout trains the same model: real ranks as processes over gloo, compared with one process and with transformers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 50
SEQUENCES = [[1, 2, 3, 4, 5], [7, 8], [9] * 12, [1, 2, 3, 4, 5]]
SCRIPT = Path(__file__).with_name("trainer_rank.py")


def launch(folder: Path, model: Path, **job: Any) -> list[dict[str, Any]]:
    """Run all ranks of a job to their end; what each rank wrote, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = 1
    for size in job["parallel"].values():
        world *= size
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(world):
        full = {"model": str(model), "vocab": VOCAB, "sequences": SEQUENCES, "steps": 3, "parts": 2, **job}
        full |= {"rank": rank, "world": world, "port": port}
        (folder / f"job{rank}.json").write_text(json.dumps(full))
        command = [sys.executable, str(SCRIPT), str(folder / f"job{rank}.json"), str(folder / f"out{rank}.json")]
        log = (folder / f"log{rank}.txt").open("w")
        ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = [(folder / f"log{rank}.txt").read_text()[-3000:] for rank in range(world)]
    assert codes == [0] * world, "\n".join(logs)
    return [json.loads((folder / f"out{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3 with random weights, norms included, written by transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    save_model(transformers, folder, tied=True)
    return folder


def save_model(transformers: Any, folder: Path, *, tied: bool) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    made = transformers.Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> dict[str, Any]:
    """One process, three steps, a checkpoint after the first."""
    folder = tmp_path_factory.mktemp("alone")
    job = {"parallel": {"tp": 1}, "save": str(folder / "checkpoint"), "save_at": 1}
    (result,) = launch(folder / "run", model, **job)
    return {**result, "checkpoint": job["save"]}


def check_same(results: list[dict[str, Any]], alone: dict[str, Any], *, skip: int = 0) -> None:
    """All ranks agree exactly; the numbers are those of one process to five digits."""
    first = results[0]
    for other in results[1:]:
        for key in ("metrics", "log_probs", "rows", "manifest"):
            assert other[key] == first[key], key
    assert len(first["metrics"]) == len(alone["metrics"]) - skip
    for ours, theirs in zip(first["metrics"], alone["metrics"][skip:], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), name
    for ours, theirs in zip(first["log_probs"], alone["log_probs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert set(first["manifest"]) == set(alone["manifest"])
    assert set(first["digests"]) == set(alone["manifest"])
    assert not any(result["digests"] for result in results[1:])


@pytest.mark.parametrize(
    ("name", "job", "writers"),
    [
        ("tp", {"parallel": {"tp": 2}}, [True, False]),
        ("pp", {"parallel": {"pp": 2}, "parts": 3}, [True, True]),
        ("dp", {"parallel": {"dp": 2}}, [True, False]),
        ("idle", {"parallel": {"dp": 2}, "idle_rank": True}, [True, False]),
    ],
)
def test_a_layout_trains_as_one_process(name, job, writers, model, alone, tmp_path):
    results = launch(tmp_path / name, model, **job)
    check_same(results, alone)
    assert [r["is_writer"] for r in results] == writers
    held = [n for r in results if r["is_writer"] for n in r["held"]]
    assert held == results[0]["manifest"]


@pytest.mark.slow
def test_sequence_parallelism_trains_as_one_process(model, alone, tmp_path):
    check_same(launch(tmp_path / "run", model, parallel={"tp": 2}, megatron={"sequence_parallel": True}), alone)


@pytest.mark.slow
def test_four_ranks_on_two_axes(model, alone, tmp_path):
    results = launch(tmp_path / "both", model, parallel={"tp": 2, "pp": 2})
    check_same(results, alone)
    assert [r["is_writer"] for r in results] == [True, False, True, False]


def test_a_fresh_process_goes_on_bit_for_bit(model, alone, tmp_path):
    (resumed,) = launch(tmp_path / "resumed", model, parallel={"tp": 1}, load=alone["checkpoint"])
    assert resumed["metrics"] == alone["metrics"][1:]
    assert resumed["digests"] == alone["digests"]
    assert resumed["log_probs"] == alone["log_probs"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_a_checkpoint_goes_on_in_another_layout(parallel, model, alone, tmp_path):
    results = launch(tmp_path / "other", model, parallel=parallel, load=alone["checkpoint"])
    check_same(results, alone, skip=1)


@pytest.mark.parametrize(("tied", "parallel"), [(True, {"tp": 2}), (False, {"pp": 2})])
def test_weights_and_log_probs_are_those_of_transformers(tied, parallel, tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    save_model(transformers, tmp_path / "model", tied=tied)
    job = {"parallel": parallel, "steps": 0, "save_hf": str(tmp_path / "saved")}
    first, *_ = launch(tmp_path / "run", tmp_path / "model", **job)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reference = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "saved").float()
    for sequence, ours in zip(SEQUENCES, first["log_probs"], strict=True):
        with torch.no_grad():
            log_p = reference(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
        theirs = log_p[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=5e-6)
