"""Finds platform plugins by entry point and brings every one of them to a status.

pluggy's own loader stops at the first plugin that does not import; this one gives each its status and keeps the original
exception. Nothing is imported until a platform is asked for, and then its lineage only.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import platform as host
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

from vime.errors import PluginError
from vime.facts.diagnosis import Check, Match, Severity
from vime.platforms.base import BASE
from vime.platforms.lineage import Platform, Plugin
from vime.platforms.policy import (
    AUTO,
    CORE,
    LOADABLE,
    REFUSED,
    PluginPolicy,
    PluginRow,
    PluginStatus,
    first_party_distributions,
    judge,
    way_out,
)
from vime.platforms.probe import ENTRY_POINT_GROUP, TIMEOUT_S, ProbeAnswer, ProbeTarget, ask_all

__all__ = ["AUTO", "Discovery", "PluginPolicy", "PluginRow", "PluginStatus", "ResolvedPlugin", "discover", "impose"]


@dataclass(frozen=True, slots=True)
class ResolvedPlugin:
    """A plugin of the driver, re-imposed on every process of the run."""

    name: str
    distribution: str
    version: str


@dataclass(slots=True)
class _Candidate:
    """An entry point on its way to a status."""

    row: PluginRow
    point: EntryPoint
    plugin: Plugin | None = None

    def fail(self, status: PluginStatus, reason: str, error: BaseException | None = None) -> PluginError:
        """Settle the status and return the error to raise."""
        self.row = self.row.failed(status, reason, error)
        return self.refusal()

    def refusal(self) -> PluginError:
        row = self.row
        return PluginError(
            f"plugin {row.name} (distribution {row.distribution} {row.version}) is {row.status}: {row.reason}",
            fix=way_out(row),
        )


class _CycleError(PluginError):
    """Parents that lead back to where they began."""


class Discovery:
    """The installed plugins, their statuses, and the platforms loaded from them. Made by `discover`."""

    def __init__(self, policy: PluginPolicy, candidates: Mapping[str, _Candidate]) -> None:
        self._policy = policy
        self._candidates = dict(candidates)
        self._platforms: dict[str, Platform] = {}

    @property
    def status(self) -> tuple[PluginRow, ...]:
        """One row per plugin name, sorted."""
        return tuple(self._candidates[name].row for name in sorted(self._candidates))

    def row(self, name: str) -> PluginRow:
        """One plugin's row. Raises PluginError for a name that is not installed."""
        return self._candidate(name).row

    def platform(self, name: str) -> Platform:
        """Load a platform and its parents. Raises PluginError with the reason and the way out; there is no fallback."""
        if name not in self._platforms:
            plugins = self._lineage(name, ())
            leaf = self._candidates[name]
            try:
                self._platforms[name] = Platform(plugins)
            except PluginError as error:
                raise leaf.fail(PluginStatus.VALIDATION_ERROR, str(error), error) from error
            for plugin in plugins:
                candidate = self._candidates[plugin.name]
                told = candidate.row.reason if candidate.row.status in (PluginStatus.ACTIVE, PluginStatus.AVAILABLE) else ""
                candidate.row = replace(candidate.row, status=PluginStatus.ACTIVE, reason=told)
        return self._platforms[name]

    def check(self, *names: str) -> None:
        """Load the plugins that may load (all, or those named), so that broken ones show in the table."""
        for name in names or tuple(self._candidates):
            candidate = self._candidate(name)
            if candidate.row.status not in (PluginStatus.AVAILABLE, PluginStatus.PROBE_CRASHED):
                continue
            try:
                Platform(self._lineage(name, ()))
            except PluginError as error:
                if candidate.row.status in LOADABLE:
                    candidate.fail(PluginStatus.VALIDATION_ERROR, str(error), error)

    def probe(self, *names: str, timeout_s: float = TIMEOUT_S) -> tuple[Match, ...]:
        """Ask the plugins that may load (all, or those named) whether this machine is theirs, each in a child process.

        A probe that crashes or hangs is no match and leaves the status `probe-crashed`; it is not asked again.
        """
        ready = (PluginStatus.AVAILABLE, PluginStatus.ACTIVE)
        asked = [c for name, c in self._candidates.items() if c.row.status in ready and (name in names or not names)]
        answers = ask_all([ProbeTarget(c.row.name, c.point.value) for c in asked], timeout_s=timeout_s)
        return tuple(match for answer in answers if (match := self._heard(answer)) is not None)

    def detect(self, *, timeout_s: float = TIMEOUT_S) -> str:
        """The platform of this machine for `auto`: the most specific match.

        Raises PluginError when nothing matches or when several match equally well.
        """
        matches = self.probe(timeout_s=timeout_s)
        if not matches:
            raise PluginError(
                "no platform that may load matches this machine: "
                + ("; ".join(f"{row.name} is {row.status}" for row in self.status) or "none is installed"),
                fix=f"choose one with --platform NAME; {self._installed()}",
            )
        best = max(match.specificity for match in matches)
        hits = [match for match in matches if match.specificity == best]
        if len(hits) > 1:
            raise PluginError(
                "several platforms match this machine equally well: "
                + "; ".join(f"{hit.platform} ({hit.reason})" for hit in hits),
                fix="choose one: " + " or ".join(f"--platform {hit.platform}" for hit in hits),
            )
        return hits[0].platform

    def _heard(self, answer: ProbeAnswer) -> Match | None:
        if answer.problem is not None:
            status = {
                "import": PluginStatus.IMPORT_ERROR,
                "validation": PluginStatus.VALIDATION_ERROR,
                "probe": PluginStatus.PROBE_CRASHED,
            }[answer.stage]
            self._candidates[answer.name].fail(status, answer.problem)
            return None
        candidate = self._candidates[answer.name]
        told = answer.match.reason if answer.match else "may load; its probe does not find its hardware on this machine"
        candidate.row = replace(candidate.row, reason=told)
        return answer.match

    def findings(self) -> tuple[Check, ...]:
        """What is wrong with the installed plugins and with the names in the policy, as doctor findings."""
        checks: list[Check] = []
        for row in self.status:
            if row.status in (PluginStatus.ACTIVE, PluginStatus.AVAILABLE):
                continue
            severity = Severity.INFO if row.status in REFUSED else Severity.WARNING
            finding = f"{row.name} is {row.status}: {row.reason}"
            checks.append(Check(f"plugin.{row.name}", severity, finding, way_out(row)))
        for name in (*self._policy.allow, *self._policy.deny, *(self._policy.listed or ())):
            if name not in self._candidates:
                finding = f"plugin {name!r} is named in the policy but not installed"
                checks.append(Check("plugin.unknown", Severity.WARNING, finding, self._nearest(name)))
        return tuple(checks)

    def resolved(self) -> tuple[ResolvedPlugin, ...]:
        """The plugins that have loaded, for `impose` in the other processes of the run."""
        return tuple(
            ResolvedPlugin(row.name, row.distribution, row.version) for row in self.status if row.status is PluginStatus.ACTIVE
        )

    # ---- loading

    def _lineage(self, name: str, below: tuple[_Candidate, ...]) -> tuple[Plugin, ...]:
        """Import a plugin and its parents; parents first, without `base`. Settles statuses and raises PluginError."""
        candidate = self._candidate(name)
        if candidate in below:
            path = " -> ".join([*(c.row.name for c in below), name])
            raise _CycleError(f"plugin parents form a cycle: {path}", fix="let one of them name another parent, or base")
        self._admit(candidate, below)
        plugin = candidate.plugin or self._import(candidate)
        if plugin.info.parent == BASE:
            return (plugin,)
        try:
            above = self._lineage(plugin.info.parent, (*below, candidate))
        except _CycleError as error:
            candidate.fail(PluginStatus.VALIDATION_ERROR, error.what, error)
            raise
        except PluginError as error:
            reason = f"it needs {plugin.info.parent}: {error.what}"
            raise candidate.fail(PluginStatus.PARENT_MISSING, reason, error) from error
        return (*above, plugin)

    def _admit(self, candidate: _Candidate, below: tuple[_Candidate, ...]) -> None:
        """Raise unless the plugin may load. `below` are the children that ask for it."""
        row = candidate.row
        if row.status is PluginStatus.NOT_ALLOWED and any(c.row.distribution == row.distribution for c in below):
            candidate.row = row.failed(PluginStatus.AVAILABLE, "")
        elif row.status is PluginStatus.VALIDATION_ERROR and candidate.plugin is not None and below:
            return  # Too little for a platform of its own is enough for a parent.
        elif row.status not in LOADABLE:
            raise candidate.refusal()

    def _import(self, candidate: _Candidate) -> Plugin:
        row = candidate.row
        try:
            namespace = candidate.point.load()
        except (Exception, SystemExit) as error:
            raise candidate.fail(PluginStatus.IMPORT_ERROR, f"{type(error).__name__}: {error}", error) from error
        try:
            plugin = Plugin.of(namespace, distribution=row.distribution, version=row.version)
            _check_identity(row.name, plugin)
        except PluginError as error:
            raise candidate.fail(PluginStatus.VALIDATION_ERROR, str(error), error) from error
        hooks = tuple(sorted({hook.hook for hook in plugin.hooks}))
        candidate.row = replace(row, parent=plugin.info.parent, hooks=hooks)
        candidate.plugin = plugin
        return plugin

    # ---- names

    def _candidate(self, name: str) -> _Candidate:
        if name not in self._candidates:
            raise PluginError(f"no platform named {name!r} is installed", fix=self._nearest(name))
        return self._candidates[name]

    def _nearest(self, name: str) -> str:
        ours = {d.removeprefix(f"{CORE}-") for d in first_party_distributions()} - {CORE, *self._candidates}
        if name in ours:
            return f"pip install '{CORE}[{name}]'; {self._installed()}"
        near = difflib.get_close_matches(name, [*self._candidates, *ours], n=1)
        return (f"did you mean {near[0]}? " if near else "") + self._installed()

    def _installed(self) -> str:
        return f"installed: {', '.join(sorted(self._candidates)) or 'none (is vime installed? pip install -e .)'}"


