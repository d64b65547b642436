"""vLLM alone: `vllm.LLM` in a process of its own with the arguments of an engine server, as the floor of what is served.

`python -m vime.benchmarks.bare ORDER` reads a JSON order and writes its findings to the order's `out`, after each part.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.benchmarks.engines import Clock, Planned
from vime.errors import DeadlineError, EngineError

RAW = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "detokenize": False, "ignore_eos": True}


def ask(planned: Planned, order: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Have a child process do the order; what it found. Raises EngineError or DeadlineError; its log is kept with the run's.

    The child gets the engine's environment, so that vLLM loads the same plugins.
    """
    from vime.rollout.engine import engine_env
    from vime.rollout.launcher import Child

    spec, folder = planned.spec, planned.folder / "bare"
    folder.mkdir(exist_ok=True)
    out = folder / f"{order['work']}.json"
    path = folder / f"{order['work']}-order.json"
    path.write_text(json.dumps({**order, "out": str(out), "llm": llm_arguments(spec)}))
    log = planned.folder / "run" / "logs" / f"bare-{order['work']}.log"
    command = [sys.executable, "-m", "vime.benchmarks.bare", str(path)]
    child = Child(command, name="bare vLLM", log_path=log, env=engine_env(spec), command_prefix=spec.command_prefix)
    try:
        while child.alive():
            clock.left()
            time.sleep(0.05)
    except DeadlineError as error:
        raise DeadlineError(
            f"bare vLLM was not done in time: {child.log_tail(5)}", where=str(log), fix="raise --limit"
        ) from error
    finally:
        how = child.exit_text()
        child.stop(5.0)
    if how != "exit code 0" or not out.exists():
        from vime.rollout.engine import find_cause

        cause = find_cause(child.log_text()) or child.log_tail(5)
        raise EngineError(f"bare vLLM ended with {how}: {cause}", where=str(log), fix="see the log's last lines in the record")
    return json.loads(out.read_text())


def llm_arguments(spec: Any) -> dict[str, Any]:
    """The server's arguments under the names of `LLM`; those that only a server has are left out by the child."""
    parallel = spec.parallel
    sizes = {"tensor": parallel.tp, "pipeline": parallel.pp, "data": parallel.dp}
    return {
        "model": str(spec.model_path),
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        **{f"{name}_parallel_size": size for name, size in sizes.items() if size > 1},
        **spec.args,
        "logprobs_mode": "processed_logprobs",
    }


# ---- in the child


def main(path: str) -> int:
    order = json.loads(Path(path).read_text())
    began = time.perf_counter()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in order["llm"].items() if name in known})
    found: dict[str, Any] = {"start_s": time.perf_counter() - began, "left_out": sorted(set(order["llm"]) - known)}
    for name, result in WORKS[order["work"]](llm, order):
        found[name] = result
        Path(order["out"]).write_text(json.dumps(found))
    return 0


def rollout(llm: Any, order: Mapping[str, Any]) -> Any:
    """Yields seconds and tokens of `generate`, without log-probs and with those that the server gives."""
    from vllm import SamplingParams

    for name, log_probs in (("plain", None), ("log_probs", 0)):
        # The prompts must be new to the prefix cache, for this floor as for the other.
        fresh, rows = bool(llm.reset_prefix_cache()), []
        for prompts in order["prompts"]:
            lengths = prompts["responses"]
            params = [SamplingParams(**RAW, n=order["n"], max_tokens=length, logprobs=log_probs) for length in lengths]
            inputs = [{"prompt_token_ids": ids} for ids in prompts["token_ids"]]
            began = time.perf_counter()
            outputs = llm.generate(inputs, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = sum(len(o.token_ids) for answer in outputs for o in answer.outputs)
            rows.append({"seconds": seconds, "tokens": tokens, "kind": prompts["kind"], "fresh": fresh})
        yield name, rows


def sleep(llm: Any, order: Mapping[str, Any]) -> Any:
    """Yields the seconds of `LLM.sleep` and of each `wake_up`, by cycle."""
    rows = []
    for _ in range(order["repeats"]):
        row: dict[str, float] = {}
        for name, call in (
            ("sleep_s", lambda: llm.sleep(level=order["level"])),
            ("wake_weights_s", lambda: llm.wake_up(tags=["weights"])),
            ("wake_cache_s", lambda: llm.wake_up(tags=["kv_cache"])),
        ):
            began = time.perf_counter()
            call()
            row[name] = time.perf_counter() - began
        rows.append(row)
        yield "cycles", rows


WORKS = {"rollout": rollout, "sleep": sleep}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
