"""Updates amid running requests are refused where no request can run through one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.errors import ConfigError
from vime.planning.plan import Plan
from vime.planning.updates import check_update
from vime.testing.plans import plan_of, topology


def planned(*, share: bool, vllm: str | None = None) -> Plan:
    plan = plan_of(topology(share="auto" if share else None))
    software = {} if vllm is None else {"vllm": vllm}
    engines = tuple(replace(e, request=replace(e.request, software=software)) for e in plan.engines)
    return replace(plan, engines=engines)


@pytest.mark.parametrize("vllm", [None, "0.32.0", "0.33.1+acme"])
def test_engines_with_devices_of_their_own_may_keep_requests(vllm: str | None) -> None:
    check_update(planned(share=False, vllm=vllm), "in_flight")


@pytest.mark.parametrize(
    ("share", "vllm", "what"),
    [
        (True, "0.32.0", r"run.yaml:4: .*take turns on the same devices.*\n  fix: use drain, or .*cpu-disaggregated"),
        (False, "0.26.0", r"run.yaml:4: .*vLLM 0\.26\.0 of pool p has what 0\.26\.0 has, and cannot\n  fix: .*vLLM 0\.32\.0"),
        (False, "0.31.2", r"vLLM 0\.31\.2 of pool p has what 0\.26\.0 has"),
    ],
)
def test_what_cannot_keep_requests_is_refused_with_its_place(share: bool, vllm: str, what: str) -> None:
    plan = planned(share=share, vllm=vllm)
    with pytest.raises(ConfigError, match=what):
        check_update(plan, "in_flight", where="run.yaml:4")
    check_update(plan, "drain", where="run.yaml:4")