def _check_identity(name: str, plugin: Plugin) -> None:
    where = f"plugin {name}"
    if plugin.name != name:
        raise PluginError(
            f"the entry point is named {name!r}, VIME_PLUGIN says {plugin.name!r}", where=where, fix="make both names equal"
        )
    if not plugin.info.parent:
        raise PluginError("VIME_PLUGIN names no parent", where=where, fix=f"name one; {BASE!r} is the parent of most")


def discover(policy: PluginPolicy | None = None) -> Discovery:
    """Read the entry points of every installed distribution; imports none of them."""
    policy = policy or PluginPolicy.read()
    points: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        points.setdefault(point.name, []).append(point)
    trusted = first_party_distributions()
    return Discovery(policy, {name: _Candidate(judge(name, same, policy, trusted), same[0]) for name, same in points.items()})


def impose(resolved: Sequence[ResolvedPlugin]) -> Discovery:
    """The driver's plugins in another process: the same names, distributions and versions, and no others.

    Raises PluginError that lists every difference.
    """
    wanted = {plugin.name: plugin for plugin in resolved}
    found = discover(PluginPolicy(allow=tuple(wanted)))
    differences: list[str] = []
    for name, plugin in wanted.items():
        candidate = found._candidates.get(name)
        if candidate is None:
            differences.append(f"{name}: {plugin.distribution} {plugin.version} is not installed here")
            continue
        row = candidate.row
        if (row.distribution, row.version) != (plugin.distribution, plugin.version):
            here, there = f"{row.distribution} {row.version}", f"{plugin.distribution} {plugin.version}"
            differences.append(f"{name}: {here} here, {there} on the driver")
        elif row.status not in LOADABLE:
            differences.append(f"{name}: {row.status} here, {row.reason}")
    if differences:
        raise PluginError(
            "this process has other plugins than the driver: " + "; ".join(differences),
            where=host.node(),
            fix="install the driver's versions on every node",
        )
    for name, candidate in found._candidates.items():
        if name not in wanted and candidate.row.status in LOADABLE:
            candidate.fail(PluginStatus.NOT_ALLOWED, "the driver of this run did not load it")
    return found
