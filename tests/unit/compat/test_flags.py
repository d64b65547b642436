"""slime's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vime.compat import algorithm_flags, flag_table
from vime.compat.flag_docs import HOMES, render_docs
from vime.compat.flags import config_from_flags, has_answer, known_flags
from vime.config.load import load_config
from vime.config.schema import Config
from vime.errors import ConfigError, Errors
from vime.planning.make import make_plan
from vime.planning.needs import needs_from
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology
from vime.topology.structure import fields_at

NEEDED = "--hf-checkpoint /m --prompt-data /d.jsonl --save /o --num-rollout 3 "


def config(words: str) -> Config:
    values, sources = config_from_flags((NEEDED + words).split())
    return load_config(None, flags=values, flag_sources=sources).config


def values(words: str) -> dict[str, Any]:
    return config_from_flags(words.split())[0]


def errors(words: str) -> list[str]:
    with pytest.raises((ConfigError, Errors)) as caught:
        config_from_flags(words.split())
    found = caught.value.errors if isinstance(caught.value, Errors) else (caught.value,)
    return [f"{e.where}: {e.what} | {e.fix}" for e in found]


def test_a_launch_script_becomes_a_run() -> None:
    made = config(
        "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --rollout-max-response-len 64 "
        "--rollout-temperature 0.8 --rollout-top-k -1 --rollout-shuffle --apply-chat-template --label-key answer "
        "--rm-type math --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.00 "
        "--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --optimizer adam "
        "--max-tokens-per-gpu 4096 --use-dynamic-batch-size --recompute-granularity full --recompute-method uniform "
        "--eval-interval 20 --eval-prompt-data gsm8k /e.jsonl --eval-max-response-len 32 --bf16"
    )
    assert (made.rollout.batch_size, made.rollout.group_size, made.trainer.updates_per_step) == (8, 4, 2)
    assert made.rollout.sampling.temperature == 0.8
    assert made.rollout.sampling.top_k == -1
    assert made.data.template == "chat"
    assert made.data.label_key == "answer"
    assert made.algorithm.kind == "grpo"
    assert (made.algorithm.clip_low, made.algorithm.clip_high) == (0.2, 0.28)
    assert made.trainer.optimizer.betas == (0.9, 0.98)
    assert made.trainer.optimizer.lr == 1e-6
    assert made.trainer.recompute == "full"
    assert made.model.dtype == "bfloat16"
    (held_out,) = made.evaluation.sets
    assert (held_out.name, str(held_out.path)) == ("gsm8k", "/e.jsonl")
    assert (held_out.sampling.max_response_tokens, held_out.sampling.temperature) == (32, 0.8)


def test_every_value_knows_its_flag() -> None:
    _, sources = config_from_flags(["--lr", "1e-6", "--vllm-max-num-seqs", "4", "--adam-beta2", "0.9"])
    assert sources == {
        "trainer.optimizer.lr": "flag `--lr`",
        "rollout.vllm.max_num_seqs": "flag `--vllm-max-num-seqs`",
        "trainer.optimizer.betas": "flag `--adam-beta2`",
    }


def test_errors_of_values_name_the_flag() -> None:
    given, sources = config_from_flags((NEEDED + "--lr fast --rollout-temperature 0").split())
    with pytest.raises(Errors) as caught:
        load_config(None, flags=given, flag_sources=sources)
    assert [e.where for e in caught.value.errors] == ["flag `--lr`", "flag `--rollout-temperature`"]


# ---- exact names


def test_no_prefix_is_ever_guessed() -> None:
    """`--rollout-max-prompt-l` begins only one known flag, and is still unknown."""
    (found,) = errors("--rollout-max-prompt-l 5")
    assert found == (
        "flag `--rollout-max-prompt-l`: unknown flag `--rollout-max-prompt-l` | did you mean `--rollout-max-prompt-len`?"
    )
    assert "--load" in errors("--load x")[0]
    assert "unknown flag `--load-debug-rollout-dat`" in errors("--load-debug-rollout-dat x")[0]


@pytest.mark.parametrize("words", ["--lr=1e-6", "--lr 1e-6"])
def test_both_ways_to_give_a_value(words: str) -> None:
    assert values(words) == {"trainer": {"optimizer": {"lr": "1e-6"}}}


def test_negative_numbers_are_values_and_short_flags_are_not_known() -> None:
    assert values("--rollout-top-k -1") == {"rollout": {"sampling": {"top_k": "-1"}}}
    assert "'-x' is not a flag" in errors("--lr 1 -x")[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--lr", "takes one value, got 0"),
        ("--lr 1 2", "takes one value, got 2: 1 2"),
        ("--bf16 true", "takes no value, got 1: true"),
        ("stray", "'stray' is not a flag"),
    ],
)
def test_the_number_of_values(words: str, text: str) -> None:
    assert text in errors(words)[0]


def test_an_explicit_zero_is_kept() -> None:
    assert values("--seed 0 --rollout-max-prompt-len 0 --entropy-coef 0") == {
        "run": {"seed": "0"},
        "data": {"max_prompt_tokens": "0"},
        "algorithm": {"entropy_coef": "0"},
    }


def test_two_flags_of_one_home_must_agree() -> None:
    assert values("--seed 1 --rollout-seed 1") == {"run": {"seed": "1"}}
    (found,) = errors("--seed 1 --rollout-seed 2")
    assert "'2' contradicts flag `--seed`, which says '1': both are `run.seed`" in found
    assert values("--lr 1 --lr 2") == {"trainer": {"optimizer": {"lr": "2"}}}


# ---- pass-through


def test_flags_of_the_engine_the_router_and_megatron() -> None:
    made = config(
        "--vllm-max-num-seqs 64 --vllm-enforce-eager --vllm-no-enable-prefix-caching --vllm-gpu-memory-utilization 0.5 "
        '--vllm-compilation-config {"level":3} --router-policy random --vllm-router-policy random '
        "--moe-router-dtype fp32 --attention-dropout 0.0 --no-gradient-accumulation-fusion --sequence-parallel"
    )
    assert made.rollout.vllm == {
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "compilation_config": {"level": 3},
    }
    assert made.rollout.router == {"policy": "random"}
    assert made.trainer.megatron == {
        "moe_router_dtype": "fp32",
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "sequence_parallel": True,
    }


def test_keys_that_vime_owns_are_refused_from_flags_too() -> None:
    given, sources = config_from_flags((NEEDED + "--vllm-dtype float32 --vllm-max-num-seq 3").split())
    with pytest.raises(Errors) as caught:
        load_config(None, flags=given, flag_sources=sources)
    assert [(e.where, e.fix) for e in caught.value.errors] == [
        ("flag `--vllm-dtype`", "use `model.dtype`; trainer and engine must agree"),
        ("flag `--vllm-max-num-seq`", "did you mean `max_num_seqs`?"),
    ]


def test_the_models_shape_is_accepted_and_not_used() -> None:
    assert values("--num-layers 4 --swiglu --group-query-attention --num-query-groups 2 --normalization RMSNorm") == {}


# ---- refusals


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--lora-rank 4", "full weights only"),
        ("--multimodal-keys x", "text models only"),
        ("--load x", "--resume"),
        ("--ref-ckpt-step 3", "--ref-load"),
        ("--use-opd", "--opd-teacher-load FOLDER"),
        ("--use-opd --opd-type vllm --opd-teacher-load /t", "--opd-type megatron"),
        ("--use-opd --opd-teacher-load /t --advantage-estimator ppo", "--advantage-estimator grpo"),
        ("--partial-rollout", "--in-flight-updates"),
        ("--disable-compute-advantages-and-returns", "--loss-type sft_loss"),
        ("--vllm-config x", "--topology"),
        ("--advantage-estimator trpo", "use one of grpo"),
        ("--loss-type value_loss", "use one of policy_loss"),
        ("--optimizer sgd", "AdamW"),
        ("--update-weights-interval 2", "max_staleness"),
    ],
)
def test_what_vime_lacks_says_what_to_do_instead(words: str, text: str) -> None:
    (found,) = errors(words)
    assert text in found


@pytest.mark.parametrize(
    "words",
    [
        "--kl-coef 0.00",
        "--use-kl-loss --kl-loss-coef 0 --kl-loss-type low_var_kl",
        "--num-critic-only-steps 0",
        "--loss-type policy_loss",
        "--get-mismatch-metrics",
        "--optimizer adam",
        "--n-samples-per-eval-prompt 1",
    ],
)
def test_what_is_off_or_already_so_is_accepted(words: str) -> None:
    assert values(words) == {}


def test_everything_wrong_is_reported_at_once() -> None:
    assert len(errors("--load x --nonsense 1 --lr --seed 1 --rollout-seed 2 --tis-clip 1")) == 5


# ---- flags that belong together


def test_samples_of_an_optimizer_step() -> None:
    base = "--rollout-batch-size 8 --n-samples-per-prompt 4 "
    assert values(base + "--global-batch-size 32")["trainer"] == {"updates_per_step": "1"}
    assert (
        "12 samples do not divide rollout-batch-size 8 x n-samples-per-prompt 4 = 32"
        in errors(base + "--global-batch-size 12")[0]
    )
    assert "contradicts" in errors(base + "--global-batch-size 16 --num-steps-per-rollout 4")[0]
    assert "--rollout-batch-size" in errors("--global-batch-size 16")[0]
    assert "whole numbers" in errors(base + "--global-batch-size x")[0]


def test_one_clip_bound_is_used_on_both_sides() -> None:
    assert values("--eps-clip 0.1")["algorithm"] == {"clip_low": "0.1", "clip_high": "0.1"}


@pytest.mark.parametrize("name", algorithm_flags.ESTIMATORS)
def test_estimators_are_kinds(name: str) -> None:
    assert config(f"--loss-type policy_loss --advantage-estimator {name}").algorithm.kind == name


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--kl-coef 0.1", {"coef": "0.1", "use": "reward", "estimator": "k1"}),
        (
            "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl",
            {"coef": "0.001", "use": "loss", "estimator": "low_var"},
        ),
        (
            "--use-kl-loss --kl-loss-coef 0.001 --use-unbiased-kl",
            {"coef": "0.001", "use": "loss", "estimator": "k1", "unbiased": True},
        ),
    ],
)
def test_a_divergence_is_in_the_reward_or_in_the_loss(words: str, expected: dict[str, Any]) -> None:
    assert values(words)["algorithm"] == {"kl": expected}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--kl-loss-coef 0.1", "no effect without --use-kl-loss"),
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "keep one of --kl-coef and --kl-loss-coef"),
        ("--kl-coef 0.1 --kl-loss-type k9", "use one of k1, k2, k3, low_var_kl"),
        ("--tis-clip 2", "no effect without --use-tis"),
        ("--custom-tis-function-path a.b --get-mismatch-metrics", "no effect without --use-tis"),
        ("--custom-loss-function-path a.b", "no effect without --loss-type custom_loss"),
        ("--opsm-delta 2", "no effect without --use-opsm"),
        ("--opd-kl-coef 2", "no effect without --use-opd"),
        ("--critic-num-nodes 2", "no effect without a critic"),
        ("--critic-lr 1e-5 --advantage-estimator grpo", "no effect without a critic"),
        ("--value-clip 0.1", "no effect without a critic"),
        ("--num-critic-only-steps 2", "no effect without a critic"),
        ("--use-tis --use-rollout-logprobs", "contradicts"),
        ("--loss-type custom_loss", "give --custom-loss-function-path"),
    ],
)
def test_halves_of_a_setting_are_refused(words: str, text: str) -> None:
    assert any(text in found for found in errors(words))


def test_corrections_and_functions_arrive_in_the_run() -> None:
    made = config("--use-tis --tis-clip 3 --tis-clip-low 0.5 --use-opsm --eps-clip-c 3 --normalize-advantages").algorithm
    assert (made.old_log_probs, made.dual_clip, made.whiten) == ("recompute", 3.0, True)
    correction = made.correction
    assert (correction.level, correction.low, correction.high, correction.opsm_delta) == ("token", 0.5, 3.0, 1e-4)
    made = config("--use-tis --custom-tis-function-path a.b --custom-advantage-function-path c.d").algorithm
    assert (made.correction.level, made.correction.function, made.advantage_function) == (None, "a.b", "c.d")
    made = config("--loss-type custom_loss --custom-loss-function-path e.f").algorithm
    assert made.loss_function == "e.f"


def test_flags_of_the_critic() -> None:
    made = config("--advantage-estimator ppo --gamma 0.9 --lambd 0.8 --value-clip 0.3 --num-critic-only-steps 5").algorithm
    assert (made.gamma, made.lam, made.critic.value_clip, made.critic.warmup_steps) == (0.9, 0.8, 0.3, 5)


def test_a_critic_has_the_actors_optimizer_but_for_what_is_its_own() -> None:
    ours = "--advantage-estimator ppo --lr 2e-6 --weight-decay 0.1 --adam-beta2 0.98 --lr-decay-style cosine "
    made = config(ours + "--critic-lr 1e-5 --critic-load /critic")
    optimizer = made.algorithm.critic.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.decay) == (1e-5, 0.1, (0.9, 0.98), "cosine")
    assert made.trainer.optimizer.lr == 2e-6
    assert made.model.others == {"critic": Path("/critic")}
    assert config(ours).algorithm.critic.optimizer.lr == 2e-6


def test_distillation_adds_the_teachers_divergence_to_the_reward() -> None:
    made = config("--use-opd --opd-type megatron --opd-teacher-load /t --opd-kl-coef 0.5 --advantage-estimator grpo")
    assert (made.algorithm.kind, made.algorithm.teacher_coef, made.algorithm.reward_coef) == ("distill", 0.5, 1.0)
    assert made.model.teacher == Path("/t")


def test_folders_of_further_models_are_not_megatrons(tmp_path: Path) -> None:
    assert config(f"--ref-load {tmp_path} --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3").model.reference == tmp_path
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    for flag in ("--ref-load", "--critic-load"):
        assert "give the Hugging Face folder" in errors(f"{flag} {tmp_path}")[0]


def test_settings_for_which_slime_has_no_flag() -> None:
    made = config(
        "--ray-address 10.0.0.5:6379 --in-flight-updates --no-rollout-shuffle --old-log-probs recompute "
        "--advantage-estimator ppo --no-normalize-advantages"
    )
    assert (made.cluster.address, made.weights.update, made.data.shuffle) == ("10.0.0.5:6379", "in_flight", False)
    assert (made.algorithm.old_log_probs, made.algorithm.whiten) == ("recompute", False)
    assert "contradicts" in errors("--old-log-probs recompute --use-rollout-logprobs")[0]


def test_checkpoints_are_written_while_training_goes_on() -> None:
    made = config("--save-interval 5 --async-save").checkpoint
    assert (made.every, made.asynchronous) == (5, True)
    assert not config("--save-interval 5").checkpoint.asynchronous


def test_evaluation_sets() -> None:
    assert values("--eval-prompt-data /a")["evaluation"]["sets"] == [{"name": "aime", "path": "/a"}]
    assert len(values("--eval-prompt-data a /a b /b")["evaluation"]["sets"]) == 2
    assert "pairs of name and path" in errors("--eval-prompt-data a /a b")[0]
    assert "no effect without --eval-prompt-data" in errors("--eval-temperature 0")[0]


def plan_of(words: str) -> Any:
    made = config(words)
    loaded = load_topology(made.topology, platform="acme")
    return make_plan(loaded, model=TINY_MODEL, needs=needs_from(made), platforms={"acme": FakePlatform()})


def test_cluster_flags_become_a_topology() -> None:
    plan = plan_of("--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4 --tensor-model-parallel-size 2")
    assert (plan.shared, plan.actor.request.parallel.tp, plan.actor.request.parallel.dp) == (True, 2, 4)
    assert len(plan.engines) == 2
    apart = plan_of(
        "--actor-num-gpus-per-node 4 --num-gpus-per-node 8 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 "
        "--update-weight-transport disk --update-weight-buffer-size 1048576"
    )
    assert (apart.shared, len(apart.pools[0].inventories), len(apart.engines)) == (False, 1, 2)
    assert (apart.transport.protocol, apart.transport.buffer_bytes) == ("disk", 2**20)


ROLES = [
    ("", ["actor", "rollout"]),
    ("--advantage-estimator ppo", ["actor", "critic", "rollout"]),
    ("--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.1", ["actor", "ref", "rollout"]),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3", ["actor", "ref", "rollout"]),
    ("--use-opd --opd-teacher-load /t", ["actor", "teacher", "rollout"]),
    ("--advantage-estimator ppo --kl-coef 0.1", ["actor", "critic", "ref", "rollout"]),
]
SIZES = "--actor-num-gpus-per-node 4 --num-gpus-per-node 8 --rollout-num-gpus 4 "


@pytest.mark.parametrize(("words", "names"), ROLES)
@pytest.mark.parametrize("sizes", ["", SIZES + "--colocate", SIZES])
def test_the_topology_has_the_roles_that_the_algorithm_reads(
    sizes: str, words: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.planning.needs.read_shape", lambda folder: TINY_MODEL)
    topology = config(f"{sizes} {words}").topology
    if isinstance(topology, dict):
        in_turn = names[:-1] if sizes == SIZES else names
        assert [share["roles"] for share in topology.get("share", [])] == ([in_turn] if len(in_turn) > 1 else [])
    else:
        assert (topology, names) == ("colocate", ["actor", "rollout"])
    plan = plan_of(f"{sizes} {words}")
    tasks = {"critic": "critic", "ref": "reference", "teacher": "teacher"}
    assert [role.task for role in plan.trainers] == ["actor", *(tasks[name] for name in names[1:-1])]


def test_a_critic_of_its_own_size_has_its_own_devices() -> None:
    plan = plan_of(f"{SIZES} --advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 2")
    actor, critic = plan.trainers
    assert (actor.request.parallel.dp, critic.request.parallel.dp, len(plan.pools[0].inventories)) == (4, 2, 2)


def test_a_given_topology_is_left_alone() -> None:
    assert values("--advantage-estimator ppo --topology cpu-critic")["topology"] == "cpu-critic"
    assert "topology" not in values("--loss-type sft_loss --kl-coef 0.1")


@pytest.mark.parametrize(
    ("words", "replay"),
    [
        ("--use-routing-replay", "trainer"),
        ("--use-rollout-routing-replay", "rollout"),
        ("--use-routing-replay --use-rollout-routing-replay", "rollout"),
    ],
)
def test_routing_replay(words: str, replay: str) -> None:
    assert values(words)["trainer"]["routing_replay"] == replay
    assert "Ray's object store" in errors(f"{words} --rollout-routed-experts-store-dir /data")[0]


@pytest.mark.parametrize(
    ("words", "residency"),
    [("", "auto"), ("--offload", "park"), ("--no-offload-train", "resident"), ("--offload-rollout", "park")],
)
def test_offload_flags(words: str, residency: str) -> None:
    made = values(f"--colocate {words}")["topology"]
    assert made["share"] == [{"roles": ["actor", "rollout"], "residency": residency}]


def test_no_engines_at_all() -> None:
    made = values("--loss-type sft_loss --actor-num-gpus-per-node 2 --rollout-num-gpus 0")
    assert list(made["topology"]["roles"]) == ["actor"]
    assert made["algorithm"]["kind"] == "sft"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--actor-num-nodes 0", "a whole number of at least 1, got '0'"),
        ("--rollout-num-gpus 6 --rollout-num-gpus-per-engine 4", "6 is not a multiple"),
        ("--update-weight-transport rdma", "use disk or nccl"),
        ("--topology cpu-train --colocate", "the topology says what --colocate say"),
    ],
)
def test_cluster_flags_that_do_not_go_together(words: str, text: str) -> None:
    assert text in errors(words)[0]


# ---- the tables


def test_every_home_is_a_key_of_the_schema() -> None:
    for name, flag in flag_table.FLAGS.items():
        *parents, last = flag.path.split(".")
        if parents != ["rollout", "router"]:
            assert last in fields_at(Config, parents), name


def test_no_flag_is_in_two_tables() -> None:
    refused = set(flag_table.REFUSED)
    assert refused & set(known_flags()) == set()
    parts = [flag_table.FLAGS, flag_table.COMBINED, flag_table.CLUSTER, flag_table.NOTHING_TO_DO, flag_table.SHAPE]
    parts += [flag_table.ONLY_VALUES, algorithm_flags.ALGORITHM]
    assert len(known_flags()) == sum(map(len, parts))


def test_every_flag_of_slime_has_an_answer() -> None:
    """Mapped, passed on, or refused with what to do."""
    listed = (Path(__file__).parent / "slime_flags.txt").read_text().split()
    assert len(listed) == len(set(listed)) > 250
    assert [name for name in listed if not has_answer(name)] == []
    assert not has_answer("nonsense")


def test_the_page_of_flags_is_current() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "flags.md"
    assert page.read_text() == render_docs(), "run: python -m vime.compat.flag_docs > docs/flags.md"
    together = set(flag_table.COMBINED) | set(algorithm_flags.ALGORITHM) | set(flag_table.CLUSTER)
    assert set(HOMES) == together
