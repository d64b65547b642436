"""The plugin API: `hookimpl` marks an implementation, `PluginInfo` identifies a plugin, `specs` lists every hook."""

from vime.hooks.api import API
from vime.hooks.markers import PluginInfo, hookimpl

__all__ = ["API", "PluginInfo", "hookimpl"]
