"""slime-style entry point for training one step behind sampling: `train.py` with `max_staleness` 1."""

import sys

from vime.cli.flags import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], overrides=("schedule.max_staleness=1",)))
