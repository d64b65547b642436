"""Environment rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vime.errors import PlanError, PluginError
from vime.facts.process import EnvMode, EnvValue, RoleKind
from vime.planning.env import EdgeEnd, check_equal, merge_env
from vime.testing.conformance.checks.planning import VARIABLE
from vime.testing.conformance.checks.transports import offers_of
from vime.testing.conformance.registry import check, fail, require
from vime.testing.conformance.subject import Asked, Case, Subject

Rules = Mapping[str, EnvValue]
_SCOPES = ("process", "both_equal")


def rules_of(subject: Subject, asked: Asked) -> Iterator[tuple[str, Rules]]:
    """The layers of one process in the order in which a plan merges them, with the hook that gives each."""
    yield "vime_process_env", subject.ask("vime_process_env", asked.request)
    if asked.request.kind is RoleKind.TRAINER:
        yield "vime_memory_backend", getattr(subject.ask("vime_memory_backend", asked.request), "env", {})
    else:
        yield "vime_vllm_defaults", subject.ask("vime_vllm_defaults", asked.request).env
        yield "vime_engine_sleep", subject.ask("vime_engine_sleep", asked.request).env


@check(
    "C18",
    hooks=["vime_process_env", "vime_vllm_defaults", "vime_memory_backend", "vime_engine_sleep"],
    title="environment rules say why",
)
def rules_say_why(subject: Subject) -> None:
    """Every rule names an environment variable and says why; options are written `option:value`, removals name the option."""
    for asked in subject.requests():
        for hook, rules in rules_of(subject, asked):
            for name, rule in rules.items():
                at = f"{name} of {hook} for {asked.about}"
                require(VARIABLE.match(name), f"{name!r} of {hook} is no name of an environment variable", "write its name")
                require(rule.why.strip(), f"{at} has no why", "say what goes wrong without it")
                require(rule.scope in _SCOPES, f"{at} has scope {rule.scope!r}", f"write one of {', '.join(_SCOPES)}")
                option, colon, value = rule.value.partition(":")
                if rule.mode is EnvMode.OPTION:
                    whole = option and colon and value and "," not in rule.value
                    require(whole, f"{at} puts in the option {rule.value!r}", "write one option:value")
                if rule.mode is EnvMode.WITHOUT:
                    named = option and not colon and "," not in option
                    require(named, f"{at} takes out the option {rule.value!r}", "write the option's name alone")


@check("C19", hooks=["vime_process_env"], title="rules of one process hold together")
def rules_hold_together(subject: Subject) -> None:
    """The rules of all hooks and of the whole lineage for one process can be kept at the same time: none requires what
    another forbids, and no child loosens a rule of its parent."""
    for asked in subject.requests():
        try:
            layers = [rules for _, rules in rules_of(subject, asked)]
            merge_env(layers, {}, process=asked.about)
        except (PluginError, PlanError) as error:
            fail(error.what, error.fix or "keep one of the rules")


@check("C20", hooks=["vime_process_env"], title="both sides get the same")
def both_sides_get_the_same(subject: Subject) -> None:
    """Rules of scope both_equal are given to trainers and to engines of the same node, with one value, for transports that
    the platform offers."""
    for case in subject.cases:
        for residency in ("park", "resident"):
            trainer, engine = (
                Asked(f"{case.name}, {kind}", subject.request(case, kind, residency=residency)) for kind in RoleKind
            )
            ends = {asked.about: [rules for _, rules in rules_of(subject, asked)] for asked in (trainer, engine)}
            shared = [{n for rules in layers for n, r in rules.items() if r.scope == "both_equal"} for layers in ends.values()]
            lone = sorted(shared[0] ^ shared[1])
            what = f"{', '.join(lone)} must be equal on both sides, and one role alone has the rule ({case.name}, {residency})"
            require(not lone, what, "give the rule to both roles")
            named = {p for layers in ends.values() for rules in layers for rule in rules.values() for p in rule.protocols}
            unknown = sorted(named - _offered(subject, case)) if named else []
            what = f"a rule is about {', '.join(unknown)}, which is not offered ({case.name}, {residency})"
            require(not unknown, what, "name protocols of vime_transports")
            try:
                check_equal(*(EdgeEnd(layers, merge_env(layers, {}, process=about)[0]) for about, layers in ends.items()))
            except PlanError as error:
                if error.what.startswith("E262"):
                    fail(f"{error.what} ({case.name})", "give the same rule to both roles")


def _offered(subject: Subject, case: Case) -> set[str]:
    """Protocols of the platform's transports on a machine."""
    edges = subject.edges(cases=[case])
    return {protocol for edge in edges for offers in offers_of(subject, edge).values() for protocol in offers}
