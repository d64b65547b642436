"""Process groups."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from vime.facts.bindings import RayBinding
from vime.facts.collectives import CollectiveSpec
from vime.facts.process import RoleKind, TrainerRuntime
from vime.planning.env import merge_env
from vime.planning.masks import mask_entries, process_mask, visible_node
from vime.testing.conformance.questions import GROUPS
from vime.testing.conformance.rank_side import MARK, PASSED
from vime.testing.conformance.registry import NotRun, check, fail, require
from vime.testing.conformance.subject import Subject

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
OPERATIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")
EXPECTED = {"sum": 5.0, "avg": 2.5, "max": 3.0, "min": 2.0, "product": 6.0}
"""Of 2 and 3."""
_HOST = "gloo"
_WAIT_S = 60.0


def backends_of(text: str) -> dict[str, str]:
    """`cpu:gloo,device:other` by device; one name stands for every device and has key "". Raises ValueError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        device, colon, backend = part.partition(":")
        if not colon:
            device, backend = "", part
        if not _NAME.match(backend) or (colon and not _NAME.match(device)) or device in found:
            raise ValueError(part)
        found[device] = backend
    if "" in found and len(found) > 1:
        raise ValueError(text)
    return found


@check("C21", hooks=["vime_collective"], title="collectives can be built")
def collectives_can_be_built(subject: Subject) -> None:
    """The backend reads as torch takes it, its parts are among the node's collectives, the timeout is positive, there are
    reduce operations, an object backend for the host, and limits say what happens."""
    for asked in subject.requests():
        for group in GROUPS:
            spec: CollectiveSpec = subject.ask("vime_collective", asked.request, group)
            at = f"for {asked.about}, {group.purpose}"
            try:
                parts = backends_of(spec.backend)
            except ValueError as error:
                fail(f"backend {spec.backend!r} {at} is none that torch reads ({error})", "write name, or cpu:name,device:name")
            known = asked.request.capabilities.collectives
            alien = sorted(set(parts.values()) - set(known))
            require(not alien, f"backend {', '.join(alien)} {at} is not among the node's {known}", "add it to capabilities")
            require(spec.timeout_s > 0, f"the timeout is {spec.timeout_s} s {at}", "give a positive number of seconds")
            require(spec.reduce_ops, f"no reduce operation {at}", "list what the backend can do")
            odd = sorted(set(spec.reduce_ops) - set(OPERATIONS))
            require(not odd, f"reduce operations {odd} {at} are unknown", f"use torch's names: {', '.join(OPERATIONS)}")
            require(_NAME.match(spec.object_backend), f"object backend {spec.object_backend!r} {at} is no name", "write gloo")
            mute = [name for name, what in spec.limits.items() if not (name.strip() and what.strip())]
            require(not mute, f"limits {mute} {at} do not say what happens", "write condition -> what happens")


@check("C22", hooks=["vime_collective"], title="two ranks meet")
def two_ranks_meet(subject: Subject) -> None:
    """Two ranks of the group's host part exchange a number with every reduce operation that is promised for the host. With
    --device and two devices two processes do so with the whole backend, each with a rank's environment and mask, in the default
    group, in one beside it and with the object backend."""
    if importlib.util.find_spec("torch") is None:
        raise NotRun("torch is not installed")
    case = subject.cases[0] if subject.cases else None
    if case is None:
        raise NotRun("there is no node to ask about")
    asked = next(iter(subject.requests(cases=[case])))
    spec: CollectiveSpec = subject.ask("vime_collective", asked.request, GROUPS[0])
    try:
        parts = backends_of(spec.backend)
    except ValueError:
        raise NotRun(f"backend {spec.backend!r} cannot be read; C21 reports it") from None
    host = parts.get("cpu", parts.get("", ""))
    if subject.device and set(parts) - {"cpu"} and set(parts.values()) != {_HOST}:
        return _on_devices(subject, spec)
    if host != _HOST:
        raise NotRun(f"backend {spec.backend} has no part for the host; run with --device")
    operations = spec.reduce_ops if set(parts.values()) == {_HOST} else ("sum",)
    for operation in operations:
        got = _reduced(operation)
        expected = EXPECTED.get(operation)
        wrong = expected is not None and got != expected
        require(not wrong, f"reduce operation {operation} of 2 and 3 gives {got}", "leave it out of reduce_ops")
    return None


