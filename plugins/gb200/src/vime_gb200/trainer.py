"""What a tray changes for a trainer: limits of kernels and dispatchers.

Binding a process to the Grace of its device needs no answer of its own: cuda's runtime binds to the memory node that the
inventory names.
"""

from __future__ import annotations

from dataclasses import replace

from vime.facts.process import MegatronAdaptation

LIMITS = {
    "fp8 with Hopper's blocks of 128 x 128": "emulated through mxfp8: it runs, converted; mxfp8 and nvfp4 are native",
    "expert dispatch by HybridEP": "its NVLink domain size must divide the expert-parallel group: an uneven split of a rack "
    "is refused when the dispatcher is built",
    "the same run inside one rack and over two": "sums are taken in another order: losses agree only to rounding",
}


def adaptation(found: MegatronAdaptation) -> MegatronAdaptation:
    """cuda's adaptation with the limits of this hardware."""
    return replace(found, limits={**found.limits, **LIMITS})
