"""Visible-device variables."""

from __future__ import annotations

import pytest

from vime.errors import PluginError
from vime_rocm.masks import CUDA, HIP, ROCR, Mask, chosen_mask, entries_of


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0,1", ("0", "1")),
        ("", ()),
        ("0,,1", ("0",)),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("GPU-aaaa,GPU-bbbb", ("GPU-aaaa", "GPU-bbbb")),
    ],
)
def test_entries_are_opaque_and_end_at_a_bad_one(text: str, entries: tuple[str, ...]) -> None:
    assert entries_of(text) == entries


@pytest.mark.parametrize(
    ("env", "mask"),
    [
        ({}, Mask(None, ())),
        ({HIP: "0,1"}, Mask(HIP, ("0", "1"))),
        ({CUDA: "3"}, Mask(CUDA, ("3",))),
        ({HIP: "2,3", CUDA: "2,3"}, Mask(HIP, ("2", "3"))),
        ({HIP: "2,3", ROCR: "2, 3"}, Mask(HIP, ("2", "3"), (ROCR,))),
        ({HIP: ""}, Mask(HIP, ())),
    ],
)
def test_equal_masks_are_one(env: dict[str, str], mask: Mask) -> None:
    assert chosen_mask(env) == mask


@pytest.mark.parametrize("other", [ROCR, CUDA])
def test_masks_that_differ_are_an_error_naming_both(other: str) -> None:
    with pytest.raises(PluginError) as raised:
        chosen_mask({HIP: "0,1", other: "2,3"})
    assert f"{HIP}='0,1'" in raised.value.what
    assert f"{other}='2,3'" in raised.value.what
    assert f"unset {other}" in (raised.value.fix or "")


def test_rocr_alone_is_refused() -> None:
    with pytest.raises(PluginError, match="only mask"):
        chosen_mask({ROCR: "0"})


def test_a_child_gets_the_entry_itself() -> None:
    mask = chosen_mask({HIP: "GPU-aaaa,7"})
    assert [mask.entry(0), mask.entry(1)] == ["GPU-aaaa", "7"]
    with pytest.raises(PluginError, match="device 2 is asked for"):
        mask.entry(2)
    assert [chosen_mask({}).entry(i) for i in range(4)] == ["0", "1", "2", "3"]
