"""Markers and identity of plugins."""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

API = "0.1"
"""Version of the hook API. A plugin declares the range it was written for; see `PluginInfo.api`."""

PROJECT = "vime"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What a plugin module exports as `VIME_PLUGIN`.

    `parent` is the platform it extends (`base` for most). `api` is a version range such as `>=0.1,<0.2`.
    """

    name: str
    parent: str = "base"
    api: str = ">=0.1,<0.2"
