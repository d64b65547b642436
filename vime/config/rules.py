"""Rules between keys: what is arithmetically impossible is an error, what has no effect is a warning."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from vime.config.algorithms import GROUP_BASELINES, PolicySection, log_prob_passes, needs_of
from vime.config.schema import Config
from vime.errors import ConfigError, VimeError
from vime.topology.findings import Finding
from vime.yamltree import Entries, Items, Node, find

_SAMPLING_ONLY = ("rollout", "reward")


def check(config: Config, tree: Node) -> tuple[list[VimeError], tuple[Finding, ...]]:
    """Errors and warnings of a configuration whose keys are each valid by themselves."""
    errors: list[VimeError] = [
        ConfigError(what, where=_where(tree, path), fix=fix)
        for rule in (_batch, _lengths, _support, _sets, _models, _replay)
        for path, what, fix in rule(config)
    ]
    given = _given(tree)
    warnings = tuple(Finding(what, _where(tree, path), fix) for path, what, fix in (*_inert(config, given), *_advice(config)))
    return errors, warnings


Said = tuple[str, str, str | None]
"""(dotted path, what, fix)."""


def _where(tree: Node, path: str) -> str | None:
    seen, where = find(tree, [int(p) if p.isdigit() else p for p in path.split(".")])
    return str(where) if seen else None


def _given(tree: Node) -> set[str]:
    """Dotted paths of every mapping key that somebody wrote, sections included."""

    def walk(node: Node, above: str) -> Iterator[str]:
        if isinstance(node, Entries):
            for key, value in node.entries.items():
                yield f"{above}{key}"
                yield from walk(value, f"{above}{key}.")
        elif isinstance(node, Items):
            for index, item in enumerate(node.items):
                yield from walk(item, f"{above}{index}.")

    return set(walk(tree, ""))


def _support(config: Config) -> Iterator[Said]:
    """A sampler that cuts the vocabulary reports log-probs over what it kept; the trainer's are over all of it."""
    if config.algorithm.kind == "sft":
        return
    sampling = config.rollout.sampling
    for key, value, whole, is_cut in (
        ("top_p", sampling.top_p, 1.0, sampling.top_p < 1),
        ("top_k", sampling.top_k, -1, sampling.top_k > 0),
    ):
        if is_cut:
            what = (
                f"`rollout.sampling.{key}: {value:g}` samples from a part of the vocabulary while the trainer's log-probs are "
                "over all of it: every ratio would be off by the probability that was cut away"
            )
            yield f"rollout.sampling.{key}", what, f"set it to {whole:g}; sampling of evaluation sets may cut"


