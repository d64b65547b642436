"""Dynamic filters: which complete groups are not worth training on. A dropped group's place is taken by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vime.errors import ConfigError
from vime.types import Sample

Filter = Callable[[Sequence[Sample]], str | None]
"""Returns why a group is dropped, or None to keep it."""


def nonzero_std(samples: Sequence[Sample]) -> str | None:
    """Drop groups whose rewards are all equal: they have no advantage (Yu et al. 2025, arXiv:2503.14476, section 3.2)."""
    rewards = {s.reward for s in samples}
    return f"zero_std_{rewards.pop()}" if len(rewards) == 1 else None


FILTERS: dict[str, Filter] = {"nonzero_std": nonzero_std}


def load_filter(name: str | None) -> Filter | None:
    """The filter by name. Raises ConfigError naming those that exist."""
    if name is None:
        return None
    if name not in FILTERS:
        raise ConfigError(f"rollout.filter: no filter is called {name!r}", fix=f"use one of {', '.join(FILTERS)}")
    return FILTERS[name]
