"""What `vime bench train` measures, in its child: `python -m vime.benchmarks.train_parts JSON` prints a marked line a part."""

from __future__ import annotations

import json
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.benchmarks.rank import Device, apply_environment, ask_platform, build_worker, rank_setup
from vime.benchmarks.train import MARK
from vime.facts.memory import NullMemory, Tag
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork

Words = Mapping[str, Any]


def make_work(vocab: int, *, tokens: int, length: int, micro_batches: int, seed: int) -> UpdateWork:
    """Random rows of `length` tokens, all but the first of them targets, packed to `tokens`."""
    draw = random.Random(seed)

    def row() -> TrainSample:
        ids = tuple(draw.randrange(vocab) for _ in range(length))
        return TrainSample(ids[:1], ids[1:], (), (1,) * (length - 1), None, ())

    packs = tuple(tuple(row() for _ in range(tokens // length)) for _ in range(micro_batches))
    rows = sum(map(len, packs))
    return UpdateWork(packs, num_rollouts=rows, num_tokens=rows * (length - 1))


def flops(shape: Any, work: UpdateWork) -> tuple[float, float]:
    """(products with weights, those and attention) of one forward and backward; recomputation does not count.

    Each weight takes 2 operations a token forward and 4 backward; a head that is not tied leaves the embedding's out.
    Causal attention takes 2 s^2 operations per layer and channel forward, and twice that backward.
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for pack in work.micro_batches for s in pack]
    weights = shape.parameters - (0 if shape.tied_embeddings else shape.vocab * shape.hidden)
    products = 6.0 * weights * sum(lengths)
    width = shape.heads * (shape.head_dim + shape.value_dim)
    return products, products + 3.0 * shape.layers * width * sum(n * n for n in lengths)


def train_steps(words: Words, setup: TrainerSetup, device: Device, recompute: str) -> dict[str, Any]:
    """Train with one kind of recomputation; the device's product is timed first, in the same process."""
    import torch

    product = device.product_tflops(getattr(torch, setup.dtype), words["product"])
    device.collect()
    worker = build_worker(replace(setup, trainer=setup.trainer.model_copy(update={"recompute": recompute})), in_place=True)
    try:
        shape, held = worker._model.shape, device.allocated_bytes()
        sizes = {name: words[name] for name in ("tokens", "length", "micro_batches")}
        works = [make_work(shape.vocab, **sizes, seed=seed) for seed in range(words["steps"] + 1)]
        first = device.timed(lambda: worker.train_step([works[0]]))
        device.forget_peak()
        rows: list[dict[str, float]] = []
        spans = [device.timed(lambda w=w: rows.append(worker.train_step([w]))) for w in works[1:]]
        products, everything = flops(shape, works[0])
        median, tokens = statistics.median(spans), words["tokens"] // words["length"] * words["length"] * words["micro_batches"]
        memory: dict[str, Any] = {"held_bytes": held, "peak_bytes": device.peak_bytes()}
        memory["bytes_by_tag"] = {str(tag): size for tag, size in worker.memory_bytes().items()}
        return {
            "recompute": recompute,
            "product": product,
            "first_step_s": first,
            "step_s": spans,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens / median,
            "tflops_6n": products / median / 1e12,
            "tflops_with_attention": everything / median / 1e12,
            "ratio_to_product": everything / median / 1e12 / product["tflops"],
            "memory": memory,
            "metrics": rows[-1],
            "park": park_and_wake(worker, device, setup),
        }
    finally:
        worker.close()


# ---- parking


def fingerprint(tensors: Sequence[Any], part: int = 2**24) -> int:
    """Of all bits in place: a sum of 64-bit words, each times an odd weight of its position, modulo 2^64."""
    import torch

    total, seen = 0, set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        words = raw[: raw.numel() // 8 * 8].view(torch.int64)
        weights = torch.arange(1, 2 * min(part, max(1, words.numel())), 2, device=tensor.device)
        for index, chunk in enumerate(words.split(part)):
            total += int((chunk * weights[: len(chunk)]).sum()) * (2 * index + 1) + 1
        total = total * 1_000_003 + int(raw[words.numel() * 8 :].long().sum())
    return total % 2**64


def park_and_wake(worker: Any, device: Device, setup: TrainerSetup) -> dict[str, Any]:
    """Twice, because the first time takes the host's memory too. Gradients are dropped, everything else must come back."""
    if isinstance(setup.memory, NullMemory):
        return {"bytes": 0, "rounds": [], "reason": setup.memory.reason}
    kept, dropped = (Tag.OPTIMIZER, Tag.PARAMS), Tag.GRADS
    held = worker.memory_bytes()
    nbytes = sum(held[tag] for tag in kept)

    def marks() -> dict[str, int]:
        return {str(tag): fingerprint(worker._tensors()[tag]) for tag in kept}

    before, rounds = marks(), []
    for _ in range(2):
        out = device.timed(lambda: worker.park([dropped, *kept]))
        left, allocated = sum(worker.memory_bytes().values()), device.allocated_bytes()
        back = device.timed(lambda: worker.wake([*kept, dropped]))
        rates = {"park_gb_per_s": nbytes / out / 1e9, "wake_gb_per_s": nbytes / back / 1e9}
        rounds.append({"park_s": out, "wake_s": back, **rates, "left_bytes": left, "allocated_bytes_when_parked": allocated})
    return {"bytes": nbytes, "rounds": rounds, "bits_equal": marks() == before, "same_sizes": worker.memory_bytes() == held}


# ---- accuracy


def compare_with_float64(words: Words, setup: TrainerSetup) -> dict[str, Any]:
    """Log-probs of this device beside transformers in float64 on the host, both with the same (rounded) weights."""
    import torch
    from transformers import Qwen3ForCausalLM

    worker, saved = build_worker(setup, in_place=False), Path(words["model"]) / "saved"
    try:
        draw, vocab, longest = random.Random(3), worker._model.shape.vocab, words["length"]
        sequences = [[draw.randrange(vocab) for _ in range(size)] for size in (2, 7, longest, longest // 2 + 1)]
        ours = [torch.tensor(row, dtype=torch.float64) for row in worker.log_probs(sequences)]
        worker.save_hf(saved)
    finally:
        worker.close()
    wide: Any = Qwen3ForCausalLM.from_pretrained(saved, dtype=torch.float64, attn_implementation="eager")
    theirs = []
    with torch.no_grad():
        for row in sequences:
            log_p = wide(input_ids=torch.tensor([row])).logits[0, :-1].double().log_softmax(-1)
            theirs.append(log_p.gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    mine, other = torch.cat(ours), torch.cat(theirs)
    error = (mine - other).abs()
    return {
        "tokens": len(mine),
        "dtype": setup.dtype,
        "mean_abs": error.mean().item(),
        "max_abs": error.max().item(),
        "mean_relative": (error / other.abs()).mean().item(),
        "mean_signed": (mine - other).mean().item(),
    }


# ---- the head alone


def head_memory(words: Words, setup: TrainerSetup, device: Device) -> dict[str, Any]:
    """Peak memory over what is held, and time, of log-probs with their gradients for a micro-batch of targets."""
    import torch

    from vime.models.registry import family_of
    from vime.trainer.megatron.logprobs import Head, score_rows

    config = json.loads((setup.model_path / "config.json").read_text())
    shape, rows, dtype = family_of(config).shape(config), words["tokens"], getattr(torch, setup.dtype)
    hidden = torch.randn(rows, shape.hidden, device=device.type).to(dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=device.type) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(shape.vocab, (rows,), device=device.type)
    chunks: dict[int, dict[str, Any]] = {}
    for chunk in sorted({min(setup.trainer.log_prob_chunk_tokens, rows), rows}):

        def step(chunk: int = chunk) -> None:
            scores = score_rows(hidden, targets, Head(weight, shape.vocab, 1.0, chunk))
            (scores.log_probs.sum() + scores.entropy.sum()).backward()
            hidden.grad = weight.grad = None

        step()
        base = device.allocated_bytes()
        device.forget_peak()
        seconds = device.timed(step)
        over = None if device.module is None else device.peak_bytes() - base
        chunks[chunk] = {"seconds": seconds, "peak_over_held_bytes": over}
    return {"rows": rows, "all_logits_bytes": rows * shape.vocab * dtype.itemsize, "chunks": chunks}


def measure(words: Words) -> Iterator[dict[str, Any]]:
    """The parts in turn. The platform's environment is in place before torch is imported."""
    asked = ask_platform(words["platform"], dtype=words["dtype"], threads=words["threads"])
    env = apply_environment(asked)
    setup = rank_setup(asked, Path(words["model"]), tokens=words["tokens"], chunk=words["chunk"], megatron=words["megatron"])
    setup.runtime.bootstrap.build().set_device(0)
    device = Device(asked.capabilities.device_type)
    works: dict[str, Callable[[str], dict[str, Any]]] = {
        "accuracy": lambda _: compare_with_float64(words, setup),
        "recompute": lambda recompute: train_steps(words, setup, device, recompute),
        "head": lambda _: head_memory(words, setup, device),
    }
    said = {"env": env, "device": asked.inventory.devices[0].name, "collective": setup.collective.backend}
    for part in words["parts"]:
        kind, _, which = part.partition(" ")
        device.collect()
        yield {**attempt(lambda k=kind, w=which: works[k](w)), "platform": said}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part's result; a part that fails says so and the others still run."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  each part stands for itself
        return {
            "ok": False,
            "error": f"{type(error).__name__}: {error}"[:4000],
            "trace": traceback.format_exc()[-4000:],
        }


if __name__ == "__main__":
    for result in measure(json.loads(sys.argv[1])):
        print(f"\n{MARK}{json.dumps(result)}", flush=True)
