import json

import pytest

from vime.errors import WeightSyncError
from vime.weights.manifest import build_manifest, check_same_manifest, manifest_from_json, manifest_to_json


def test_offsets_are_aligned_and_siblings_become_neighbours():
    manifest = build_manifest(
        [("a.q_proj.weight", "float32", (3, 5)), ("norm.weight", "bfloat16", (7,)), ("a.v_proj.weight", "float32", (2, 5))]
    )
    assert [(t.name, t.offset, t.nbytes) for t in manifest.tensors] == [
        ("a.q_proj.weight", 0, 60),
        ("a.v_proj.weight", 64, 40),
        ("norm.weight", 128, 14),
    ]
    assert manifest.nbytes == 192


def test_json_round_trip():
    manifest = build_manifest([("a", "float32", (2, 3)), ("b", "uint8", ())])
    assert manifest_from_json(json.loads(json.dumps(manifest_to_json(manifest)))) == manifest


def test_a_name_given_twice_and_an_unknown_dtype_are_errors():
    with pytest.raises(WeightSyncError, match="a is listed twice"):
        build_manifest([("a", "float32", (1,)), ("a", "float32", (1,))])
    with pytest.raises(WeightSyncError, match="complex64"):
        build_manifest([("a", "complex64", (1,))])


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ([("a", "float32", (2,))], "missing: b"),
        ([("a", "float32", (2,)), ("b", "float32", (2,)), ("c", "float32", (1,))], "not in the first manifest: c"),
        ([("a", "float32", (2,)), ("b", "float32", (3,))], r"b was float32\[2\], now float32\[3\]"),
        ([("a", "float32", (2,)), ("b", "bfloat16", (2,))], r"b was float32\[2\], now bfloat16\[2\]"),
    ],
)
def test_a_later_manifest_must_be_the_accepted_one(offered, words):
    accepted = build_manifest([("a", "float32", (2,)), ("b", "float32", (2,))])
    check_same_manifest(accepted, build_manifest([("b", "float32", (2,)), ("a", "float32", (2,))]))
    with pytest.raises(WeightSyncError, match=words):
        check_same_manifest(accepted, build_manifest(offered))
