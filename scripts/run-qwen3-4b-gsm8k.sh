#!/usr/bin/env bash
# examples/qwen3-4b-gsm8k with flags, on one node of eight devices that trainer and engines share.
#   MODEL=/models/Qwen3-4B DATA=/data/train.jsonl scripts/run-qwen3-4b-gsm8k.sh --input-key question --label-key answer
# More flags, such as --dry-run or --platform NAME, go to the end.
set -euo pipefail
NAME=qwen3-4b-gsm8k
source "$(dirname "${BASH_SOURCE[0]}")/grpo.sh"

CLUSTER_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --rollout-num-gpus-per-engine 1
  --colocate
)
RUN_ARGS=(
  --rm-type gsm8k
  --num-rollout 200
  --save-interval 50
  --rollout-max-response-len 1024
  --max-tokens-per-gpu 8192
)

train "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
