#!/usr/bin/env bash
# examples/glm4.5-air-dapo with flags, on four nodes of four devices that trainer and engines share.
#   MODEL=/models/GLM-4.5-Air DATA=/data/dapo-math-17k.jsonl scripts/run-glm4.5-air-dapo.sh
# More flags, such as --dry-run or --platform NAME, go to the end.
set -euo pipefail
NAME=glm4.5-air-dapo
source "$(dirname "${BASH_SOURCE[0]}")/grpo.sh"

CLUSTER_ARGS=(
  --actor-num-nodes 4
  --actor-num-gpus-per-node 4
  --rollout-num-gpus-per-engine 4
  --expert-model-parallel-size 16
  --colocate
)

train "${CLUSTER_ARGS[@]}" "${DAPO_ARGS[@]}" "$@"
