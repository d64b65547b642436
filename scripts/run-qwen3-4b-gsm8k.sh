#!/usr/bin/env bash
# examples/qwen3-4b-gsm8k with flags, on one node of eight devices that trainer and engines share.
#   MODEL=/models/Qwen3-4B DATA=/data/train.jsonl scripts/run-qwen3-4b-gsm8k.sh --input-key question --label-key answer
# More flags, such as --dry-run or --platform NAME, go to the end.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXAMPLE="$ROOT/examples/qwen3-4b-gsm8k"

CKPT_ARGS=(
  --hf-checkpoint "${MODEL:-$EXAMPLE/model}"
  --save "${RUN_DIR:-$ROOT/runs/qwen3-4b-gsm8k}"
  --save-interval 50
)
CLUSTER_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --rollout-num-gpus-per-engine 1
  --colocate
)
ROLLOUT_ARGS=(
  --prompt-data "${DATA:-$EXAMPLE/sample.jsonl}"
  --apply-chat-template
  --rollout-shuffle
  --rollout-max-prompt-len 512
  --rm-type gsm8k
  --num-rollout 200
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 1024
  --rollout-temperature 1.0
)
GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
  --bf16
  --optimizer adam
  --lr 1e-6
  --adam-beta1 0.9
  --adam-beta2 0.98
  --weight-decay 0.1
  --clip-grad 1.0
  --use-dynamic-batch-size
  --max-tokens-per-gpu 8192
)

exec "${PYTHON:-python}" "$ROOT/train.py" \
  "${CKPT_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
