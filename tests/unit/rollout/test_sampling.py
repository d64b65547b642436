from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.config.schema import SamplingSection
from vime.rollout.sampling import sampling_params, seed_for


def test_parameters_ask_for_the_sampled_tokens_log_probs_and_no_text() -> None:
    section = SamplingSection(temperature=0.7, top_p=0.9, top_k=40, max_response_tokens=12, stop_token_ids=(5, 6))
    assert sampling_params(section) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 12,
        "logprobs": 0,
        "detokenize": False,
        "stop_token_ids": [5, 6],
    }
    assert "stop_token_ids" not in sampling_params(SamplingSection())


def test_the_same_request_gets_the_same_seed() -> None:
    assert seed_for(7, 3, 1, group_size=8) == seed_for(7, 3, 1, group_size=8)
    assert seed_for(7, 3, 1, group_size=8) != seed_for(8, 3, 1, group_size=8)


@pytest.mark.parametrize("group_size", [1, 5, 8, 16])
def test_no_two_responses_of_a_run_share_a_stream_even_where_only_32_bits_count(group_size: int) -> None:
    requests = itertools.product(range(2000), range(3))
    starts = [seed_for(11, group, attempt, group_size=group_size) for group, attempt in requests]
    streams = {(start + j) % 2**32 for start in starts for j in range(group_size)}
    assert len(streams) == len(starts) * group_size


@given(
    st.integers(0, 2**63),
    st.integers(0, 2**40),
    st.integers(0, 10_000),
    st.integers(1, 1024),
)
def test_seeds_stay_where_the_engine_takes_them(run_seed: int, group: int, attempt: int, group_size: int) -> None:
    seed = seed_for(run_seed, group, attempt, group_size=group_size)
    assert seed >= 0
    assert seed + group_size - 1 < 2**63


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="group -1"):
        seed_for(0, -1, group_size=8)
