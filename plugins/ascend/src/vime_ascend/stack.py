"""What is installed beside the driver: CANN, and the chips that vllm-ascend was built for. Read from files, never by import."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

SOFTWARE: Mapping[str, tuple[str, ...]] = {
    "trainer": ("torch", "torch-npu", "mindspeed", "megatron-core", "safetensors", "transformers", "ray"),
    "engine": ("vllm", "vllm-ascend", "torch", "torch-npu", "transformers", "ray"),
    "router": ("vllm-router",),
}
"""Distributions by the role that needs them."""

CANN = "cann"
"""The toolkit's name among a role's software. It is no distribution of Python."""

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_INSTALL_INFO = "ascend_toolkit_install.info"
_VERSION = re.compile(r"^version=(\S+)", re.MULTILINE)
_DEVICE_TYPE = re.compile(r"__device_type__\s*=.*?(A2|A3|A5|310P)\b")
_SOC_VERSION = re.compile(r"__soc_version__\s*=\s*['\"]ascend(910b|910_93|910c|950|310p)", re.IGNORECASE)
_GENERATIONS = {"910b": "A2", "910_93": "A3", "910c": "A3", "950": "A5", "310p": "310P"}


def cann_version(env: Mapping[str, str]) -> str | None:
    """The toolkit's version, from the install file under the folder that its `set_env.sh` exports; None without it."""
    homes = [Path(env[name]) for name in _HOMES if env.get(name)]
    for path in _install_files(homes):
        try:
            found = _VERSION.search(path.read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found[1]
    return None


def _install_files(homes: Iterable[Path]) -> Iterable[Path]:
    for home in homes:
        yield home / f"{platform.machine()}-linux" / _INSTALL_INFO
        yield home / _INSTALL_INFO
        # A path that a profile of another processor set: the folder's own name says for which.
        yield from sorted(home.glob(f"*-linux/{_INSTALL_INFO}"))


def vllm_ascend_build() -> str | None:
    """`A2`, `A3`, `A5` or `310P`: the chips that the installed vllm-ascend has kernels for; None where it does not say.

    The package's folder is found without importing it: importing takes the device.
    """
    spec = importlib.util.find_spec("vllm_ascend")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return build_from((Path(folder) / "_build_info.py").read_text())
        except OSError:
            continue
    return None


def build_from(text: str) -> str | None:
    """The kind of chip in a `_build_info.py`; releases before `__device_type__` name the SoC instead."""
    if found := _DEVICE_TYPE.search(text):
        return found[1]
    soc = _SOC_VERSION.search(text)
    return _GENERATIONS[soc[1].lower()] if soc else None
