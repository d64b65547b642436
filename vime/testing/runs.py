"""A made-up run directory, for whoever works on what reads one."""

from __future__ import annotations

import math
import random
from pathlib import Path

from vime.observe import layout
from vime.observe.jsonl import MetricsFile, Row, RowKind
from vime.observe.metrics import DIFF, DIFF_MAX, RESPONSE_TOKENS, REWARD, STALENESS_MAX, STALENESS_MEAN, TOTAL_TOKENS, Number
from vime.observe.samples import SamplesFile, SampleText
from vime.observe.timeline import LOOP_STARTED

EVALUATE_EVERY = 50
SAVE_EVERY = 100

_CONFIG = """\
run: {dir: example, seed: 0}
model: {path: models/tiny-qwen3}
data: {path: data/chain_sum.jsonl}
schedule: {num_steps: %d}
algorithm: {kind: grpo}
topology: cpu-colocate
platform: cpu
"""


def write_example_run(directory: Path, steps: int) -> Path:
    """Write `resolved.yaml`, `metrics.jsonl` and `samples.jsonl` of a run that learns sums; the same at every call.

    The reward rises from about 0.35 towards 0.55; every step takes about half a second. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / layout.RESOLVED).write_text(_CONFIG % steps, encoding="utf-8")
    for name in (layout.METRICS, layout.SAMPLES):
        (directory / name).unlink(missing_ok=True)
    writer = _Writer(directory)
    writer.start()
    for step in range(1, steps + 1):
        writer.step(step, last=step == steps)
    writer.close()
    return directory


class _Writer:
    """Writes rows in the order of a real run, with a clock of its own."""

    def __init__(self, directory: Path) -> None:
        self._file = MetricsFile(directory / layout.METRICS)
        self._samples = SamplesFile(directory / layout.SAMPLES, per_step=1)
        self._random = random.Random(0)
        self._time = 1_760_000_000.0
        self._version = "0.0"

    def start(self) -> None:
        about = {"name": "example", "model": "tiny-qwen3 (0.8M)", "topology": "cpu-colocate", "platform": "cpu"}
        self._write(RowKind.RUN, 0, data={**about, "algorithm": "grpo", "devices": 2})
        self._sync(0)
        self._evaluate(0)
        self._memory()
        seconds = {"start": 14.2, "evaluate": 3.3, "sync": 0.06}
        self._write(RowKind.EVENT, 0, seconds=seconds, data={"name": LOOP_STARTED})

    def step(self, step: int, *, last: bool) -> None:
        draw = self._random
        slow = 0.4 if step == 1 else 0.0
        generate, train = max(0.1, draw.gauss(0.2, 0.02)) + slow, max(0.1, draw.gauss(0.25, 0.015)) + slow
        self._version = f"0.{step}"
        self._time += generate + train
        metrics = self._step_metrics(step)
        self._write(RowKind.STEP, step, metrics=metrics, seconds={"generate": generate, "train": train, "train/pack": 0.002})
        save = self._save(step) if last or step % SAVE_EVERY == 0 else 0.0
        sync = self._sync(step)
        evaluate = self._evaluate(step) if last or step % EVALUATE_EVERY == 0 else 0.0
        if step == 70:
            message = "engine 0 did not answer its health check for 10 s; it was restarted and loaded version 0.69"
            self._write(RowKind.EVENT, step, data={"name": "engine_restarted", "message": message})
        self._samples.write(step, [self._sample(metrics[REWARD])])
        other = abs(draw.gauss(0.007, 0.002))
        seconds = {"wall": generate + train + sync + save + evaluate + other, "generate": generate, "train": train}
        seconds |= {"sync": sync, "save": save, "evaluate": evaluate, "other": other, "train/pack": 0.002}
        metrics = {"perf/step_time": seconds["wall"], "perf/response_tokens_per_s": metrics[RESPONSE_TOKENS] / seconds["wall"]}
        self._write(RowKind.WALL, step, metrics=metrics, seconds=seconds)

    def close(self) -> None:
        self._file.close()
        self._samples.close()

    def _step_metrics(self, step: int) -> dict[str, float]:
        draw = self._random
        progress = 1 - math.exp(-step / 80)
        length = 3.5 + 0.3 * progress + draw.gauss(0, 0.05)
        diff = 5e-7 * math.exp(draw.gauss(0, 0.12))
        return {
            REWARD: min(1.0, max(0.0, 0.35 + 0.2 * progress + draw.gauss(0, 0.03))),
            "rollout/response_len/mean": length,
            "rollout/response_len/max": 8 + draw.randint(0, 4),
            "rollout/truncated_ratio": 0.0,
            RESPONSE_TOKENS: round(256 * length),
            TOTAL_TOKENS: round(256 * (length + 9)),
            STALENESS_MEAN: 0.0,
            STALENESS_MAX: 0,
            "train/loss": draw.gauss(0, 0.01),
            "train/entropy_loss": 1.4 - 0.6 * progress + draw.gauss(0, 0.03),
            "train/grad_norm": 0.6 * math.exp(draw.gauss(0, 0.25)),
            DIFF: diff,
            DIFF_MAX: diff * 14 * math.exp(abs(draw.gauss(0, 0.6))),
        }

    def _sync(self, step: int) -> float:
        parts = {"sync/pause": 0.022, "sync/transfer": 0.013, "sync/resume": 0.002}
        parts = {name: max(0.001, value * self._random.gauss(1, 0.1)) for name, value in parts.items()}
        metrics: dict[str, Number | None] = {"perf/update_weights_wire_bytes": 3_313_664}
        if step < 3 or step % 20 == 0:
            parts["sync/probe"] = 0.008
            metrics |= {"sync/probe_abs_diff": 4.1e-7 * self._random.gauss(1, 0.1), "sync/fingerprint_tensors": 46}
        seconds = sum(parts.values())
        self._time += seconds
        metrics["perf/update_weights_time"] = seconds
        self._write(RowKind.SYNC, step, metrics=metrics, seconds={"sync": seconds, **parts})
        return seconds

    def _evaluate(self, step: int) -> float:
        progress = 1 - math.exp(-step / 80)
        greedy, sampled = 0.463 + 0.16 * progress, 0.353 + 0.19 * progress
        self._time += 3.3
        self._write(RowKind.EVAL, step, metrics={"eval/chain_sum/greedy": greedy, "eval/chain_sum/sampled": sampled})
        return 3.3

    def _save(self, step: int) -> float:
        self._time += 0.05
        self._write(RowKind.SAVE, step, metrics={"perf/save_model_time": 0.05}, seconds={"save": 0.05})
        return 0.05

    def _memory(self) -> None:
        params, kv = 3_313_664, 64 << 20
        actor = {"params": params, "grads": params, "optimizer": 2 * params}
        edges = {
            "serving": {"rollout": {"engine_weights": params, "kv": kv}},
            "training": {"actor": {**actor, "activations": 40 << 20}},
            "updating": {"actor": {"params": params}, "rollout": {"engine_weights": params}},
        }
        for edge, device in edges.items():
            self._write(RowKind.MEMORY, 0, data={"edge": edge, "device": device, "host": {}})

    def _sample(self, chance: float) -> SampleText:
        left, right = self._random.randint(1, 99), self._random.randint(1, 99)
        right_answer = self._random.random() < chance
        answer = left + right if right_answer else left + right - self._random.randint(1, 9)
        return SampleText(f"{left} + {right} =", str(answer), float(right_answer), str(left + right))

    def _write(self, kind: RowKind, step: int, **content: object) -> None:
        self._file.write(Row(kind, step, self._time, self._version, **content))  # pyright: ignore[reportArgumentType]
