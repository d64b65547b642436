"""Every layout trains the same model: real ranks as processes over gloo, compared with one process and with transformers."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_rank

VOCAB = 50
SEQUENCES = [[1, 2, 3, 4, 5], [7, 8], [9] * 12, [1, 2, 3, 4, 5]]
# Each rank is forked from a process that has imported what a trainer needs and done nothing else.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["vime.trainer.megatron.worker", "megatron.core.models.gpt", "megatron.core.dist_checkpointing"]
)


def launch(folder: Path, model: Path, **job: Any) -> list[dict[str, Any]]:
    """Run all ranks of a job to their end; what each rank wrote, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = math.prod(job["parallel"].get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    folder.mkdir()
    ranks = []
    for rank in range(world):
        full = {"model": str(model), "vocab": VOCAB, "sequences": SEQUENCES, "steps": 3, "parts": 2, **job}
        full |= {"rank": rank, "world": world, "port": port}
        files = folder / f"out{rank}.json", folder / f"log{rank}.txt"
        files[1].touch()
        ranks.append(PROCESSES.Process(target=trainer_rank.run, args=(full, *files)))
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=120)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.is_alive():
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


def save_model(transformers: Any, folder: Path, *, tied: bool, experts: int = 0) -> None:
    """Dense, or with `experts` in every layer, two of them for a token."""
    torch.manual_seed(0)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    kind = "Qwen3Moe" if experts else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(
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
        **(mixture if experts else {}),
    )
    made = getattr(transformers, f"{kind}ForCausalLM")(config).float()
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
    assert list(first["digests"]) == first["manifest"]
    assert not any(result["digests"] for result in results[1:])
    for result in results:
        assert list(result["digests_on_every_rank"].items()) == list(first["digests"].items())


@pytest.mark.parametrize(
    ("name", "job", "writers"),
    [
        ("tp", {"parallel": {"tp": 2}, "rings": 2}, [True, False]),
        ("pp", {"parallel": {"pp": 2}, "parts": 3, "rings": 1}, [True, True]),
        ("dp", {"parallel": {"dp": 2}}, [True, False]),
        ("cp", {"parallel": {"cp": 2}, "rings": 1}, [True, False]),
        ("idle", {"parallel": {"dp": 2}, "idle_rank": True}, [True, False]),
    ],
)
def test_a_layout_trains_as_one_process(name, job, writers, model, alone, tmp_path):
    """`rings` is on how many hosts the ranks say they are, each with an engine worker beside it."""
    results = launch(tmp_path / name, model, **job)
    check_same(results, alone)
    for result in results if job.get("rings") else ():
        assert result["rings"] == [results[0]["digests"]] * 2, "the worker beside every rank gets all weights, live and kept"
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
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}], ids=["tp", "pp", "cp", "dp"])
def test_a_checkpoint_goes_on_in_another_layout(parallel, model, alone, tmp_path):
    results = launch(tmp_path / "other", model, parallel=parallel, load=alone["checkpoint"])
    check_same(results, alone, skip=1)