def nearest_updates(groups: int, updates: int) -> str:
    """What to write where `groups` do not divide into `updates`: the next numbers below and above of either that do."""
    divisors = sorted({d for n in range(1, int(groups**0.5) + 1) if groups % n == 0 for d in (n, groups // n)})
    near = [*[d for d in divisors if d <= updates][-1:], *[d for d in divisors if d > updates][:1]]
    lower = groups - groups % max(updates, 1)
    batches = [b for b in (lower, lower + updates) if b > 0] if updates > 0 else []
    other = f", or batches of {' or '.join(map(str, batches))} groups" if batches else ""
    return f"use {' or '.join(map(str, near))} updates{other}"


def _batch(config: Config) -> Iterator[Said]:
    """Updates are made of whole groups; supervised batches may split unevenly."""
    updates, groups = config.trainer.updates_per_step, config.rollout.batch_size
    if config.algorithm.kind == "sft" or groups % updates == 0:
        return
    rest = f"{groups} / {updates} leaves {groups % updates}"
    what = f"`trainer.updates_per_step` {updates} does not divide rollout.batch_size {groups} groups: {rest}"
    yield "trainer.updates_per_step", what, nearest_updates(groups, updates)


def _lengths(config: Config) -> Iterator[Said]:
    cap, answer = config.trainer.max_tokens_per_micro_batch, config.rollout.sampling.max_response_tokens
    if config.algorithm.kind == "sft":
        return
    prompt = config.data.max_prompt_tokens
    longest = answer + (prompt or 1)
    if longest > cap:
        parts = f"data.max_prompt_tokens {prompt}" if prompt else "a prompt of at least 1"
        what = (
            f"`trainer.max_tokens_per_micro_batch` {cap} is below {parts} + rollout.sampling.max_response_tokens {answer}"
            f" = {longest}: the longest sample could not be trained"
        )
        yield "trainer.max_tokens_per_micro_batch", what, f"raise it to {longest} at least, or shorten the samples"


def _sets(config: Config) -> Iterator[Said]:
    seen: set[str] = set()
    for index, chosen in enumerate(config.evaluation.sets):
        if chosen.name in seen:
            what = f"two evaluation sets are called {chosen.name!r}: their metrics would be mixed up"
            yield f"evaluation.sets.{index}.name", what, "give each set its own name"
        seen.add(chosen.name)


MODELS = {"reference": "reference", "teacher": "teacher", "critic": "values"}
"""Keys of `model` for further training roles, and what an algorithm needs to use them."""


def _models(config: Config) -> Iterator[Said]:
    if "teacher" in needs_of(config.algorithm) and config.model.teacher is None:
        what = f"`model.teacher` is missing: algorithm.kind {config.algorithm.kind} learns from another model than its own"
        yield "model", what, "set model.teacher to a Hugging Face folder with the same vocabulary"


def _replay(config: Config) -> Iterator[Said]:
    if config.algorithm.kind == "sft" and config.trainer.routing_replay == "rollout":
        what = "`trainer.routing_replay: rollout` takes the experts of an engine, and algorithm.kind sft has none"
        yield "trainer.routing_replay", what, "leave trainer.routing_replay out"


def _written(given: AbstractSet[str], *paths: str) -> list[str]:
    return [path for path in paths if path in given]


def _inert(config: Config, given: AbstractSet[str]) -> Iterator[Said]:
    """Settings that were written and have no effect: one warning a block."""
    optimizer = config.trainer.optimizer
    if optimizer.decay == "constant":
        keys = _written(given, "trainer.optimizer.decay_steps", "trainer.optimizer.min_lr")
        yield from _one(keys, "trainer.optimizer.decay is constant", "set trainer.optimizer.decay to linear or cosine")
    if not config.evaluation.sets:
        keys = _written(given, "evaluation.every", "evaluation.at_start")
        yield from _one(keys, "evaluation.sets is empty", "add a set, or remove the block")
    probe = config.weights.probe
    if probe.first == 0 and probe.every == 0:
        yield from _one(_written(given, "weights.probe.tolerance"), "the probe is off", "set weights.probe.first or every")
    if config.weights.update == "in_flight" and config.schedule.max_staleness == 0:
        keys = _written(given, "weights.update")
        why = "at schedule.max_staleness 0 nothing is sampled while weights change"
        yield from _one(keys, why, "set schedule.max_staleness to 1 or more")
    if config.algorithm.kind == "sft":
        unused = [k for k in given if k.startswith("rollout.") and k not in _SFT_ROLLOUT and k.count(".") == 1]
        keys = sorted([*unused, *_written(given, "reward")])
        yield from _one(keys, "algorithm.kind is sft, which samples and scores nothing", "remove these keys")
    if isinstance(config.algorithm, PolicySection):
        longest = config.rollout.sampling.max_response_tokens
        yield from _inert_algorithm(config.algorithm, given, max_response_tokens=longest)
    trainer = config.trainer
    if trainer.routing_replay == "trainer" and not log_prob_passes(config.algorithm, updates_per_step=trainer.updates_per_step):
        why = "no pass for old log-probs goes before an update, so there are no experts to repeat"
        fix = "leave it out, or set algorithm.old_log_probs to recompute and trainer.updates_per_step above 1"
        yield from _one(_written(given, "trainer.routing_replay"), why, fix)
    needs = needs_of(config.algorithm)
    unused = [f"model.{key}" for key, need in MODELS.items() if need not in needs]
    yield from _one(_written(given, *unused), "the algorithm does not use this model", "remove it")
    plugins = set(config.plugins.allow) & set(config.plugins.deny)
    if plugins:
        yield "plugins.allow", f"`plugins.allow` has no effect for {', '.join(sorted(plugins))}: deny beats allow", None


def _inert_algorithm(section: PolicySection, given: AbstractSet[str], *, max_response_tokens: int) -> Iterator[Said]:
    correction, overlong = section.correction, section.overlong
    if correction.level is None and correction.function is None:
        keys = _written(given, *(f"algorithm.correction.{key}" for key in ("bounds", "low", "high")))
        why = "algorithm.correction.level is null, so no token has a weight"
        yield from _one(keys, why, "set algorithm.correction.level to token, sequence or geometric")
    if section.kl.coef == 0:
        keys = _written(given, *(f"algorithm.kl.{key}" for key in ("estimator", "use", "unbiased")))
        yield from _one(keys, "algorithm.kl.coef is 0", "set algorithm.kl.coef above 0")
    if overlong is not None and (start := overlong.max_tokens - overlong.buffer_tokens) >= max_response_tokens:
        why = f"it punishes from {start} tokens on, and rollout.sampling.max_response_tokens is {max_response_tokens}"
        yield from _one(["algorithm.overlong"], why, "lower algorithm.overlong.max_tokens")


_SFT_ROLLOUT = frozenset(
    {f"rollout.{key}" for key in ("batch_size", "group_size", "vllm", "router", "start_timeout_s", "workers")}
)


def _one(keys: list[str], why: str, fix: str) -> Iterator[Said]:
    if keys:
        names = ", ".join(f"`{key}`" for key in keys)
        yield keys[0], f"{names} {'has' if len(keys) == 1 else 'have'} no effect: {why}", fix


def _advice(config: Config) -> Iterator[Said]:
    algorithm = config.algorithm
    if algorithm.kind in GROUP_BASELINES and config.rollout.group_size == 1:
        what = "`rollout.group_size` is 1: an answer without siblings has advantage 0, so nothing is learned"
        yield "rollout.group_size", what, "set rollout.group_size to 2 or more"
    if config.schedule.stop_when is not None and not config.evaluation.sets:
        what = "`schedule.stop_when` never fires: nothing is evaluated"
        yield "schedule.stop_when", what, "add a set to evaluation.sets"
