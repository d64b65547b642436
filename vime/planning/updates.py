"""Whether engines can be updated in the way that a run asks for."""

from __future__ import annotations

from vime.errors import ConfigError
from vime.facts.engine import RELEASES, features_of
from vime.planning.plan import Plan


def check_update(plan: Plan, update: str, *, where: str | None = None) -> None:
    """Raise ConfigError for `weights.update: in_flight` where no request can run through an update.

    Args:
        update: `weights.update`.
        where: the place that says so.
    """
    if update != "in_flight" or not plan.engines:
        return
    if plan.shared:
        raise ConfigError(
            "`weights.update: in_flight` keeps requests in the engines while weights change, but trainer and engines of"
            f" {plan.topology} take turns on the same devices: no request runs then",
            where=where,
            fix="use drain, or a topology whose engines have devices of their own, such as cpu-disaggregated or disaggregated",
        )
    for engine in plan.engines:
        release = engine.request.software.get("vllm")
        if release is not None and not (features := features_of(release)).in_flight:
            able = next(known.release for known in RELEASES if known.in_flight)
            raise ConfigError(
                f"`weights.update: in_flight` needs engines that tell which weights sampled which token; vLLM {release} of pool"
                f" {engine.pool} has what {features.release} has, and cannot",
                where=where,
                fix=f"use drain, or install vLLM {able} or newer there",
            )
