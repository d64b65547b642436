"""The version of the hook API, and how a plugin's metadata says which versions it was written for.

Semantic versioning: a *minor* version adds hooks, keyword parameters of hooks and fields with defaults; a *major* one may
change or remove. A distribution declares its range as a keyword of its metadata, written like a requirement:

    [project]
    keywords = ["vime-hooks>=1.2,<2"]

Keywords are metadata that every build tool writes and that can be read without importing anything.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

API: tuple[int, int] = (1, 2)
"""(major, minor) of the hook API."""

API_TEXT = f"{API[0]}.{API[1]}"
KEYWORD = "vime-hooks"
_OPERATORS = "<>=!~"
_FROM = (">", ">=", "==", "===", "~=")


def range_of_this() -> str:
    """The range for a plugin that is written today: this version and the minor ones to come."""
    return f">={API_TEXT},<{API[0] + 1}"


def declared_range(keywords: str | None) -> str | None:
    """The range in a metadata field `Keywords` (comma-separated) as it is written, None where it states none."""
    found: list[str] = []
    ours = False
    for word in (part.strip() for part in (keywords or "").split(",")):
        rest = word.removeprefix(KEYWORD).strip()
        if word.startswith(KEYWORD) and (not rest or rest[0] in _OPERATORS):
            ours = True
            found.append(rest)
        elif ours and word[:1] and word[0] in _OPERATORS:
            found.append(word)
        else:
            ours = False
    return ",".join(text for text in found if text) or None


def admits(supported: str, version: tuple[int, int] = API) -> bool:
    """Whether a range contains a version of the hook API. Raises packaging.specifiers.InvalidSpecifier."""
    return SpecifierSet(supported).contains(f"{version[0]}.{version[1]}", prereleases=True)


def is_newer(supported: str) -> bool:
    """Whether a range that leaves this version out begins above it: then vime is too old, not the plugin."""
    above = (s for s in SpecifierSet(supported) if s.operator in _FROM)
    return any(Version(s.version.removesuffix(".*")) >= Version(API_TEXT) for s in above)
