"""Versions as the vendor writes them: `25.5.1`, `24.1.rc3.7`, `8.3.RC1`, `24.1.rc1.b030`."""

from __future__ import annotations

import re

from packaging.version import Version

_WRITTEN = re.compile(r"^\s*(\d+(?:\.\d+)*)(?:[._-]?(rc|alpha|beta|b)[._-]?(\d+))?", re.IGNORECASE)
_STAGE = {"rc": "rc", "alpha": "a", "beta": "b", "b": "b"}


def parse(text: str | None) -> Version | None:
    """The version that a text starts with, build suffixes left out; None where it starts with none."""
    found = _WRITTEN.match(text or "")
    if found is None:
        return None
    release, stage, number = found.groups()
    return Version(release + (f"{_STAGE[stage.lower()]}{number}" if stage else ""))


def older(text: str | None, than: str) -> bool:
    """Whether a version is known and older. An unknown one is not."""
    mine, other = parse(text), parse(than)
    return mine is not None and other is not None and mine < other
