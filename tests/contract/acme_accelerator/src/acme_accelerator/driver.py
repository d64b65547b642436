"""The pretend vendor library: it lists the devices of this machine, or fails as a driver does.

A plugin for real hardware imports its vendor's library in functions such as these, and nowhere at module level: a broken
driver must not break `vime --help`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLE_VARIABLE = "ACME_DEVICE_TABLE"
"""Names the file in which the driver finds its devices. A machine without it has no driver."""


class DriverError(Exception):
    """The driver is there and does not answer."""


def is_present(env: Mapping[str, str]) -> bool:
    """Whether this machine has the driver; looks at a name and opens nothing."""
    return bool(env.get(TABLE_VARIABLE))


def list_devices(env: Mapping[str, str]) -> dict[str, Any]:
    """`{"driver": version, "devices": [{serial, model, memory_bytes, fault}]}`. Raises DriverError."""
    path = Path(env.get(TABLE_VARIABLE, ""))
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {"driver": table["driver"], "devices": table["devices"]}
    except OSError as error:
        raise DriverError(f"cannot open {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DriverError(f"{path} holds no device table: {type(error).__name__}: {error}") from error
