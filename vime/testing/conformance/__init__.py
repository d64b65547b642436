"""The conformance kit: what every platform plugin must keep, as checks that pytest and `vime plugins validate` run.

from vime.testing.conformance import Machine, PlatformConformance

class TestMine(PlatformConformance):
    platform = "mine"
    machines = MACHINES
"""

from vime.testing.conformance.machine import ANY, Machine, plain_host
from vime.testing.conformance.registry import (
    CHECKS,
    Check,
    ConformanceFailure,
    NotRun,
    Outcome,
    Status,
    check,
    every_check,
    fail,
    require,
    run_check,
    run_checks,
)
from vime.testing.conformance.subject import Subject, load_subject
from vime.testing.conformance.suite import PlatformConformance

__all__ = [
    "ANY",
    "CHECKS",
    "Check",
    "ConformanceFailure",
    "Machine",
    "NotRun",
    "Outcome",
    "PlatformConformance",
    "Status",
    "Subject",
    "check",
    "every_check",
    "fail",
    "load_subject",
    "plain_host",
    "require",
    "run_check",
    "run_checks",
]