@pytest.mark.parametrize(
    ("tied", "experts", "parallel"),
    [
        (True, 0, {"tp": 2}),
        (False, 0, {"pp": 2}),
        (False, 8, {"dp": 2, "ep": 2}),
        pytest.param(True, 8, {"tp": 2, "etp": 2}, marks=pytest.mark.slow),
        pytest.param(False, 8, {"tp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_weights_and_log_probs_are_those_of_transformers(tied, experts, parallel, tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    save_model(transformers, tmp_path / "model", tied=tied, experts=experts)
    job = {"parallel": parallel, "steps": 0, "save_hf": str(tmp_path / "saved")}
    first, *_ = launch(tmp_path / "run", tmp_path / "model", **job)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").float()
    for sequence, ours in zip(SEQUENCES, first["log_probs"], strict=True):
        with torch.no_grad():
            log_p = reference(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
        theirs = log_p[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=5e-6)


def by_sample(results: list[dict[str, Any]], job: dict[str, Any]) -> list[list[list[float]]]:
    """Scores of every step in the order of its samples, from the ranks that speak."""
    dp = job["parallel"].get("dp", 1)
    speakers = [result for result in results if result["scores"][0] is not None]
    assert len(speakers) == dp
    steps = []
    for step in range(len(speakers[0]["scores"])):
        rows: dict[int, list[float]] = {}
        for rank, result in enumerate(speakers):
            own = [scores for batch in result["scores"][step] for scores in batch]
            rows |= {rank + dp * i: scores for i, scores in enumerate(own)}
        steps.append([rows[i] for i in sorted(rows)])
    return steps


@pytest.fixture(scope="module")
def critic(model, tmp_path_factory) -> dict[str, Any]:
    """A critic in one process: three steps, a checkpoint after the first, its folder at the end."""
    folder = tmp_path_factory.mktemp("critic")
    job = {"parallel": {"tp": 1}, "task": "critic", "save": str(folder / "checkpoint"), "save_at": 1}
    (result,) = launch(folder / "run", model, **job, save_hf=str(folder / "saved"))
    return {**result, "checkpoint": job["save"], "saved": folder / "saved", "steps": by_sample([result], job)}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"parallel": {"tp": 2}, "megatron": {"sequence_parallel": True}}, id="sequence-parallel"),
        pytest.param({"parallel": {"pp": 2, "dp": 2}, "parts": 3}, id="pp-dp"),
        pytest.param({"parallel": {"tp": 2}}, id="tp"),
        pytest.param({"parallel": {"dp": 2}}, id="dp"),
        pytest.param({"parallel": {"pp": 2}}, id="pp"),
        pytest.param({"parallel": {"cp": 2}}, id="cp"),
    ],
)
def test_a_critic_in_a_layout_trains_as_one_process(job, model, critic, tmp_path):
    job = {**job, "task": "critic"}
    results = launch(tmp_path / "run", model, **job)
    for result in results:
        assert result["metrics"] == results[0]["metrics"]
    for ours, theirs in zip(results[0]["metrics"], critic["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-6)
    for ours, theirs in zip(by_sample(results, job), critic["steps"], strict=True):
        assert [s for row in ours for s in row] == pytest.approx([s for row in theirs for s in row], abs=5e-5)


def test_a_critic_goes_on_bit_for_bit_in_a_fresh_process(model, critic, tmp_path):
    job = {"parallel": {"tp": 1}, "task": "critic", "load": critic["checkpoint"], "first": 1}
    (resumed,) = launch(tmp_path / "resumed", model, **job)
    assert resumed["metrics"] == critic["metrics"][1:]
    assert resumed["scores"] == critic["scores"][1:]
    assert resumed["digests"] == critic["digests"]


def test_values_and_scores_are_those_of_transformers(model, critic, tmp_path):
    """The critic's folder opens as a token classifier; a frozen rank's log-probs are those of the policy's folder, at the
    sampler's temperature.
    """
    transformers = pytest.importorskip("transformers")
    values = transformers.AutoModelForTokenClassification.from_pretrained(critic["saved"], num_labels=1).float().eval()
    job = {"parallel": {"tp": 1}, "task": "critic", "steps": 1, "parts": 1}
    (after,) = launch(tmp_path / "critic", critic["saved"], **job)
    frozen = {**job, "task": "reference", "parallel": {"dp": 2}, "parts": 2}
    scores = by_sample(launch(tmp_path / "frozen", model, **frozen), frozen)[0]
    policy = transformers.AutoModelForCausalLM.from_pretrained(model).float().eval()
    rows = zip(trainer_rank.samples(VOCAB, 0), by_sample([after], job)[0], scores, strict=True)
    for sample, own_values, own_scores in rows:
        start, ids = len(sample.prompt_ids) - 1, torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            expected = values(input_ids=ids).logits[0, start:-1, 0]
            log_p = (policy(input_ids=ids).logits[0, start:-1] / 0.9).log_softmax(-1)
        torch.testing.assert_close(torch.tensor(own_values), expected, rtol=0, atol=1e-5)
        targets = torch.tensor(sample.response_ids)[:, None]
        torch.testing.assert_close(torch.tensor(own_scores), log_p.gather(1, targets)[:, 0], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A Qwen3 with experts, and what one process makes of it: three steps, a checkpoint after the first."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("mixture")
    save_model(transformers, folder / "model", tied=False, experts=8)
    job = {"parallel": {"tp": 1}, "save": str(folder / "checkpoint"), "save_at": 1}
    (result,) = launch(folder / "run", folder / "model", **job)
    return folder / "model", {**result, "checkpoint": job["save"]}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"parallel": {"dp": 2, "ep": 2}, "max_tokens": 16}, id="ep"),
        *[
            pytest.param(job, id=name, marks=pytest.mark.slow)
            for name, job in {
                "idle": {"parallel": {"dp": 2, "ep": 2}, "idle_rank": True},
                "dp": {"parallel": {"dp": 2}},
                "recompute": {"parallel": {"tp": 1}, "recompute": "full"},
                "ep-recompute": {"parallel": {"dp": 2, "ep": 2}, "recompute": "full"},
                "tp": {"parallel": {"tp": 2}},
                "tp-etp": {"parallel": {"tp": 2, "etp": 2}},
                "tp-ep": {"parallel": {"tp": 2, "ep": 2}},
                "pp": {"parallel": {"pp": 2}, "parts": 3},
                "tp-dp-ep": {"parallel": {"tp": 2, "dp": 2, "ep": 2}},
                "pp-dp-ep": {"parallel": {"pp": 2, "dp": 2, "ep": 2}},
            }.items()
        ],
    ],
)
def test_experts_train_as_in_one_process_in_every_layout(job, mixture, tmp_path):
    """With `max_tokens` the ranks score different numbers of packs, which a layer of experts must survive."""
    model, alone = mixture
    results = launch(tmp_path / "run", model, **job)
    check_same(results, alone)
    assert results[0]["rows"] == pytest.approx(alone["rows"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 1}, {"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}], ids=["same", "ep", "etp"])
def test_a_checkpoint_with_experts_goes_on_in_another_layout(parallel, mixture, tmp_path):
    model, alone = mixture
    results = launch(tmp_path / "other", model, parallel=parallel, load=alone["checkpoint"])
    check_same(results, alone, skip=1)
    if parallel == {"tp": 1}:
        assert results[0]["digests"] == alone["digests"]


@pytest.mark.slow
def test_experts_train_in_sixteen_bits_too(mixture, tmp_path):
    """The spread is that of bfloat16, in which one unit in the last place is 2^-8."""
    model, _ = mixture
    (alone,) = launch(tmp_path / "alone", model, parallel={"tp": 1}, dtype="bfloat16")
    for name, parallel in (("ep", {"dp": 2, "ep": 2}), ("tp", {"tp": 2, "ep": 2})):
        first, second = launch(tmp_path / name, model, parallel=parallel, dtype="bfloat16")
        assert first["metrics"] == second["metrics"]
        for ours, theirs in zip(first["metrics"], alone["metrics"], strict=True):
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.01)
            assert ours["train/entropy_loss"] == pytest.approx(theirs["train/entropy_loss"], rel=0.005)
