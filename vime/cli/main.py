"""The `vime` command. Every subcommand is a module that is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS: dict[str, str] = {
    "run": "train by reinforcement learning or on labels",
    "check": "check a run file, its data and its plan; needs no accelerator and no torch",
    "plan": "print placement, memory and transports of a run",
    "doctor": "look for what usually goes wrong on this machine",
    "plugins": "list and show platform plugins",
    "topology": "list, show and check topologies",
    "node": "make this machine a node of a Ray cluster",
    "data": "make prompt files and tiny models",
    "convert": "turn a Hugging Face folder into torch_dist, and back",
    "report": "write the report of a run",
    "bench": "measure a part beside its floor",
}


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime", allow_abbrev=False, description="Reinforcement-learning post-training.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return f"vime {version('vime')}"


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code is returned. A `VimeError` becomes a message on stderr and exit code 1."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        _overview().parse_args(words or ["--help"])
        return 2
    from vime.errors import VimeError

    parser = argparse.ArgumentParser(prog="vime", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    importlib.import_module(f"vime.cli.{words[0]}").add_parser(commands)
    args = _parse(parser, words)
    try:
        return args.handler(args)
    except VimeError as error:
        print(f"vime {words[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"vime {words[0]}: interrupted", file=sys.stderr)
        return 130


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """argparse takes KEY=VALUE words in one place only; a person writes them anywhere."""
    args, rest = parser.parse_known_args(words)
    late = [word for word in rest if "=" in word and not word.startswith("-") and hasattr(args, "overrides")]
    if len(late) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word not in late)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


if __name__ == "__main__":
    sys.exit(main())
