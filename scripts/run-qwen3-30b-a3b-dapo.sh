#!/usr/bin/env bash
# examples/qwen3-30b-a3b-dapo with flags, on one node of eight devices that trainer and engines share.
#   MODEL=/models/Qwen3-30B-A3B DATA=/data/dapo-math-17k.jsonl scripts/run-qwen3-30b-a3b-dapo.sh
# More flags, such as --dry-run or --platform NAME, go to the end.
set -euo pipefail
NAME=qwen3-30b-a3b-dapo
source "$(dirname "${BASH_SOURCE[0]}")/grpo.sh"

CLUSTER_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --rollout-num-gpus-per-engine 4
  --expert-model-parallel-size 8
  --colocate
)
EXPERTS_ARGS=(
  --use-rollout-routing-replay
)

train "${CLUSTER_ARGS[@]}" "${DAPO_ARGS[@]}" "${EXPERTS_ARGS[@]}" "$@"
