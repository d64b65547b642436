"""Asks plugins whether this machine is theirs, each in a child process with a time limit.

A probe may abort, hang or raise: that costs its own answer only. The child (`python -m vime.platforms.probe`) writes its
answer to a file, so that whatever a plugin prints cannot be mistaken for it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.errors import VimeError
from vime.facts.diagnosis import Match, ProbeContext
from vime.platforms.lineage import Plugin

HOOK = "vime_probe"
ENTRY_POINT_GROUP = "vime.plugins"
TIMEOUT_S = 20.0
_OUTPUT_TAIL = 400


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A plugin to ask: its name and the object its entry point refers to."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What came back. `stage` is `import`, `validation` or `probe` when `problem` says why there is no answer."""

    name: str
    match: Match | None = None
    problem: str | None = None
    stage: str = "probe"


@dataclass(frozen=True, slots=True)
class _Child:
    target: ProbeTarget
    process: subprocess.Popen[bytes]
    answer: Path
    output: Path


def ask_all(targets: Sequence[ProbeTarget], *, timeout_s: float = TIMEOUT_S) -> tuple[ProbeAnswer, ...]:
    """Ask every target at the same time; one answer each, in order, after at most about `timeout_s`."""
    with tempfile.TemporaryDirectory(prefix="vime-probe-") as folder:
        deadline = time.monotonic() + timeout_s
        children: list[_Child] = []
        try:
            children += [_start(target, Path(folder)) for target in targets]
            return tuple(_collect(child, deadline, timeout_s) for child in children)
        finally:
            for child in children:
                _end(child)


def _start(target: ProbeTarget, folder: Path) -> _Child:
    answer, output = folder / f"{target.name}.json", folder / f"{target.name}.log"
    # The child sees the same packages as this process, wherever they were found.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vime.platforms.probe", target.name, target.value, str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
    return _Child(target, process, answer, output)


def _collect(child: _Child, deadline: float, timeout_s: float) -> ProbeAnswer:
    name = child.target.name
    try:
        code = child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ProbeAnswer(name, problem=f"the probe did not answer within {timeout_s:g} s and was ended")
    if code != 0 or not child.answer.exists():
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ProbeAnswer(name, problem=f"the probe's process ended with {ended}{_tail(child.output)}")
    data: Mapping[str, Any] = json.loads(child.answer.read_text())
    match = Match(**data["match"]) if data["match"] else None
    return ProbeAnswer(name, match, data["problem"], data["stage"])


def _tail(output: Path) -> str:
    text = output.read_text(errors="replace").strip()
    return f": {text[-_OUTPUT_TAIL:]}" if text else ""


def _end(child: _Child) -> None:
    """End the session of a child that has not ended by itself, helpers that it started included."""
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


def ask(target: ProbeTarget, ctx: ProbeContext) -> ProbeAnswer:
    """Ask one plugin, its own `vime_probe` only, in this process. Problems of the plugin become an answer."""
    point = importlib.metadata.EntryPoint(target.name, target.value, ENTRY_POINT_GROUP)
    stage = "import"
    try:
        namespace = point.load()
        stage = "validation"
        plugin = Plugin.of(namespace)
        probes = [hook.call for hook in plugin.hooks if hook.hook == HOOK]
        stage = "probe"
        return ProbeAnswer(target.name, _matched(target.name, probes[0](**_wanted(probes[0], ctx))) if probes else None)
    except VimeError as error:
        return ProbeAnswer(target.name, problem=error.what, stage=stage)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a plugin does costs only its own answer
        return ProbeAnswer(target.name, problem=f"{type(error).__name__}: {error}", stage=stage)


def _wanted(probe: Any, ctx: ProbeContext) -> dict[str, ProbeContext]:
    return {"ctx": ctx} if "ctx" in inspect.signature(probe).parameters else {}


def _matched(name: str, match: Match | None) -> Match | None:
    if match is None:
        return None
    if match.platform != name or match.specificity < 0:
        raise VimeError(f"{HOOK} answered {match!r}: expected platform {name!r} and a specificity of 0 or more")
    return match


def main(words: Sequence[str]) -> int:
    """The child: `NAME VALUE ANSWER_FILE`."""
    name, value, path = words
    answer = ask(ProbeTarget(name, value), ProbeContext(env=dict(os.environ)))
    Path(path).write_text(json.dumps(asdict(answer)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
