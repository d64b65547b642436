"""Run files: includes, overrides, messages with file and line, round trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vime.config.load import LoadedConfig, dump_resolved, load_config
from vime.errors import ConfigError, Errors

MINIMAL = """\
run: {dir: out}
model: {path: model}
data: {path: d.jsonl}
schedule: {num_steps: 2}
"""

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(extra, *overrides)`: a minimal file with more text below it."""

    def run(extra: str = "", *overrides: str, base: str = MINIMAL) -> LoadedConfig:
        path = tmp_path / "run.yaml"
        path.write_text(base + extra)
        return load_config(path, overrides=overrides)

    return run


def messages(load: Load, extra: str = "", *overrides: str, base: str = MINIMAL) -> list[str]:
    """Every error, places shortened to file names."""
    with pytest.raises((ConfigError, Errors)) as caught:
        load(extra, *overrides, base=base)
    errors = caught.value.errors if isinstance(caught.value, Errors) else (caught.value,)
    return [f"{(e.where or '').rpartition('/')[2]}: {e.what} | {e.fix}" for e in errors]


# ---- numbers, booleans, text


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1e6", 1e6), ("'3e-4'", 3e-4)])
def test_learning_rates_as_people_write_them(load: Load, text: str, value: float) -> None:
    assert load(f"trainer: {{optimizer: {{lr: {text}}}}}\n").config.trainer.optimizer.lr == value


def test_a_word_for_a_number_is_an_error_with_file_and_line(load: Load) -> None:
    found = messages(load, "trainer:\n  optimizer:\n    lr: fast\n")
    assert found == ["run.yaml:7: `trainer.optimizer.lr`: expected a number, got 'fast' | None"]


@pytest.mark.parametrize(("text", "value"), [("on", True), ("no", False), ("true", True), ("off", False)])
def test_on_and_off_are_booleans_in_boolean_fields(load: Load, text: str, value: bool) -> None:
    assert load(f"observe: {{tensorboard: {text}}}\n").config.observe.tensorboard is value


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "08", "1:30:00"])
def test_in_a_text_field_they_stay_text(load: Load, text: str) -> None:
    assert load(f"rollout: {{filter: {text}}}\n").config.rollout.filter == text


def test_a_boolean_for_a_text_field_asks_for_quotes(load: Load) -> None:
    found = messages(load, base=MINIMAL.replace("d.jsonl", "d.jsonl, label_key: true"))
    assert found == ['run.yaml:3: `data.label_key`: expected text, got true | write it in quotes: "true"']


def test_a_number_for_a_text_field_asks_for_quotes(load: Load) -> None:
    found = messages(load, base=MINIMAL.replace("d.jsonl", "d.jsonl, template: 5"))
    assert found == ['run.yaml:3: `data.template`: expected text, got 5 | write it in quotes: "5"']


@pytest.mark.parametrize(("text", "seed"), [("010", 10), ("08", 8), ("1_000", 1000)])
def test_numbers_with_leading_zeros_and_underscores(load: Load, text: str, seed: int) -> None:
    assert load("", f"run.seed={text}").config.run.seed == seed


def test_a_clock_time_is_no_number(load: Load) -> None:
    found = messages(load, "reward: {timeout_s: 1:30:00}\n")
    assert found == ["run.yaml:5: `reward.timeout_s`: expected a number, got '1:30:00' | None"]


def test_a_key_written_twice(load: Load) -> None:
    assert "the key `model` is written twice (first at line 2)" in messages(load, "model: {path: x}\n")[0]


# ---- unknown and missing keys


def test_unknown_keys_with_the_nearest_name_or_their_home(load: Load) -> None:
    found = messages(load, "rollout: {batchsize: 3}\nnum_steps: 4\nalgorithm:\n  clip_lo: 1\n")
    assert found == [
        "run.yaml:5: unknown key `rollout.batchsize` | did you mean `batch_size`?",
        "run.yaml:6: unknown key `num_steps` | `num_steps` belongs to `schedule`",
        "run.yaml:8: unknown key `algorithm.clip_lo` | did you mean `clip_low`?",
    ]


def test_missing_keys(load: Load) -> None:
    found = messages(load, base="run: {}\nmodel: {path: m}\ndata: {path: d}\n")
    assert found == [
        "run.yaml:1: missing key `run.dir` | write `dir:` into `run`",
        "run.yaml:1: missing key `schedule` | write `schedule:` into the file",
    ]


