from hypothesis import given
from hypothesis import strategies as st

from vime.weights.buckets import plan_buckets
from vime.weights.fused import fused_key
from vime.weights.manifest import build_manifest

PARTS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "norm.weight",
)


@st.composite
def manifests(draw):
    names = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PARTS)), unique=True, max_size=20))
    shapes = st.lists(st.integers(0, 9), min_size=0, max_size=2)
    dtypes = st.sampled_from(["float32", "bfloat16", "uint8"])
    return build_manifest((f"layers.{layer}.{part}", draw(dtypes), draw(shapes)) for layer, part in names)


@given(manifests(), st.integers(1, 2000))
def test_every_tensor_is_in_exactly_one_bucket_and_in_manifest_order(manifest, bucket_bytes):
    buckets = plan_buckets(manifest.tensors, bucket_bytes)
    assert [t for bucket in buckets for t in bucket.tensors] == list(manifest.tensors)


@given(manifests(), st.integers(1, 2000))
def test_no_fused_group_is_cut_and_only_a_single_group_exceeds_the_limit(manifest, bucket_bytes):
    seen: set[str] = set()
    for bucket in plan_buckets(manifest.tensors, bucket_bytes):
        keys = {fused_key(t.name) for t in bucket.tensors}
        assert not keys & seen
        seen |= keys
        assert bucket.nbytes <= bucket_bytes or len(keys) == 1


@given(manifests(), st.integers(1, 2000))
def test_tensors_lie_inside_their_bucket_without_overlap(manifest, bucket_bytes):
    for bucket in plan_buckets(manifest.tensors, bucket_bytes):
        position = bucket.start
        for t in bucket.tensors:
            assert t.offset >= position
            position = t.offset + t.nbytes
        assert position == bucket.end


def test_a_limit_below_one_group_makes_one_bucket_a_group():
    names = [f"layers.0.{part}" for part in PARTS]
    manifest = build_manifest((name, "float32", (8,)) for name in names)
    buckets = plan_buckets(manifest.tensors, 1)
    assert [[t.name.split(".")[2] for t in b.tensors] for b in buckets] == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["norm"],
    ]


def test_experts_are_fused_one_by_one():
    assert fused_key("layers.0.mlp.experts.3.gate_proj.weight") == fused_key("layers.0.mlp.experts.3.up_proj.weight")
    assert fused_key("layers.0.mlp.experts.3.gate_proj.weight") != fused_key("layers.0.mlp.experts.2.up_proj.weight")
    assert fused_key("layers.0.mlp.experts.3.down_proj.weight") == "layers.0.mlp.experts.3.down_proj.weight"


def test_a_rank_without_tensors_has_no_buckets():
    assert plan_buckets((), 1024) == ()
