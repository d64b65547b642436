"""A few log-probs of fixed tokens, compared between trainer and engine: finds faults of the engine's own loader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vime.errors import ProbeError

LogProbs = Sequence[Sequence[float]]
"""For every sequence, the log-prob of each token after the first, given those before it, at temperature 1."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest mean absolute difference by the engine's dtype. Measured on small models: 1e-6 and 1e-2."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences over all probed tokens, in nats."""

    mean: float
    max: float


def probe_ids(vocab_size: int, *, seed: int = 0, sequences: int = 4, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """The same token ids in every process: `sequences` x `length`, drawn from [0, vocab_size) by `seed`."""
    rng = random.Random(f"vime-probe-{seed}")
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(sequences))


def tolerance_for(dtype: str, override: float | None = None) -> float:
    """Mean tolerance: the user's, or the default of the dtype."""
    return override if override is not None else TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def compare(expected: LogProbs, measured: LogProbs, *, tolerance: float, engine: str) -> ProbeResult:
    """Mean and maximum absolute difference over all tokens.

    Raises ProbeError when shapes differ, a value is not finite or the mean exceeds the tolerance.
    """
    shapes = [len(row) for row in expected], [len(row) for row in measured]
    if shapes[0] != shapes[1] or not sum(shapes[0]):
        raise ProbeError(f"{engine}: probe shapes differ: trainer {shapes[0]}, engine {shapes[1]}", fix="report a bug")
    differences = [abs(a - b) for x, y in zip(expected, measured, strict=True) for a, b in zip(x, y, strict=True)]
    result = ProbeResult(mean=sum(differences) / len(differences), max=max(differences))
    if not result.mean <= tolerance:
        raise ProbeError(
            f"{engine}: log-probs after the update differ from the trainer's by {result.mean:.3g} in the mean "
            f"(max {result.max:.3g}); at most {tolerance:.3g} is allowed",
            fix="the engine stays paused with its gate shut; check the model family's name table and the engine's weight "
            "loader, or raise weights.probe.tolerance if the engine computes in lower precision",
        )
    return result
