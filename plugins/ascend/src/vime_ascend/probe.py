"""Reads a node with `npu-smi`: its text is the recording, so that a replay runs the same parsers.

torch_npu and acl are never imported here: a process may initialise them once, and the driver would then hold a device.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.platforms.host import read_host
from vime_ascend import smi_text, stack
from vime_ascend.chips import generation_of

TOOL = "npu-smi"
TIMEOUT_S = 15.0
"""A healthy node answers in about a second; a hung driver does not answer at all."""

host_facts: Callable[[Mapping[str, Iterable[str]]], dict[str, Any]] = read_host
"""The host's part of the facts; a fake machine puts its own in place."""

NEEDED: Mapping[str, tuple[str, ...]] = {"info": ("info",), "map": ("info", "-m")}
OPTIONAL: Mapping[str, tuple[str, ...]] = {"topo": ("info", "-t", "topo")}

_PATH_FIX = "install the driver, or add its folder to PATH (export PATH=/usr/local/sbin:$PATH); in a container, mount it"


def matched(ctx: ProbeContext) -> Match | None:
    """Yes where `npu-smi` lists a chip of a generation that the platform knows. No device is opened."""
    if shutil.which(TOOL, path=ctx.env.get("PATH")) is None:
        return None
    try:
        text = run(ctx.env, *NEEDED["info"])
    except PluginError:
        return None
    chips = smi_text.chips(text)
    known = [chip for chip in chips if generation_of(chip.name, chip.physical is not None)]
    if not known:
        return None
    return Match("ascend", 10, f"{TOOL} lists {len(known)} chips, the first a {known[0].name}")


def read(env: Mapping[str, str]) -> dict[str, Any]:
    """The facts of this node as JSON values: what `inventory.from_facts` reads and a recording holds.

    Raises PluginError when the tool is missing, does not answer or refuses what cannot be done without.
    """
    texts = {name: run(env, *words) for name, words in NEEDED.items()}
    problems: dict[str, str] = {}
    wanted = dict(OPTIONAL)
    first = next(iter(smi_text.mapping(texts["map"])), None)
    if first is not None:
        wanted["board"] = ("info", "-t", "board", "-i", str(first.card))
        if any(chip.physical is not None for chip in smi_text.chips(texts["info"])):
            wanted["super_pod"] = ("info", "-t", "spod-info", "-i", str(first.card), "-c", str(first.chip))
    for name, words in wanted.items():
        try:
            texts[name] = run(env, *words)
        except PluginError as error:
            problems[name] = error.what
    return {
        "host": host_facts(stack.SOFTWARE),
        "npu_smi": texts,
        "problems": problems,
        "cann": stack.cann_version(env),
        "vllm_ascend_build": stack.vllm_ascend_build(),
    }


def run(env: Mapping[str, str], *words: str) -> str:
    """One call of the tool, asked for untranslated output. Raises PluginError with the command and what it said."""
    command = shutil.which(TOOL, path=env.get("PATH"))
    if command is None:
        raise PluginError(f"{TOOL} is not on PATH, so the node's chips cannot be listed", where=TOOL, fix=_PATH_FIX)
    asked = " ".join((TOOL, *words))
    language = {"LC_ALL": "C", "LANG": "C", "LC_MESSAGES": "C"}
    try:
        done = subprocess.run(
            [command, *words],
            env={**env, **language},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fix = "look for a hung driver (`dmesg | grep -i devdrv`); restart the node if a chip does not come back"
        raise PluginError(f"`{asked}` did not answer within {TIMEOUT_S:g} s", where=TOOL, fix=fix) from None
    except OSError as error:
        raise PluginError(f"`{asked}` cannot be started: {error.strerror}", where=TOOL, fix=_PATH_FIX) from error
    out, said = (stream.decode("utf-8", errors="replace") for stream in (done.stdout, done.stderr))
    if done.returncode != 0:
        last = (said.strip() or out.strip() or "nothing").splitlines()[-1]
        fix = "run the command by hand; a container needs /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc"
        raise PluginError(f"`{asked}` ended with code {done.returncode} and said: {last}", where=TOOL, fix=fix)
    return out
