"""Which resources Ray masks devices for, asked in a child process: the kit itself imports no Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

LIMIT_S = 60.0
_ASK = """
import json
from ray._private.accelerators import get_all_accelerator_resource_names
print(json.dumps(sorted(get_all_accelerator_resource_names())))
"""


@cache
def masked_resources() -> frozenset[str]:
    """Resources whose visible-device variables Ray sets in its workers; none where Ray is not installed or does not tell."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, check=False, text=True, timeout=LIMIT_S)
    return frozenset(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else frozenset()
