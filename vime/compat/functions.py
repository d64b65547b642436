"""Functions of the user's own, by dotted path as slime takes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vime.errors import ConfigError


def load_function(path: str, *, setting: str) -> Callable[..., Any]:
    """Import `package.module.function` (or with a colon before the function).

    Raises:
        ConfigError: it cannot be imported or called; names `setting`.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{path}: {error}", where=setting, fix="install its package, or put its folder on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"{module_name} has no function {name!r}", where=setting, fix="give package.module.function")
    return found
