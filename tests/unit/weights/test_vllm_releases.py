"""What vime uses of vLLM, against records of every release that it is made for (`releases/`, by `releases/record.py`)."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vime.config.manifest import Manifest, _shipped
from vime.config.schema import SamplingSection
from vime.facts.engine import RELEASES, TOKEN_ROUTE, VERSION_ROUTE, EngineFeatures, features_of, missing_routes
from vime.planning.engine_args import ENGINE_NEEDS, TOKEN_FLAGS, engine_needs
from vime.platforms.cpu.engine import ARGS
from vime.rollout.engine import EngineSpec, engine_env
from vime.rollout.sampling import sampling_params

FOLDER = Path(__file__).parent / "releases"


@dataclass(frozen=True)
class Release:
    """A recorded release: `names` are classes and functions, `arguments` those of its command line."""

    features: EngineFeatures
    record: dict[str, Any]
    arguments: Manifest

    def name(self, name: str) -> dict[str, Any]:
        return self.record["names"][name]

    def method(self, owner: str, method: str) -> list[str]:
        return self.name(owner)["methods"][method]


@pytest.fixture(params=RELEASES, ids=lambda features: features.release)
def release(request: pytest.FixtureRequest) -> Release:
    features: EngineFeatures = request.param
    record = json.loads((FOLDER / f"vllm-{features.release}.json").read_text())
    return Release(features, record, _shipped("vllm", features.release))


def test_features_are_what_the_record_says(release: Release) -> None:
    features, routes = release.features, release.record["routes"]
    assert (release.record["release"], release.arguments.version) == (features.release, features.release)
    assert features.versions == (VERSION_ROUTE in routes)
    names = release.record["names"]
    fields = {f for n in ("GenerateResponseChoice", "GenerateChoiceBase") if n in names for f in names[n]["fields"]}
    assert {"index", "token_ids", "finish_reason"} <= fields
    assert features.versions == ("weight_versions" in fields)
    assert (features.token_flag is not None) == ("enable_scale_out" in release.arguments.arguments)
    assert release.record["servers"][-1] == features.launch


@pytest.mark.parametrize("also", ["/sleep", "/wake_up", "/health", "/version", "/update_weights"])
def test_every_route_that_vime_calls_is_there(release: Release, also: str) -> None:
    assert missing_routes(release.record["routes"]) == ()
    assert also in release.record["routes"]


def test_updates_in_flight_need_what_the_release_has_or_are_refused(release: Release) -> None:
    assert release.features.in_flight == (missing_routes(release.record["routes"], in_flight=True) == ())


def test_a_route_that_is_missing_is_named(release: Release) -> None:
    routes = set(release.record["routes"]) - {TOKEN_ROUTE, "/pause"}
    assert missing_routes(routes) == (TOKEN_ROUTE, "/pause")


@pytest.mark.parametrize(
    "extra",
    [
        *("enable_sleep_mode", "gpu_memory_utilization", "numa_bind", "numa_bind_nodes", "additional_config"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_model_len"),
        *("model", "served_model_name", "host", "port", "dtype", "seed"),
    ],
)
def test_every_argument_that_vime_gives_is_one_of_the_release(release: Release, extra: str) -> None:
    given = {*engine_needs(release.features), *(ARGS.keys() - TOKEN_FLAGS), extra}
    assert given - release.arguments.arguments.keys() == set()


def test_the_token_flag_is_given_only_where_it_exists() -> None:
    old, new = RELEASES
    assert engine_needs(old) == ENGINE_NEEDS
    assert engine_needs(new) == {"enable_scale_out": True, **ENGINE_NEEDS}


def test_requests_use_fields_of_the_release(release: Release) -> None:
    asked = {*sampling_params(SamplingSection(stop_token_ids=(7,))), "n", "seed", "prompt_logprobs"}
    assert asked - set(release.name("SamplingParams")["fields"]) == set()
    assert {"token_ids", "sampling_params", "model", "request_id"} <= set(release.name("GenerateRequest")["fields"])
    assert "logprob" in release.name("Logprob")["fields"]


def test_variables_that_vime_sets_are_read(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    spec = EngineSpec(Path("m"), "float32", Path("log"), "t", 8, api_key="k")
    given = {name for name in engine_env(spec) if name.startswith("VLLM_") and name not in os.environ}
    assert given <= set(release.record["variables"])


def test_the_transfer_engine_fits_the_releases_base_class(release: Release) -> None:
    engine = pytest.importorskip("vime.weights.vllm_ext").VimeWeightTransferEngine
    base = release.name("WeightTransferEngine")
    assert {"init_transfer_engine", "start_weight_update", "receive_weights"} <= set(base["abstract"])
    for method in {*base["abstract"], "update_weights"}:
        own = vars(engine).get(method)
        assert own is not None, f"{method} is abstract in {release.features.release}"
        function = own.__func__ if isinstance(own, staticmethod) else own
        assert list(inspect.signature(function).parameters) == base["methods"][method]
    assert base["methods"]["__init__"] == ["self", "config", "vllm_config", "device", "model"]
    assert release.method("WeightTransferEngineFactory", "register_engine")[1:] == ["name", "module_path_or_cls", "class_name="]
    assert "backend" in release.name("WeightTransferConfig")["fields"]


def test_worker_methods_take_what_vime_gives(release: Release) -> None:
    given = {"init_weight_transfer_engine": 1, "start_weight_update": 0, "update_weights": 1, "finish_weight_update": 0}
    for method, count in given.items():
        parameters = release.method("Worker", method)[1:]
        assert len([p for p in parameters if not p.endswith("=")]) <= count <= len(parameters), method
    assert release.method("Worker", "sleep") == ["self", "level="]
    assert release.method("Worker", "wake_up") == ["self", "tags="]


def test_the_reload_and_pause_calls_have_their_parameters(release: Release) -> None:
    assert release.name("get_layerwise_info")["parameters"] == ["layer"]
    assert release.name("initialize_layerwise_reload")["parameters"] == ["model"]
    assert release.name("finalize_layerwise_processing")["parameters"] == ["model", "model_config"]
    assert release.name("restore_layer_refs")["parameters"] == ["tensor", "layer"]
    assert "restore_metadata" in release.name("LayerReloadingInfo")["fields"]
    assert release.name("set_current_vllm_config")["parameters"][0] == "vllm_config"
    assert release.method("AsyncMPClient", "pause_scheduler_async") == ["self", "mode=", "clear_cache="]
    assert release.method("BaseRenderer", "clear_mm_cache_async") == ["self"]


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", "0.32.0"),
        ("0.32.0rc2", "0.32.0"),
        ("0.33.1+cu130", "0.32.0"),
        ("0.31.9", "0.26.0"),
        ("0.26.0", "0.26.0"),
        ("0.26.1.post1", "0.26.0"),
        ("0.9.2", "0.26.0"),
        ("dev", "0.32.0"),
        (None, "0.32.0"),
    ],
)
def test_a_version_has_the_features_of_the_newest_known_release_before_it(version: str | None, release: str) -> None:
    assert features_of(version).release == release
