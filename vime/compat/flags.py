"""slime's command line as a configuration: exact flag names, no prefix guessing, every problem reported at once.

`--vllm-x-y` becomes `rollout.vllm.x_y`, `--router-x-y` becomes `rollout.router.x_y`, a name of megatron-core's transformer
config becomes `trainer.megatron.name`. Flags of nodes and parallel sizes become an inline topology.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.compat import flag_table as table
from vime.compat.algorithm_flags import ALGORITHM, algorithm_settings, tasks_of
from vime.compat.cluster_flags import shared_topology, topology_from
from vime.config.manifest import Argument, manifest_of
from vime.errors import ConfigError, Errors, VimeError
from vime.yamltree import nearest, parse, plain

_NUMBER = re.compile(r"-[0-9.].*")


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as it was written: its name without dashes and its words."""

    name: str
    words: tuple[str, ...]

    @property
    def place(self) -> str:
        """For messages and provenance."""
        return f"flag `--{self.name}`"


def config_from_flags(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values as a tree, and the flag of every dotted path in it; `load_config` takes both.

    Raises:
        ConfigError or Errors: unknown flags with the nearest name, flags that vime refuses with what to do instead.
    """
    given, errors = _read(argv)
    reader = _Tree(errors)
    for flag in given:
        reader.add(flag)
    reader.combine(given)
    if reader.errors:
        raise reader.errors[0] if len(reader.errors) == 1 else Errors(reader.errors)
    return reader.values, reader.sources


def known_flags() -> tuple[str, ...]:
    """Every flag with a meaning here, pass-through names left out."""
    tables = (table.FLAGS, table.COMBINED, ALGORITHM, table.CLUSTER, table.NOTHING_TO_DO, table.SHAPE, table.ONLY_VALUES)
    return tuple(sorted({name for part in tables for name in part}))


def has_answer(name: str) -> bool:
    """Whether a flag is known, refused with a reason, or another package's."""
    return name in known_flags() or name in table.REFUSED or _pass_through(name) is not None


# ---- words


def _read(argv: Sequence[str]) -> tuple[list[Given], list[VimeError]]:
    given: list[Given] = []
    errors: list[VimeError] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--") or word == "--":
            errors.append(ConfigError(f"{word!r} is not a flag and follows none that takes a value", fix="write --name value"))
            continue
        name, equals, text = word[2:].partition("=")
        words = [text] if equals else []
        while not equals and at < len(argv) and not _is_flag(argv[at]):
            words.append(argv[at])
            at += 1
        given.append(Given(name, tuple(words)))
    return given, errors


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.fullmatch(word) and word != "-"


# ---- the tree


class _Tree:
    """Collects values, their flags, and what is wrong."""

    def __init__(self, errors: list[VimeError]) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.errors = errors

    def fail(self, given: Given, what: str, fix: str | None) -> None:
        self.errors.append(ConfigError(what, where=given.place, fix=fix))

    def set(self, path: str, value: object, given: Given) -> None:
        """Put a value at a dotted path. A second flag with the same home must say the same."""
        before = self.sources.get(path)
        *parents, last = path.split(".")
        node = self.values
        for step in parents:
            node = node.setdefault(step, {})
        if before is not None and before != given.place and node[last] != value:
            self.fail(
                given, f"{value!r} contradicts {before}, which says {node[last]!r}: both are `{path}`", "keep one of them"
            )
            return
        node[last], self.sources[path] = value, given.place

    def add(self, given: Given) -> None:
        """Handle one flag."""
        name = given.name
        if name in table.FLAGS:
            self._direct(given, table.FLAGS[name])
        elif name in table.REFUSED:
            self.fail(given, "vime does not have this", table.REFUSED[name])
        elif name in table.ONLY_VALUES:
            self._only(given, table.ONLY_VALUES[name])
        elif (arity := _plain_arity(name)) is not None:
            self._count(given, arity)
        elif (home := _pass_through(name)) is not None:
            self._pass(given, *home)
        else:
            self.fail(given, f"unknown flag `--{name}`", _suggest(name))

    def _direct(self, given: Given, flag: table.Flag) -> None:
        if not self._count(given, flag.arity):
            return
        words: Any = given.words[0] if flag.arity == 1 else list(given.words)
        try:
            self.set(flag.path, flag.convert(words), given)
        except ConfigError as error:
            self.fail(given, error.what, error.fix)

    def _only(self, given: Given, known: Mapping[str, str]) -> None:
        if self._count(given, 1) and given.words[0] not in known:
            self.fail(given, f"{given.words[0]!r} is not there: {next(iter(known.values()))}", f"use {', '.join(known)}")

    def _count(self, given: Given, arity: int | str) -> bool:
        """Whether the flag has as many words as it takes."""
        number = len(given.words)
        good = number >= 1 if arity == "+" else number == arity
        if not good:
            wanted = {0: "no value", 1: "one value", "+": "one or more values"}[arity]
            self.fail(
                given, f"takes {wanted}, got {number}: {' '.join(given.words)}".rstrip(": "), f"write --{given.name} VALUE"
            )
        return good

    def _pass(self, given: Given, section: str, key: str, argument: Argument) -> None:
        negated = argument.kind == "flag" and key.startswith("no_")
        path = f"{section}.{key.removeprefix('no_') if negated else key}"
        if argument.kind == "flag" and not given.words:
            self.set(path, not negated, given)
        elif len(given.words) > 1:
            self.set(path, [_value(word) for word in given.words], given)
        elif given.words:
            self.set(path, _value(given.words[0]), given)
        else:
            self.fail(given, "takes a value", f"write --{given.name} VALUE")

    def combine(self, given: Sequence[Given]) -> None:
        """Flags that make sense only together."""
        by_name = {flag.name: flag for flag in given if flag.words or _plain_arity(flag.name) == 0}
        for step in (_betas, _clip, _updates, _replay, _evaluation, _algorithm, _critic):
            for path, value, flag in step(by_name, self):
                self.set(path, value, flag)
        self._topology(by_name)

    def _topology(self, by_name: Mapping[str, Given]) -> None:
        """From the flags of nodes and sizes; without them, one node with the roles that the algorithm reads."""
        cluster = {name: flag for name, flag in by_name.items() if name in table.CLUSTER}
        words = {name: flag.words for name, flag in by_name.items()}
        tasks = tasks_of(words)
        if cluster and "topology" in self.sources:
            listed = ", ".join(f"--{name}" for name in cluster)
            self.fail(by_name["topology"], f"the topology says what {listed} say", "keep one of the two")
        elif cluster:
            first = next(iter(cluster.values()))
            try:
                self.set("topology", topology_from({name: words[name] for name in cluster}, tasks=tasks), first)
            except ConfigError as error:
                self.fail(first, error.what, error.fix)
        elif tasks and "topology" not in self.sources:
            self.set("topology", shared_topology(tasks), by_name[next(iter(tasks.values()))])


def _plain_arity(name: str) -> int | str | None:
    for part in (table.COMBINED, ALGORITHM, table.CLUSTER, table.NOTHING_TO_DO, table.SHAPE):
        if name in part:
            return part[name]
    return None


def _pass_through(name: str) -> tuple[str, str, Argument] | None:
    """Section, key and argument of a flag that another package reads; None when none does."""
    for prefix, section, package in (("vllm-", "rollout.vllm", "vllm"), ("router-", "rollout.router", "vllm-router")):
        if name.startswith(prefix):
            key = name.removeprefix(prefix).replace("-", "_")
            known = manifest_of(package).arguments
            return section, key, known.get(key) or known.get(key.removeprefix("no_")) or Argument("any")
    key = name.replace("-", "_")
    known = manifest_of("megatron-core").arguments
    found = known.get(key) or known.get(key.removeprefix("no_"))
    if found is None or (key not in known and found.kind != "flag"):
        return None
    return "trainer.megatron", key, found


def _value(word: str) -> Any:
    """A word of a pass-through flag, read as YAML (JSON included)."""
    try:
        return plain(parse(word, "flag"))
    except VimeError:
        return word


def _suggest(name: str) -> str:
    names = [*known_flags(), *table.REFUSED, *(n.replace("_", "-") for n in manifest_of("megatron-core").arguments)]
    near = nearest(name, names, cutoff=0.7)
    return f"did you mean `--{near}`?" if near else "leave it out, or give its setting in a run file"


# ---- flags that belong together

_Set = Iterator[tuple[str, object, Given]]


def _betas(given: Mapping[str, Given], tree: _Tree) -> _Set:
    found = [given[name] for name in ("adam-beta1", "adam-beta2") if name in given]
    if found:
        first = given["adam-beta1"].words[0] if "adam-beta1" in given else "0.9"
        second = given["adam-beta2"].words[0] if "adam-beta2" in given else "0.95"
        yield "trainer.optimizer.betas", [first, second], found[0]


def _clip(given: Mapping[str, Given], tree: _Tree) -> _Set:
    """One bound alone is used for both sides."""
    if "eps-clip" in given and "eps-clip-high" not in given:
        yield "algorithm.clip_high", given["eps-clip"].words[0], given["eps-clip"]


def _updates(given: Mapping[str, Given], tree: _Tree) -> _Set:
    """Samples of an optimizer step against those of a rollout."""
    if "global-batch-size" not in given:
        return
    flag = given["global-batch-size"]
    names = ("rollout-batch-size", "n-samples-per-prompt", "global-batch-size")
    try:
        groups, each, wanted = (int(given[n].words[0]) if n in given else 1 for n in names)
    except ValueError:
        tree.fail(flag, "batch sizes must be whole numbers", None)
        return
    if "rollout-batch-size" not in given:
        tree.fail(flag, "needs --rollout-batch-size to be compared with", "give --rollout-batch-size")
    elif wanted < 1 or groups * each % wanted:
        what = f"{wanted} samples do not divide rollout-batch-size {groups} x n-samples-per-prompt {each} = {groups * each}"
        tree.fail(flag, what, f"use a divisor of {groups * each}")
    else:
        yield "trainer.updates_per_step", str(groups * each // wanted), flag


def _replay(given: Mapping[str, Given], tree: _Tree) -> _Set:
    """The engine's experts go before those of the trainer's own pass."""
    for name, value in (("use-rollout-routing-replay", "rollout"), ("use-routing-replay", "trainer")):
        if name in given:
            yield "trainer.routing_replay", value, given[name]
            return


def _algorithm(given: Mapping[str, Given], tree: _Tree) -> _Set:
    words = {name: flag.words for name, flag in given.items()}
    for path, value, name in algorithm_settings(words, lambda name, what, fix: tree.fail(given[name], what, fix)):
        yield path, value, given[name]


def _critic(given: Mapping[str, Given], tree: _Tree) -> _Set:
    """A critic's optimizer has the actor's settings, except those given for it."""
    if "critic" not in tasks_of({name: flag.words for name, flag in given.items()}):
        for name in [n for n, flag in table.FLAGS.items() if n in given and flag.path.startswith("algorithm.critic.")]:
            tree.fail(given[name], "has no effect without a critic", "give --advantage-estimator ppo, or leave it out")
        return
    for name, flag in table.FLAGS.items():
        path = flag.path.replace("trainer.optimizer", "algorithm.critic.optimizer")
        if name in given and path != flag.path and path not in tree.sources:
            yield path, given[name].words[0], given[name]
    for path, value, flag in _betas(given, tree):
        yield path.replace("trainer.optimizer", "algorithm.critic.optimizer"), value, flag


_EVALUATION = {
    "max-response-len": "max_response_tokens",
    "temperature": "temperature",
    "top-p": "top_p",
    "top-k": "top_k",
}


def _evaluation(given: Mapping[str, Given], tree: _Tree) -> _Set:
    """Pairs of name and path; sampling flags hold for every set, and those of the rollout where evaluation has none."""
    sampling: dict[str, str] = {}
    for name, key in _EVALUATION.items():
        own, training = given.get(f"eval-{name}"), given.get(f"rollout-{name}")
        if own is not None and "eval-prompt-data" not in given:
            tree.fail(own, "has no effect without --eval-prompt-data", "give --eval-prompt-data NAME PATH")
        elif (flag := own or training) is not None:
            sampling[key] = flag.words[0]
    if "eval-prompt-data" not in given:
        return
    flag = given["eval-prompt-data"]
    words = ("aime", *flag.words) if len(flag.words) == 1 else flag.words
    if len(words) % 2:
        tree.fail(flag, f"takes pairs of name and path, got {len(words)} words", "write NAME PATH [NAME PATH ...]")
        return
    pairs = zip(words[::2], words[1::2], strict=True)
    sets = [{"name": name, "path": path, **({"sampling": sampling} if sampling else {})} for name, path in pairs]
    yield "evaluation.sets", sets, flag
