"""A stand-in for an engine's server process, for tests of what starts and stops servers. Standard library only.

Run by `python -m vime.testing.engine_server --host H --port P ...` with vLLM's other arguments ignored. `FAKE_ENGINE` picks
what it does: `serve` (default), `foreign` (serves another run), `crash`, `mute` (listens, never answers), `taken` (the port
is in use at the first start, `FAKE_ENGINE_MARK` remembers it), `stubborn` (serves, and its child ignores SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CRASH_LOG = """\
(APIServer pid=7) INFO 11-29 17:02:40 [core.py:133] Initializing an engine
(EngineCore pid=9) ERROR 11-29 17:02:41 [core.py:1500] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-29 17:02:41 [core.py:1500] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-29 17:02:41 [core.py:1500]   File "core.py", line 1496, in run_engine_core
(EngineCore pid=9) ERROR 11-29 17:02:41 [core.py:1500] ValueError: No common block size for 16.
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "entry.py", line 236, in <module>
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
nanobind: leaked 12 functions!
 - leaked function "create_get_num_programs"
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        foreign = os.environ.get("FAKE_ENGINE") == "foreign"
        token = "another run" if foreign else os.environ.get("VIME_RUN_TOKEN", "")
        body = json.dumps({"run_token": token, "pid": os.getpid()}).encode() if self.path == "/vime/identity" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    address = parser.parse_known_args()[0]
    behaviour = os.environ.get("FAKE_ENGINE", "serve")
    if behaviour == "crash":
        sys.stderr.write(CRASH_LOG)
        sys.exit(1)
    if behaviour == "taken" and not (mark := Path(os.environ["FAKE_ENGINE_MARK"])).exists():
        mark.write_text(str(address.port))
        sys.exit("OSError: [Errno 98] Address already in use")
    if behaviour == "mute":
        with socket.create_server((address.host, address.port)):
            time.sleep(600)
    if behaviour == "stubborn":
        wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", wait])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ThreadingHTTPServer((address.host, address.port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
