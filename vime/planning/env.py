"""Environment of a process: a platform's rules and the user's variables, merged with a reason for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vime.errors import PlanError
from vime.facts.process import EnvMode, EnvValue
from vime.planning.plan import EnvReason

Rules = Mapping[str, EnvValue]


def merge_env(
    layers: Iterable[Rules], user: Mapping[str, str], *, process: str, where: str | None = None
) -> tuple[dict[str, str], tuple[EnvReason, ...]]:
    """Merge the rules of several hooks with the user's variables, which win over defaults.

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
        chosen, mode, why = _value(name, rules, user.get(name), process=process, where=where)
        for rule in rules:
            if rule.mode is EnvMode.FORBID:
                _check_forbidden(name, rule, chosen, why, process=process, where=where)
                reasons.append(EnvReason(process, name, rule.value, str(rule.mode), rule.why))
        if chosen is not None:
            values[name] = chosen
            reasons.append(EnvReason(process, name, chosen, mode, why))
    return values, tuple(reasons)


def _value(
    name: str, rules: list[EnvValue], user: str | None, *, process: str, where: str | None
) -> tuple[str | None, str, str]:
    """The value, what kind of rule gave it, and why. A later default replaces an earlier one."""
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
        raise PlanError(f"E261 {process}: {text}", where=where, fix=f"remove {name} from `env`, or give another value")


def check_equal(
    rules: Iterable[Rules], trainer: Mapping[str, str], engine: Mapping[str, str], *, where: str | None = None
) -> None:
    """Variables of scope `both_equal` must be the same on both sides of an edge. Raises PlanError E262."""
    for layer in rules:
        for name, rule in layer.items():
            if rule.scope == "both_equal" and trainer.get(name) != engine.get(name):
                text = f"{name} is {trainer.get(name)!r} for the trainer and {engine.get(name)!r} for the engine: {rule.why}"
                raise PlanError(f"E262 {text}", where=where, fix=f"give {name} one value in `env.trainer` and `env.engine`")
