"""slime-style entry point: flags in, the same run as `vime run`."""

import sys

from vime.cli.flags import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
