"""Runs TRL's GRPOTrainer on the quick start's task and prints seconds per step as JSON. Needs `trl`; knows nothing of vime.

Same model, prompts, batch (32 prompts x 8 answers), lengths, reward and learning rate as `examples/quickstart/run.yaml`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

TEMPLATE = "<|im_start|>{}<|sep|>"
SKIPPED = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=8)
    parser.add_argument("--out", default="/tmp/trl-steps")
    args = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    data = Dataset.from_list([{"prompt": TEMPLATE.format(r["prompt"]), "label": r["label"]} for r in rows])

    def right(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: object) -> list[float]:
        ended = [ids[-1] == 3 for ids in completion_ids]
        return [float(e and text.strip() == want) for e, text, want in zip(ended, completions, label, strict=True)]

    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.append((time.perf_counter(), sum(os.times()[:4])))

    settings = GRPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.samples,
        num_generations=8,
        max_completion_length=args.response_tokens,
        learning_rate=2e-4,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(model=args.model, reward_funcs=right, args=settings, train_dataset=data, callbacks=[Clock()])
    torch.set_num_threads(args.threads)
    trainer.train()
    skipped = min(SKIPPED, args.steps // 3)
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks[skipped - 1 :], marks[skipped:], strict=False)]
    wall, cpu = (statistics.median(values) for values in zip(*spans, strict=True))
    print(json.dumps({"threads": args.threads, "steps": len(spans), "wall_s": wall, "cpu_s": cpu}))


if __name__ == "__main__":
    main()
