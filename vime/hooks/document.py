"""Writes the reference of all hooks from their specifications."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping

from vime.hooks.api import API_TEXT, KEYWORD, range_of_this
from vime.hooks.specs import RULES, HookRule, Kind, VimeSpecs

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "Device discovery": ("vime_probe", "vime_inventory", "vime_profiles", "vime_capabilities", "vime_ray_binding"),
    "Process": ("vime_process_env", "vime_trainer_runtime", "vime_megatron_adapt", "vime_vllm_defaults"),
    "Collective backends": ("vime_collective",),
    "Memory offload": ("vime_memory_backend", "vime_engine_sleep"),
    "Weight-transfer kernels": ("vime_transports",),
    "Planning": ("vime_perf_model",),
    "Diagnosis": ("vime_doctor_checks", "vime_fixture"),
}

_KINDS = {
    Kind.FIRST: "the leaf of the lineage answers first, None falls through to its parent; an exception never does",
    Kind.ALL: "every plugin of the lineage contributes; the core merges, parents first",
    Kind.ISOLATED: "every implementation is called on its own; one that raises costs only its answer; no wrappers",
}


def render() -> str:
    """The page `docs/hooks.md` (Markdown)."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Hooks"
    yield ""
    yield f"Hook API {API_TEXT}. Written from `vime/hooks/specs.py` by `vime.hooks.document`; do not edit."
    yield ""
    yield "A plugin is a module with `VIME_PLUGIN = PluginInfo(name, parent=...)` and functions marked `@hookimpl`, named by an"
    yield "entry point of the group `vime.plugins`. Trailing parameters that an implementation does not need may be left out."
    yield "`@hookimpl(wrapper=True)` amends the answers of parents."
    yield ""
    yield "The distribution states the versions of this API that it was written for as a keyword of its metadata:"
    yield f'`keywords = ["{KEYWORD}{range_of_this()}"]`. A minor version adds hooks, parameters and fields with'
    yield "defaults; a major one may change or remove. The range is read before anything of the plugin is imported."
    yield ""
    for kind, meaning in _KINDS.items():
        yield f"- *{kind}*: {meaning}."
    yield ""
    yield "| hook | kind | required | answer |"
    yield "|---|---|---|---|"
    for hook, rule in RULES.items():
        yield f"| [`{hook}`](#{hook}) | {rule.kind} | {'yes' if rule.required else ''} | {_answers(rule)} |"
    for family, hooks in FAMILIES.items():
        yield from ("", f"## {family}")
        for hook in hooks:
            yield from _section(hook, RULES[hook])


def _section(hook: str, rule: HookRule) -> Iterator[str]:
    specification = getattr(VimeSpecs, hook)
    signature = inspect.signature(specification)
    parameters = [f"{name}: {p.annotation}" for name, p in signature.parameters.items() if name != "self"]
    asked = "asked in every run" if rule.runtime else "asked when needed"
    yield from ("", f"### {hook}", "")
    yield from ("```python", f"def {hook}({', '.join(parameters)}) -> {signature.return_annotation}", "```", "")
    yield f"*{rule.kind}*{', required' if rule.required else ''}, {asked}."
    yield ""
    yield from textwrap.dedent(f"        {specification.__doc__}").strip().splitlines()


def _answers(rule: HookRule) -> str:
    return " or ".join(f"`{kind.__name__}`" for kind in rule.returns)
