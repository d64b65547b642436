"""From a configuration and a plan to a running loop: the only place that knows which class plays which role."""

from vime.assemble.system import Start, run

__all__ = ["Start", "run"]
