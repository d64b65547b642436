"""What the fake `npu-smi` does: answers a command line from a profile, and fails as the tool does for the rest.

It runs once a question, so it imports little: a test asks dozens.
"""

from __future__ import annotations

import json
import sys

from vime_ascend.testing import smi_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

MISUSE = 255
"""The exit status for a command line that the tool does not know."""


def main(words: Sequence[str], profile_path: str) -> int:
    """Answer one command line. What the tool does not know ends with an error and its usage, as the tool's does."""
    profile: dict[str, Any] = _load(profile_path)
    if profile["tool"] == "broken":
        print("dcmi module initialize failed. ret is -8005", file=sys.stderr)
        return 1
    if profile["tool"] == "hung":
        import time

        time.sleep(3600)
    try:
        text = answer(profile, words)
    except MisuseError as error:
        print(f"Error parameter of {error}\nUsage: npu-smi info [Options...]")
        return MISUSE
    sys.stdout.buffer.write(text.encode())
    return 0


def _load(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


class MisuseError(Exception):
    """A word of the command line that the tool does not know or cannot find."""


def answer(profile: Mapping[str, Any], words: Sequence[str]) -> str:
    """What the tool prints. Raises MisuseError."""
    if list(words) == ["-v"]:
        return f"npu-smi version: {profile['driver']}\n"
    if not words or words[0] != "info":
        raise MisuseError(words[0] if words else "nothing")
    plain = {(): smi_output.info, ("-m",): smi_output.mapping, ("-l",): smi_output.listing}
    rest = tuple(words[1:])
    if rest in plain:
        return plain[rest](profile)
    options = _options(rest)
    kind = options.get("-t")
    if kind in profile["refuses"]:
        raise MisuseError(f"-t {kind}: this device does not support it")
    if kind == "topo":
        return smi_output.topology(profile)
    card = _chosen(smi_output.cards(profile), options.get("-i"), "-i")
    if kind == "board":
        return smi_output.board(profile, card)
    chip = _chosen(card["chips"], options.get("-c", "0"), "-c")
    if kind == "health":
        return f"\tHealth                         : {chip['health']}\n"
    if kind == "spod-info" and profile["super_pod"]:
        return smi_output.super_pod(profile, card, chip)
    raise MisuseError(f"-t {kind}")


def _options(words: Sequence[str]) -> dict[str, str]:
    if len(words) % 2 or any(name not in ("-t", "-i", "-c") for name in words[::2]):
        raise MisuseError(" ".join(words))
    return dict(zip(words[::2], words[1::2], strict=True))


def _chosen(items: Sequence[dict[str, Any]], text: str | None, option: str) -> dict[str, Any]:
    if text is None or not text.isdecimal() or int(text) >= len(items):
        raise MisuseError(f"{option} {text}")
    return items[int(text)]
