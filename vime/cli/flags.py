"""`train.py` and `train_async.py`: slime's and Megatron's flags, then the same run as `vime run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.errors import VimeError


def main(argv: Sequence[str], *, overrides: Sequence[str] = ()) -> int:
    """Run what the flags describe; `--resume` and `--dry-run` are those of `vime run`. Returns the exit code."""
    from vime.cli.prepare import Hardware, prepare_loaded
    from vime.cli.run import train
    from vime.compat.flags import config_from_flags
    from vime.config.load import load_config
    from vime.planning.explain import explain_text

    own = {"--resume", "--dry-run"}
    try:
        values, sources = config_from_flags([word for word in argv if word not in own])
        dry_run = "--dry-run" in argv
        loaded = load_config(None, flags=values, flag_sources=sources, overrides=overrides)
        prepared = prepare_loaded(loaded, Hardware(live=not dry_run))
        if dry_run:
            print(explain_text(prepared.plan))
            return 0
        return train(prepared, resume="--resume" in argv)
    except VimeError as error:
        print(f"vime: {error}", file=sys.stderr)
        return 1
