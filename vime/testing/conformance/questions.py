"""Every question that a run, a plan and doctor put to a platform, for checks that look at all answers alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from vime.errors import PluginError
from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import DoctorContext
from vime.facts.process import RoleKind
from vime.facts.transports import Side
from vime.hooks.specs import RULES
from vime.testing.conformance.subject import MODELS, Asked, Case, Subject

GROUPS = (GroupRequest("trainer", 8), GroupRequest("weight_sync", 3))


@dataclass(frozen=True)
class Question:
    """One call: the hook, what it is about, its arguments."""

    hook: str
    about: str
    arguments: tuple[Any, ...]

    def put(self, subject: Subject) -> Any:
        """The answer. Whatever the hook raises travels."""
        return getattr(subject.platform, self.hook.removeprefix("vime_"))(*self.arguments)


def questions(subject: Subject) -> Generator[Question]:
    """All questions, each while its machine is in place."""
    yield Question("vime_profiles", "profiles", ())
    yield from _of_machines(subject)
    for case in subject.cases:
        yield from _of_node(case)
    for asked in subject.requests():
        for hook in ROLE_HOOKS[asked.request.kind]:
            yield from _of_role(hook, asked)
    for asked in subject.edges():
        for side in Side:
            yield Question("vime_transports", f"{asked.about}, {side} side", (asked.edge, side))


def _of_machines(subject: Subject) -> Iterator[Question]:
    for machine in (*subject.machines, *subject.foreign):
        with machine.installed() as ctx:
            yield Question("vime_probe", machine.name, (ctx,))
            if machine.readable and machine not in subject.foreign:
                yield Question("vime_inventory", machine.name, (ctx,))
                yield Question("vime_fixture", machine.name, (ctx,))


def _of_node(case: Case) -> Iterator[Question]:
    for hook in ("vime_capabilities", "vime_ray_binding", "vime_perf_model"):
        yield Question(hook, case.name, (case.inventory,))
    if case.machine is None:
        yield Question("vime_doctor_checks", case.name, (DoctorContext(case.inventory, {}),))
        return
    with case.machine.installed() as ctx:
        yield Question("vime_doctor_checks", case.name, (DoctorContext(case.inventory, ctx.env),))


ROLE_HOOKS: Mapping[RoleKind, tuple[str, ...]] = {
    RoleKind.TRAINER: (
        *("vime_process_env", "vime_trainer_runtime", "vime_megatron_adapt", "vime_collective", "vime_memory_backend"),
    ),
    RoleKind.ENGINE: ("vime_process_env", "vime_vllm_defaults", "vime_collective", "vime_engine_sleep"),
}

_EXTRA: Mapping[str, tuple[Any, ...]] = {"vime_megatron_adapt": MODELS, "vime_collective": GROUPS}


def _of_role(hook: str, asked: Asked) -> Iterator[Question]:
    if hook not in _EXTRA:
        yield Question(hook, asked.about, (asked.request,))
        return
    for extra in _EXTRA[hook]:
        name = getattr(extra, "family", "") or getattr(extra, "purpose", "")
        yield Question(hook, f"{asked.about}, {name}", (asked.request, extra))


def each_answer(subject: Subject, look: Callable[[Question, Any], None]) -> None:
    """Call `look` with every question and its answer; hooks that fail are left to the check that reports it."""
    with closing(questions(subject)) as asked:
        for question in asked:
            try:
                answer = question.put(subject)
            except PluginError:
                continue
            look(question, answer)


def unasked() -> tuple[str, ...]:
    """Hooks that `questions` does not ask: none, or this module is behind the specification."""
    asked = {"vime_profiles", "vime_probe", "vime_inventory", "vime_fixture", "vime_doctor_checks", "vime_transports"}
    asked |= {"vime_capabilities", "vime_ray_binding", "vime_perf_model"}
    asked |= {hook for hooks in ROLE_HOOKS.values() for hook in hooks}
    return tuple(name for name in RULES if name not in asked)
