"""Which layouts are compared, and what the table says of them."""

from __future__ import annotations

import pytest

from vime.benchmarks import parity_process, parity_table
from vime.benchmarks.comparing import axes_in, relative
from vime.benchmarks.parity_table import BOUNDS, Layout, Line, layouts, summary
from vime.data.schedule import Split
from vime.errors import ConfigError


def line(apart: dict[str, float], *, dtype: str = "float32", error: str | None = None) -> Line:
    return Line(Layout("dense", {"tp": 2}, {"overlap": True}, dtype), apart, 1.0, error)


def test_every_axis_is_compared_alone_and_with_others_with_experts_and_without() -> None:
    seen = layouts()
    assert len(set(map(str, seen))) == len(seen)
    for model, axes in (("dense", {"tp", "pp", "cp", "dp", "vpp"}), ("experts", {"tp", "pp", "cp", "dp", "vpp", "ep", "etp"})):
        used = [set(layout.axes) for layout in seen if layout.model == model and layout.dtype == "float32"]
        assert set().union(*used) >= axes
        assert all(any(axis in one and len(one) > 1 for one in used) for axis in axes)
    assert {layout.dtype for layout in seen} == set(BOUNDS)
    assert {layout.model for layout in seen} == set(parity_table.MODELS)


def test_names_say_axes_and_settings() -> None:
    layout = Layout("dense", axes_in("tp2-cp4"), {"overlap": True, "megatron": {"sequence_parallel": True}})
    assert (layout.name, layout.devices) == ("tp2-cp4 overlap=True sequence_parallel=True", 8)


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (line({"train/loss": 1e-6, "train/grad_norm": 9e-6}), True),
        (line({"train/loss": 1e-6, "train/grad_norm": 2e-5}), False),
        (line({"train/loss": 1e-2, "train/grad_norm": 1e-3}, dtype="bfloat16"), True),
        (line({"train/loss": relative(float("nan"), 1.0)}), False),
        (line({}, error="a rank ended"), False),
        (line({}), False),
    ],
)
def test_a_difference_beyond_its_bound_is_not_good(found: Line, good: bool) -> None:
    assert found.good is good
    assert ("BEYOND" in str(found) or "a rank ended" in str(found)) is not good


def test_the_last_line_counts_layouts_and_tells_the_worst_of_each_type() -> None:
    lines = [line({"train/loss": 3e-7}), line({"train/loss": 2e-6}), line({"train/loss": 4e-3}, dtype="bfloat16")]
    assert summary(lines) == "parity: 3 layouts, worst relative difference 2.0e-06 (float32), 4.0e-03 (bfloat16)"
    assert summary(lines[:1]) == "parity: 1 layouts, worst relative difference 3.0e-07 (float32)"


def test_a_name_that_no_layout_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no layout has such a name"):
        parity_table.main(["--only", "dense tp99"])


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_ranks_share_every_sample_once(dp: int) -> None:
    groups = parity_process.batch(0)
    parts = [parity_process.share(groups, Split(dp, parity_table.MAX_TOKENS), rank, 1) for rank in range(dp)]
    given = [sample for part in parts for work in part for micro in work.micro_batches for sample in micro]
    assert sorted(map(id, given)) == sorted(id(sample) for group in groups for sample in group)
    assert max(len(s.prompt_ids) + len(s.response_ids) for group in groups for s in group) <= parity_table.MAX_TOKENS
