"""The guardian ends what its owner leaves behind, and only that."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime.cluster.guardian import LOOK_EVERY_S, SHARED_MEMORY, descendants, guardian_command, kill_below, still_running

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


def test_a_killed_process_that_guards_its_segments_leaves_none() -> None:
    """As a trainer rank on a node that outlives the run."""
    code = "import time; from pathlib import Path; from vime.cluster.guardian import guard_segments; "
    code += f"g = guard_segments({PREFIX!r}); Path('{SHARED_MEMORY}/{PREFIX}-2').write_bytes(b'x'); print(g.pid, flush=True);"
    owner = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guardian = int(owner.stdout.readline())
    deadline = time.monotonic() + 10
    while len(descendants(guardian)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    family, path = descendants(guardian), Path(f"{SHARED_MEMORY}/{PREFIX}-2")
    assert len(family) == 2
    assert path.exists()
    owner.kill()
    owner.wait()
    assert wait_gone(family, 10)
    assert not path.exists()


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


# ---- segments


def segment(name: str) -> Path:
    return SHARED_MEMORY / f"segtest-{os.getpid()}-{name}"


USER = """
import ctypes, os, subprocess, sys, time
libc = ctypes.CDLL(None)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def make(path, mode=0o600):
    handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    os.ftruncate(handle, 8192)
    return handle
def only_map(path, mode=0o600):
    handle = make(path, mode)
    libc.mmap(None, 8192, 3, 1, handle, 0)
    os.close(handle)
"""
FIRST = f"only_map({str(segment('mapped'))!r})\nmake({str(segment('open'))!r})\n"
SECOND = f"only_map({str(segment('child'))!r})\nprint('up', flush=True)\ntime.sleep(60)"
HOLDERS = USER + FIRST + f"subprocess.Popen([sys.executable, '-c', {USER + SECOND!r}])\ntime.sleep(60)"
"""A process and its child that use three files: one only mapped, one only open, one of the child."""

NAMES = ("mapped", "open", "child")


@pytest.fixture(autouse=True)
def no_segments() -> Iterator[None]:
    yield
    shutil.rmtree(segment("folder"), ignore_errors=True)
    for path in (*SHARED_MEMORY.glob(f"segtest-{os.getpid()}-*"), *SHARED_MEMORY.glob(f"{PREFIX}*")):
        path.unlink(missing_ok=True)


def guarded(code: str, *words: str) -> subprocess.Popen[str]:
    """Running, and it has printed a line."""
    command = [*guardian_command(segments=PREFIX), sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def kill_group(guardian: subprocess.Popen[str]) -> None:
    (command,) = (int(pid) for pid in Path(f"/proc/{guardian.pid}/task/{guardian.pid}/children").read_text().split())
    assert os.getpgid(command) == command != guardian.pid
    os.killpg(command, signal.SIGKILL)


@pytest.mark.parametrize("end", [kill_group, subprocess.Popen.terminate, lambda guardian: kill_below(guardian.pid)])
def test_however_a_command_ends_its_segments_go(end: Callable[[subprocess.Popen[str]], None]) -> None:
    guardian = guarded(HOLDERS)
    time.sleep(LOOK_EVERY_S + 0.5)
    family = descendants(guardian.pid)
    assert len(family) == 3
    assert all(segment(name).exists() for name in NAMES)
    end(guardian)
    assert guardian.wait(10) != 0
    assert wait_gone(family, 1)
    assert [name for name in NAMES if segment(name).exists()] == []


def test_the_segments_of_what_outlives_a_killed_process_are_found_with_no_time_to_look() -> None:
    """The parent dies at once; its child lives until the guardian ends it, and shows what it holds."""
    guardian = guarded(HOLDERS)
    parent = next(pid for pid in descendants(guardian.pid) if os.getpgid(pid) == pid != guardian.pid)
    os.kill(parent, signal.SIGKILL)
    guardian.wait(10)
    assert not segment("child").exists()


def test_only_what_the_command_alone_used_is_removed() -> None:
    """Its own, and seven files that stay: each differs from it in one thing."""
    stay = ("before", "in use", "never used", "open to others", "made anew", "the run's", "folder/file")
    paths = {name: segment(name) for name in stay[:5]}
    paths |= {stay[5]: SHARED_MEMORY / f"{PREFIX}-run", stay[6]: segment("folder") / "file"}
    paths[stay[6]].parent.mkdir()
    paths["before"].touch(0o600)
    own = segment("own")
    used = [path for name, path in paths.items() if name != "never used"]
    lines = [f"only_map({str(path)!r}, {0o644 if path is paths['open to others'] else 0o600})" for path in (*used, own)]
    guardian = guarded("\n".join([USER, *lines, "print('up', flush=True)", "time.sleep(60)"]))
    paths["never used"].touch(0o600)
    time.sleep(LOOK_EVERY_S + 0.5)
    paths["made anew"].unlink()
    paths["made anew"].touch(0o600)
    with paths["in use"].open("rb"):
        kill_group(guardian)
        guardian.wait(10)
    left = [name for name, path in paths.items() if path.exists()]
    assert left == list(paths)
    assert not own.exists()
