"""The page docs/flags.md, made from the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vime.compat import flag_table as table
from vime.compat.algorithm_flags import ALGORITHM
from vime.compat.refused_flags import REFUSED

HOMES: Mapping[str, str] = {
    "adam-beta1": "`trainer.optimizer.betas`",
    "adam-beta2": "`trainer.optimizer.betas`",
    "global-batch-size": "`trainer.updates_per_step`: rollout-batch-size x n-samples-per-prompt / this",
    "eval-prompt-data": "`evaluation.sets`: pairs of name and path",
    "eval-max-response-len": "`sampling` of every evaluation set; left out, that of the rollout",
    "eval-temperature": "as above",
    "eval-top-p": "as above",
    "eval-top-k": "as above",
    "use-routing-replay": "`trainer.routing_replay: trainer`",
    "use-rollout-routing-replay": "`trainer.routing_replay: rollout`, also beside the flag above",
    "loss-type": "`policy_loss`, `sft_loss` (`algorithm.kind: sft`) or `custom_loss`",
    "advantage-estimator": "`algorithm.kind`; ppo adds a critic to the topology, with the actor's optimizer settings",
    "disable-compute-advantages-and-returns": "accepted with `--loss-type sft_loss`",
    "use-opd": "`algorithm.kind: distill` with `reward_coef: 1`; adds a teacher to the topology",
    "opd-type": "`megatron` only: the teacher is a role",
    "opd-kl-coef": "`algorithm.teacher_coef`",
    "opd-teacher-load": "`model.teacher`, a Hugging Face folder",
    "num-critic-only-steps": "`algorithm.critic.warmup_steps`",
    "kl-coef": "`algorithm.kl.coef` with `use: reward`; adds a reference to the topology",
    "use-kl-loss": "`algorithm.kl.use: loss`",
    "kl-loss-coef": "`algorithm.kl.coef`; adds a reference to the topology",
    "kl-loss-type": "`algorithm.kl.estimator`; k1 where it is left out, `low_var_kl` is `low_var`",
    "use-unbiased-kl": "`algorithm.kl.unbiased`",
    "use-tis": "`algorithm.correction.level: token` and `algorithm.old_log_probs: recompute`",
    "tis-clip": "`algorithm.correction.high`",
    "tis-clip-low": "`algorithm.correction.low`",
    "use-opsm": "`algorithm.correction.opsm_delta`, 1e-4 where `--opsm-delta` is left out",
    "opsm-delta": "`algorithm.correction.opsm_delta`",
    "actor-num-nodes": "`devices` of the actor: nodes x devices of a node",
    "actor-num-gpus-per-node": "as above; 8 where it is left out",
    "critic-num-nodes": "`devices` of a critic with devices of its own; left out, it takes turns with the actor",
    "critic-num-gpus-per-node": "as above; the actor's where it is left out",
    "num-gpus-per-node": "`devices_per_node` of the pool",
    "rollout-num-gpus": "`engines`: this / rollout-num-gpus-per-engine",
    "rollout-num-gpus-per-engine": "`parallel.tp` of an engine",
    "colocate": "`share`: actor and engines take turns",
    "offload": "`residency: park` of the share",
    "offload-train": "as above",
    "offload-rollout": "as above",
    "no-offload-train": "`residency: resident` of the share",
    "no-offload-rollout": "as above",
    "tensor-model-parallel-size": "`parallel.tp` of the actor",
    "pipeline-model-parallel-size": "`parallel.pp` of the actor",
    "context-parallel-size": "`parallel.cp` of the actor",
    "expert-model-parallel-size": "`parallel.ep` of the actor",
    "expert-tensor-parallel-size": "`parallel.etp` of the actor",
    "update-weight-transport": "`sync`: `disk` is required, `nccl` prefers `collective`",
    "update-weight-buffer-size": "`sync`: `buffer`",
}
"""What flags that are not in `FLAGS` amount to."""

_HEAD = """\
# Flags

Generated from the tables in `vime/compat/` by `python -m vime.compat.flag_docs > docs/flags.md`; do not edit.

`train.py` and `train_async.py` take slime's and Megatron's flags and make the run of `vime run`; `train_async.py` samples one
step ahead (`schedule.max_staleness: 1`). Both take `--resume` and `--dry-run` as well. Names are exact: no prefix is guessed.
Everything wrong is reported at once.

A flag that is left out means vime's default. These are not slime's:

| key | vime | for slime's |
|---|---|---|
| `algorithm.old_log_probs` | `rollout`: the sampler's | `--old-log-probs recompute` |
| `data.shuffle` | true | `--no-rollout-shuffle` |
| `algorithm.whiten` of ppo | true | `--no-normalize-advantages` |
| `algorithm.clip_low`, `clip_high` of gspo and cispo | those of the papers | `--eps-clip`, `--eps-clip-high` |
"""


def render_docs() -> str:
    """The page docs/flags.md."""
    return _HEAD + "\n" + "\n".join(_sections()) + "\n"


def _sections() -> Iterator[str]:
    own = {name: flag for name, flag in table.FLAGS.items() if name in table.OWN}
    direct = {name: flag for name, flag in table.FLAGS.items() if name not in table.OWN}
    yield from _table("One key each", {name: _home(flag) for name, flag in direct.items()})
    yield from _table("Of vime's own", {name: _home(flag) for name, flag in own.items()})
    together = {"Algorithm": ALGORITHM, "Batches, evaluation, routing replay": table.COMBINED, "Topology": table.CLUSTER}
    for title, names in together.items():
        yield from _table(title, {name: HOMES[name] for name in names})
    yield from _table("One value only", {name: _only(known) for name, known in table.ONLY_VALUES.items()})
    yield from ("## Passed on", "", "| flag | goes to |", "|---|---|")
    yield from ("| `--vllm-NAME` | `rollout.vllm` |", "| `--router-NAME` | `rollout.router` |")
    yield from ("| a name of megatron-core's transformer config | `trainer.megatron` |", "")
    yield from ("## Accepted without effect", "", "vime does this anyway: " + _names(table.NOTHING_TO_DO), "")
    yield from ("The model's config.json says this: " + _names(table.SHAPE), "")
    yield from ("## Refused", "", "| what to do instead | flags |", "|---|---|")
    for answer in dict.fromkeys(REFUSED.values()):
        yield f"| {answer} | {_names(name for name, given in REFUSED.items() if given == answer)} |"


def _home(flag: table.Flag) -> str:
    return f"`{flag.path}`" if flag.arity != 0 else f"`{flag.path}: {str(flag.convert(None)).lower()}`"


def _only(known: Mapping[str, str]) -> str:
    return "; ".join(f"`{value}`: {why}" for value, why in known.items())


def _names(names: Iterator[str] | Mapping[str, object]) -> str:
    return ", ".join(f"`--{name}`" for name in names)


def _table(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield from (f"## {title}", "", "| flag | meaning |", "|---|---|")
    yield from (f"| `--{name}` | {text} |" for name, text in rows.items())
    yield ""


if __name__ == "__main__":
    print(render_docs(), end="")
