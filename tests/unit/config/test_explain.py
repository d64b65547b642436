"""The schema and a loaded configuration in words."""

from __future__ import annotations

from vime.config.explain import describe_schema, explain_config
from vime.config.load import load_config
from vime.config.schema import Config
from vime.topology.structure import fields_at, homes_of, path_fields


def test_every_key_is_described_with_type_and_default() -> None:
    by_path = {doc.path: doc for doc in describe_schema()}
    assert by_path["schedule.num_steps"].default == "required"
    assert by_path["trainer.optimizer.lr"].default == "1e-06"
    assert by_path["trainer.recompute"].type == "auto | none | selective | full"
    assert by_path["evaluation.sets.*.path"].type == "path"
    assert by_path["data.label_key"].type == "text | null"
    assert by_path["algorithm.digits_apart"].default == "false"
    assert by_path["rollout.vllm"].type == "mapping"


def test_given_values_are_listed_with_their_origin() -> None:
    words = ["run.dir=/o", "model.path=/m", "data.path=/d", "schedule.num_steps=3"]
    text = explain_config(load_config(None, overrides=words))
    assert "schedule.num_steps  3  [override `schedule.num_steps=3`]" in text
    assert "rollout" not in text


def test_the_schema_knows_its_own_structure() -> None:
    models = [("model", key) for key in ("path", "reference", "teacher", "critic")]
    assert path_fields(Config) == (("run", "dir"), *models, ("data", "path"), ("evaluation", "sets", "*", "path"))
    assert homes_of(Config, "temperature") == ["evaluation.sets.*.sampling", "rollout.sampling"]
    assert fields_at(Config, ("algorithm", "sft")) == ["digits_apart", "kind", "loss_mean"]
    assert "clip_low" in fields_at(Config, ("algorithm", "grpo"))
