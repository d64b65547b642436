"""One trainer rank on one device through a platform's own factories, without Ray: speed, memory, accuracy, parking.

Prints one JSON document. `--shape tiny` runs anywhere, the host included:

    python bench/device_trainer.py --platform cpu --shape tiny --tokens 256 --length 64
    python bench/device_trainer.py --platform cuda --shape 4b --tokens 8192 --length 2048 --recompute none full
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES = {
    "tiny": ((1000, 128, 256, 4), (8, 2, 64)),
    "0.6b": ((151936, 1024, 3072, 28), (16, 8, 128)),
    "4b": ((151936, 2560, 9728, 36), (32, 8, 128)),
}
"""Tiny is made up; the others are the published Qwen3 models'."""


def hf_config(shape: str) -> dict[str, Any]:
    """A shape's config.json, or the one at a path."""
    if shape not in SHAPES:
        return json.loads(Path(shape).read_text())
    sizes, heads = SHAPES[shape]
    return {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **dict(zip(HEADS, heads, strict=True))}


# ---- the platform's answers


def ask_platform(args: argparse.Namespace, folder: Path) -> tuple[Any, dict[str, Any]]:
    """(set-up of one rank, what the platform said); puts the platform's environment rules in place before torch is loaded."""
    from vime.config.schema import OptimizerSection, SftSection, TrainerSection
    from vime.facts.collectives import GroupRequest
    from vime.facts.diagnosis import ProbeContext
    from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
    from vime.models.registry import family_of
    from vime.planning.env import merge_env
    from vime.platforms.discovery import PluginPolicy, discover
    from vime.trainer.setup import TrainerSetup

    platform = discover(PluginPolicy.read(platform=args.platform)).platform(args.platform)
    inventory = platform.inventory(ProbeContext(dict(os.environ)))
    capabilities = platform.capabilities(inventory)
    request = RoleRequest(
        role="actor",
        kind=RoleKind.TRAINER,
        placement=RolePlacement("actor", (Slot(0, 0),)),
        inventories=(inventory,),
        capabilities=capabilities,
        parallel=Parallel(),
        dtype=args.dtype or capabilities.default_dtype,
        shared_with=("rollout",),
        residency="park",
        software=inventory.software.get("trainer", {}),
        threads=args.threads,
    )
    env, reasons = merge_env([platform.process_env(request)], {}, process="trainer", inherited=os.environ)
    os.environ.update(env)
    config = hf_config(args.shape)
    shape = family_of(config).shape(config)
    (folder / "config.json").write_text(json.dumps(config))
    setup = TrainerSetup(
        model_path=folder,
        dtype=request.dtype,
        parallel=Parallel(),
        rank=0,
        world=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=0,
        seed=1,
        num_steps=1000,
        temperature=1.0,
        algorithm=SftSection(),
        trainer=TrainerSection(
            optimizer=OptimizerSection(lr=1e-5),
            max_tokens_per_micro_batch=args.tokens,
            log_prob_chunk_tokens=args.chunk,
            megatron=dict(json.loads(args.megatron)),
        ),
        runtime=platform.trainer_runtime(request),
        adaptation=platform.megatron_adapt(request, shape),
        collective=platform.collective(request, GroupRequest("trainer", 1)),
        memory=platform.memory_backend(request),
        from_scratch_seed=7,
        node_device=0,
    )
    said = {"env": env, "env_reasons": [str(reason) for reason in reasons], "device": inventory.devices[0].name}
    return setup, {**said, "device_type": capabilities.device_type, "collective": setup.collective.backend}


def build_worker(setup: Any, *, in_place: bool) -> Any:
    """A rank; `in_place` draws the weights on the device, which is faster than drawing billions on the host."""
    from vime.trainer.megatron.worker import MegatronWorker

    if not in_place:
        return MegatronWorker(setup)

    class InPlace(MegatronWorker):
        def _load_weights(self) -> None:
            for param in self._model.bare.parameters():
                if param.dim() > 1:
                    param.data.normal_(0.0, 0.02)
                else:
                    param.data.fill_(1.0)

    return InPlace(setup)


# ---- the device


