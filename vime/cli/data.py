"""`vime data`: make prompt files and a tiny model to start from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vime.errors import DataError

_MAKE_HELP = """\
Draws N questions of a procedural task and writes one JSONL file a part, with rows {prompt, label, task, metadata}.
Parts share no question; the same arguments give the same files.

  vime data make reasoning_gym:chain_sum --n 60000 --seed 7 --split eval=1500,sft=6000,rl \\
      --config min_terms=2 --config max_terms=2 --out data/chain_sum
"""


def add_parser(subparsers: Any) -> None:
    """Add `vime data make` and `vime data tiny-model`."""
    parser = subparsers.add_parser("data", help="make prompt files and a tiny start model", allow_abbrev=False)
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_make(commands)
    _add_tiny_model(commands)


def _add_make(commands: Any) -> None:
    make = commands.add_parser(
        "make",
        help="prompt files from a procedural task",
        description=_MAKE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    make.add_argument("source", help="reasoning_gym:TASK")
    make.add_argument("--n", type=_count, default=1000, metavar="N", help="questions drawn; repeats are dropped (1000)")
    make.add_argument("--seed", type=int, default=0, help="seeds the draws and the split (0)")
    make.add_argument(
        "--split",
        default="train",
        metavar="PART[=AMOUNT],...",
        help="a whole AMOUNT counts questions, one below 1 is a share, none takes the rest (train)",
    )
    make.add_argument("--out", type=Path, metavar="DIR", help="folder for PART.jsonl (data/TASK)")
    make.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of the task, as JSON; repeatable"
    )
    make.set_defaults(handler=run_make)


def _add_tiny_model(commands: Any) -> None:
    tiny = commands.add_parser("tiny-model", help="a small random model with a tokenizer of its own", allow_abbrev=False)
    tiny.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the model")
    family = "qwen2, qwen3, llama, or with --experts qwen3, glm4_moe or deepseek_v3 (qwen3)"
    tiny.add_argument("--family", default="qwen3", metavar="NAME", help=family)
    tiny.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="prompt file that trains the tokenizer")
    for name, default, what in (
        ("hidden", 128, "hidden size"),
        ("layers", 4, "layers"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key-value heads"),
        ("head-dim", 32, "size of a head: 32 or 64 for vLLM on a host"),
        ("ffn", 384, "size of the MLP"),
        ("max-positions", 256, "longest sequence in tokens"),
        ("max-vocab", 384, "most tokenizer entries"),
    ):
        tiny.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} ({default})")
    experts = "a mixture of N experts, each --ffn wide; a token goes to 2 of them"
    tiny.add_argument("--experts", type=_count, default=0, metavar="N", help=experts)
    tiny.add_argument("--untied", action="store_true", help="output layer apart from the embedding")
    tiny.add_argument("--seed", type=int, default=0, help="seeds the weights (0)")
    tiny.set_defaults(handler=run_tiny_model)


def run_make(args: argparse.Namespace) -> int:
    """Handler of `vime data make`."""
    from vime.data.make import make_prompt_files, parse_split

    out = args.out or Path("data") / args.source.rpartition(":")[2]
    split, config = parse_split(args.split), dict(_setting(text) for text in args.config)
    made = make_prompt_files(args.source, out, num_draws=args.n, seed=args.seed, split=split, config=config)
    print(f"{made.num_draws} draws, {made.num_questions} different questions")
    for path, rows in made.rows.items():
        print(f"{rows:>8} rows  {path}")
    if made.num_unlabelled:
        print(f"{made.num_unlabelled} questions have no label, only a verifier: train on them with data.label_key: null")
    return 0


def run_tiny_model(args: argparse.Namespace) -> int:
    """Handler of `vime data tiny-model`."""
    from vime.data.make import make_start_model
    from vime.data.tiny_model import TinyShape

    shape = TinyShape(
        vocab_size=args.max_vocab,
        family=args.family,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        ffn=args.ffn,
        tied=not args.untied,
        max_positions=args.max_positions,
        experts=args.experts,
        experts_per_token=min(2, args.experts),
    )
    made = make_start_model(args.out, args.prompts, shape, seed=args.seed)
    print(f"{made.directory}: {made.num_parameters / 1e6:.3f} M parameters, {made.vocab_size} tokenizer entries")
    print(f"longest prompt {made.longest_prompt} tokens with data.template {made.template!r}")
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return value


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise DataError(f"--config {text!r} is not KEY=VALUE")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value