def test_everything_wrong_is_reported_at_once_in_file_order(load: Load) -> None:
    extra = "rollout:\n  batch_size: 0\n  vllm: {max_nm_seqs: 3}\nreward: {workers: many}\n"
    found = messages(load, extra, "nonsense", "trainer.recompute=half")
    assert [text.partition(": ")[0] for text in found] == [
        "run.yaml:6",
        "run.yaml:7",
        "run.yaml:8",
        "override `nonsense`",
        "override `trainer.recompute=half`",
    ]


def test_a_list_item_is_named_by_its_number(load: Load) -> None:
    extra = "evaluation:\n  sets:\n    - {name: a, path: x}\n    - {name: b, path: y, num_rows: 0}\n"
    assert messages(load, extra) == [
        "run.yaml:8: `evaluation.sets.1.num_rows`: should be greater than or equal to 1, got 0 | None"
    ]


def test_a_union_of_types_gives_one_message(load: Load) -> None:
    assert messages(load, "topology: [1]\n") == ["run.yaml:5: `topology`: expected text or a mapping, got a list | None"]


def test_an_algorithm_is_named_or_grpo(load: Load) -> None:
    assert load("algorithm: {clip_low: 0.1}\n").config.algorithm.kind == "grpo"
    assert messages(load, "algorithm: {kind: grop}\n") == [
        "run.yaml:5: `algorithm`: expected `kind` to be one of 'grpo', 'gspo', 'cispo', 'ppo', 'reinforce_plus_plus', "
        "'reinforce_plus_plus_baseline', 'rloo', 'distill', 'sft', got 'grop' | did you mean `grpo`?"
    ]


@pytest.mark.parametrize("text", ["0", "-1", ".nan", ".inf"])
def test_a_training_temperature_that_cannot_be_is_refused_by_name(load: Load, text: str) -> None:
    (found,) = messages(load, f"rollout:\n  sampling:\n    temperature: {text}\n")
    assert found.startswith("run.yaml:7: ")
    assert "temperature" in found


@pytest.mark.parametrize("text", ["top_p: 0.9", "top_k: 20"])
def test_a_sampler_that_cuts_the_vocabulary_is_refused_for_training(load: Load, text: str) -> None:
    found = messages(load, f"rollout: {{sampling: {{{text}}}}}\n")
    assert any(text.split(":")[0] in message and "the probability that was cut away" in message for message in found)
    load("rollout: {sampling: {top_p: 1.0, top_k: -1}}\n")
    load(f"evaluation: {{sets: [{{name: held, path: held.jsonl, sampling: {{{text}}}}}]}}\n")


def test_temperature_zero_is_greedy_in_evaluation(load: Load) -> None:
    loaded = load("evaluation: {sets: [{name: a, path: x, sampling: {temperature: 0}}]}\n")
    assert loaded.config.evaluation.sets[0].sampling.temperature == 0


# ---- arithmetic between keys


def test_updates_must_divide_the_groups(load: Load) -> None:
    (found,) = messages(load, "rollout: {batch_size: 8, group_size: 5}\ntrainer: {updates_per_step: 3}\n")
    assert "`trainer.updates_per_step` 3 does not divide rollout.batch_size 8 groups: 8 / 3 leaves 2" in found
    assert "use 2 or 4 updates, or batches of 6 or 9 groups" in found
    assert found.startswith("run.yaml:6")


def test_updates_of_supervised_rows_need_not_divide(load: Load) -> None:
    extra = "algorithm: {kind: sft}\nrollout: {batch_size: 8}\ntrainer: {updates_per_step: 3}\n"
    assert load(extra).config.trainer.updates_per_step == 3


def test_the_longest_sample_must_fit_a_micro_batch(load: Load) -> None:
    base = MINIMAL.replace("d.jsonl", "d.jsonl, max_prompt_tokens: 100")
    (found,) = messages(load, "trainer: {max_tokens_per_micro_batch: 300}\n", base=base)
    assert "300 is below data.max_prompt_tokens 100 + rollout.sampling.max_response_tokens 256 = 356" in found
    assert load("trainer: {max_tokens_per_micro_batch: 356}\n", base=base).config.trainer.max_tokens_per_micro_batch == 356


def test_two_evaluation_sets_of_one_name(load: Load) -> None:
    (found,) = messages(load, "evaluation:\n  sets:\n    - {name: a, path: x}\n    - {name: a, path: y}\n")
    assert found.startswith("run.yaml:8: two evaluation sets are called 'a'")


# ---- explicit values and inert blocks


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("5", 5)])
def test_an_explicit_zero_is_kept(load: Load, text: str, value: int) -> None:
    assert load("", f"checkpoint.every={text}", f"weights.probe.first={text}").config.weights.probe.first == value
    assert load("", f"checkpoint.every={text}").config.checkpoint.every == value