class Device:
    """What is asked of a device beside its runtime: peak memory, and how fast it multiplies."""

    def __init__(self, device_type: str) -> None:
        import torch

        self.type = device_type
        self.module: Any = None if device_type == "cpu" else torch.get_device_module(device_type)

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def collect(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if self.module is not None:
            self.module.empty_cache()

    def forget_peak(self) -> None:
        if self.module is not None:
            self.module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Of torch's tensors since `forget_peak`; on a host the largest resident size of the process."""
        if self.module is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.module.max_memory_allocated()

    def allocated_bytes(self) -> int:
        return 0 if self.module is None else self.module.memory_allocated()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until the device is done."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def product_tflops(self, dtype: Any, size: int) -> dict[str, Any]:
        """A square product of random matrices."""
        import torch

        a, b = (torch.randn(size, size, device=self.type).to(dtype) for _ in range(2))
        spans = [self.timed(lambda: a @ b) for _ in range(13)][3:]
        return {"size": size, "dtype": str(dtype), "tflops": 2 * size**3 / statistics.median(spans) / 1e12}


# ---- training


def make_work(vocab: int, *, tokens: int, length: int, micro_batches: int, seed: int) -> Any:
    """Random rows of `length` tokens, all but the first of them targets, packed to `tokens`."""
    from vime.types import TrainSample, UpdateWork

    draw = random.Random(seed)

    def row() -> Any:
        ids = tuple(draw.randrange(vocab) for _ in range(length))
        return TrainSample(ids[:1], ids[1:], (), (1,) * (length - 1), None, ())

    packs = tuple(tuple(row() for _ in range(tokens // length)) for _ in range(micro_batches))
    rows = sum(map(len, packs))
    return UpdateWork(packs, num_rollouts=rows, num_tokens=rows * (length - 1))


def flops(shape: Any, work: Any) -> tuple[float, float]:
    """(products with weights, those and attention) of one forward and backward; recomputation does not count.

    Each weight takes 2 operations a token forward and 4 backward; a head that is not tied leaves the embedding's out.
    Causal attention takes 2 s^2 operations per layer and channel forward, and twice that backward.
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for pack in work.micro_batches for s in pack]
    weights = shape.parameters - (0 if shape.tied_embeddings else shape.vocab * shape.hidden)
    products = 6.0 * weights * sum(lengths)
    return products, products + 6.0 * shape.layers * shape.heads * shape.head_dim * sum(n * n for n in lengths)


def run_steps(args: argparse.Namespace, setup: Any, recompute: str, device: Device, product: float) -> dict[str, Any]:
    """Train with one kind of recomputation."""
    setup = replace(setup, trainer=setup.trainer.model_copy(update={"recompute": recompute}))
    worker = build_worker(setup, in_place=True)
    try:
        shape, held = worker._model.shape, device.allocated_bytes()
        works = [
            make_work(shape.vocab, tokens=args.tokens, length=args.length, micro_batches=args.micro_batches, seed=seed)
            for seed in range(args.steps + 1)
        ]
        first = device.timed(lambda: worker.train_step([works[0]]))
        device.forget_peak()
        rows: list[dict[str, float]] = []
        spans = [device.timed(lambda w=w: rows.append(worker.train_step([w]))) for w in works[1:]]
        products, everything = flops(shape, works[0])
        median = statistics.median(spans)
        return {
            "recompute": recompute,
            "first_step_s": first,
            "step_s": spans,
            "tokens_per_step": args.tokens * args.micro_batches,
            "tokens_per_s": args.tokens * args.micro_batches / median,
            "tflops_6n": products / median / 1e12,
            "tflops_with_attention": everything / median / 1e12,
            "ratio_to_product": everything / median / 1e12 / product,
            "held_bytes": held,
            "peak_bytes": device.peak_bytes(),
            "bytes_by_tag": {str(tag): size for tag, size in worker.memory_bytes().items()},
            "metrics": rows[-1],
            "park": park_and_wake(worker, device),
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


def park_and_wake(worker: Any, device: Device) -> dict[str, Any]:
    """Twice, because the first time takes the host's memory too. Gradients are dropped, everything else must come back."""
    from vime.facts.memory import Tag

    kept, dropped = (Tag.OPTIMIZER, Tag.PARAMS), Tag.GRADS
    held = worker.memory_bytes()
    nbytes = sum(held[tag] for tag in kept)

    def marks() -> dict[str, int]:
        return {str(tag): fingerprint(worker._tensors()[tag]) for tag in kept}

    before = marks()
    rounds = []
    for _ in range(2):
        out = device.timed(lambda: worker.park([dropped, *kept]))
        left = sum(worker.memory_bytes().values())
        allocated = device.allocated_bytes()
        back = device.timed(lambda: worker.wake([*kept, dropped]))
        rounds.append(
            {"park_s": out, "wake_s": back, "park_gb_per_s": nbytes / out / 1e9, "wake_gb_per_s": nbytes / back / 1e9}
        )
        rounds[-1] |= {"left_bytes": left, "allocated_bytes_when_parked": allocated}
    return {"bytes": nbytes, "rounds": rounds, "bits_equal": marks() == before, "same_sizes": worker.memory_bytes() == held}


# ---- accuracy


def compare_with_float64(args: argparse.Namespace, setup: Any, folder: Path) -> dict[str, Any]:
    """Log-probs of this device beside transformers in float64 on the host, both with the same (rounded) weights."""
    import torch
    from transformers import Qwen3ForCausalLM

    worker = build_worker(setup, in_place=False)
    try:
        draw = random.Random(3)
        vocab = worker._model.shape.vocab
        sequences = [[draw.randrange(vocab) for _ in range(size)] for size in (2, 7, args.length, args.length // 2 + 1)]
        ours = [torch.tensor(row, dtype=torch.float64) for row in worker.log_probs(sequences)]
        worker.save_hf(folder / "saved")
    finally:
        worker.close()
    wide: Any = Qwen3ForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64, attn_implementation="eager")
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


def head_memory(setup: Any, shape: Any, device: Device, rows: int) -> dict[str, Any]:
    """Peak memory over what is held, and time, of log-probs with their gradients for `rows` targets."""
    import torch

    from vime.trainer.megatron.logprobs import Head, score_rows

    dtype = getattr(torch, setup.dtype)
    hidden = torch.randn(rows, shape.hidden, device=device.type).to(dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=device.type) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(shape.vocab, (rows,), device=device.type)
    result = {"rows": rows, "all_logits_bytes": rows * shape.vocab * dtype.itemsize, "chunks": {}}
    for chunk in sorted({setup.trainer.log_prob_chunk_tokens, rows}):

        def step(chunk: int = chunk) -> None:
            scores = score_rows(hidden, targets, Head(weight, shape.vocab, 1.0, chunk))
            (scores.log_probs.sum() + scores.entropy.sum()).backward()
            hidden.grad = weight.grad = None

        step()
        base = device.allocated_bytes()
        device.forget_peak()
        seconds = device.timed(step)
        over = None if device.module is None else device.peak_bytes() - base
        result["chunks"][chunk] = {"seconds": seconds, "peak_over_held_bytes": over}
    return result


def attempt(work: Callable[[], Any]) -> Any:
    """A part's result; a part that fails says so and the others still run."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - each part stands for itself
        return {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()[-12:]}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    setup, said = ask_platform(args, folder)
    import torch

    setup.runtime.bootstrap.build().set_device(0)
    import megatron.core

    device = Device(said["device_type"])
    result: dict[str, Any] = {"platform": said, "torch": torch.__version__, "megatron_core": megatron.core.__version__}
    product = device.product_tflops(getattr(torch, setup.dtype), args.product)
    result["product"] = product
    if args.shape == "tiny":
        result["log_probs"] = attempt(lambda: compare_with_float64(args, setup, folder))
    result["training"] = []
    for recompute in args.recompute:
        device.collect()
        result["training"].append(attempt(lambda: run_steps(args, setup, recompute, device, product["tflops"])))  # noqa: B023
    device.collect()
    from vime.models.registry import family_of

    config = hf_config(args.shape)
    result["head"] = attempt(lambda: head_memory(setup, family_of(config).shape(config), device, args.tokens))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--shape", default="tiny", help=f"{', '.join(SHAPES)}, or the path of a Qwen3 config.json")
    parser.add_argument("--dtype", help="default: the platform's")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="of a row")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", nargs="+", default=["none", "full"], choices=["none", "selective", "full"])
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits at once")
    parser.add_argument("--product", type=int, default=8192, help="size of the reference product")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megatron", default="{}", help="JSON for trainer.megatron")
    args = parser.parse_args()
    if args.tokens < args.length:
        sys.exit("--tokens must hold at least one row of --length tokens")
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as folder:
        print(json.dumps(measure(args, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
