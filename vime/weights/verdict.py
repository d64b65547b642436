"""Answers wait for the verdict on the weights that sampled them.

Requests that an engine kept through an update run on as soon as it resumes, and the probe that judges the update can only run
beside them. What they sample meanwhile leaves the server when the gate opens. When the update is refused instead, every request
that ran under it is answered with `WITHDRAWN`, whenever it ends.
"""

from __future__ import annotations

import asyncio
import json

from vime.facts.engine import WITHDRAWN_STATUS
from vime.weights.asgi import Message, Send, problem, send_json

WITHDRAWN = "withdrawn: the weights that sampled a part of this answer were refused"


class Verdicts:
    """One trial of weights at a time: it begins when the engine resumes behind a shut gate."""

    def __init__(self) -> None:
        self._decided = asyncio.Event()
        self._decided.set()
        self._refusals = 0

    def begin(self) -> None:
        self._decided.clear()

    def accept(self) -> None:
        self._decided.set()

    def refuse(self) -> None:
        """Ends a trial against the weights; without a trial nothing changes."""
        if not self._decided.is_set():
            self._refusals += 1
            self._decided.set()

    def mark(self) -> int:
        """For `stands`: a request notes it when it comes in."""
        return self._refusals

    async def stands(self, mark: int) -> bool:
        """Wait out a trial; whether no weights were refused since `mark`."""
        await self._decided.wait()
        return self._refusals == mark


class JudgedAnswer:
    """Takes an app's messages in place of `send`; passes them on once no trial is under way.

    An answer that had begun to stream when its weights were refused breaks off: `send` raises ConnectionAbortedError.
    """

    def __init__(self, send: Send, verdicts: Verdicts) -> None:
        self._send, self._verdicts = send, verdicts
        self._mark = verdicts.mark()
        self._begun = self._withdrawn = False

    async def send(self, message: Message) -> None:
        if self._withdrawn:
            return
        if await self._verdicts.stands(self._mark):
            self._begun = True
            await self._send(message)
            return
        self._withdrawn = True
        if self._begun:
            raise ConnectionAbortedError(WITHDRAWN)
        await send_json(self._send, WITHDRAWN_STATUS, json.dumps(problem(WITHDRAWN)).encode())
