"""The digest that is computed where a tensor lies."""

import pytest
import torch

from vime.errors import WeightSyncError
from vime.weights.fingerprint import check_digest, digest, word_digest

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def multiplier(place):
    """splitmix64 of the place, odd."""
    z = (place + 1) * GOLDEN & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def by_hand(data: bytes) -> str:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(word * multiplier(place) for place, word in enumerate(words)) & MASK
    return f"words:{total ^ (len(data) * GOLDEN & MASK):016x}"


@pytest.mark.parametrize(("size", "dtype"), [(0, torch.float32), (3, torch.bfloat16), (35, torch.float32), (129, torch.int8)])
def test_it_is_the_sum_of_words_times_odd_numbers(size, dtype):
    tensor = torch.arange(size).to(dtype)
    assert word_digest(tensor) == by_hand(bytes(tensor.view(torch.uint8).tolist()))


def test_views_have_the_digest_of_their_own_elements():
    base = torch.arange(24, dtype=torch.bfloat16)
    assert word_digest(base[3:11]) == word_digest(base[3:11].clone())
    assert word_digest(base.view(4, 6).t()) == word_digest(base.view(4, 6).t().contiguous())


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, 2 * 2**20 + 4])
def test_a_single_bit_anywhere_shows(place):
    """Two chunks of 2^20 words of 8 bytes, and a bit of a third."""
    tensor = torch.zeros(2 * 2**20 + 5, dtype=torch.int64)
    before = word_digest(tensor)
    tensor[place] = 1 << 62
    assert word_digest(tensor) != before


def test_swapped_words_and_another_length_show():
    assert word_digest(torch.tensor([1.0, 2.0, 3.0, 4.0])) != word_digest(torch.tensor([3.0, 4.0, 1.0, 2.0]))
    assert word_digest(torch.zeros(2)) != word_digest(torch.zeros(3))


@pytest.mark.parametrize("kind", [digest, word_digest])
def test_the_receiver_uses_the_kind_that_was_sent(kind):
    tensor = torch.linspace(0, 1, 10)
    check_digest({"w": kind(tensor)}, "w", tensor)
    sent = {"w": kind(tensor)}
    tensor[9] += 1e-6
    with pytest.raises(WeightSyncError, match="tensor w was altered"):
        check_digest(sent, "w", tensor)
