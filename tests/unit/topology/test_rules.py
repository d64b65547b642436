"""Topologies: shipped files, loading, and every rule with its id, line, arithmetic and nearest valid values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import Errors, TopologyError
from vime.facts.model import Latent
from vime.facts.process import Parallel
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import LoadedTopology, fill_platform, load_topology, shipped_names
from vime.topology.profiles import choose_profile, looks_like, nominal_nodes, real_nodes
from vime.topology.rules import NOTES, RULES, PoolNodes, check_hardware, check_model
from vime.topology.sharing import check_supply, demand_of, share_groups


def errors_of(source: Any, **options: Any) -> list[str]:
    with pytest.raises((TopologyError, Errors)) as caught:
        load_topology(source, **options)
    errors = caught.value.errors if isinstance(caught.value, Errors) else (caught.value,)
    return [f"{(e.where or '').rpartition('/')[2]}: {e.what} | {e.fix}" for e in errors]


def inline(roles: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pools": {"p": {"platform": "acme"}}, "roles": roles, **more}


TRAIN8 = {"kind": "train", "devices": 8}


# ---- shipped files and loading


def test_the_shipped_topologies_load_and_say_who_sits_where() -> None:
    assert set(shipped_names()) == {
        *("cpu-colocate", "cpu-disaggregated", "cpu-one-ahead", "cpu-train", "colocate", "disaggregated"),
        *("a100x8-4train-4rollout", "h200x8-colocate", "h200x8-disaggregated", "gb200x8-colocate", "gb200x16-colocate"),
        *("gb200-nvl72", "mi300x8-colocate", "atlas-a2", "atlas-a3", "mixed-h200x8-mi300x8"),
        *("cpu-critic", "cpu-reference", "cpu-teacher", "colocate-critic", "colocate-reference", "colocate-teacher"),
    }
    roles = {name: [(r.name, r.devices, r.engines) for r in load_topology(name).roles] for name in shipped_names()}
    assert roles["cpu-colocate"] == [("actor", 1, 1), ("rollout", 1, 1)]
    assert roles["cpu-disaggregated"] == [("actor", 1, 1), ("rollout", 2, 2)]
    assert roles["cpu-one-ahead"] == [("actor", 1, 1), ("rollout", 1, 1)]
    assert roles["cpu-train"] == [("actor", 1, 1)]
    assert roles["cpu-critic"] == [("actor", 1, 1), ("critic", 1, 1), ("rollout", 1, 1)]
    assert roles["cpu-reference"] == [("actor", 1, 1), ("ref", 1, 1), ("rollout", 1, 1)]
    assert roles["gb200-nvl72"] == [("actor", 72, 1), ("rollout", 72, 18)]
    assert roles["a100x8-4train-4rollout"] == [("actor", 4, 1), ("rollout", 4, 4)]
    for name in shipped_names():
        assert load_topology(name).topology.name == name
        assert load_topology(name).topology.description


def test_an_unknown_name_gets_the_nearest() -> None:
    assert errors_of("cpu-colocat") == [
        ": E104 no topology is called 'cpu-colocat' | did you mean `cpu-colocate`? (a path contains a / or ends in .yaml)"
    ]


def test_a_missing_file() -> None:
    assert "no such file" in errors_of("./none.yaml")[0]


def test_an_unknown_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("name: x\nschema: vime.topology/v9\nfuture: 1\n")
    (found,) = errors_of(path)
    assert found.startswith("t.yaml:2: E101 schema: 'vime.topology/v9' is not known; this vime reads vime.topology/v1")


def test_unknown_keys_and_bad_units_together(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "pools:\n  p: {platform: acme, domian: x}\nroles:\n  a: {kind: train, devices: many}\n  b: {kind: critic}\n"
        "limits:\n  device_reserve: 6Gib\n  host_pinned_per_node: 700GiBs\n  start_timeout: soon\n"
    )
    assert errors_of(path) == [
        "t.yaml:2: E102 unknown key `pools.p.domian` | did you mean `domain`?",
        "t.yaml:4: E103 `roles.a.devices`: expected a number or 'all' or 'half', got 'many' | None",
        "t.yaml:5: E103 `roles.b.kind`: expected 'train' or 'rollout', got 'critic' | None",
        "t.yaml:8: E103 `limits.host_pinned_per_node`: expected a size such as 512MiB, got '700GiBs' | None",
        "t.yaml:9: E103 `limits.start_timeout`: expected a duration such as 90s or 20m, got 'soon' | None",
    ]


def test_sizes_durations_and_environment_are_read() -> None:
    loaded = load_topology(Path(__file__).parent / "units.yaml")
    limits = loaded.topology.limits
    assert (limits.device_reserve, limits.host_pinned_per_node, limits.start_timeout) == (6 * 2**30, 700 * 2**30, 1200.0)
    assert loaded.topology.sync[0].buffer == 2**30
    assert loaded.topology.env.trainer == {"A": "010", "B": "true", "C": "1e-6", "D": "on"}


def test_no_expressions_are_evaluated() -> None:
    (found,) = errors_of(inline({"a": {"kind": "train", "devices": "2*4"}}))
    assert "expected a number or 'all' or 'half', got '2*4'" in found


def test_a_topology_is_a_mapping_with_pools_and_roles(tmp_path: Path) -> None:
    path = tmp_path / "text.yaml"
    path.write_text("- a\n- b\n")
    assert "E103 a topology is a mapping" in errors_of(path)[0]
    assert [text.partition(": ")[2] for text in errors_of({"pools": {}, "roles": {}})] == [
        "E103 `pools`: expected at least 1 item | None",
        "E103 `roles`: expected at least 1 item | None",
    ]


# ---- platforms


def test_a_platform_fills_auto_and_conflicts_with_a_pin() -> None:
    two = {"pools": {"a": {}, "b": {"platform": "acme"}}, "roles": {"x": {"kind": "train", "pool": "a"}}}
    assert load_topology(two).platforms() == ("auto", "acme")
    assert load_topology(two, platform="acme").platforms() == ("acme",)
    (found,) = errors_of(two, platform="other")
    assert "E105 pools.b.platform: acme is pinned here, but other was asked for" in found
    assert fill_platform(load_topology(two), "auto").platforms() == ("auto", "acme")


# ---- roles


def test_devices_that_are_no_multiple() -> None:
    (found,) = errors_of(inline({"a": {"kind": "train", "devices": 7, "parallel": {"tp": 2}}}))
    assert "E202 roles.a.devices: 7 devices are not a multiple of tp 2 x pp 1 x cp 1 = 2 | use 6 or 8 devices" in found


def test_a_written_dp_must_agree() -> None:
    (found,) = errors_of(inline({"a": {"kind": "train", "devices": 8, "parallel": {"tp": 2, "dp": 3}}}))
    assert "E202 roles.a.parallel.dp: 8 devices / (tp 2 x pp 1 x cp 1 = 2) leave dp 4, but dp 3 is written" in found


def test_experts_must_divide_what_is_left_beside_pp() -> None:
    (found,) = errors_of(inline({"a": {"kind": "train", "devices": 8, "parallel": {"pp": 2, "ep": 3, "etp": 1}}}))
    assert "E203 roles.a.parallel: ep 3 x etp 1 = 3 does not divide 8 devices / pp 2 = 4 | use ep x etp of 2 or 4" in found


def test_devices_follow_from_parallel() -> None:
    loaded = load_topology(inline({"a": {"kind": "train", "parallel": {"tp": 2, "pp": 3, "dp": 2}}}))
    assert loaded.roles[0].devices == 12
    assert loaded.roles[0].parallel == Parallel(tp=2, pp=3, dp=2)


def test_engines_times_their_devices() -> None:
    (found,) = errors_of(inline({"r": {"kind": "rollout", "engines": 3, "devices": 8, "parallel": {"tp": 4}}}))
    assert "E206 roles.r.devices: 3 engines x (tp 4 x pp 1 x dp 1 = 4) = 12, but devices says 8" in found
    assert "use devices 12, or engines 2" in found


def test_a_virtual_pipeline_needs_stages_to_cut() -> None:
    (found,) = errors_of(inline({"a": {"kind": "train", "parallel": {"tp": 2, "vpp": 2}}}))
    assert "E103 roles.a.parallel.vpp: vpp 2 cuts pipeline stages, but pp is 1 | remove vpp, or use pp 2 or more" in found
    loaded = load_topology(inline({"a": {"kind": "train", "parallel": {"pp": 2, "vpp": 3, "dp": 2}}}))
    assert (loaded.roles[0].devices, loaded.roles[0].parallel) == (4, Parallel(pp=2, vpp=3, dp=2))


@pytest.mark.parametrize(
    ("axis", "rule"),
    [({"cp": 2}, "E103"), ({"etp": 2}, "E103"), ({"pp": 2, "vpp": 2}, "E103"), ({"tp": 2, "ep": 3}, "E203")],
)
def test_axes_that_an_engine_does_not_have(axis: dict[str, int], rule: str) -> None:
    (found,) = errors_of(inline({"r": {"kind": "rollout", "parallel": axis}}))
    assert f" {rule} " in found


def test_like_takes_the_numbers_of_another_role() -> None:
    roles = {
        "a": {"kind": "train", "devices": 4, "parallel": {"tp": 2}},
        "ref": {"kind": "train", "like": "a", "optimizer": False},
    }
    ref = load_topology(inline(roles)).roles[1]
    assert (ref.devices, ref.parallel.tp, ref.optimizer) == (4, 2, False)
    (found,) = errors_of(inline({"a": {"kind": "train", "like": "b"}}))
    assert "E104 roles.a.like: no role is called 'b'" in found
    found = errors_of(inline({"a": {"kind": "train", "like": "b"}, "b": {"kind": "train", "like": "a"}}))
    assert all("a circle" in text for text in found)


def test_names_that_refer_to_nothing() -> None:
    roles = {"a": {"kind": "train", "pool": "q"}, "r": {"kind": "rollout"}}
    found = errors_of(inline(roles, share=[{"roles": ["a", "x"]}], sync=[{"from": "r", "to": "y"}]))
    assert [text.split(":")[1].split(" ")[1:3] for text in found] == [
        ["E104", "roles.a.pool"],
        ["E104", "share.0.roles"],
        ["E104", "sync.0.from"],
        ["E104", "sync.0.to"],
    ]
    assert "weights go from a train role to a rollout role" in found[2]


def test_absurd_numbers_are_refused_quickly() -> None:
    for axes in ({"tp": 99999, "pp": 99999, "ep": 7}, {"tp": 10**9}):
        assert "E103" in errors_of(inline({"a": {"kind": "train", "parallel": axes}}))[0]


# ---- sharing and supply


def test_time_sharing_needs_identical_devices() -> None:
    roles = {"a": TRAIN8, "r": {"kind": "rollout", "parallel": {"tp": 4}}}
    (found,) = errors_of(inline(roles, share=[{"roles": ["a", "r"]}]))
    assert "E233 share.0: time sharing needs one set of devices, but a uses 8, r uses 4 (1 engine x 4)" in found
    assert found.endswith("use roles.r.engines 2")


def test_sharing_across_pools_and_platforms() -> None:
    for platform, rule in (("other", "E232"), ("acme", "E233")):
        source = {
            "pools": {"p": {"platform": "acme"}, "q": {"platform": platform}},
            "roles": {"a": {"kind": "train", "pool": "p"}, "r": {"kind": "rollout", "pool": "q"}},
            "share": [{"roles": ["a", "r"]}],
        }
        assert rule in errors_of(source)[0]


def test_a_role_takes_turns_in_one_group() -> None:
    roles = {"a": TRAIN8, "b": TRAIN8, "c": TRAIN8}
    (found,) = errors_of(inline(roles, share=[{"roles": ["a", "b"]}, {"roles": ["a", "c"]}]))
    assert "E233 share.1.roles: a takes turns in two groups" in found


def test_a_share_group_is_counted_once() -> None:
    shared = load_topology(inline({"actor": TRAIN8, "critic": TRAIN8, "ref": TRAIN8}, share=[{"roles": ["actor", "critic"]}]))
    assert demand_of(shared.topology, shared.roles, "p") == 16
    assert [[r.name for r in group] for group in share_groups(shared.topology, shared.roles)] == [["actor", "critic"], ["ref"]]
    (error,) = check_supply(shared.topology, shared.roles, {"p": 12}, shared.tree)
    assert "E201 pools.p: roles need actor/critic 8 + ref 8 = 16 devices, the pool has 12" in error.what
    assert "add 4 devices" in (error.fix or "")
    assert check_supply(shared.topology, shared.roles, {"p": 16}, shared.tree) == []


def test_a_required_transport_must_not_be_forbidden() -> None:
    roles = {"a": {"kind": "train"}, "r": {"kind": "rollout"}}
    edge = {"from": "a", "to": "r", "forbid": ["disk"], "require": ["disk"]}
    assert "E242 sync.0: disk is required and forbidden" in errors_of(inline(roles, sync=[edge]))[0]


# ---- hardware and model


def loaded_with(roles: dict[str, Any], **pool: Any) -> LoadedTopology:
    return load_topology({"pools": {"p": {"platform": "acme", **pool}}, "roles": roles})


def test_devices_per_node_are_checked_never_assumed() -> None:
    tray = FakePlatform(devices_per_node=4)
    loaded = loaded_with({"a": {"kind": "train", "parallel": {"tp": 8}}}, nodes=2, devices_per_node=8)
    pool = loaded.topology.pools["p"]
    nodes = nominal_nodes("p", pool, tray.profile(), demand=8, tree=loaded.tree)
    found = check_hardware(PoolNodes("p", pool, nodes, tray.profile()), loaded.roles, loaded.tree)
    assert [e.what for e in found] == [
        "E211 pools.p.devices_per_node: expected 4, you wrote 8: one acme-80g node has 4 devices"
    ]
    found = check_hardware(PoolNodes("p", pool, (tray.node(devices=4),) * 2), loaded.roles, loaded.tree)
    assert [e.what.split(" ")[0] for e in found] == ["E211", "E204"]


def test_a_tensor_parallel_group_stays_in_a_domain() -> None:
    loaded = loaded_with({"a": {"kind": "train", "parallel": {"tp": 8}}}, nodes=2)
    pool, tray = loaded.topology.pools["p"], FakePlatform(devices_per_node=4)
    nodes = nominal_nodes("p", pool, tray.profile(), demand=8, tree=loaded.tree)
    (error,) = check_hardware(PoolNodes("p", pool, nodes, tray.profile()), loaded.roles, loaded.tree)
    assert error.what == "E204 roles.a.parallel.tp: tp 8 is larger than a scale-up domain of 4 devices"
    rack = loaded_with({"a": {"kind": "train", "parallel": {"tp": 8}}}, nodes=2, domain={"kind": "fabric", "segment_nodes": 2})
    at = PoolNodes("p", rack.topology.pools["p"], nodes, tray.profile())
    assert check_hardware(at, rack.roles, rack.tree) == []


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"tp": 3}, "tp 3 does not divide 4 attention heads"),
        ({"pp": 3}, "pp 3 does not divide 4 layers"),
        ({"pp": 2, "vpp": 3}, "vpp 3 does not divide 2 layers of a pipeline stage"),
        ({"tp": 1, "ep": 2, "dp": 2}, "ep 2, but the model has no experts"),
    ],
)
def test_axes_must_divide_the_model(axes: dict[str, int], text: str) -> None:
    loaded = loaded_with({"a": {"kind": "train", "parallel": axes}})
    found = check_model(loaded.roles, TINY_MODEL, loaded.tree)
    assert text in found[0].what
    assert found[0].what.startswith("E205 roles.a.parallel.")
    assert (found[0].fix or "").startswith("use ")


def test_more_ranks_than_key_value_heads_are_fine_when_a_multiple() -> None:
    loaded = loaded_with({"a": {"kind": "train", "parallel": {"tp": 4}}})
    assert check_model(loaded.roles, TINY_MODEL, loaded.tree) == []


def test_a_trainer_splits_compressed_vectors_and_the_dense_layers_of_a_mixture() -> None:
    latent = Latent(kv_rank=6, q_rank=8, plain=32, rotary=2, value=32)
    model = replace(TINY_MODEL, heads=16, kv_heads=16, latent=latent, experts=8, ffn=36, dense_layers=1)
    trainer, engine = (loaded_with({"a": {"kind": kind, "parallel": {"tp": 16}}}) for kind in ("train", "rollout"))
    found = [error.what for error in check_model(trainer.roles, model, trainer.tree)]
    assert [text.partition("does not divide ")[2] for text in found] == [
        "36 feed-forward width",
        "8 entries of the compressed key",
        "8 entries of the compressed query",
    ]
    assert len(check_model(engine.roles, model, engine.tree)) == 1


def test_an_engine_may_split_layers_unevenly() -> None:
    loaded = loaded_with({"r": {"kind": "rollout", "parallel": {"pp": 3}}})
    assert check_model(loaded.roles, TINY_MODEL, loaded.tree) == []


# ---- nodes


def test_a_host_gets_as_many_slots_as_roles_ask_for() -> None:
    host = FakePlatform(virtual=True, devices_per_node=None, node_memory_bytes=30)
    loaded = loaded_with({"a": {"kind": "train", "devices": 3}})
    (node,) = nominal_nodes("p", loaded.topology.pools["p"], host.profile(), demand=3, tree=loaded.tree)
    assert [d.memory_bytes for d in node.devices] == [10, 10, 10]
    found = host.node(devices=2)
    (node,) = real_nodes("p", loaded.topology.pools["p"], (found,), demand=3, tree=loaded.tree)
    assert [d.uuid for d in node.devices] == ["n0/0", "n0/1", "n0:2"]
    assert {d.memory_bytes for d in node.devices} == {10}


def test_uneven_nodes() -> None:
    loaded = loaded_with({"a": {"kind": "train", "devices": 12}}, nodes=[{"count": 1, "devices": 8}, {"devices": 4}])
    nodes = nominal_nodes("p", loaded.topology.pools["p"], FakePlatform().profile(), demand=12, tree=loaded.tree)
    assert [len(node.devices) for node in nodes] == [8, 4]


def test_too_few_and_foreign_nodes() -> None:
    loaded = loaded_with({"a": {"kind": "train"}}, nodes=2)
    pool, fake = loaded.topology.pools["p"], FakePlatform()
    with pytest.raises(TopologyError, match=r"E201 pools\.p\.nodes: 2 nodes asked for, 1 there"):
        real_nodes("p", pool, (fake.node(),), demand=1, tree=loaded.tree)
    with pytest.raises(TopologyError, match=r"E105 pools\.p: the inventory is of other"):
        real_nodes("p", pool, (FakePlatform(name="other").node(),) * 2, demand=1, tree=loaded.tree)


def test_every_rule_has_a_sentence() -> None:
    assert all(rule.startswith("E") and text and text[0].islower() for rule, text in RULES.items())
    assert all(rule.startswith("W") and text and text[0].islower() for rule, text in NOTES.items())
    assert [*RULES] == sorted(RULES)


def test_the_document_has_every_rule() -> None:
    text = (Path(__file__).parents[3] / "docs" / "topology.md").read_text()
    assert dict(re.findall(r"^\| ([EW]\d{3}) \| ([^|]+?) \|", text, flags=re.MULTILINE)) == {**RULES, **NOTES}


def test_a_machine_looks_like_a_profile_by_instruction_set_and_memory() -> None:
    fake = FakePlatform()
    profile = replace(fake.profile(), device_arch="a1")
    node = fake.node()
    assert looks_like(node, profile)
    assert not looks_like(replace(node, devices=()), profile)
    other = replace(node.devices[0], arch="a2")
    assert not looks_like(replace(node, devices=(other,)), profile)
    small = replace(node.devices[0], arch="a1", memory_bytes=40 * 2**30)
    assert not looks_like(replace(node, devices=(small,)), profile)


def test_a_profile_with_the_platforms_own_name_needs_no_naming() -> None:
    fake = FakePlatform()
    pool = load_topology(inline({"a": TRAIN8})).topology.pools["p"]
    two = (fake.profile("acme"), fake.profile("acme-max"))
    assert choose_profile("p", pool, two, load_topology(inline({"a": TRAIN8})).tree).name == "acme"
    with pytest.raises(TopologyError, match="knows 2 nominal devices and none is named") as caught:
        choose_profile("p", pool, (two[1], fake.profile("acme-mini")), load_topology(inline({"a": TRAIN8})).tree)
    assert caught.value.fix == "give --device, or write `device:`, with one of acme-max, acme-mini"
