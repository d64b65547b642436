"""Environment of a process: a platform's rules and the user's variables, merged with a reason for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vime.errors import PlanError
from vime.facts.process import EnvMode, EnvValue
from vime.planning.plan import EnvReason

Rules = Mapping[str, EnvValue]
_OPTIONS = (EnvMode.OPTION, EnvMode.WITHOUT)
_INHERITED = "inherited from the environment"


def merge_env(
    layers: Iterable[Rules],
    user: Mapping[str, str],
    *,
    process: str,
    where: str | None = None,
    inherited: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], tuple[EnvReason, ...]]:
    """Merge the rules of several hooks with the user's variables, which win over defaults.

    Rules about options of a list change the user's value, else a default, else the `inherited` one (the environment that the
    process gets anyway); where that changes nothing, nothing is said.

    Raises:
        PlanError: E261 when two rules contradict, or a user's value breaks one; both reasons are in the message.
    """
    by_name: dict[str, list[EnvValue]] = {}
    for layer in layers:
        for name, rule in layer.items():
            by_name.setdefault(name, []).append(rule)
    values: dict[str, str] = {}
    reasons: list[EnvReason] = []
    for name in dict.fromkeys((*by_name, *user)):
        rules = by_name.get(name, [])
        given = _value(name, rules, user.get(name), process=process, where=where)
        options = [rule for rule in rules if rule.mode in _OPTIONS]
        if options:
            given = _with_options(name, options, given, (inherited or {}).get(name), process=process, where=where)
        chosen, mode, why = given
        for rule in rules:
            if rule.mode is EnvMode.FORBID:
                found = (chosen, why) if chosen is not None else ((inherited or {}).get(name), _INHERITED)
                _check_forbidden(name, rule, *found, process=process, where=where)
                reasons.append(EnvReason(process, name, rule.value, str(rule.mode), rule.why))
        if chosen is not None:
            values[name] = chosen
            reasons.append(EnvReason(process, name, chosen, mode, why))
    return values, tuple(reasons)


_Given = tuple[str | None, str, str]
"""(the value, what kind of rule gave it, why)."""


def _value(name: str, rules: list[EnvValue], user: str | None, *, process: str, where: str | None) -> _Given:
    """The value before options. A later default replaces an earlier one."""
    required = [rule for rule in rules if rule.mode is EnvMode.REQUIRE]
    for rule in required:
        if rule.value != required[0].value:
            other = required[0]
            text = f"{name} must be {other.value!r} ({other.why}) and {rule.value!r} ({rule.why})"
            raise PlanError(f"E261 {process}: {text}", where=where, fix="report it to the platform's authors")
        if user is not None and user != rule.value:
            text = f"{name} is {user!r} in the topology, but must be {rule.value!r}: {rule.why}"
            raise PlanError(f"E261 {process}: {text}", where=where, fix=f"remove {name} from `env`")
    if required:
        return required[0].value, str(EnvMode.REQUIRE), required[0].why
    if user is not None:
        return user, "user", "set in the topology"
    defaults = [rule for rule in rules if rule.mode is EnvMode.DEFAULT]
    return (defaults[-1].value, str(EnvMode.DEFAULT), defaults[-1].why) if defaults else (None, "", "")


def _check_forbidden(name: str, rule: EnvValue, value: str | None, why: str, *, process: str, where: str | None) -> None:
    if value == rule.value:
        text = f"{name} is {value!r} ({why}), which is forbidden: {rule.why}"
        home, place = ("the environment", None) if why == _INHERITED else ("`env`", where)
        raise PlanError(f"E261 {process}: {text}", where=place, fix=f"remove {name} from {home}, or give another value")


# ---- lists of options


def _with_options(
    name: str, rules: Sequence[EnvValue], given: _Given, inherited: str | None, *, process: str, where: str | None
) -> _Given:
    _check_options(name, rules, process=process, where=where)
    value, mode, _ = given
    before = inherited if value is None else value
    after = before
    for rule in rules:
        after = put_option(after, rule.value) if rule.mode is EnvMode.OPTION else drop_option(after, rule.value)
    if after == before:
        return given
    whys = "; ".join(dict.fromkeys(rule.why for rule in rules))
    if mode == EnvMode.REQUIRE:
        text = f"{name} must be {value!r} ({given[2]}) and {after!r} ({whys})"
        raise PlanError(f"E261 {process}: {text}", where=where, fix="report it to the platform's authors")
    origin = {"user": "your value", "default": "the default"}.get(mode, "the environment's value")
    return after, str(rules[-1].mode), whys if before is None else f"{whys} (from {origin} {before!r})"


def _check_options(name: str, rules: Sequence[EnvValue], *, process: str, where: str | None) -> None:
    """Raise E261 where two rules want different things of one option."""
    wanted: dict[str, EnvValue] = {}
    for rule in rules:
        option = option_of(rule.value)
        first = wanted.setdefault(option, rule)
        if (first.mode, first.value) != (rule.mode, rule.value):
            told = [f"{'with' if r.mode is EnvMode.OPTION else 'without'} {r.value!r} ({r.why})" for r in (first, rule)]
            text = f"E261 {process}: {name} must be {told[0]} and {told[1]}"
            raise PlanError(text, where=where, fix="report it to the platform's authors")


def option_of(text: str) -> str:
    """`max_split_size_mb` of `max_split_size_mb:128`."""
    return text.partition(":")[0].strip()


def split_options(text: str) -> list[str]:
    """The options of a list; commas inside brackets belong to a value."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def put_option(text: str | None, option: str) -> str:
    """The list with an option, in place of another value of it; other options keep their places."""
    parts = split_options(text or "")
    if option in parts and sum(option_of(p) == option_of(option) for p in parts) == 1:
        return text or option
    kept = [part for part in parts if option_of(part) != option_of(option)]
    return ",".join([*kept, option])


