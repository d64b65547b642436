"""The range of the hook API in a distribution's keywords."""

from __future__ import annotations

import pytest

from vime.hooks.api import API, admits, declared_range, is_newer, range_of_this


@pytest.mark.parametrize(
    ("keywords", "found"),
    [
        ("vime-hooks>=1.0,<2", ">=1.0,<2"),
        ("rl, vime-hooks >=1.0, <2 ,accelerator", ">=1.0,<2"),
        ("vime-hooks>=1.0,vime-hooks<2", ">=1.0,<2"),
        ("vime-hooks~=1.0", "~=1.0"),
        ("vime-hooks", None),
        ("vime-hooks-more>=1.0", None),
        ("a,<2,vime", None),
        ("", None),
        (None, None),
    ],
)
def test_the_range_is_found_among_other_keywords(keywords: str | None, found: str | None) -> None:
    assert declared_range(keywords) == found


def test_a_range_written_for_this_version_takes_minor_versions_and_no_major_one() -> None:
    major, minor = API
    assert admits(range_of_this())
    assert admits(range_of_this(), (major, minor + 7))
    assert not admits(range_of_this(), (major + 1, 0))
    assert not admits(range_of_this(), (0, 1))


@pytest.mark.parametrize(("text", "newer"), [(">=0.1,<0.2", False), ("<1", False), (">=1.3,<2", True), ("==2.*", True)])
def test_a_range_beyond_this_version_is_told_from_one_before_it(text: str, newer: bool) -> None:
    assert not admits(text)
    assert is_newer(text) is newer
