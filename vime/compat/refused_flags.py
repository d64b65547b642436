"""slime's flags that vime refuses: what to do instead, and the flags that get this answer."""

from __future__ import annotations

from collections.abc import Mapping

_BY_ANSWER: Mapping[str, str] = {
    # weights, checkpoints, roles
    "vime resumes a run from its own folder: `vime run RUN.yaml --resume`": "load start-rollout-id",
    "give the Hugging Face folder of the reference: --ref-load": "ref-ckpt-step",
    "the reference stays as it is: leave it out": "ref-update-interval",
    "give the Hugging Face folder of the teacher: --opd-teacher-load": "opd-teacher-ckpt-step opd-teacher-model",
    "the teacher is a role of the run, not a server: give --use-opd --opd-teacher-load FOLDER": """
        teacher-port teacher-warmup-port teacher-warmup-timeout-s teacher-sample-reduction-chunk-size
        teacher-label-reduction-chunk-size megatron-server-max-length megatron-server-update-timeout-s""",
    "the critic is saved with the run's checkpoints: leave it out": "critic-save",
    "a checkpoint has all that a resumed run needs: leave it out": "no-save-optim",
    "the model is written to the run's folder in Hugging Face form when the run ends, and on the way with"
    " `checkpoint.export_every` of a run file: leave it out": "save-hf",
    "vime trains full weights only: merge the adapter into the model and give its folder as --hf-checkpoint": """
        lora-rank lora-alpha lora-target-modules use-lora""",
    "vime trains text models only: leave image columns out": "multimodal-keys",
    "the model's kind is read from its config.json: leave it out": "model-name megatron-to-hf-mode",
    "AdamW keeps its moments from step to step: leave it out": "reset-optimizer-states use-stateless-adam",
    "all parameters train; `trainer.freeze_router: true` in a run file leaves routers out": """
        only-train-params-name-list freeze-params-name-list freeze-indexer""",
    "heads that predict further tokens are not trained: leave it out": "enable-mtp-training",
    # trainer
    "the trainer keeps no further copy of the actor: leave it out": "keep-old-actor",
    "the trainer's processes stay for the whole run: leave it out, and use --offload-train": "release-train",
    "the platform chooses layouts and kernels: leave it out": """
        qkv-format qwen-gdn-backend allgather-cp force-fp8-ue8m0-scale data-pad-size-multiplier
        megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers
        megatron-deepgemm-moe-forward-modules""",
    "the platform chooses the collective backend: leave it out": "distributed-backend",
    "give the deadline of a step in a run file: `trainer.step_timeout_s`": "distributed-timeout-minutes",
    "one cap holds for all passes: --max-tokens-per-gpu": "log-probs-max-tokens-per-gpu",
    "packs and ranks have even work within the cap: leave it out": "balance-by-flops",
    "rows of logits are handled in chunks: --log-probs-chunk-size": "recompute-loss-function",
    "give variables in a topology, under `env.trainer`": "train-env-vars",
    "give the reserve in a topology, as `limits.device_reserve`": "train-memory-margin-bytes",
    "give the values in a run file: `vime run FILE`": "custom-config-path",
    "give the values in a run file, under `trainer.megatron`": "megatron-config-path",
    "models are built from their config.json, and vime calls functions of yours only for advantage, loss, correction and"
    " reward: leave it out": """
        custom-model-provider-path custom-megatron-init-path custom-megatron-before-log-prob-hook-path
        custom-megatron-before-train-step-hook-path custom-delta-pre-push-path custom-update-weight-post-write-path""",
    # algorithm
    "write the whole loss: --loss-type custom_loss --custom-loss-function-path package.module.function": """
        custom-pg-loss-reducer-function-path pg-loss-type use-score-centering score-centering-top-k""",
    "write the advantage: --custom-advantage-function-path package.module.function": "disable-rewards-normalization",
    "write a grader, and give it as --custom-rm-path module:callable": "custom-reward-post-process-path",
    "entropy is a metric of every update: leave it out": "use-rollout-entropy",
    "experts of tokens travel with the samples in Ray's object store, which spills to disk by itself: leave it out": """
        rollout-routed-experts-store-dir routing-replay-prefetch-microbatches keep-rollout-routed-experts-files""",
    # rollout, data, reward
    "unfinished groups are not put back; train_async.py with --in-flight-updates lets them run on over an update": """
        partial-rollout mask-offpolicy-in-partial-rollout""",
    "dropped groups are replaced one by one; leave it out": "over-sampling-batch-size",
    "say how many steps: --num-rollout": "num-epoch",
    "vime's own rollout samples, filters and orders, and takes no function of yours there yet: leave it out": """
        custom-generate-function-path buffer-filter-path buffer-sort-by-staleness data-source-path rollout-sample-hook-path
        rollout-sample-filter-path rollout-all-samples-process-path rollout-data-postprocess-path eval-function-path
        custom-rollout-log-function-path custom-eval-rollout-log-function-path custom-convert-samples-to-train-data-path
        disable-rollout-global-dataset""",
    "prompts come from a file: --prompt-data FILE": """
        rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type loss-mask-type""",
    "vime chooses how batches travel: leave it out": """
        rollout-data-transport rollout-data-dir rollout-queue-run-id rollout-storage-profile rollout-storage-declaration
        transfer-backend mooncake-store-init-kwargs""",
    "vLLM is the only engine: leave it out": "rollout-backend",
    "bound the two parts: --rollout-max-prompt-len and --rollout-max-response-len": "rollout-max-context-len",
    "stop at tokens: --rollout-stop-token-ids": "rollout-stop",
    "write the tools into the prompt, or a format as `data.template` in a run file": "tool-key apply-chat-template-kwargs",
    "a grader sees one sample: write one, and give it as --custom-rm-path module:callable": "group-rm",
    "write a grader `module:callable` that asks the server, and give it as --custom-rm-path": "rm-url",
    "an engine that died is always replaced: leave it out": """
        rollout-health-check-interval rollout-health-check-timeout rollout-health-check-first-wait""",
    "there is no split of prefill and decode yet; leave it out": "prefill-num-servers",
    "vime starts its engines itself; leave it out": "rollout-external-engine-addrs",
    "vime starts the router itself; leave it out": "vllm-router-ip vllm-router-port",
    "write the engines into a topology: --topology FILE": "vllm-config",
    "bound an engine's requests with --vllm-max-num-seqs": "vllm-server-concurrency",
    "the plan chooses how weights are sent; wishes go into a topology, under `sync`": """
        update-weight-disk-dir update-weight-disk-keep-files update-weight-delta-encoding update-weight-delta-checksum
        update-weight-local-checkpoint-dir update-weight-encoding update-weight-delta-dir update-weight-delta-keep-files
        vllm-weight-sync-mode no-vllm-weight-sync-packed""",
    # evaluation and observation
    "give the sets in a run file, under `evaluation.sets`": "eval-config",
    "a set has the columns, the grader and the prompts' bounds of the training file: leave it out": """
        eval-input-key eval-label-key eval-tool-key eval-reward-key eval-max-prompt-len""",
    "bound answers with --eval-max-response-len": "eval-max-context-len eval-min-new-tokens",
    "metrics go to metrics.jsonl and TensorBoard in the run's folder: leave it out": """
        use-wandb wandb-mode wandb-dir wandb-key wandb-host wandb-team wandb-group wandb-project wandb-run-id
        disable-wandb-random-suffix wandb-always-use-train-step tb-project-name tb-experiment-name
        log-multi-turn log-passrate log-reward-category log-correct-samples""",
    "samples are kept for the report: `observe.samples_per_step` in a run file": """
        dump-details save-debug-rollout-data save-debug-train-data""",
    "runs sample their own answers: leave it out, or train on rows with --loss-type sft_loss": """
        load-debug-rollout-data load-debug-rollout-data-subsample load-forge-rollout-data""",
    "leave it out; `vime plan` shows a run without starting it": "debug-rollout-only",
    "use --loss-type sft_loss to train without sampling": "debug-train-only",
    "time and memory of each step are in metrics.jsonl: leave it out": """
        memory-snapshot-dir memory-snapshot-num-steps profile-target memory-recorder record-memory-history""",
    "updates are checked by fingerprints and a probe; see `weights` of a run file": "check-weight-update-equal",
    "requests go straight to the router: leave it out": "http-proxy use-distributed-post",
    "it belongs to slime's own tests: leave it out": """
        ci-test ci-disable-kl-checker ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm""",
}

REFUSED: Mapping[str, str] = {name: answer for answer, names in _BY_ANSWER.items() for name in names.split()}
"""What to do instead, by flag."""
