"""Tokens per second through engine server, router and client beside `vllm.LLM` alone with the same engine arguments.

Responses of equal length end in the same step, so every answer is written when the engine has no work left: the worst case
for a server. The last repeat has responses of spread lengths, as in training. Prompts are new in each repeat, so that no
prefix cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from vime.benchmarks import bare
from vime.benchmarks.engines import (
    Clock,
    Planned,
    add_engine_arguments,
    bounded,
    control_of,
    finish,
    look,
    model_of,
    open_record,
    plan_run,
    routed,
    served,
    table,
    with_logs,
)

GOAL = 0.95
BATCHED_TOKENS = 8192
WARM_UP_RESPONSE = 16
FIRST_ID = 4
"""Below are the ids of padding and end of sequence in the random models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, residency="park", kv_gib=32)
    parser.add_argument("--prompts", type=int, default=None, help="prompts at once (256; 16 on a host)")
    parser.add_argument("--n", type=int, default=1, help="responses to a prompt (1)")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="(256; 32 on a host)")
    parser.add_argument("--response-tokens", type=int, default=None, help="(512; 32 on a host)")
    parser.add_argument("--repeats", type=int, default=2, help="measured repeats after a warm-up (2)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, record. 1 where a part failed."""
    clock, here = Clock(args.limit), look(args)
    for name, device, host in (("prompts", 256, 16), ("prompt_tokens", 256, 32), ("response_tokens", 512, 32)):
        if getattr(args, name) is None:
            setattr(args, name, host if here.node.virtual else device)
    if not here.node.virtual:
        # vLLM's own bounds differ between its server and its LLM class.
        bounds = {"max_num_seqs": args.prompts * args.n, "max_num_batched_tokens": BATCHED_TOKENS}
        args.overrides = [*(f"rollout.vllm.{name}={value}" for name, value in bounds.items()), *args.overrides]
    record = open_record(args, "rollout")
    planned = plan_run(args, here, model_of(args, here, clock), tokens=(args.prompt_tokens, args.response_tokens))
    record.parts["plan"] = {"ok": True, **planned.told()}
    sets = prompt_sets(args, planned.plan.model.vocab)
    order = {"work": "rollout", "n": args.n, "prompts": sets}
    record.run("server", lambda: with_logs(lambda: bounded(lambda: serve(planned, order, clock), clock), planned))
    record.run("bare", lambda: with_logs(lambda: {"rates": rates(found := bare.ask(planned, order, clock)), **found}, planned))
    record.parts.pop("ratios", None)
    if record.ok:
        record.run("ratios", lambda: ratios(record.parts))
    return finish(record, planned, report(record.parts))


def prompt_sets(args: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    """A set for the warm-up, one for each repeat and one of spread lengths; the same for server and floor.

    `responses` are the lengths, by prompt.
    """
    rng, longest = random.Random(11), args.response_tokens

    def drawn(kind: str, lengths: list[int]) -> dict[str, Any]:
        ids = [[rng.randrange(FIRST_ID, vocab) for _ in range(args.prompt_tokens)] for _ in lengths]
        return {"kind": kind, "token_ids": ids, "responses": lengths}

    warm = drawn("warm-up", [min(WARM_UP_RESPONSE, longest)] * args.prompts)
    spread = drawn("spread", [rng.randint(max(1, longest // 4), longest) for _ in range(args.prompts)])
    return [warm, *(drawn("equal", [longest] * args.prompts) for _ in range(args.repeats)), spread]


# ---- our way


async def serve(planned: Planned, order: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Through the router, then once straight to the engine; what each process spends; what an answer weighs."""
    from vime.rollout.client import GenerateClient

    keys, timeout_s = planned.keys, clock.left()
    began = time.perf_counter()
    async with served(planned, clock) as server, control_of(planned, server, clock) as control:
        start_s = time.perf_counter() - began
        await control.open("0.0")
        async with routed(planned, server, clock) as router:
            processes = Processes({"engine": server.pid, "router": router.pid})
            async with GenerateClient(router.url, keys.api_key, timeout_s=timeout_s) as client:
                rows = [await measured(client, order, prompts, processes) for prompts in order["prompts"]]
            weight = await weigh(server.url, keys.api_key, order)
        async with GenerateClient(server.url, keys.api_key, timeout_s=timeout_s) as client:
            # Turned around: these prompts are not in the engine's prefix cache.
            last = next(p for p in order["prompts"] if p["kind"] == "equal")
            fresh = {**last, "kind": "direct", "token_ids": [ids[::-1] for ids in last["token_ids"]]}
            rows.append(await measured(client, order, fresh, Processes({"engine": server.pid})))
    best = fastest(rows, "equal")
    return {
        "start_s": start_s,
        "repeats": rows,
        "rates": {kind: rate(fastest(rows, kind)) for kind in ("equal", "spread", "direct")},
        "us_per_token": {name: 1e6 * seconds / best["tokens"] for name, seconds in best["cpu_s"].items()},
        "answer": weight,
    }


async def measured(client: Any, order: Mapping[str, Any], prompts: Mapping[str, Any], processes: Processes) -> dict[str, Any]:
    """All prompts at once, a request each, as a rollout worker sends them."""
    params = {**bare.RAW, "logprobs": 0}
    work = list(enumerate(zip(prompts["token_ids"], prompts["responses"], strict=True)))
    before, began = processes.seconds(), time.perf_counter()
    answers = await asyncio.gather(
        *(client.generate(ids, n=order["n"], params={**params, "max_tokens": m}, request_id=f"g{i}") for i, (ids, m) in work)
    )
    seconds, after = time.perf_counter() - began, processes.seconds()
    return {
        "seconds": seconds,
        "tokens": sum(len(choice.token_ids) for answer in answers for choice in answer.choices),
        "kind": prompts["kind"],
        "cpu_s": {name: after[name] - before.get(name, 0.0) for name in after},
    }


async def weigh(url: str, api_key: str, order: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of one answer, and what reading it costs the client, for each token."""
    import aiohttp

    from vime.rollout.client import GENERATE_ROUTE, WHOLE_ANSWER, parse_generation

    prompts, n = next(p for p in order["prompts"] if p["kind"] == "equal"), order["n"]
    length = prompts["responses"][0]
    params = {**WHOLE_ANSWER, **bare.RAW, "max_tokens": length, "logprobs": 0, "n": n}
    body = {"token_ids": prompts["token_ids"][0], "sampling_params": params}
    async with (
        aiohttp.ClientSession(trust_env=False, headers={"Authorization": f"Bearer {api_key}"}) as session,
        session.post(url + GENERATE_ROUTE, json=body) as response,
    ):
        text = await response.read()
    tokens, times = length * n, [time.perf_counter()]
    value = json.loads(text)
    times.append(time.perf_counter())
    parse_generation(value, n=n)
    times.append(time.perf_counter())
    spans = [1e6 * (after - before) / tokens for before, after in itertools.pairwise(times)]
    return {"bytes_per_token": len(text) / tokens, "client_json_us_per_token": spans[0], "client_check_us_per_token": spans[1]}


@dataclass
class Processes:
    """Processor seconds of this process and of the families of some others, process by process."""

    roots: Mapping[str, int]

    def seconds(self) -> dict[str, float]:
        """By name; what a root started by its command as well."""
        found: dict[str, float] = {"client": time.process_time()}
        for name, pid in self.roots.items():
            try:
                root = psutil.Process(pid)
                family = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            for process in family:
                try:
                    times, title = process.cpu_times(), _title(process)
                except psutil.Error:
                    continue
                key = f"{name}: {title}"
                found[key] = found.get(key, 0.0) + times.user + times.system
        return found


def _title(process: psutil.Process) -> str:
    """vLLM names its processes (`VLLM::EngineCore`); others are named by what they run."""
    words = process.cmdline()
    told = next((w for w in words if w.startswith("VLLM::")), None)
    if told is None and "-m" in words[:-1]:
        told = words[words.index("-m") + 1].rpartition(".")[2]
    return (told or process.name()).strip()


# ---- what it means


def rate(row: Mapping[str, Any]) -> float:
    return row["tokens"] / row["seconds"]


def fastest(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return max((row for row in rows if row["kind"] == kind), key=rate)


def rates(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The best repeat's tokens per second of each floor, by kind."""
    return {name: {kind: rate(fastest(found[name], kind)) for kind in ("equal", "spread")} for name in ("plain", "log_probs")}


def ratios(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the server's rate to those of the floors."""
    ours, floors = parts["server"]["rates"], parts["bare"]["rates"]
    found = {f"{kind} / {name}": ours[kind] / floors[name][kind] for name in floors for kind in ("equal", "spread")}
    return {**found, "direct / log_probs": ours["direct"] / floors["log_probs"]["equal"], "goal": GOAL}


def report(parts: Mapping[str, Any]) -> str:
    rows: list[Sequence[Any]] = []
    server, floor, ratio = (parts.get(name, {}) for name in ("server", "bare", "ratios"))
    for name, part, title in (("server", server, _ours), ("bare", floor, _floors)):
        if not part.get("ok"):
            rows.append((f"{name} failed: {part.get('error', 'not run')}",))
            continue
        rows += [(text, value, "tokens/s") for text, value in title(part["rates"])]
    if server.get("ok"):
        rows += [(f"processor: {name}", us, "us a token") for name, us in server["us_per_token"].items() if us >= 0.05]
        rows += [(f"answer: {name.replace('_', ' ')}", value) for name, value in server["answer"].items()]
    if ratio.get("ok"):
        rows += [(f"served / floor without log-probs, {kind}", ratio[f"{kind} / plain"], "") for kind in ("equal", "spread")]
        rows += [("straight to the server / floor, equal", ratio["direct / log_probs"], "")]
        rows += [(f"served / floor, {kind}", ratio[f"{kind} / log_probs"], f"goal {GOAL:g}") for kind in ("equal", "spread")]
    return table("rollout", rows)


def _ours(rates: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        ("served: through server, router and client", rates["equal"]),
        ("served: responses of spread lengths", rates["spread"]),
        ("straight to the server", rates["direct"]),
    ]


def _floors(rates: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float]]:
    return [
        ("floor: vLLM alone, with log-probs", rates["log_probs"]["equal"]),
        ("floor: responses of spread lengths", rates["log_probs"]["spread"]),
        ("floor without log-probs", rates["plain"]["equal"]),
    ]
