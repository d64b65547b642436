"""Which plugins may load, and the statuses that metadata alone decides: nothing is imported here.

*First-party* plugins may load by themselves. A third-party plugin is code execution and loads only when it is named, by
`--platform NAME`, `plugins: {allow: [NAME]}` or `VIME_PLUGINS=NAME,...`. An empty `VIME_PLUGINS` turns every third-party
plugin off, and deny beats everything.

First-party are the distribution `vime` and those that its own metadata lists as extras (`vime[...]`, names that begin with
`vime-`). The list says which names we publish; it proves no origin, as no Python metadata does.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import EntryPoint

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier
from packaging.utils import canonicalize_name

from vime.hooks.api import API_TEXT, KEYWORD, admits, declared_range, is_newer, range_of_this
from vime.platforms.base import BASE

CORE = "vime"
PLUGINS_VARIABLE = "VIME_PLUGINS"
AUTO = "auto"
_RESERVED = (AUTO, BASE)


class PluginStatus(StrEnum):
    """How an entry point ended. `available` may load, `active` has loaded as part of an asked-for platform."""

    ACTIVE = "active"
    AVAILABLE = "available"
    DENIED = "denied"
    NOT_ALLOWED = "not-allowed"
    IMPORT_ERROR = "import-error"
    API_MISMATCH = "api-mismatch"
    PARENT_MISSING = "parent-missing"
    VALIDATION_ERROR = "validation-error"
    PROBE_CRASHED = "probe-crashed"


LOADABLE = (PluginStatus.ACTIVE, PluginStatus.AVAILABLE, PluginStatus.PROBE_CRASHED)
REFUSED = (PluginStatus.DENIED, PluginStatus.NOT_ALLOWED)


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Which plugins may load. `listed` is `VIME_PLUGINS`: None when unset, empty for no third-party plugin at all."""

    platforms: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    listed: tuple[str, ...] | None = None

    @classmethod
    def read(
        cls, *, platform: str = AUTO, allow: Iterable[str] = (), deny: Iterable[str] = (), env: Mapping[str, str] | None = None
    ) -> PluginPolicy:
        """From `--platform`, the run file's `plugins` section and the environment (this process's by default)."""
        text = (os.environ if env is None else env).get(PLUGINS_VARIABLE)
        listed = None if text is None else tuple(word for part in text.split(",") if (word := part.strip()))
        return cls(() if platform == AUTO else (platform,), tuple(allow), tuple(deny), listed)

    def names(self, plugin: str) -> bool:
        """Is this third-party plugin named?"""
        if self.listed == ():
            return False
        return plugin in (*self.platforms, *self.allow, *(self.listed or ()))


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One entry point in the status table. `error` is the original exception, where there is one."""

    name: str
    distribution: str
    version: str
    module: str
    first_party: bool
    status: PluginStatus
    reason: str = ""
    parent: str | None = None
    api: str | None = None
    hooks: tuple[str, ...] = ()
    error: BaseException | None = None

    def failed(self, status: PluginStatus, reason: str, error: BaseException | None = None) -> PluginRow:
        """The row with another status and why."""
        return replace(self, status=status, reason=reason, error=error)


def way_out(row: PluginRow) -> str:
    """The next step for a plugin that is not usable."""
    name = row.name
    match row.status:
        case PluginStatus.DENIED:
            return f"take {name} out of plugins.deny"
        case PluginStatus.NOT_ALLOWED:
            return f"if you trust it, name it: --platform {name}, plugins.allow, or {PLUGINS_VARIABLE}={name}"
        case PluginStatus.API_MISMATCH:
            return _for_this_api(row)
        case PluginStatus.PARENT_MISSING:
            return f"mend or install its parent {row.parent}; see `vime plugins show {name}`"
        case PluginStatus.PROBE_CRASHED:
            return f"choose the platform yourself with --platform {name}, or see `vime plugins show {name}`"
        case _:
            return f"see `vime plugins show {name}`; mend or reinstall {row.distribution}, or choose another --platform"


def _for_this_api(row: PluginRow) -> str:
    """What to do about a plugin for another vime or another hook API."""
    if row.api is not None and admits(row.api):
        return f"install the {CORE} that it requires, or another release of {row.distribution}"
    if row.api is not None and is_newer(row.api):
        return f"install a newer {CORE}, or a {row.distribution} for hook API {API_TEXT}"
    return (
        f"install a {row.distribution} for hook API {API_TEXT}; its authors port it (docs/decisions/0007-hook-api-1.md) and "
        f'add "{KEYWORD}{range_of_this()}" to `keywords` in its pyproject.toml'
    )


def first_party_distributions() -> frozenset[str]:
    """Canonical names of the distributions that vime's own metadata lists as extras, and `vime`."""
    names = {CORE}
    for requirement in _requirements(_core()):
        if requirement.marker is not None and "extra" in str(requirement.marker):
            name = canonicalize_name(requirement.name)
            if name.startswith(f"{CORE}-"):
                names.add(name)
    return frozenset(names)


