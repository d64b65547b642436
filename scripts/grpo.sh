# Of the scripts beside this file, which source it after they have set NAME, an example's: the flags that they have in common,
# and `train`, which gives these and its own arguments to train.py.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXAMPLE="$ROOT/examples/$NAME"

CKPT_ARGS=(
  --hf-checkpoint "${MODEL:-$EXAMPLE/model}"
  --save "${RUN_DIR:-$ROOT/runs/$NAME}"
)
ROLLOUT_ARGS=(
  --prompt-data "${DATA:-$EXAMPLE/sample.jsonl}"
  --apply-chat-template
  --rollout-shuffle
  --rollout-max-prompt-len 512
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
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
)
# Competition mathematics with long answers, and of DAPO the mean over tokens.
DAPO_ARGS=(
  --rm-type math
  --num-rollout 100
  --save-interval 20
  --rollout-max-response-len 8192
  --max-tokens-per-gpu 9216
  --calculate-per-token-loss
)

train() {
  exec "${PYTHON:-python}" "$ROOT/train.py" \
    "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
}
