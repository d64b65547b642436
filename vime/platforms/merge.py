"""How contributions of a lineage merge: parents first, the child speaks last, and contradictions are errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from vime.errors import PluginError
from vime.facts.inventory import DeviceProfile
from vime.facts.process import EnvMode, EnvValue, VllmDefaults
from vime.facts.transports import Side, TransportOffer

_BOTH = "both_equal"
_OPTIONS = frozenset({EnvMode.OPTION, EnvMode.WITHOUT})
_VERBS = {
    EnvMode.DEFAULT: "defaults to",
    EnvMode.REQUIRE: "must be",
    EnvMode.FORBID: "must not be",
    EnvMode.OPTION: "must hold",
    EnvMode.WITHOUT: "must be without",
}


def merge_env(layers: Iterable[Mapping[str, EnvValue]], *, where: str) -> dict[str, EnvValue]:
    """Environment rules of a lineage, one per variable; `layers` come parents first.

    A child's rule replaces its parent's default. What a parent requires or forbids may be repeated or made stricter,
    never loosened: that is a PluginError with both reasons. A rule about an option of a list may be repeated; another rule
    beside it is a contradiction, as one rule per variable can be kept. `both_equal` stays once it is said, for the transports
    of either rule.
    """
    merged: dict[str, EnvValue] = {}
    for layer in layers:
        for name, rule in layer.items():
            above = merged.get(name)
            merged[name] = rule if above is None else _combine(name, above, rule, where=where)
    return merged


def _combine(name: str, parent: EnvValue, child: EnvValue, *, where: str) -> EnvValue:
    binding = [rule.protocols for rule in (parent, child) if rule.scope == _BOTH]
    scope = _BOTH if binding else child.scope
    protocols = tuple(dict.fromkeys(chain(*binding))) if all(binding) else ()
    child = replace(child, scope=scope, protocols=protocols)
    parent = replace(parent, scope=scope, protocols=protocols)
    if _OPTIONS & {parent.mode, child.mode}:
        return _combine_options(name, parent, child, where=where)
    if parent.mode is EnvMode.DEFAULT:
        if child.mode is EnvMode.FORBID and child.value != parent.value:
            raise _contradiction(name, parent, child, where=where, what="one rule per variable can be kept")
        return child
    same = parent.value == child.value
    if parent.mode is EnvMode.REQUIRE:
        agrees = same != (child.mode is EnvMode.FORBID)
        stricter = replace(parent, why=child.why if child.mode is EnvMode.REQUIRE else parent.why)
    else:
        agrees = same if child.mode is EnvMode.FORBID else (child.mode is EnvMode.REQUIRE and not same)
        stricter = child
    if not agrees:
        raise _contradiction(name, parent, child, where=where, what="the child cannot loosen it")
    return stricter


def _combine_options(name: str, parent: EnvValue, child: EnvValue, *, where: str) -> EnvValue:
    """Rules about options of a list: equal ones merge, a whole value may not stand beside them."""
    if (parent.mode, parent.value) == (child.mode, child.value):
        return child
    one_option = {parent.mode, child.mode} <= _OPTIONS and option_name(parent.value) == option_name(child.value)
    what = "they are about one option" if one_option else "one rule per variable can be kept"
    raise _contradiction(name, parent, child, where=where, what=what)


def option_name(text: str) -> str:
    """`expandable_segments` of `expandable_segments:True`."""
    return text.partition(":")[0].strip()


def _contradiction(name: str, parent: EnvValue, child: EnvValue, *, where: str, what: str) -> PluginError:
    def told(rule: EnvValue) -> str:
        return f"{name} {_VERBS[rule.mode]} {rule.value!r} ({rule.why})"

    return PluginError(
        f"environment rules contradict: a parent says {told(parent)}, its child says {told(child)}; {what}",
        where=where,
        fix="require one value in the child, or amend the parent's rules with @hookimpl(wrapper=True)",
    )


def merge_defaults(layers: Iterable[VllmDefaults], *, where: str) -> VllmDefaults:
    """Launch defaults of a lineage: args by key, env by rule, entry points joined, the last launch and platform named."""
    parts = tuple(layers)
    args: dict[str, Any] = {}
    for part in parts:
        args.update(part.args)
    points = dict.fromkeys(name for part in parts for name in part.entry_points)
    return VllmDefaults(
        args=args,
        env=merge_env((part.env for part in parts), where=where),
        launch=_last(part.launch for part in parts),
        entry_points=tuple(points),
        expected_platform=_last(part.expected_platform for part in parts),
    )


def _last(values: Iterable[str | None]) -> str | None:
    return next((value for value in reversed(tuple(values)) if value is not None), None)


def merge_profiles(layers: Iterable[tuple[DeviceProfile, ...]]) -> tuple[DeviceProfile, ...]:
    """Nominal devices by name; a child's profile replaces its parent's of the same name."""
    return tuple({profile.name: profile for layer in layers for profile in layer}.values())


def merge_offers(layers: Iterable[tuple[TransportOffer, ...]], side: Side, *, where: str) -> tuple[TransportOffer, ...]:
    """Half offers by protocol; a child's offer replaces its parent's. Raises PluginError for the other side's half.

    A child's offers come first: among transports of unknown speed the one nearest to the hardware is taken.
    """
    offers: dict[str, TransportOffer] = {}
    for layer in reversed(tuple(layers)):
        for offer in layer:
            if offer.side is not side:
                raise PluginError(
                    f"transport {offer.protocol!r} was offered for the {offer.side} side, the {side} side was asked",
                    where=where,
                    fix="return offers with `side=side`",
                )
            offers.setdefault(offer.protocol, offer)
    return tuple(offers.values())
