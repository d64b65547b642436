"""`vime check`: everything that can be known to be wrong before a run, reported at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vime.cli.prepare import Hardware, add_run_arguments, hardware_of, missing_parts, overrides_of, require_whole_model
from vime.errors import Errors, VimeError

if TYPE_CHECKING:
    from vime.config.load import LoadedConfig
    from vime.data.prompts import PromptFileCheck
    from vime.facts.model import ModelShape
    from vime.planning.plan import Plan

_Value = TypeVar("_Value")


def add_parser(commands: Any) -> None:
    """Add `check`."""
    summary = "check a run file, its data and its plan; needs no accelerator and no torch"
    parser = commands.add_parser("check", help=summary, allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--sources", action="store_true", help="also print every given value with its origin")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Print what was found; 1 when something is wrong."""
    report = Report()
    loaded = report.attempt(lambda: _load(args))
    hardware = report.attempt(lambda: hardware_of(args, live=False))
    plan = _check(loaded, hardware, report) if loaded is not None and hardware is not None else None
    if loaded is not None and args.sources:
        from vime.config.explain import explain_config

        print(explain_config(loaded))
    for kind, found in (("note", report.notes), ("warning", report.warnings), ("error", report.errors)):
        for finding in found:
            print(f"{kind}: {finding}")
    if report.errors:
        print(f"{args.config}: {len(report.errors)} error(s), {len(report.warnings)} warning(s)")
        return 1
    print(f"{args.config}: ok" + (f"; {_summary(plan)}" if plan else ""))
    return 0


class Report:
    """Errors, warnings and notes of independent steps."""

    def __init__(self) -> None:
        self.errors: list[VimeError] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def attempt(self, step: Callable[[], _Value], *, where: str | None = None) -> _Value | None:
        """The step's value; what it raises is noted, at `where` when the error names no place."""
        try:
            return step()
        except Errors as several:
            self.errors += several.errors
        except VimeError as error:
            if error.where is None:
                error = type(error)(error.what, where=where, fix=error.fix)
            self.errors.append(error)
        return None


def _load(args: argparse.Namespace) -> LoadedConfig:
    from vime.config.load import load_config

    return load_config(args.config, overrides=overrides_of(args))


def _check(loaded: LoadedConfig, hardware: Hardware, report: Report) -> Plan | None:
    """Model, grader, data, topology and plan; each is looked at whatever the others say."""
    from vime.cli.layout import lay_out, plan_layout
    from vime.rewards.registry import check_grader

    config = loaded.config
    report.warnings += [str(warning) for warning in loaded.warnings]
    report.notes += [f"{section} was checked against {source}" for section, source in loaded.manifests.items()]
    model = report.attempt(lambda: _model(config.model.path, report), where=loaded.where("model.path"))
    if config.algorithm.kind != "sft":
        report.attempt(lambda: check_grader(config.reward.kind), where=loaded.where("reward.kind"))
    _data(loaded, report)
    layout = report.attempt(lambda: lay_out(loaded, hardware), where=loaded.where("topology"))
    if model is None or layout is None:
        return None
    plan = report.attempt(lambda: plan_layout(loaded, layout, model, hardware), where=loaded.where("topology"))
    report.notes += plan.notes if plan else ()
    return plan


def _model(folder: Path, report: Report) -> ModelShape:
    """The model's sizes. A folder with sizes alone is enough for a plan, so that it is worth a warning only."""
    from vime.models.registry import read_shape

    shape = read_shape(folder)
    if len(missing_parts(folder)) > 1:
        report.warnings.append(
            f"model folder {folder} has sizes only (config.json): a run needs a complete Hugging Face folder"
        )
    else:
        require_whole_model(folder)
    return shape


def _data(loaded: LoadedConfig, report: Report) -> None:
    from vime.data.prompts import check_prompt_file

    data = loaded.config.data
    paths = [("data.path", data.path)]
    paths += [(f"evaluation.sets.{i}.path", chosen.path) for i, chosen in enumerate(loaded.config.evaluation.sets)]
    for key, path in paths:
        section = data.model_copy(update={"path": path})
        checked: PromptFileCheck | None = report.attempt(lambda: check_prompt_file(section), where=loaded.where(key))  # noqa: B023
        for row in checked.bad_rows if checked else ():
            report.warnings.append(f"{row} (skipped: data.on_bad_row)")


def _summary(plan: Plan) -> str:
    transport = f", weights by {plan.transport.protocol}" if plan.transport else ""
    residency = f", shared devices ({plan.residency})" if plan.shared else ""
    return f"{plan.topology}, {plan.model.parameters:,} parameters in {plan.dtype}{residency}{transport}"
