#!/usr/bin/env bash
# examples/glm4.5-air-dapo with flags, on four nodes of four devices that trainer and engines share.
#   MODEL=/models/GLM-4.5-Air DATA=/data/dapo-math-17k.jsonl scripts/run-glm4.5-air-dapo.sh
# More flags, such as --dry-run or --platform NAME, go to the end.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXAMPLE="$ROOT/examples/glm4.5-air-dapo"

CKPT_ARGS=(
  --hf-checkpoint "${MODEL:-$EXAMPLE/model}"
  --save "${RUN_DIR:-$ROOT/runs/glm4.5-air-dapo}"
  --save-interval 20
)
CLUSTER_ARGS=(
  --actor-num-nodes 4
  --actor-num-gpus-per-node 4
  --rollout-num-gpus-per-engine 4
  --expert-model-parallel-size 16
  --colocate
)
ROLLOUT_ARGS=(
  --prompt-data "${DATA:-$EXAMPLE/sample.jsonl}"
  --apply-chat-template
  --rollout-shuffle
  --rollout-max-prompt-len 512
  --rm-type math
  --num-rollout 100
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 8192
  --rollout-temperature 1.0
)
GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --calculate-per-token-loss
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
  --max-tokens-per-gpu 9216
)

exec "${PYTHON:-python}" "$ROOT/train.py" \
  "${CKPT_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
