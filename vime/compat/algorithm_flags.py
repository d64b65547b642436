"""slime's flags that together say what `algorithm` is: divergence, importance weights, sequence masks, the loss's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

ALGORITHM: Mapping[str, int | str] = {
    "loss-type": 1,
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

_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}


def algorithm_settings(words: Words, fail: Fail) -> Iterator[Setting]:
    """What flags of `ALGORITHM` amount to."""
    yield from _loss_type(words, fail)
    yield from _divergence(words, fail)
    yield from _weights(words, fail)
    if _positive(words, "num-critic-only-steps"):
        yield "algorithm.critic.warmup_steps", words["num-critic-only-steps"][0], "num-critic-only-steps"


def _loss_type(words: Words, fail: Fail) -> Iterator[Setting]:
    kind = words["loss-type"][0] if "loss-type" in words else "policy_loss"
    if kind == "sft_loss":
        yield "algorithm.kind", "sft", "loss-type"
    elif kind == "custom_loss" and "custom-loss-function-path" not in words:
        fail("loss-type", "custom_loss needs a function", "give --custom-loss-function-path")
    elif kind not in ("policy_loss", "custom_loss"):
        fail("loss-type", f"{kind!r} is not there", "use one of policy_loss, sft_loss, custom_loss")


def _divergence(words: Words, fail: Fail) -> Iterator[Setting]:
    """In the reward or in the loss, never both; a coefficient of 0 asks for no reference."""
    in_reward, in_loss = _positive(words, "kl-coef"), _positive(words, "kl-loss-coef") and "use-kl-loss" in words
    if _positive(words, "kl-loss-coef") and not in_loss:
        fail("kl-loss-coef", "has no effect without --use-kl-loss", "give --use-kl-loss, or leave it out")
    if in_reward and in_loss:
        fail("kl-coef", "the divergence cannot be in the reward and in the loss", "keep one of --kl-coef and --kl-loss-coef")
        return
    if not (in_reward or in_loss):
        return
    flag = "kl-coef" if in_reward else "kl-loss-coef"
    estimator = words["kl-loss-type"][0] if "kl-loss-type" in words else "k1"
    if estimator not in _ESTIMATORS:
        fail("kl-loss-type", f"{estimator!r} is not there", f"use one of {', '.join(_ESTIMATORS)}")
        return
    yield "algorithm.kl.coef", words[flag][0], flag
    yield "algorithm.kl.use", "reward" if in_reward else "loss", flag
    yield "algorithm.kl.estimator", _ESTIMATORS[estimator], "kl-loss-type" if "kl-loss-type" in words else flag
    if "use-unbiased-kl" in words:
        yield "algorithm.kl.unbiased", True, "use-unbiased-kl"


def _weights(words: Words, fail: Fail) -> Iterator[Setting]:
    """Truncated importance weights compare the trainer's old log-probs with the sampler's, so the former are computed."""
    if "use-tis" in words:
        yield "algorithm.old_log_probs", "recompute", "use-tis"
        if "custom-tis-function-path" not in words:
            yield "algorithm.correction.level", "token", "use-tis"
    for flag, path in (("tis-clip", "high"), ("tis-clip-low", "low")):
        if flag in words and "use-tis" not in words:
            fail(flag, "has no effect without --use-tis", "give --use-tis, or leave it out")
        elif flag in words:
            yield f"algorithm.correction.{path}", words[flag][0], flag
    if "use-opsm" in words:
        yield "algorithm.correction.opsm_delta", words.get("opsm-delta", ["1e-4"])[0], "use-opsm"
    elif "opsm-delta" in words:
        fail("opsm-delta", "has no effect without --use-opsm", "give --use-opsm, or leave it out")


def _positive(words: Words, flag: str) -> bool:
    """Whether a flag is given and is not a zero; what is no number is left to the value's own check."""
    try:
        return flag in words and float(words[flag][0]) != 0
    except ValueError:
        return True
