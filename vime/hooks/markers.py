"""Markers and identity of plugins."""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

PROJECT = "vime"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What a plugin module exports as `VIME_PLUGIN`.

    `parent` is the platform it extends (`base` for most). The range of the hook API is in the distribution's metadata
    (`vime.hooks.api`), where it can be read before the module is imported.
    """

    name: str
    parent: str = "base"
