"""What every measurement writes beside its figures: the command, versions, the date and the machine, in one JSON file.

A file is written after every part. A script that is started again goes on with the parts that are missing or failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.manifest import DISTRIBUTIONS

PACKAGES = ("vime", "torch", "triton", "vllm", "megatron-core", "ray", "transformers", "vllm-router", "safetensors", "pytest")
TAIL_LINES = 100


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The words that all scripts share."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--platform", default="cpu", metavar="NAME", help="an installed platform (cpu)")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", metavar="DIR", help="folder of the JSON files")
    parser.add_argument("--again", action="store_true", help="run parts that are done already too")
    return parser


class Record:
    """One JSON file that grows by parts."""

    def __init__(self, path: Path, platform_name: str, *, again: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() and not again else {}
        self.parts: dict[str, Any] = known.get("parts", {})
        self._head = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "machine": machine(platform_name),
        }

    def run(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Do a part unless it is done, and keep what it returns, or how it failed."""
        if self.parts.get(name, {}).get("ok"):
            print(f"{name}: done already", flush=True)
            return
        began = time.perf_counter()
        try:
            found: dict[str, Any] = {"ok": True, **work()}
        except Exception as error:  # noqa: BLE001  a part that fails must not cost the others
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:4000], "trace": traceback.format_exc()[-4000:]}
        found["part_s"] = round(time.perf_counter() - began, 3)
        self.parts[name] = found
        self.save()
        print(f"{name}: {'ok' if found['ok'] else found.get('error', 'failed')} ({found['part_s']:.1f} s)", flush=True)

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self._head, "parts": self.parts}, indent=1) + "\n")
        partial.replace(self.path)

    @property
    def ok(self) -> bool:
        return all(part["ok"] for part in self.parts.values())


def versions() -> dict[str, str | None]:
    """Of the packages that matter; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = None
        for name in reversed(DISTRIBUTIONS.get(package, (package,))):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
    return found


def machine(platform_name: str) -> dict[str, Any]:
    """The platform's inventory in short, or why there is none."""
    from vime.errors import VimeError
    from vime.facts.diagnosis import ProbeContext
    from vime.platforms.discovery import PluginPolicy, discover

    try:
        node = (
            discover(PluginPolicy.read(platform=platform_name))
            .platform(platform_name)
            .inventory(ProbeContext(dict(os.environ)))
        )
    except VimeError as error:
        return {"error": str(error)}
    devices = [{"name": d.name, "memory_bytes": d.memory_bytes, "arch": d.arch, "health": d.health} for d in node.devices]
    kernel = platform.release()
    return {"cpus": node.cpus, "memory_bytes": node.memory_bytes, "driver": node.driver, "kernel": kernel, "devices": devices}


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None where it was stopped at its limit."""

    code: int | None
    seconds: float
    output: str

    def told(self) -> dict[str, Any]:
        """For a record: the last lines only."""
        lines = self.output.splitlines()[-TAIL_LINES:]
        return {"exit_code": self.code, "seconds": round(self.seconds, 3), "tail": lines}


def command(words: Sequence[str | Path], *, limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command in a session of its own, which is ended with it at the limit."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [str(word) for word in words],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
        code: int | None = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        code = None
    return Ended(code, time.perf_counter() - began, output)


def vime(*words: str | Path) -> list[str | Path]:
    """The command line of `vime WORDS` in this interpreter."""
    return [sys.executable, "-m", "vime.cli.main", *words]
