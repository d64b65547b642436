"""The graders themselves: right and wrong answers, and what is the grader's own failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.errors import RewardError
from vime.rewards import exact, gsm8k, math, reasoning_gym, typography
from vime.rewards.registry import GRADERS, check_grader, load_grader
from vime.rewards.values import GradeJob, Score
from vime.rewards.workers import GraderPool

CHAIN_SUM = {"task": "chain_sum", "metadata": {"source_dataset": "chain_sum"}}


def in_main_thread(work: Callable[[], float]) -> float:
    return work()


def in_thread(work: Callable[[], float]) -> float:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def in_executor(work: Callable[[], float]) -> float:
    async def ask() -> float:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    return asyncio.run(ask())


@pytest.mark.parametrize("where", [in_main_thread, in_thread, in_executor])
def test_every_grader_scores_the_same_off_the_main_thread(where: Callable[[Callable[[], float]], float]) -> None:
    assert where(lambda: math.grade(GradeJob(r"\boxed{73}", "73.0"))) == 1.0
    assert where(lambda: math.grade(GradeJob(r"\boxed{74}", "73.0"))) == 0.0
    assert where(lambda: exact.grade(GradeJob("a ", "a"))) == 1.0
    assert where(lambda: gsm8k.grade(GradeJob("#### 4", "4"))) == 1.0
    assert where(lambda: reasoning_gym.grade(GradeJob("4", "4", **CHAIN_SUM)).reward or 0.0) == 1.0


async def test_every_grader_scores_the_same_in_a_worker_process() -> None:
    for kind, right, wrong in (
        ("math", GradeJob(r"\boxed{73}", "73.0"), GradeJob(r"\boxed{74}", "73.0")),
        ("exact", GradeJob("a ", "a"), GradeJob("b", "a")),
        ("gsm8k", GradeJob("#### 4", "4"), GradeJob("#### 5", "4")),
        ("reasoning_gym", GradeJob("177", "177", **CHAIN_SUM), GradeJob("1771", "177", **CHAIN_SUM)),
    ):
        async with GraderPool(kind) as pool:
            outcomes = await pool.score([right, wrong])
            assert [o.reward for o in outcomes] == [1.0, 0.0], kind
            assert [o.raw for o in outcomes] == [1.0, 0.75 if kind == "reasoning_gym" else 0.0]


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        (r"First \boxed{3}; checking again: \boxed{4}", "4", 1.0),
        (r"First \boxed{3}; checking again: \boxed{4}", "3", 0.0),
        (r"\boxed{4} but then \boxed{", "4", 0.0),
        (r"\boxed{4} but then \boxed{4", "4", 0.0),
        (r"\boxed{4} but then \boxed", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{[2,\infty)}", r"x \ge 2", 1.0),
        (r"\boxed{x \ge 2}", r"[2,\infty)", 0.0),
        (r"\boxed{\frac{\sqrt{4}}{4}}", "1/2", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{\boxed{7}}", "7", 1.0),
        ("Final Answer: **73**", "73", 1.0),
        ("We have 2**3 and 3**2. Final Answer: **73**", "73", 1.0),
        ("\\boxed{\uff15}", "5", 1.0),
        ("\\boxed{\u22123}", "-3", 1.0),
        ("\\boxed{x\u00b2}", "x^2", 1.0),
        (r"\boxed{\$100}", "100", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        (r"the answer is $\frac{1}{2}$", "0.5", 1.0),
        ("so it is 42", "42", 1.0),
        ("so it is 43", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{no idea!}", "42", 0.0),
    ],
)
def test_math_answers(text: str, label: str, reward: float) -> None:
    assert math.grade(GradeJob(text, label)) == reward


def test_a_long_box_is_read_whole() -> None:
    content = "+".join(["x"] * 80)
    assert len(content) == 159
    for filler in ("", " word" * 2000):
        assert math.grade(GradeJob(f"\\boxed{{{content}}}{filler}", "80x")) == 1.0
        assert math.grade(GradeJob(f"\\boxed{{{content}}}{filler}", "79x")) == 0.0


@pytest.mark.parametrize("frame", [r"\boxed{%s}", "Final answer: %s", "%s", r"\boxed{1+%s}", "$%s$"])
def test_a_response_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame: str) -> None:
    monkeypatch.chdir(tmp_path)
    attack = "__import__('pathlib').Path('pwned').touch()"
    assert math.grade(GradeJob(frame % attack, "4")) == 0.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", [None, "", "  "])
def test_a_math_label_is_needed(label: str | None) -> None:
    with pytest.raises(RewardError, match="no label"):
        math.grade(GradeJob(r"\boxed{4}", label))


def test_last_box() -> None:
    assert math.last_box("nothing") is None
    assert math.last_box(r"\boxed{a{b}c} and \fbox{ d }") == "d"
    assert math.last_box(r"\boxed{\}}") == r"\}"
    assert math.last_box(r"\boxed{a") == ""
    assert math.last_box(r"\boxes{a}") is None


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("2+40=42\n#### 42\n" + "x" * 480, "42", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 42.", "42", 1.0),
        ("#### $42", "42", 1.0),
        ("#### **42**", "42", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 42.0", "42", 1.0),
        ("#### 42.5", "42", 0.0),
        ("#### 1\n#### 2", "2", 1.0),
        ("#### 2\n#### 1", "2", 0.0),
        ("#### 42", "6 * 7 = 42\n#### 42", 1.0),
        ("42", "42", 0.0),
        ("#### ", "42", 0.0),
        ("#### none", "42", 0.0),
    ],
)
def test_gsm8k_answers(text: str, label: str, reward: float) -> None:
    assert gsm8k.grade(GradeJob(text, label)) == reward


def test_a_gsm8k_label_without_a_number_is_the_graders_failure() -> None:
    with pytest.raises(RewardError, match="holds no number"):
        gsm8k.grade(GradeJob("#### 4", "four"))


def test_exact_ignores_white_space_at_the_ends_only() -> None:
    assert exact.grade(GradeJob(" a b\n", "a b")) == 1.0
    assert exact.grade(GradeJob("a  b", "a b")) == 0.0
    with pytest.raises(RewardError, match="no label"):
        exact.grade(GradeJob("a"))


def test_a_verifiers_partial_credit_is_kept_apart() -> None:
    score = reasoning_gym.grade(GradeJob("1771", "177", **CHAIN_SUM))
    assert score.reward == 0.0
    assert score.raw is not None
    assert 0.0 < score.raw < 1.0
    assert reasoning_gym.grade(GradeJob("177\n", "177", **CHAIN_SUM)) == Score(1.0, 1.0)


def test_a_cut_response_has_not_answered() -> None:
    assert reasoning_gym.grade(GradeJob("177", "177", **CHAIN_SUM, finished=False)) == Score(0.0, 0.0)


def test_the_task_may_come_from_the_metadata() -> None:
    assert reasoning_gym.grade(GradeJob("4", "4", metadata=CHAIN_SUM["metadata"])).reward == 1.0
    assert reasoning_gym.grade(GradeJob("4", "4", task="reasoning_gym:chain_sum")).reward == 1.0
    with pytest.raises(RewardError, match="names no task"):
        reasoning_gym.grade(GradeJob("4", "4"))
    with pytest.raises(RewardError, match="no task 'chain_sun'"):
        reasoning_gym.grade(GradeJob("4", "4", task="chain_sun"))


def test_a_verifier_that_raises_is_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.grade(
            GradeJob("zzz", "2 \u00d7 3", task="prime_factorization", metadata={"number": 6, "factors": [2, 3]})
        )


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("**73**", "73"),
        ("***a b***", "a b"),
        ("__x__", "x"),
        ("2**3**2", "2**3**2"),
        ("a ** b ** c", "a ** b ** c"),
        ("\uff11\uff12", "12"),
        ("\U0001d7d3", "5"),
        ("x\u00b2\u207b\u00b9", "x^{2-1}"),
        ("\u00bd", "\u00bd"),
        ("H\u2082O", "H\u2082O"),
        ("\u2212\u20133", "--3"),
        ("e\u0301", "\u00e9"),
    ],
)
def test_typography(text: str, plain: str) -> None:
    assert typography.plain_text(text) == plain


def test_names_of_graders() -> None:
    for kind in GRADERS:
        assert callable(load_grader(kind))
    assert check_grader("my.reward:score") == "my.reward:score"
    with pytest.raises(RewardError, match="known are exact, gsm8k, math, reasoning_gym") as caught:
        check_grader("maths")
    assert caught.value.fix == "did you mean math?"
    for kind in ("", "a b:c", "module:", ":call", "a:b:c", "a.b"):
        with pytest.raises(RewardError, match="unknown grader"):
            check_grader(kind)
    with pytest.raises(RewardError, match="No module named"):
        load_grader("not_a_module_here:grade")
    with pytest.raises(RewardError, match="no callable"):
        load_grader("json:nothing")
