"""The parts of the host's vLLM plugin that need no vLLM: what it patches, what it leaves alone, which rows it shares."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import numpy as np
import pytest

from vime.platforms.cpu import vllm_plugin
from vime.platforms.cpu.shared_prefill import share_rows


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class in a module of its own, as a release of vLLM would have it."""

    class Runner:
        def step(self) -> int:
            return 1

    module = ModuleType("some_engine")
    module.Runner = Runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_engine", module)
    return Runner


def add_ten(original):
    return lambda self: original(self) + 10


def test_a_patch_is_applied_once(target: type) -> None:
    for _ in range(3):
        assert vllm_plugin._patch("some_engine", "Runner.step", add_ten)
    assert target().step() == 11


@pytest.mark.parametrize("path", ["Runner.gone", "Gone.step", "gone"])
def test_a_patch_without_its_target_warns_and_changes_nothing(
    target: type, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not vllm_plugin._patch("some_engine", path, add_ten)
        assert not vllm_plugin._patch("no_such_engine", path, add_ten)
    assert [record.message for record in caplog.records] == [
        f"vime: this vLLM has no some_engine.{path}; the fix that needs it is left out",
        f"vime: this vLLM has no no_such_engine.{path}; the fix that needs it is left out",
    ]
    assert target().step() == 1


def test_a_process_that_vime_did_not_start_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIME_ENGINE", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_plugin.register()


# ---- shared rows


def step(requests: list[tuple[int, list[int], list[int]]], block_size: int = 4) -> tuple[list[int], list[int]] | None:
    """`requests` are (tokens computed before, new tokens, cache blocks)."""
    tokens = np.array([t for _, new, _ in requests for t in new], dtype=np.int32)
    positions = np.concatenate([np.arange(done, done + len(new)) for done, new, _ in requests])
    starts = np.cumsum([0, *(len(new) for _, new, _ in requests)])
    blocks = np.zeros((len(requests), 4), dtype=np.int32)
    for row, (_, _, ids) in enumerate(requests):
        blocks[row, : len(ids)] = ids
    return share_rows(tokens, positions, starts, blocks, block_size)


def test_siblings_of_a_prompt_take_the_rows_of_the_first() -> None:
    prompt = [5, 6, 7, 8, 9]
    rows = step([(0, prompt, [1, 2]), (0, prompt, [3, 4]), (0, prompt, [5, 6])])
    assert rows == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4] * 3)


def test_other_prompts_and_running_requests_keep_their_own_rows() -> None:
    prompt, other = [5, 6, 7, 8, 9], [5, 6, 7, 8, 1]
    rows = step([(6, [3], [1, 2]), (0, prompt, [3]), (0, other, [4]), (0, prompt, [5]), (6, [3], [6, 7]), (0, prompt, [8])])
    assert rows is not None
    keep, spread = rows
    assert keep == [0, *range(1, 11), 16]
    assert spread == [0, *range(1, 6), *range(6, 11), *range(1, 6), 11, *range(1, 6)]


def test_the_rest_of_a_prompt_is_shared_only_behind_the_same_cached_blocks() -> None:
    rest = list(range(10))
    rows = step([(4, rest, [7, 1]), (4, rest, [7, 2]), (4, rest, [8, 3]), (8, rest, [7, 9])])
    assert rows is not None
    keep, spread = rows
    assert keep == [*range(10), *range(20, 30), *range(30, 40)]
    assert spread == [*range(10), *range(10), *range(10, 20), *range(20, 30)]


def test_a_part_of_a_block_is_no_common_context() -> None:
    rest = list(range(10))
    assert step([(3, rest, [7]), (3, rest, [7])]) is None


def test_a_small_saving_is_not_worth_it() -> None:
    assert step([(0, [1, 2, 3], [1]), (0, [1, 2, 3], [2])]) is None


@pytest.mark.parametrize("gone", ["get_aux_output_connector", "initialize_kv_cache", "execute_model", "sample_tokens"])
def test_returned_experts_need_every_part_of_the_engine(gone: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A release that lacks one part keeps its refusal of the flag, and is told."""
    from vime.platforms.cpu import routed_experts as parts

    names = set(parts.RUNNER_PARTS) - {gone}
    runner = type("CPUModelRunner", (), dict.fromkeys(names, print))
    config = type("VllmConfig", (), {"_verify_aux_output_compatibility": lambda self: "refused"})
    held = {} if gone == "get_aux_output_connector" else {"get_aux_output_connector": print}
    for module, members in (
        (parts.CONNECTOR, held), (parts.RUNNER, {"CPUModelRunner": runner}), (parts.CONFIG, {"VllmConfig": config}),
    ):  # fmt: skip
        fake = ModuleType(module)
        fake.__dict__.update(members)
        monkeypatch.setitem(sys.modules, module, fake)
    before = dict(vars(runner))
    with caplog.at_level(logging.WARNING):
        vllm_plugin.return_routed_experts()
    assert gone in caplog.text
    assert dict(vars(runner)) == before
    assert config()._verify_aux_output_compatibility() == "refused"  # type: ignore[attr-defined]
