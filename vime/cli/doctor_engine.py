"""`vime doctor --engine`: which platform vLLM resolves on this machine, in the environment that an engine would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import VimeError
from vime.facts.diagnosis import Check, Severity
from vime.facts.inventory import NodeInventory
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.platforms.lineage import Platform

ID = "engine.platform"
TIMEOUT_S = 180.0
_MODULE = "vime.weights.vllm_platform"


def check_engine(platform: Platform, inventory: NodeInventory) -> Check:
    """Ask vLLM in a process of its own; nothing of it is imported here."""
    try:
        env = engine_environment(platform, inventory)
        done = subprocess.run(
            [sys.executable, "-m", _MODULE], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except VimeError as error:
        return Check(ID, Severity.ERROR, error.what, error.fix or f"mend or update plugin {platform.name}")
    except subprocess.TimeoutExpired:
        finding = f"vLLM did not resolve its platform within {TIMEOUT_S:g} s"
        return Check(ID, Severity.ERROR, finding, f"run `{sys.executable} -m {_MODULE}` to see where it waits")
    if done.returncode != 0:
        text = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        finding = f"the process that asks vLLM for its platform ended with {done.returncode}: {text}"
        return Check(ID, Severity.ERROR, finding, f"run `{sys.executable} -m {_MODULE}`")
    return judge(json.loads(done.stdout.splitlines()[-1]), env.get("VLLM_PLUGINS", ""))


def engine_environment(platform: Platform, inventory: NodeInventory) -> dict[str, str]:
    """The environment of an engine on the node's first device. Raises PluginError, PlanError."""
    from vime.planning.env import merge_env
    from vime.rollout.engine import EngineSpec, engine_env

    capabilities = platform.capabilities(inventory)
    request = RoleRequest(
        role="rollout",
        kind=RoleKind.ENGINE,
        placement=RolePlacement("rollout", (Slot(0, 0),)),
        inventories=(inventory,),
        capabilities=capabilities,
        parallel=Parallel(),
        dtype=capabilities.default_dtype,
        software=inventory.software.get("engine", {}),
    )
    defaults = platform.vllm_defaults(request)
    layers = (platform.process_env(request), defaults.env)
    env, _ = merge_env(layers, {}, process="rollout", inherited=os.environ)
    binding = platform.ray_binding(inventory)
    return engine_env(
        EngineSpec(
            Path(),
            request.dtype,
            Path(),
            "doctor",
            max_model_len=0,
            env=env,
            entry_points=defaults.entry_points,
            expected_platform=defaults.expected_platform,
            unset=() if binding.virtual else binding.unset_env,
        )
    )


def judge(told: Mapping[str, Any], admitted: str) -> Check:
    """The finding for what the process told."""
    broken = [f"{p['name']} ({p['distribution']}) raised {p['error']}" for p in told["plugins"] if p["error"]]
    swallowed = f"; vLLM swallowed: {'; '.join(broken)}" if broken else ""
    fix = "mend or reinstall the distribution named, or vLLM itself for this hardware"
    if told["error"]:
        return Check(ID, Severity.ERROR, f"vLLM resolves no platform: {told['error']}{swallowed}", fix)
    expected = told["expected"]
    if not told["as_expected"]:
        shut = [p["name"] for p in told["plugins"] if not p["admitted"]]
        left = f"; not admitted: {', '.join(shut)}" if shut else ""
        finding = f"vLLM resolves {told['resolved']}, expected {expected} (VLLM_PLUGINS {admitted!r}{left}){swallowed}"
        return Check(ID, Severity.ERROR, finding, fix)
    finding = f"vLLM resolves {told['resolved']}{swallowed}"
    return Check(ID, Severity.WARNING, finding, fix) if broken else Check(ID, Severity.OK, finding)
