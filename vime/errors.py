"""The errors a user can meet. Each says where, what and the next step."""

from __future__ import annotations

from collections.abc import Iterable


class VimeError(Exception):
    """Base of every error that vime raises on purpose.

    Args:
        what: what is wrong, with the values involved.
        where: `file:line`, a process or a device; None where there is no place to point at.
        fix: the next step for the reader.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        step = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{place}{self.what}{step}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(cls: type[VimeError], what: str, where: str | None, fix: str | None) -> VimeError:
    return cls(what, where=where, fix=fix)


class ConfigError(VimeError):
    """A run file, an override or a flag is wrong."""


class TopologyError(VimeError):
    """A topology file breaks a rule; `what` starts with the rule's id."""


class PlanError(VimeError):
    """The run does not fit the hardware: placement, memory or transport."""


class PluginError(VimeError):
    """A platform plugin is absent, refused, broken or answers wrongly."""


class DataError(VimeError):
    """A data file or row cannot be used; `where` is `file:line`."""


class RewardError(VimeError):
    """A grader cannot score; the sample is dropped and counted."""


class RolloutError(VimeError):
    """Sampling failed in a way that retries do not mend."""


class EngineError(VimeError):
    """An engine or the router did not start, answer or stop as it must."""


class WeightSyncError(VimeError):
    """Weights did not reach an engine whole."""


class ProbeError(WeightSyncError):
    """An engine loaded weights that give other log-probs than the trainer's."""


class TrainerError(VimeError):
    """A training step cannot be computed."""


class MemoryStateError(VimeError):
    """A role asked for a transition that its memory state does not allow."""


class CheckpointError(VimeError):
    """A checkpoint is torn, foreign or cannot be written."""


class PlacementError(VimeError):
    """The cluster cannot hold what the plan asks for."""


class DeadlineError(VimeError):
    """A wait reached its deadline; `what` names who did not answer."""


class Errors(VimeError):
    """Several independent errors, reported together."""

    def __init__(self, errors: Iterable[VimeError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(e) for e in self.errors))

    def __str__(self) -> str:
        return self.what

    def __reduce__(self) -> tuple[object, ...]:
        return (Errors, (self.errors,))
