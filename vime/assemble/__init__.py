"""From a configuration and a plan to a running loop: the only place that knows which class plays which role."""

from vime.assemble.system import Order, Start, run

__all__ = ["Order", "Start", "run"]