def _reduced(operation: str) -> float:
    """All-reduce 2.0 and 3.0 between two host ranks in threads of this process."""
    import torch
    import torch.distributed as dist

    module: Any = dist
    results: list[float] = [0.0, 0.0]
    problems: list[Exception] = []
    store = module.HashStore()
    options = module.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())

    def rank(number: int) -> None:
        try:
            group = module.ProcessGroupGloo(store, number, 2, timedelta(seconds=_WAIT_S))
            value = torch.tensor([2.0 + number])
            group.allreduce([value], options).wait()
            results[number] = float(value)
        except Exception as error:  # noqa: BLE001  reported by the caller
            problems.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    if problems:
        fail(f"reduce operation {operation} fails between two host ranks: {problems[0]}", "leave it out of reduce_ops")
    require(not any(thread.is_alive() for thread in threads), "two host ranks did not meet", "check the host's network")
    require(results[0] == results[1], f"two ranks hold {results} after {operation}", "leave it out of reduce_ops")
    return results[0]


def _on_devices(subject: Subject, spec: CollectiveSpec) -> None:
    """Two processes, each with the environment and the mask of a trainer rank: its only device is number 0 to it."""
    case = subject.real[0]
    binding: RayBinding = subject.ask("vime_ray_binding", case.inventory)
    node = visible_node(binding, case.inventory, os.environ)
    if len(node.devices) < 2:
        raise NotRun(f"backend {spec.backend} needs two devices, this machine has {len(node.devices)}")
    request = subject.request(case, RoleKind.TRAINER, tp=2)
    runtime: TrainerRuntime = subject.ask("vime_trainer_runtime", request)
    path = subject.folder / "two-ranks"
    path.unlink(missing_ok=True)
    order = {
        "path": str(path),
        "backend": spec.backend,
        "object_backend": spec.object_backend,
        "kind": runtime.device_type,
        "limit_s": _WAIT_S,
        "runtime": {"target": runtime.bootstrap.target, "options": dict(runtime.bootstrap.options)},
        "operations": [operation for operation in spec.reduce_ops if operation in EXPECTED],
    }
    rules, _ = merge_env([subject.ask("vime_process_env", request)], {}, process="trainer", inherited=os.environ)
    entries = mask_entries(binding, node, os.environ)
    base = {name: value for name, value in os.environ.items() if name not in binding.unset_env}
    base |= {**rules, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    masks = [process_mask(binding, entries, [rank]) for rank in range(2)]
    told = _told([{**order, "rank": rank} for rank in range(2)], [{**base, **mask} for mask in masks], spec.backend)
    judge(told, spec, alone=bool(masks[0]) and not binding.full_node_mask)


def _told(orders: Sequence[Mapping[str, Any]], envs: Sequence[Mapping[str, str]], backend: str) -> list[Mapping[str, Any]]:
    calls = [[sys.executable, "-m", "vime.testing.conformance.rank_side", json.dumps(order)] for order in orders]
    ranks = [
        subprocess.Popen(call, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for call, env in zip(calls, envs, strict=True)
    ]
    try:
        ended = [rank.communicate(timeout=2 * _WAIT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        fail(f"two ranks do not meet over {backend} within {2 * _WAIT_S:g} s", "see the backend's own log")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, text) in zip(ranks, ended, strict=True):
        last = (text.strip().splitlines() or [""])[-1]
        require(rank.returncode == 0, f"two ranks do not meet over {backend}: {last}", "see the backend's own log")
    marked = (next(line for line in out.splitlines() if line.startswith(MARK)) for out, _ in ended)
    return [json.loads(line.removeprefix(MARK)) for line in marked]


def judge(told: Sequence[Mapping[str, Any]], spec: CollectiveSpec, *, alone: bool) -> None:
    """What two ranks told is what the promises mean; `alone`: a mask leaves each of them one device."""
    for rank, seen in enumerate(told):
        for operation, got in seen["reduced"].items():
            wrong = got != EXPECTED[operation]
            what = f"reduce operation {operation} of 2 and 3 over {spec.backend} gives {got} on rank {rank}"
            require(not wrong, what, "leave it out of reduce_ops")
        what = f"rank {rank} of a group of both got {seen['passed']} where rank 1 sent {PASSED}"
        require(seen["passed"] == PASSED, what, "see the backend's own log")
        what = f"the object backend {spec.object_backend} gives rank {rank} {seen['gathered']}"
        require(seen["gathered"] == [0, 1], what, "name a backend that carries objects of the host")
        crowded = alone and seen["visible"] is not None and seen["visible"] != 1
        what = f"rank {rank} sees {seen['visible']} devices under a mask of one"
        require(not crowded, what, "name the variables that the libraries read in visible_env")
    own = [seen["identity"] for seen in told]
    same = alone and None not in own and own[0] == own[1]
    require(not same, f"both ranks are on device {own[0]}", "give the masks entries that name one device each")
