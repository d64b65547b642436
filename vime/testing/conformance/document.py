"""Writes the page of all checks from the registry."""

from __future__ import annotations

from collections.abc import Iterator

from vime.testing.conformance.registry import Check, every_check

_LOADING = "C04"
"""The last check that looks at the plugin as a whole and not at its answers."""

INTRODUCTION = """\
# Conformance

Written from the checks in `vime/testing/conformance/checks/` by `vime.testing.conformance.document`; do not edit.

A platform plugin keeps the contract of every [hook](hooks.md) when these checks pass. They need the core and pytest
(`pip install 'vime[testing]'`), no accelerator and no library of a vendor: a plugin brings fakes or recordings of its machines.

```python
from vime.testing.conformance import Machine, PlatformConformance


class TestMine(PlatformConformance):
    platform = "mine"  # the entry point's name; it is loaded by real discovery
    machines = MACHINES  # Machine(name, origin, install, devices, matches=..., readable=...)
    foreign = OTHERS  # where its probe must say no; left out, the plain host of the test
```

- `pytest tests/test_conformance.py` runs one test per check. What cannot run here is skipped with its reason and counted as
  *not run* in the summary: `conformance mine: 33 passed, 0 failed, 1 not run`.
- `--device` says that the hardware is here: the machine joins `machines`, and the checks that need a device run on it.
- `pytest --vime-platform NAME` checks an installed platform without a test file.
- `vime plugins validate NAME|MODULE [--machine RECORDING.json] [--device] [--json]` does the same without pytest; it exits
  with 1 when a check fails.

A machine is a context manager that puts a fake of the vendor's library in place and yields the environment to probe with.
Answers are looked at on every machine that matches and can be read, and on a nominal node of every profile, whose `vendor`,
`links` and `software` are empty. Code that factories name is looked up in source, so that it needs no library of the vendor.
A pass without `--device` says that the facts are consistent and the host part works; it says nothing about the device.
"""


def render() -> str:
    """The page `docs/conformance.md` (Markdown)."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "| check | looks at | asks |"
    yield "|---|---|---|"
    for check in every_check():
        yield f"| {check.id} {check.title} | {_hooks(check)} | {check.asks} |"


def _hooks(check: Check) -> str:
    if not check.hooks:
        return "the plugin" if check.id <= _LOADING else "every hook"
    return ", ".join(f"[`{hook}`](hooks.md#{hook})" for hook in check.hooks)


if __name__ == "__main__":
    print(render(), end="")