def test_only_null_means_decide(load: Load) -> None:
    assert load("weights: {probe: {tolerance: 0}}\n").config.weights.probe.tolerance == 0.0
    assert load("weights: {probe: {tolerance: null}}\n").config.weights.probe.tolerance is None


def test_a_block_without_effect_gives_one_warning(load: Load) -> None:
    loaded = load("trainer:\n  optimizer:\n    min_lr: 0.1\n    decay_steps: 5\n")
    (warning,) = loaded.warnings
    assert "`trainer.optimizer.decay_steps`, `trainer.optimizer.min_lr` have no effect" in warning.what
    assert (warning.where or "").endswith("run.yaml:8")
    assert load("trainer: {optimizer: {min_lr: 0.1, decay: cosine}}\n").warnings == ()


def test_evaluation_without_sets_and_reward_of_sft_are_inert(load: Load) -> None:
    (warning,) = load("evaluation: {every: 5}\n").warnings
    assert "evaluation.sets is empty" in warning.what
    (warning,) = load("algorithm: {kind: sft}\nreward: {kind: math}\nrollout: {order: prompt}\n").warnings
    assert warning.what.startswith("`reward`, `rollout.order` have no effect")


@pytest.mark.parametrize("algorithm", ["grpo", "grpo, old_log_probs: recompute", "sft"])
def test_experts_of_a_pass_that_is_not_made_have_no_effect(load: Load, algorithm: str) -> None:
    """The first update's own forward pass gives the old log-probs."""
    (warning,) = load(f"trainer: {{routing_replay: trainer}}\nalgorithm: {{kind: {algorithm}}}\n").warnings
    assert warning.what.startswith("`trainer.routing_replay` has no effect: no pass for old log-probs")
    assert (warning.where or "").endswith("run.yaml:5")


def test_experts_that_can_be_replayed_need_no_words(load: Load) -> None:
    several = "trainer: {routing_replay: trainer, updates_per_step: 2}\nalgorithm: {old_log_probs: recompute}\n"
    assert load(several).warnings == ()
    assert load("trainer: {routing_replay: rollout}\n").warnings == ()


def test_supervised_rows_have_no_engine_s_experts(load: Load) -> None:
    (said,) = messages(load, "algorithm: {kind: sft}\ntrainer: {routing_replay: rollout}\n")
    assert said.startswith("run.yaml:6: `trainer.routing_replay: rollout` takes the experts of an engine")


def test_a_group_of_one_learns_nothing(load: Load) -> None:
    (warning,) = load("rollout: {group_size: 1}\n").warnings
    assert "advantage 0" in warning.what


# ---- includes, overrides, provenance


