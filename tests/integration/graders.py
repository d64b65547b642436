"""Graders for runs of random tiny models: rewards that vary from the first step on and can be learned quickly."""

from __future__ import annotations

from typing import Any


def digits(job: Any) -> float:
    """Share of characters that are digits; 0 for an empty answer."""
    text = str(job.text)
    return sum(c.isdigit() for c in text) / len(text) if text else 0.0
