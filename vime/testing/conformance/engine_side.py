"""The engine's end of a round trip: answers messages in a thread of the checking process, or in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from vime.facts.process import Factory

WAIT_S = 60.0
_MARK = "vime-engine-side:"
Message = Mapping[str, Any]


class Peer(Protocol):
    """An engine's half somewhere else."""

    def tell(self, message: Message) -> None:
        """Start an action; the answer comes later."""
        ...

    def answer(self) -> Message:
        """The answer to the oldest action. Raises TimeoutError."""
        ...

    def close(self) -> None: ...


def content(tensor: Any) -> list[Any]:
    """What a tensor is and holds, as JSON: dtype, shape, a hash of its bytes."""
    import torch

    host = tensor.detach().to("cpu").contiguous()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def serve(factory: Factory, messages: Iterable[Message], reply: Callable[[Message], None]) -> None:
    """Build the half and do what the messages say: `connect` and `receive` with their `info`, then `close`."""
    half: Any = None
    for message in messages:
        try:
            match message["action"]:
                case "connect":
                    half = half or factory.build()
                    half.connect(message["info"])
                    reply({})
                case "receive":
                    assert half is not None, "receive before connect"
                    arriving: Any = half.receive(message["info"])
                    reply({"tensors": [[name, *content(tensor)] for name, tensor in arriving]})
                case _:
                    if half is not None:
                        half.close()
                    reply({})
                    return
        except Exception as error:  # noqa: BLE001  the other side reports it
            reply({"error": f"{type(error).__name__}: {error}"})


class ThreadPeer:
    """The half in a thread of this process, for transports that use host memory."""

    def __init__(self, factory: Factory) -> None:
        self._messages: queue.Queue[Message] = queue.Queue()
        self._answers: queue.Queue[Message] = queue.Queue()
        messages = iter(self._messages.get, None)
        threading.Thread(target=serve, args=(factory, messages, self._answers.put), daemon=True).start()

    def tell(self, message: Message) -> None:
        self._messages.put(message)

    def answer(self) -> Message:
        try:
            return self._answers.get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"the engine's half did not answer within {WAIT_S:g} s") from None

    def close(self) -> None:
        self.tell({"action": "close"})
        self.answer()


class ChildPeer:
    """The half in a process of its own, on a device: handles of device memory cannot be opened by their owner."""

    def __init__(self, factory: Factory, *, device_type: str, index: int) -> None:
        setup = json.dumps({"target": factory.target, "options": dict(factory.options), "device": device_type, "index": index})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vime.testing.conformance.engine_side", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self._lines.put(line.removeprefix(_MARK))
        self._lines.put(json.dumps({"error": "the engine's process ended"}))

    def tell(self, message: Message) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Message:
        try:
            return json.loads(self._lines.get(timeout=WAIT_S))
        except queue.Empty:
            raise TimeoutError(f"the engine's process did not answer within {WAIT_S:g} s") from None

    def close(self) -> None:
        try:
            self.tell({"action": "close"})
            self._process.wait(WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def main(setup: Mapping[str, Any]) -> None:
    """The child: messages on stdin, marked answers on stdout."""
    import torch

    torch.get_device_module(setup["device"]).set_device(setup["index"])
    messages = (json.loads(line) for line in sys.stdin)
    serve(Factory(setup["target"], setup["options"]), messages, lambda answer: print(_MARK + json.dumps(answer), flush=True))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
