"""Fingerprints and the probe's arithmetic."""

import pytest
import torch
import xxhash

from vime.config.schema import CheckSchedule
from vime.errors import ProbeError, WeightSyncError
from vime.weights.fingerprint import check_digest, digest
from vime.weights.merge import merge_stage_info
from vime.weights.probe import compare, probe_ids, tolerance_for
from vime.weights.protocol import is_due


def test_a_digest_covers_the_bytes_in_row_major_order():
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes())
    assert digest(tensor) == expected
    assert digest(tensor.t().contiguous().t()) == expected
    assert digest(tensor.t()) != expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_element_type_has_a_digest(dtype):
    tensor = torch.arange(6).to(dtype)
    changed = tensor.clone()
    changed[5] += 1
    assert digest(tensor) != digest(changed)
    assert digest(torch.zeros((), dtype=dtype)) != digest(torch.ones((), dtype=dtype))


def test_one_changed_bit_names_the_tensor():
    tensor = torch.zeros(1000)
    sent = {"layers.0.mlp.weight": digest(tensor)}
    check_digest(sent, "layers.0.mlp.weight", tensor)
    tensor.view(torch.int32)[999] ^= 1
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.weight was altered"):
        check_digest(sent, "layers.0.mlp.weight", tensor)
    with pytest.raises(WeightSyncError, match="other arrived without"):
        check_digest(sent, "other", tensor)


def test_probe_ids_repeat_and_lie_in_the_vocabulary():
    ids = probe_ids(37, seed=3)
    assert ids == probe_ids(37, seed=3)
    assert ids != probe_ids(37, seed=4)
    assert [len(row) for row in ids] == [16] * 4
    assert {i for row in probe_ids(3, length=100) for i in row} == {0, 1, 2}


def test_probe_differences_by_hand():
    result = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]], tolerance=0.25, engine="e0")
    assert result.mean == pytest.approx((0.5 + 0.0 + 0.25) / 3)
    assert result.max == 0.5


def test_a_probe_over_the_tolerance_says_engine_and_numbers():
    with pytest.raises(ProbeError, match=r"e7: .* by 0\.5 in the mean \(max 0\.5\); at most 0\.1 is allowed"):
        compare([[-1.0]], [[-1.5]], tolerance=0.1, engine="e7")


@pytest.mark.parametrize("measured", [[[float("nan")]], [[-1.0, -1.0]], [[]], []])
def test_a_probe_that_is_no_number_or_has_another_shape_fails(measured):
    with pytest.raises(ProbeError, match="e0"):
        compare([[-1.0]], measured, tolerance=1e9, engine="e0")


def test_the_tolerance_goes_by_dtype_unless_given():
    assert tolerance_for("float32") == 1e-4
    assert tolerance_for("bfloat16") == 5e-2
    assert tolerance_for("bfloat16", 0.0) == 0.0


def test_checks_are_due_first_and_then_every_nth():
    due = [n for n in range(1, 13) if is_due(CheckSchedule(first=2, every=5), n)]
    assert due == [1, 2, 5, 10]
    assert [n for n in range(1, 13) if is_due(CheckSchedule(first=0, every=0), n)] == []


def test_stage_results_of_several_ranks_are_merged_and_counted():
    parts = [
        {"version": "0.1", "tensors": 2, "digests": {"a": "x", "b": "y"}},
        {"version": "0.1", "tensors": 1, "digests": {"c": "z"}},
    ]
    assert merge_stage_info(parts, 3) == {"version": "0.1", "tensors": 3, "digests": {"a": "x", "b": "y", "c": "z"}}
    with pytest.raises(WeightSyncError, match="staged 3 tensors, the manifest has 4"):
        merge_stage_info(parts, 4)
    with pytest.raises(WeightSyncError, match="rank 1 staged version"):
        merge_stage_info([{"version": "0.1", "tensors": 1}, {"version": "0.2", "tensors": 1}], 2)
