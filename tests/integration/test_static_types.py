"""The type checker agrees with the sources; slower than the other static checks, hence here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pyright() -> None:
    done = subprocess.run([Path(sys.executable).with_name("pyright")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
