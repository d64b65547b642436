"""The machines on which the conformance kit asks the platform, and those that are not ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from acme_accelerator.driver import TABLE_VARIABLE
from acme_accelerator.testing import table
from vime.testing.conformance import Machine


def _installed(path: Path | None) -> Callable[[], AbstractContextManager[Mapping[str, str]]]:
    """Put a device table in place for a block; None is a machine without the driver."""

    @contextmanager
    def install() -> Iterator[Mapping[str, str]]:
        before = os.environ.pop(TABLE_VARIABLE, None)
        if path is not None:
            os.environ[TABLE_VARIABLE] = str(path)
        try:
            yield dict(os.environ)
        finally:
            os.environ.pop(TABLE_VARIABLE, None)
            if before is not None:
                os.environ[TABLE_VARIABLE] = before

    return install


MACHINES = (
    Machine("a1x2", "synthetic", _installed(table("a1x2")), devices=2),
    Machine("a1x2-fault", "synthetic", _installed(table("a1x2-fault")), devices=2, note="its second device has a fault"),
    Machine("broken", "synthetic", _installed(table("broken")), devices=0, matches=False, readable=False, note="a torn table"),
    Machine("missing", "synthetic", _installed(Path("/nowhere.json")), devices=0, matches=False, readable=False),
)
FOREIGN = (Machine("no-driver", "synthetic", _installed(None), devices=0, matches=False, readable=False),)