def drop_option(text: str | None, option: str) -> str | None:
    """The list without an option, whatever its value."""
    parts = split_options(text or "")
    kept = [part for part in parts if option_of(part) != option_of(option)]
    return text if kept == parts else ",".join(kept)


# ---- both sides of an edge


_BOTH = "both_equal"


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One side of an edge: the rules of its hooks, and the values that its process is started with."""

    rules: Sequence[Rules]
    env: Mapping[str, str]

    def of(self, name: str, inherited: Mapping[str, str]) -> str | None:
        """A variable as the process sees it: what it is started with, else what it inherits."""
        return self.env.get(name, inherited.get(name))


def check_equal(
    trainer: EdgeEnd,
    engine: EdgeEnd,
    *,
    protocol: str | None = None,
    inherited: Mapping[str, str] | None = None,
    where: str | None = None,
) -> None:
    """Variables of scope `both_equal` must be the same on both sides of an edge, whichever side has the rule.

    A rule that one side alone has binds the other too: a platform that knows what an edge needs speaks for one that does not.
    Nothing is set for the other side; where its value differs, the run is refused. A rule about an option of a list compares
    that option, any other the whole value. Rules about transports other than `protocol` do not count; without a `protocol`
    all do. Raises PlanError E262.
    """
    given = inherited or {}
    for name, rule, holders in _shared(trainer, engine, protocol):
        ours, theirs = trainer.of(name, given), engine.of(name, given)
        if _compared(rule, ours) == _compared(rule, theirs):
            continue
        text = f"{name} is {ours!r} for the trainer and {theirs!r} for the engine: {rule.why}"
        alone = f" (only the {holders[0]}'s platform says so)" if len(holders) == 1 else ""
        fix = f"give {name} one value in `env.trainer` and `env.engine`"
        if rule.protocols:
            fix += f", or choose a transport other than {' and '.join(rule.protocols)}"
        raise PlanError(f"E262 {text}{alone}", where=where, fix=fix)


def _shared(trainer: EdgeEnd, engine: EdgeEnd, protocol: str | None) -> Iterator[tuple[str, EnvValue, list[str]]]:
    """Rules that bind both sides of an edge over `protocol`, with the sides that have one for the variable."""
    for end in (trainer, engine):
        for layer in end.rules:
            for name, rule in layer.items():
                if _binds(rule, protocol):
                    sides = (("trainer", trainer), ("engine", engine))
                    holders = [side for side, at in sides if any(_binds(rules.get(name), protocol) for rules in at.rules)]
                    yield name, rule, holders


def _binds(rule: EnvValue | None, protocol: str | None) -> bool:
    if rule is None or rule.scope != _BOTH:
        return False
    return protocol is None or not rule.protocols or protocol in rule.protocols


def _compared(rule: EnvValue, value: str | None) -> object:
    """What must be equal: the entries of the rule's option, or the whole value."""
    if rule.mode not in _OPTIONS:
        return value
    return [part for part in split_options(value or "") if option_of(part) == option_of(rule.value)]
