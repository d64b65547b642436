"""What has to happen, in this order, before a trainer process imports megatron-core.

The order is data (`STEPS`), so that a test can run it without the vendor's packages and a newer MindSpeed changes one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vime.errors import TrainerError

Importer = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """Import `module`; then call its function `call`, if one is named, with the settings. `fix`: what to do when it fails."""

    module: str
    why: str
    fix: str
    call: str | None = None


STEPS = (
    Step(
        "torch_npu",
        "registers the device with torch; everything after it may ask for a device",
        "install the torch-npu of this torch, and run CANN's set_env.sh before starting Ray",
    ),
    Step(
        "mindspeed.megatron_adaptor",
        "replaces what megatron-core takes from other vendors, which works on modules that are not imported yet",
        "install MindSpeed from source for this megatron-core; the package on the index is a placeholder",
    ),
    Step(
        "mindspeed.megatron_adaptor",
        "the features that depend on settings are chosen again: at import it only saw an empty command line",
        "use a MindSpeed whose megatron_adaptor has `repatch`",
        call="repatch",
    ),
)

SETTINGS: Mapping[str, Any] = {"use_flash_attn": True}
"""Settings in MindSpeed's names. vime's own attention calls the kernel itself; this keeps MindSpeed from building masks."""


def run(
    settings: Mapping[str, Any] = SETTINGS,
    *,
    importer: Importer = importlib.import_module,
    loaded: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Run every step -> what was done, for a log.

    Args:
        settings: handed to `repatch`.
        importer: imports a module by name.
        loaded: the modules that are imported already; this process's by default.

    Raises TrainerError when megatron-core came first, or naming the step that failed.
    """
    early = sorted(name for name in (sys.modules if loaded is None else loaded) if name.partition(".")[0] == "megatron")
    if early:
        raise TrainerError(
            f"megatron-core is imported already ({early[0]}), so MindSpeed cannot change it any more",
            where="vime_ascend.bootstrap",
            fix="build the trainer runtime before anything imports megatron; look for a custom function that does",
        )
    done: list[str] = []
    for step in STEPS:
        name = f"{step.module}.{step.call}" if step.call else step.module
        try:
            with _empty_command_line():
                module = importer(step.module)
            if step.call:
                getattr(module, step.call)(dict(settings))
        except (ImportError, AttributeError, OSError) as error:
            what = f"{name} failed ({type(error).__name__}: {error}); it {step.why}"
            raise TrainerError(what, where="vime_ascend.bootstrap", fix=step.fix) from error
        done.append(name)
    return tuple(done)


@contextmanager
def _empty_command_line() -> Iterator[None]:
    """MindSpeed parses the process's command line on import, which here belongs to Ray."""
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept
