"""The guardian ends what its owner leaves behind, and only that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime.cluster.guardian import SHARED_MEMORY, descendants, guardian_command, still_running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

PREFIX = f"vime-guardtest-{os.getpid()}"
FAMILY = (
    "import subprocess, sys, time;"
    "from pathlib import Path;"
    f"Path('{SHARED_MEMORY}/{PREFIX}-1').write_bytes(b'x');"
    "subprocess.Popen(['sleep', '60'], start_new_session=True);"
    "time.sleep(60)"
)


def owner_of(child: str) -> subprocess.Popen[str]:
    """A process that starts `child` under a guardian, prints the guardian's pid and waits."""
    code = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([*{guardian_command(segments=PREFIX)!r}[:4], '--owner', str(__import__('os').getpid()),"
        f" '--segments', {PREFIX!r}, '--', sys.executable, '-c', {child!r}], start_new_session=True);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_gone(recorded: dict[int, int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not still_running(recorded):
            return True
        time.sleep(0.02)
    return False


def test_a_killed_owner_leaves_nothing() -> None:
    owner = owner_of(FAMILY)
    assert owner.stdout is not None
    guardian = int(owner.stdout.readline())
    segment = Path(f"{SHARED_MEMORY}/{PREFIX}-1")
    deadline = time.monotonic() + 10
    while not (segment.exists() and len(descendants(guardian)) == 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    family = descendants(guardian)
    assert len(family) == 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert wait_gone(family, 10)
    assert not segment.exists()


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_commands(code: str, expected: int) -> None:
    done = subprocess.run([*guardian_command(), sys.executable, "-c", code])
    assert done.returncode == expected


def test_orphans_of_a_dead_command_are_ended() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    done = subprocess.run([*guardian_command(), sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_sigterm_is_passed_on() -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5));"
        "print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([*guardian_command(), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(10) == 5


def test_orphans_of_a_running_command_go_with_it_when_the_owner_dies() -> None:
    """A grandchild whose parent has ended is nobody's descendant but the guardian's."""
    middle = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    family = (
        "import subprocess, sys, time;"
        f"subprocess.run([sys.executable, '-c', {middle!r}], stdout=open('{SHARED_MEMORY}/{PREFIX}-pid', 'w'));"
        "time.sleep(60)"
    )
    owner = owner_of(family)
    assert owner.stdout is not None
    owner.stdout.readline()
    note = Path(f"{SHARED_MEMORY}/{PREFIX}-pid")
    deadline = time.monotonic() + 10
    while not (note.exists() and note.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    orphan = int(note.read_text())
    time.sleep(0.2)
    recorded = {orphan: descendants(orphan)[orphan]}
    owner.kill()
    owner.wait()
    assert wait_gone(recorded, 10)


def test_the_command_ends_when_its_guardian_is_killed() -> None:
    guardian = subprocess.Popen([*guardian_command(), "sleep", "60"], start_new_session=True)
    deadline = time.monotonic() + 10
    while len(descendants(guardian.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    family = descendants(guardian.pid)
    assert len(family) == 2
    guardian.kill()
    guardian.wait()
    assert wait_gone(family, 5)
