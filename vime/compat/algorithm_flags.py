"""slime's flags that together say what `algorithm` is: divergence, importance weights, sequence masks, the loss's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

ALGORITHM: Mapping[str, int | str] = {
    "loss-type": 1,
    "advantage-estimator": 1,
    "disable-compute-advantages-and-returns": 0,
    "use-opd": 0,
    "opd-type": 1,
    "opd-kl-coef": 1,
    "opd-teacher-load": 1,
    "num-critic-only-steps": 1,
    "kl-coef": 1,
    "use-kl-loss": 0,
    "kl-loss-coef": 1,
    "kl-loss-type": 1,
    "use-unbiased-kl": 0,
    "use-tis": 0,
    "tis-clip": 1,
    "tis-clip-low": 1,
    "use-opsm": 0,
    "opsm-delta": 1,
}
"""Flags whose home or value depends on another one, and how many words they take."""

Words = Mapping[str, Sequence[str]]
Fail = Callable[[str, str, str], None]
"""(flag, what, fix)."""
Setting = tuple[str, object, str]
"""(dotted path, value, flag)."""

ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")
"""Values of --advantage-estimator, which are kinds of algorithm."""

_DIVERGENCES = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}


def algorithm_settings(words: Words, fail: Fail) -> Iterator[Setting]:
    """What flags of `ALGORITHM` amount to."""
    yield from _loss_type(words, fail)
    yield from _divergence(words, fail)
    yield from _weights(words, fail)
    if _positive(words, "num-critic-only-steps") and "critic" not in tasks_of(words):
        what = "has no effect without a critic"
        fail("num-critic-only-steps", what, "give --advantage-estimator ppo, or leave it out")
    elif _positive(words, "num-critic-only-steps"):
        yield "algorithm.critic.warmup_steps", words["num-critic-only-steps"][0], "num-critic-only-steps"


def tasks_of(words: Words) -> dict[str, str]:
    """The training roles beside the actor that the flags ask for: their task and the flag that asks."""
    if words.get("loss-type", [""])[0] == "sft_loss":
        return {}
    tasks = {}
    if words.get("advantage-estimator", [""])[0] == "ppo":
        tasks["critic"] = "advantage-estimator"
    if _positive(words, "kl-coef"):
        tasks["reference"] = "kl-coef"
    elif "use-kl-loss" in words and _positive(words, "kl-loss-coef"):
        tasks["reference"] = "kl-loss-coef"
    if "use-opd" in words:
        tasks["teacher"] = "use-opd"
    return tasks


def _loss_type(words: Words, fail: Fail) -> Iterator[Setting]:
    kind = words["loss-type"][0] if "loss-type" in words else "policy_loss"
    estimator = words["advantage-estimator"][0] if "advantage-estimator" in words else None
    if kind == "sft_loss":
        yield "algorithm.kind", "sft", "loss-type"
    elif kind == "custom_loss" and "custom-loss-function-path" not in words:
        fail("loss-type", "custom_loss needs a function", "give --custom-loss-function-path")
    elif kind not in ("policy_loss", "custom_loss"):
        fail("loss-type", f"{kind!r} is not there", "use one of policy_loss, sft_loss, custom_loss")
    if kind != "custom_loss" and "custom-loss-function-path" in words:
        what = "has no effect without --loss-type custom_loss"
        fail("custom-loss-function-path", what, "give --loss-type custom_loss, or leave it out")
    if kind != "sft_loss" and "disable-compute-advantages-and-returns" in words:
        what = "only supervised training has no advantages"
        fail("disable-compute-advantages-and-returns", what, "give --loss-type sft_loss, or leave it out")
    if estimator is not None and estimator not in ESTIMATORS:
        fail("advantage-estimator", f"{estimator!r} is not there", f"use one of {', '.join(ESTIMATORS)}")
    elif estimator is not None and "use-opd" not in words:
        yield "algorithm.kind", estimator, "advantage-estimator"
    yield from _distillation(words, fail)


def _distillation(words: Words, fail: Fail) -> Iterator[Setting]:
    """slime adds the divergence from the teacher to the advantage of the reward, so both count."""
    _only_with("use-opd", ("opd-type", "opd-kl-coef", "opd-teacher-load"), words, fail)
    if "use-opd" not in words:
        return
    estimator, place = words.get("advantage-estimator", ["grpo"])[0], words.get("opd-type", ["megatron"])[0]
    if estimator != "grpo" and estimator in ESTIMATORS:
        fail("use-opd", f"is not there with --advantage-estimator {estimator}", "use --advantage-estimator grpo")
    if place != "megatron":
        what = f"{place!r} is not there: the teacher is a role of the run, not a server"
        fail("opd-type", what, "use --opd-type megatron --opd-teacher-load FOLDER")
    elif "opd-teacher-load" not in words:
        fail("use-opd", "needs a teacher", "give its Hugging Face folder: --opd-teacher-load FOLDER")
    else:
        yield "model.teacher", words["opd-teacher-load"][0], "opd-teacher-load"
    yield "algorithm.kind", "distill", "use-opd"
    yield "algorithm.reward_coef", "1", "use-opd"
    if "opd-kl-coef" in words:
        yield "algorithm.teacher_coef", words["opd-kl-coef"][0], "opd-kl-coef"


def _divergence(words: Words, fail: Fail) -> Iterator[Setting]:
    """In the reward or in the loss, never both; a coefficient of 0 asks for no reference."""
    in_reward, in_loss = _positive(words, "kl-coef"), _positive(words, "kl-loss-coef") and "use-kl-loss" in words
    if _positive(words, "kl-loss-coef"):
        _only_with("use-kl-loss", ("kl-loss-coef",), words, fail)
    if in_reward and in_loss:
        fail("kl-coef", "the divergence cannot be in the reward and in the loss", "keep one of --kl-coef and --kl-loss-coef")
        return
    if not (in_reward or in_loss):
        return
    flag = "kl-coef" if in_reward else "kl-loss-coef"
    estimator = words["kl-loss-type"][0] if "kl-loss-type" in words else "k1"
    if estimator not in _DIVERGENCES:
        fail("kl-loss-type", f"{estimator!r} is not there", f"use one of {', '.join(_DIVERGENCES)}")
        return
    yield "algorithm.kl.coef", words[flag][0], flag
    yield "algorithm.kl.use", "reward" if in_reward else "loss", flag
    yield "algorithm.kl.estimator", _DIVERGENCES[estimator], "kl-loss-type" if "kl-loss-type" in words else flag
    if "use-unbiased-kl" in words:
        yield "algorithm.kl.unbiased", True, "use-unbiased-kl"


def _weights(words: Words, fail: Fail) -> Iterator[Setting]:
    """Truncated importance weights compare the trainer's old log-probs with the sampler's, so the former are computed."""
    if "use-tis" in words:
        yield "algorithm.old_log_probs", "recompute", "use-tis"
        if "custom-tis-function-path" not in words:
            yield "algorithm.correction.level", "token", "use-tis"
        for flag, path in (("tis-clip", "high"), ("tis-clip-low", "low")):
            if flag in words:
                yield f"algorithm.correction.{path}", words[flag][0], flag
    if "use-opsm" in words:
        yield "algorithm.correction.opsm_delta", words.get("opsm-delta", ["1e-4"])[0], "use-opsm"
    _only_with("use-tis", ("tis-clip", "tis-clip-low", "custom-tis-function-path"), words, fail)
    _only_with("use-opsm", ("opsm-delta",), words, fail)


def _only_with(switch: str, flags: Sequence[str], words: Words, fail: Fail) -> None:
    """Refuse flags of a part that no switch turns on."""
    for flag in flags:
        if flag in words and switch not in words:
            fail(flag, f"has no effect without --{switch}", f"give --{switch}, or leave it out")


def _positive(words: Words, flag: str) -> bool:
    """Whether a flag is given and is not a zero; what is no number is left to the value's own check."""
    try:
        return flag in words and float(words[flag][0]) != 0
    except ValueError:
        return True
