"""The trainer's side: device runtime, pieces of the model, settings that the hardware forces."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.manifest import manifest_of
from vime.facts.process import Factory, MegatronAdaptation, RoleKind, TrainerRuntime
from vime.testing.conformance.registry import check, require
from vime.testing.conformance.source import bad_options, members_of, problem
from vime.testing.conformance.subject import MODELS, Subject
from vime.trainer.runtime import DeviceRuntime

NATIVE = ("torch_dist", "torch", "zarr", "fsdp_dtensor")
"""Checkpoint formats that megatron-core writes."""


@check("C23", hooks=["vime_trainer_runtime"], title="the device runtime exists")
def runtime_exists(subject: Subject) -> None:
    """The factory names a class with every method of DeviceRuntime, its options are those that the constructor takes, and
    its device type is that of the capabilities."""
    methods, attributes = members_of(DeviceRuntime)
    for asked in subject.requests(RoleKind.TRAINER):
        runtime: TrainerRuntime = subject.ask("vime_trainer_runtime", asked.request)
        wrong = problem(runtime.bootstrap, methods=methods, attributes=attributes) or bad_options(runtime.bootstrap)
        require(not wrong, f"{wrong} (for {asked.about})", "implement vime.trainer.runtime.DeviceRuntime")
        wanted = asked.request.capabilities.device_type
        what = f"the runtime's device type is {runtime.device_type!r}, the capabilities' {wanted!r} (for {asked.about})"
        require(runtime.device_type == wanted, what, "name one device type in both")


@check("C24", hooks=["vime_megatron_adapt"], title="megatron's pieces and settings exist")
def adaptation_exists(subject: Subject) -> None:
    """Pieces of the model exist, forced settings are fields of megatron-core's TransformerConfig and say why, checkpoint
    formats are megatron-core's, and limits say what happens."""
    known = manifest_of("megatron-core")
    for asked in subject.requests(RoleKind.TRAINER):
        for model in MODELS:
            found: MegatronAdaptation = subject.ask("vime_megatron_adapt", asked.request, model)
            at = f"for {asked.about}, {model.family}"
            for name, factory in _pieces(found):
                wrong = problem(factory)
                require(not wrong, f"{name} {at}: {wrong}", "name what exists")
            for name, override in found.overrides.items():
                why = f"megatron-core has no setting {name!r} ({known.origin}) {at}"
                require(name in known.arguments, why, "write the field's name in TransformerConfig")
                require(override.why.strip(), f"the setting {name} {at} has no why", "say what goes wrong without it")
            require(found.checkpoint_formats, f"no checkpoint format {at}", "list at least one")
            odd = [name for name in found.checkpoint_formats if name not in NATIVE]
            require(not odd, f"checkpoint formats {odd} {at} are unknown", f"write some of {', '.join(NATIVE)}")
            recipes = asked.request.capabilities.fp8_recipes
            listed = found.fp8_recipe is None or found.fp8_recipe in recipes
            what = f"fp8_recipe {found.fp8_recipe!r} {at} is not among the node's {recipes}"
            require(listed, what, "name one that the capabilities list")
            mute = [name for name, what in found.limits.items() if not (name.strip() and what.strip())]
            require(not mute, f"limits {mute} {at} do not say what happens", "write condition -> what happens")


def _pieces(found: MegatronAdaptation) -> Iterator[tuple[str, Factory]]:
    for name in ("norm", "core_attention", "optimizer"):
        factory = getattr(found, name)
        if factory is not None:
            yield name, factory
