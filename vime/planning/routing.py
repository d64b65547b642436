"""Whether a model and its engines allow the routing replay that a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.errors import ConfigError, Errors
from vime.planning.plan import EnginePlan, Plan

KEY = "trainer.routing_replay"
_SEVERAL = ("decode_context_parallel_size", "prefill_context_parallel_size")


def check_routing(plan: Plan, replay: str, *, where: Callable[[str], str | None]) -> None:
    """Raise ConfigError for a replay without experts, and for one of engines that vLLM would not start.

    Args:
        replay: `trainer.routing_replay`.
        where: the place of a dotted path of the run file.
    """
    if replay == "none":
        return
    if not plan.model.experts:
        what = f"`{KEY}: {replay}`, but {plan.model.family} has no experts to choose"
        raise ConfigError(what, where=where(KEY), fix=f"leave {KEY} out")
    if replay != "rollout" or not plan.engines:
        return
    errors = [ConfigError(what, where=where(path), fix=fix) for path, what, fix in _refused(plan.engines[0])]
    if errors:
        raise errors[0] if len(errors) == 1 else Errors(errors)


def _refused(engine: EnginePlan) -> Iterator[tuple[str, str, str]]:
    """(path, what, fix) of each setting with which vLLM tells no experts. The engines of a run differ in none of them."""
    why = f"`{KEY}: rollout` needs engines that tell the experts of every token, which vLLM refuses"
    if (pp := engine.request.parallel.pp) > 1:
        yield KEY, f"{why} over {pp} stages of a pipeline", f"use roles.{engine.request.role}.parallel.pp 1"
    given = {arg.name: arg.value for arg in engine.args}
    for name in _SEVERAL:
        if (size := given.get(name) or 1) > 1:
            yield f"rollout.vllm.{name}", f"{why} with {name} {size}", f"leave rollout.vllm.{name} out"
    if given.get("enable_prefix_caching") is False:
        fix = "leave rollout.vllm.enable_prefix_caching out"
        yield "rollout.vllm.enable_prefix_caching", f"{why} without a prefix cache, which it keeps them beside", fix
