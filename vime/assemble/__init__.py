"""From a configuration and a plan to a running loop: the only place that knows which class plays which role."""

from vime.assemble.processes import Order, Start
from vime.assemble.system import run

__all__ = ["Order", "Start", "run"]
