"""Device memory of the acme platform as another process opens it: weights by device_ipc, each device under its own name.

`install` puts this module and an offer of device_ipc in place of the platform's own link. A process knows its devices by its
mask; a worker of an engine over several devices takes the one of its rank. What is opened is written down, so that a test can
see who took from whom.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.weights.transports.exporters import HostExporter

TRACE = "BOARDS_TRACE"
HOSTS = "BOARDS_ON_HOSTS"
"""Where this is set, every board is on a host of its own."""
MASK = "ACME_VISIBLE_DEVICES"

OFFERS = '''"""Half offers of weight transports: device_ipc through the boards' memory."""

from vime.facts.process import Factory
from vime.facts.transports import Relation, Side, TransferCost, TransportOffer

PROTOCOL = "device_ipc"
_CORE = "vime.weights.transports.device_ipc"
_HALVES = {
    Side.TRAINER: Factory(f"{_CORE}:DeviceIpcTrainer", {"exporter": "acme_accelerator.boards:BoardExporter"}),
    Side.ENGINE: Factory(f"{_CORE}:DeviceIpcEngine"),
}


def offers(edge, side):
    options = {"in_place": True} if side is Side.ENGINE else {}
    return (TransportOffer(PROTOCOL, side, _HALVES[side], TransferCost(1e10, provenance="nominal"), options=options),)
'''


class BoardExporter(HostExporter):
    """The host's memory under the names of acme devices, or where hosts are planted under one name that every host has."""

    def identity(self) -> str:
        return "a board" if HOSTS in os.environ else self._board()

    def _board(self) -> str:
        import torch.distributed as dist

        own = os.environ[MASK].split(",")
        rank = dist.get_rank() if len(own) > 1 and dist.is_initialized() else 0
        return f"board {own[rank]}"

    def allocate(self, nbytes: int) -> Any:
        tensor = super().allocate(nbytes)
        self._note("allocated", str(self._paths[tensor.data_ptr()]))
        return tensor

    def open(self, handle: Mapping[str, Any]) -> Any:
        self._note("opened", str(handle["path"]))
        return super().open(handle)

    def _note(self, what: str, path: str) -> None:
        with Path(os.environ[TRACE]).open("a") as file:
            print(json.dumps([what, self._board(), path]), file=file)


PLANT = """
import os
import vime.weights.hosts

if {hosts!r} in os.environ:
    vime.weights.hosts.host_identity = lambda: "host of board " + os.environ.get({mask!r}, "")
"""
"""At the start of every process, before anything of vime asks: a process is on the host of the boards that it sees."""


def install(acme_site: Path, folder: Path) -> Path:
    """A copy of the installed platform with this module in it -> a folder for PYTHONPATH."""
    site = folder / "site"
    shutil.copytree(acme_site, site)
    shutil.copy(__file__, site / "acme_accelerator" / "boards.py")
    (site / "acme_accelerator" / "weights.py").write_text(OFFERS)
    (site / "sitecustomize.py").write_text(PLANT.format(hosts=HOSTS, mask=MASK))
    return site


def taken(trace: Path) -> set[tuple[str, str]]:
    """(device that opened, device whose memory it is) of all buffers that were opened."""
    notes = [json.loads(line) for line in trace.read_text().splitlines()]
    owners = {path: device for what, device, path in notes if what == "allocated"}
    return {(device, owners[path]) for what, device, path in notes if what == "opened"}
