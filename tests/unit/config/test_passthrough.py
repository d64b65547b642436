"""Pass-through sections against the arguments of the packages that read them."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vime.config import manifest as manifests
from vime.config import passthrough
from vime.config.manifest import Argument, Manifest, dump, load, manifest_of
from vime.yamltree import Entries, parse, plain

VLLM, ROUTER, MEGATRON = passthrough.SECTIONS


def check(section: passthrough.Section, text: str) -> tuple[dict[str, Any], list[str]]:
    node = parse(text, "f")
    assert isinstance(node, Entries)
    done = passthrough.check(section, node)
    return plain(done.entries), [f"{e.where}: {e.what} | {e.fix}" for e in done.errors]


def test_known_keys_get_the_types_of_the_package() -> None:
    values, errors = check(VLLM, "max_num_seqs: 08\nenforce_eager: on\ngpu_memory_utilization: 1e-1\nquantization: fp8\n")
    assert errors == []
    assert values == {"max_num_seqs": 8, "enforce_eager": True, "gpu_memory_utilization": 0.1, "quantization": "fp8"}


def test_unknown_keys_name_the_nearest_argument() -> None:
    _, errors = check(VLLM, "max-num-seqs: 1\ngpu_memory_utilisation: 1\n")
    assert errors == [
        "f:1: unknown key `rollout.vllm.max-num-seqs`: vllm 0.32.0 has no such argument | did you mean `max_num_seqs`?",
        "f:2: unknown key `rollout.vllm.gpu_memory_utilisation`: vllm 0.32.0 has no such argument"
        " | did you mean `gpu_memory_utilization`?",
    ]


@pytest.mark.parametrize(
    ("section", "key", "instead"),
    [
        (VLLM, "dtype", "model.dtype"),
        (VLLM, "tp", "parallel.tp"),
        (VLLM, "tensor_parallel_size", "parallel.tp"),
        (VLLM, "seed", "run.seed"),
        (VLLM, "enable_lora", "full weights only"),
        (ROUTER, "worker_urls", "its engines"),
        (MEGATRON, "bf16", "model.dtype"),
        (MEGATRON, "expert_model_parallel_size", "parallel.ep"),
        (MEGATRON, "num_layers", "config.json"),
    ],
)
def test_keys_that_vime_sets_say_what_to_use(section: passthrough.Section, key: str, instead: str) -> None:
    _, errors = check(section, f"{key}: 1\n")
    assert len(errors) == 1
    assert "is set by vime" in errors[0]
    assert instead in errors[0]


def test_a_near_miss_of_an_owned_key_says_what_to_use() -> None:
    _, errors = check(VLLM, "tensor_parallel_sise: 2\n")
    assert "parallel.tp" in errors[0]


@pytest.mark.parametrize("section", passthrough.SECTIONS, ids=lambda s: s.package)
def test_every_owned_key_is_an_argument_of_the_package(section: passthrough.Section) -> None:
    shipped = manifest_of(section.package)
    known = {*shipped.arguments, *shipped.aliases, "model_tag"}
    assert set(section.owned) - known == set()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_num_seqs: many", "expected a whole number, got 'many'"),
        ("max_num_seqs: 1.5", "expected a whole number, got 1.5"),
        ("enforce_eager: maybe", "expected true or false, got 'maybe'"),
        ("middleware: true", None),
        ("load_format: true", "expected text, got True"),
        ("max_num_seqs: null", None),
    ],
)
def test_types(text: str, problem: str | None) -> None:
    _, errors = check(VLLM, text)
    assert len(errors) == (problem is not None)
    assert (problem or "") in "".join(errors)


def test_choices_are_checked() -> None:
    _, errors = check(MEGATRON, "moe_router_score_function: softmaxx\n")
    assert "expected one of sigmoid, softmax; got 'softmaxx'" in errors[0]


@pytest.mark.parametrize("package", ["vllm", "vllm-router", "megatron-core"])
def test_without_the_package_the_shipped_manifest_answers(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    found = manifest_of(package)
    assert "is not installed here" in found.origin
    assert len(found.arguments) > 50


def test_local_versions_equal_their_public_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.32.0+cpu")
    assert manifest_of("vllm").origin == "shipped with vime for the installed 0.32.0"


def test_a_release_with_a_manifest_of_its_own_is_checked_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.26.0+cu130")
    found = manifest_of("vllm")
    assert (found.version, found.origin) == ("0.26.0", "shipped with vime for the installed 0.26.0")
    assert "enable_scale_out" not in found.arguments
    _, errors = check(VLLM, "enable_scale_out: true\nmax_num_active_seqs: 2\n")
    assert "`rollout.vllm.enable_scale_out` is set by vime" in errors[0]
    assert "vllm 0.26.0 has no such argument" in errors[1]


def test_another_version_is_asked_in_a_child_process_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm_router")
    monkeypatch.setattr(manifests, "installed_version", lambda _: "99.0")
    made = manifest_of("vllm-router", cache=tmp_path)
    assert made.origin == "read from the installed 99.0"
    assert made.arguments == manifests._shipped("vllm-router").arguments
    monkeypatch.setattr(manifests, "_make", None)
    assert manifest_of("vllm-router", cache=tmp_path) == made


def test_a_package_that_cannot_be_asked_falls_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "installed_version", lambda _: "99.0")
    monkeypatch.setattr(manifests.sys, "executable", "/nowhere/python")
    assert "could not be asked" in manifest_of("vllm", cache=tmp_path).origin


def test_a_torn_cache_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Manifest("vllm-router", "99.0", {"port": Argument("int")}, "")
    (tmp_path / "vllm-router-99.0.json").write_text('{"package":')
    monkeypatch.setattr(manifests, "installed_version", lambda _: "99.0")
    monkeypatch.setattr(manifests, "_make", lambda *_: made)
    assert manifest_of("vllm-router", cache=tmp_path).arguments == made.arguments


def test_a_manifest_survives_writing() -> None:
    made = Manifest("p", "1", {"a": Argument("int"), "b": Argument("choice", ("x", "y"))}, "", {"t": "a"})
    assert load(dump(made)) == dataclasses.replace(made)
