"""The engine's side: how vLLM is launched and how it sleeps."""

from __future__ import annotations

import re
from typing import Any

from vime.config.manifest import Argument, manifest_of
from vime.facts.memory import EngineSleep, Tag
from vime.facts.process import RoleKind, VllmDefaults
from vime.testing.conformance.registry import check, require
from vime.testing.conformance.subject import Subject

CORE_ENTRY_POINT = "vime"
_CLASS = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)+\Z")
_KINDS: dict[str, tuple[type, ...]] = {"flag": (bool,), "int": (int,), "float": (int, float), "text": (str,)}
_LEVELS = (0, 1, 2)


@check("C25", hooks=["vime_vllm_defaults"], title="vLLM is launched with what it knows")
def vllm_knows_its_arguments(subject: Subject) -> None:
    """Arguments are vLLM's own, with values of their kind; the expected platform is a class, the plugins that must load
    include vime's, and the launch module is a module's name."""
    known = manifest_of("vllm")
    for asked in subject.requests(RoleKind.ENGINE):
        found: VllmDefaults = subject.ask("vime_vllm_defaults", asked.request)
        at = f"for {asked.about}"
        for name, value in found.args.items():
            argument = known.arguments.get(known.aliases.get(name, name))
            require(
                argument, f"vLLM has no argument {name!r} ({known.origin}) {at}", "write it with underscores, as vLLM names it"
            )
            assert argument is not None
            require(
                _fits(argument, value), f"vLLM's {name} is a {argument.kind}, not {value!r} {at}", "give a value of its kind"
            )
        expected = found.expected_platform or ""
        require(_CLASS.match(expected), f"expected_platform is {found.expected_platform!r} {at}", "name vLLM's class for it")
        points = found.entry_points
        require(CORE_ENTRY_POINT in points, f"entry points {points} leave out vime's {at}", f"add {CORE_ENTRY_POINT!r}")
        module = found.launch is None or _CLASS.match(found.launch)
        require(module, f"launch {found.launch!r} is no module {at}", "name what `python -m` runs, or None")


def _fits(argument: Argument, value: Any) -> bool:
    if argument.kind == "choice":
        return value is None or not isinstance(value, str) or value in argument.choices
    kinds = _KINDS.get(argument.kind)
    if kinds is None or value is None:
        return True
    return isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


@check("C28", hooks=["vime_engine_sleep"], title="engine sleep says what it does")
def sleep_says_what_it_does(subject: Subject) -> None:
    """Level 0 frees nothing and asks for no argument; a deeper sleep frees weights or cache; level 2 does not claim to keep
    the weights, level 1 does not claim to lose them. Weights and cache are described, and what does not leave says why."""
    known = manifest_of("vllm")
    for asked in subject.requests(RoleKind.ENGINE):
        sleep: EngineSleep = subject.ask("vime_engine_sleep", asked.request)
        at = f"for {asked.about}"
        require(sleep.level in _LEVELS, f"the sleep level is {sleep.level} {at}", "write vLLM's level: 0, 1 or 2")
        for tag in (Tag.ENGINE_WEIGHTS, Tag.KV):
            require(tag in sleep.tags, f"the sleep says nothing about {tag} {at}", "say what sleep does to it")
        freed = [tag for tag, semantics in sleep.tags.items() if semantics.frees]
        mute = [tag for tag, semantics in sleep.tags.items() if not semantics.why.strip() and not semantics.frees]
        require(not mute, f"{', '.join(mute)} stays on the device {at}, and nothing says why", "give TagSemantics a why")
        if sleep.level == 0:
            require(
                not freed, f"level 0 only pauses, but {', '.join(freed)} is freed {at}", "set frees=False, or another level"
            )
            require(not sleep.args, f"level 0 asks for {', '.join(sleep.args)} {at}", "leave args empty")
            require(sleep.why.strip(), f"level 0 does not say why {at}", "say why the engine stays on the device")
        else:
            require(freed, f"level {sleep.level} frees nothing {at}", "use level 0 where sleep frees nothing")
            kept = sleep.tags[Tag.ENGINE_WEIGHTS]
            what = f"level {sleep.level} says that weights are {'kept' if kept.preserves else 'lost'} {at}"
            require(kept.preserves == (sleep.level == 1), what, "level 1 copies weights to the host, level 2 discards them")
            cache = sleep.tags[Tag.KV]
            lost = not (cache.frees and cache.preserves)
            require(lost, f"the sleep claims to keep the cache that it frees {at}", "vLLM's sleep discards the cache")
            odd = [name for name in sleep.args if known.aliases.get(name, name) not in known.arguments]
            require(not odd, f"vLLM has no argument {', '.join(odd)} ({known.origin}) {at}", "write vLLM's name")