def test_includes_are_merged_and_keep_their_origin(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text("data: {path: d.jsonl, shuffle: false}\nmodel: {path: /m}\n")
    (tmp_path / "more.yaml").write_text("schedule:\n  num_steps: 9\n")
    run = tmp_path / "run.yaml"
    run.write_text("include: [shared/base.yaml, more.yaml]\nrun: {dir: out}\ndata: {shuffle: true}\n")
    loaded = load_config(run, overrides=["run.seed=3"])
    assert loaded.config.data.shuffle is True
    assert loaded.config.schedule.num_steps == 9
    assert loaded.sources["data.path"].endswith("shared/base.yaml:1")
    assert loaded.sources["data.shuffle"].endswith("run.yaml:3")
    assert loaded.sources["schedule.num_steps"].endswith("more.yaml:2")
    assert loaded.sources["run.seed"] == "override `run.seed=3`"
    assert "rollout.batch_size" not in loaded.sources


def test_relative_paths_belong_to_the_file_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "base.yaml").write_text("data: {path: d.jsonl}\nmodel: {path: ../m}\n")
    run = tmp_path / "a" / "b" / "run.yaml"
    run.write_text(
        "include: ../base.yaml\nrun: {dir: out}\nschedule: {num_steps: 1}\ntopology: t.yaml\n"
        "evaluation: {sets: [{name: e, path: ../e.jsonl}]}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("a/b/run.yaml", overrides=["model.path=here"]).config
    assert config.data.path == tmp_path / "a" / "d.jsonl"
    assert config.run.dir == tmp_path / "a" / "b" / "out"
    assert config.evaluation.sets[0].path == tmp_path / "a" / "e.jsonl"
    assert config.topology == str(tmp_path / "a" / "b" / "t.yaml")
    assert config.model.path == tmp_path / "here"


def test_the_name_of_a_shipped_topology_is_no_path(load: Load) -> None:
    assert load("topology: cpu-train\n").config.topology == "cpu-train"


def test_a_file_that_includes_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(ConfigError, match="includes itself"):
        load_config(tmp_path / "a.yaml")


def test_a_missing_include_names_the_line(load: Load) -> None:
    (found,) = messages(load, "include: none.yaml\n")
    assert found.startswith("run.yaml:5: `include`: no such file")


def test_overrides_reach_lists_and_pass_through_sections(load: Load) -> None:
    extra = "evaluation: {sets: [{name: a, path: x}, {name: b, path: y}]}\nrollout: {vllm: {max_num_seqs: 1}}\n"
    loaded = load(extra, "evaluation.sets.1.num_rows=7", "rollout.vllm.block_size=16", "rollout.vllm.max_num_seqs=64")
    assert [chosen.num_rows for chosen in loaded.config.evaluation.sets] == [None, 7]
    assert loaded.config.evaluation.sets[1].name == "b"
    assert loaded.config.rollout.vllm == {"max_num_seqs": 64, "block_size": 16}


def test_overrides_are_yaml(load: Load) -> None:
    config = load("", "rollout.sampling={temperature: 0.5, stop_token_ids: [1, 2]}", "data.label_key=null").config
    assert config.rollout.sampling.stop_token_ids == (1, 2)
    assert config.data.label_key is None


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", ".=1"])
def test_overrides_that_are_none(load: Load, override: str) -> None:
    assert "an override is written `dotted.path=value`" in messages(load, "", override)[0]


def test_an_override_below_a_plain_value(load: Load) -> None:
    assert "below a plain value" in messages(load, "topology: cpu-train\n", "topology.pools.x=1")[0]
    assert "is not an item of this list" in messages(load, "evaluation: {sets: []}\n", "evaluation.sets.3.name=x")[0]


def test_the_last_override_wins(load: Load) -> None:
    assert load("", "run.seed=1", "run.seed=2").config.run.seed == 2


def test_a_run_may_come_from_flags_alone() -> None:
    values = {"run": {"dir": "/o"}, "model": {"path": "/m"}, "data": {"path": "/d"}, "schedule": {"num_steps": "1"}}
    loaded = load_config(None, flags=values, flag_sources={"model.path": "flag `--hf-checkpoint`"})
    assert loaded.config.schedule.num_steps == 1
    assert loaded.sources["model.path"] == "flag `--hf-checkpoint`"


def test_an_inline_topology_keeps_its_lines(load: Load) -> None:
    loaded = load("topology:\n  pools: {p: {}}\n  roles: {a: {kind: train}}\n")
    assert not isinstance(loaded.topology_source, str)
    assert loaded.where("topology.roles.a") == f"{loaded.tree.where.file}:7"


# ---- writing


def test_the_resolved_file_loads_to_itself(load: Load, tmp_path: Path) -> None:
    extra = (
        "algorithm: {kind: sft, digits_apart: on}\n"
        "topology: {pools: {'1e3': {platform: auto}}, roles: {a: {kind: train}}, env: {trainer: {A: '010', B: 'on', C: ''}}}\n"
        "rollout: {vllm: {compilation_config: {x: 1e-6, y: '1e-6', z: null, w: 'null', v: [1, '2']}}}\n"
        "weights: {probe: {tolerance: 1e-5}}\n"
    )
    base = MINIMAL.replace("d.jsonl", 'd.jsonl, template: "1e3", input_key: "~", label_key: "1_000", metadata_key: ".inf"')
    config = load(extra, base=base).config
    again = tmp_path / "again" / "resolved.yaml"
    again.parent.mkdir()
    again.write_text(dump_resolved(config))
    assert load_config(again).config == config
    assert dump_resolved(load_config(again).config) == dump_resolved(config)


# ---- models of further training roles


def test_distillation_needs_a_teacher_of_its_own(load: Load) -> None:
    found = messages(load, "algorithm: {kind: distill}\n")
    assert found == [
        "run.yaml:2: `model.teacher` is missing: algorithm.kind distill learns from another model than its own"
        " | set model.teacher to a Hugging Face folder with the same vocabulary"
    ]
    assert load("algorithm: {kind: distill}\n", "model.teacher=big").config.model.teacher is not None


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [("reference", "{kl: {coef: 0.1}}"), ("critic", "{kind: ppo}"), ("teacher", "{kind: distill}")],
)
def test_a_model_that_no_role_holds_has_no_effect(load: Load, key: str, algorithm: str) -> None:
    base = MINIMAL.replace("path: model", f"path: model, {key}: other")
    used = load(f"algorithm: {algorithm}\n", base=base)
    assert [w for w in used.warnings if f"model.{key}" in str(w)] == []
    (unused,) = [str(w) for w in load(base=base).warnings if f"model.{key}" in str(w)]
    assert f"`model.{key}` has no effect: the algorithm does not use this model" in unused