def _core() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(CORE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(distribution: importlib.metadata.Distribution | None) -> list[Requirement]:
    found: list[Requirement] = []
    for text in (distribution.requires or ()) if distribution else ():
        try:
            found.append(Requirement(text))
        except InvalidRequirement:
            continue
    return found


def _core_mismatch(point: EntryPoint) -> str | None:
    """Why the plugin's metadata rules out this vime, read before anything of it is imported."""
    core = _core()
    if core is None or point.dist is None:
        return None
    for requirement in _requirements(point.dist):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) != CORE or not applies:
            continue
        if not requirement.specifier.contains(core.version, prereleases=True):
            return f"its metadata requires {requirement}, this is {CORE} {core.version}"
    return None


def judge(name: str, points: Sequence[EntryPoint], policy: PluginPolicy, trusted: frozenset[str]) -> PluginRow:
    """The row of a plugin name from its entry points (several when distributions collide) and the policy."""
    point, owners = points[0], sorted(_owner(p) for p in points)
    first_party = all(canonicalize_name(owner) in trusted for owner in owners)
    version = (point.dist.version if point.dist else None) or ""
    row = PluginRow(name, owners[0], version, point.value, first_party, PluginStatus.AVAILABLE)
    if name in policy.deny:
        return row.failed(PluginStatus.DENIED, "plugins.deny names it")
    if len(points) > 1:
        reason = f"{' and '.join(owners)} both provide a plugin named {name!r}; uninstall one of them"
        return row.failed(PluginStatus.VALIDATION_ERROR, reason)
    if name in _RESERVED:
        return row.failed(PluginStatus.VALIDATION_ERROR, f"the name {name!r} is reserved")
    if not first_party and not policy.names(name):
        return row.failed(PluginStatus.NOT_ALLOWED, _unnamed(policy))
    row = _with_api(row, point)
    if row.status is PluginStatus.AVAILABLE and (mismatch := _core_mismatch(point)):
        return row.failed(PluginStatus.API_MISMATCH, mismatch)
    return row


def _with_api(row: PluginRow, point: EntryPoint) -> PluginRow:
    """The row with the range of the hook API that the metadata states, refused where this version is not in it.

    Plugins of the core's own distribution are of this version.
    """
    if point.dist is None or canonicalize_name(point.dist.name) == CORE:
        return replace(row, api=API_TEXT)
    supported = declared_range(",".join(point.dist.metadata.get_all("Keywords") or ()))
    if supported is None:
        reason = f"its metadata states no range of the hook API, which is the mark of a plugin for 0.x; this is {API_TEXT}"
        return row.failed(PluginStatus.API_MISMATCH, reason)
    row = replace(row, api=supported)
    try:
        suits = admits(supported)
    except InvalidSpecifier as error:
        return row.failed(PluginStatus.VALIDATION_ERROR, f"{supported!r} in its keyword {KEYWORD} is no version range", error)
    reason = f"it is written for hook API {supported}, this is {API_TEXT}"
    return row if suits else row.failed(PluginStatus.API_MISMATCH, reason)


def _unnamed(policy: PluginPolicy) -> str:
    if policy.listed == ():
        return f"{PLUGINS_VARIABLE} is empty, which turns third-party plugins off"
    return "a third-party plugin is code execution and loads only when it is named"


def _owner(point: EntryPoint) -> str:
    name: str | None = point.dist.name if point.dist else None
    return name or "unknown"
