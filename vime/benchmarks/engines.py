"""The engine that a benchmark measures: planned as a colocated run's is, started as a run starts it, ended with its block.

Everything here runs in the benchmark's own process and imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from vime.benchmarks.record import TAIL_LINES, Record, command
from vime.errors import ConfigError, DeadlineError, VimeError

TINY = (16, 16)
GIB = 2**30


def add_engine_arguments(parser: argparse.ArgumentParser, *, residency: str, kv_gib: float) -> None:
    """The words of all benchmarks with an engine."""
    add = parser.add_argument
    add("--dtype", default=None, help="of the model (bfloat16; float32 on a host)")
    add("--residency", choices=("park", "resident", "auto"), default=residency, help=f"as in a topology ({residency})")
    add("--kv-gib", type=float, default=kv_gib, metavar="GIB", help=f"the engine's cache; a host keeps its own ({kv_gib:g})")
    add("--utilization", type=float, default=None, metavar="PART", help="of the device for the engine (the platform's)")
    add("--start-limit", type=float, default=180.0, metavar="S", help="seconds for an engine to start (180)")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="a value of the run file")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "vime-models", metavar="DIR", help="random weights")


class Clock:
    """What is left of the seconds that `--limit` gives to the whole of a benchmark."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self.limit_s = limit_s

    def left(self, at_most: float = float("inf")) -> float:
        """Raises DeadlineError when nothing is left."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise DeadlineError(
                f"the benchmark's {self.limit_s:g} s are over", fix="raise --limit; parts that are done are kept"
            )
        return min(seconds, at_most)


# ---- the model and the plan


def open_record(args: argparse.Namespace, name: str) -> Record:
    """`<out>/bench-NAME.json`. Parts of a run with other words are not gone on with."""
    words = {k: str(v) for k, v in sorted(vars(args).items()) if k not in ("out", "again", "limit", "handler", "start_limit")}
    record = Record(args.out / f"bench-{name}.json", args.platform, again=args.again)
    if record.parts.get("words", {}).get("words") != words:
        record.parts.clear()
    record.parts["words"] = {"ok": True, "words": words}
    return record


@dataclass(frozen=True)
class Here:
    """This machine as the asked platform sees it, with the devices that a mask of its environment leaves."""

    platform: Any
    node: Any
    capabilities: Any


def look(args: argparse.Namespace) -> Here:
    """Raises the platform's own error where it, or its hardware, is not here."""
    from vime.facts.diagnosis import ProbeContext
    from vime.planning.masks import visible_node
    from vime.platforms.discovery import PluginPolicy, discover

    platform = discover(PluginPolicy.read(platform=args.platform)).platform(args.platform)
    env = dict(os.environ)
    node = platform.inventory(ProbeContext(env))
    node = visible_node(platform.ray_binding(node), node, env)
    return Here(platform, node, platform.capabilities(node))


def model_of(args: argparse.Namespace, here: Here, clock: Clock) -> Path:
    """`--model`, or random weights of `--shape`, drawn once by a process of its own, whose device memory goes with it."""
    if args.model is not None:
        return args.model
    dtype = args.dtype or here.capabilities.default_dtype
    folder = args.models / f"{args.shape}-{dtype}"
    if (folder / "model.safetensors").exists() and (folder / "tokenizer_config.json").exists():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    code = "import sys; from vime.benchmarks.shapes import SHAPES, write_model; from pathlib import Path; a = sys.argv; "
    code += "write_model(Path(a[1]), SHAPES[a[2]], device=a[3], dtype=a[4])"
    words = [partial, args.shape, here.capabilities.device_type, dtype]
    ended = command([sys.executable, "-c", code, *words], limit_s=clock.left(180))
    if ended.code != 0:
        raise ConfigError(f"no weights of shape {args.shape} could be written: {ended.told()}", fix="give --model DIR")
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").exists():
            raise
    return folder


@dataclass(frozen=True)
class Planned:
    """A run with one trainer rank and one engine, colocated or apart, that is planned and not started."""

    config: Any
    plan: Any
    keys: Any
    folder: Path

    @property
    def spec(self) -> Any:
        """The engine's `EngineSpec`, under a guardian of this process."""
        from vime.assemble.setups import engine_specs
        from vime.cluster.guardian import guardian_command

        spec = engine_specs(self.config, self.plan, self.keys)[0]
        return replace(spec, command_prefix=guardian_command(segments=self.keys.segments))

    @property
    def device_type(self) -> str:
        """torch's name of the trainer's device."""
        return self.plan.actor.runtime.device_type

    def told(self) -> dict[str, Any]:
        """For a record: what the engine is started with."""
        engine, transport = self.plan.engines[0], self.plan.transport
        return {
            "model": str(self.config.model.path),
            "dtype": self.plan.dtype,
            "residency": self.plan.residency,
            "transport": transport.protocol if transport else None,
            "sleep_level": engine.sleep.level,
            "engine_args": {arg.name: arg.value for arg in engine.args},
            "engine_env": {**engine.env, **engine.mask},
        }

    def logs(self) -> dict[str, list[str]]:
        """The last lines of what engine, router and children printed."""
        files = sorted((self.folder / "run" / "logs").glob("*"))
        return {f.name: f.read_text(errors="replace").splitlines()[-TAIL_LINES:] for f in files if f.is_file()}


def finish(record: Record, planned: Planned, text: str) -> int:
    """Write and print; the folder with the logs stays where a part failed. The exit code."""
    record.save()
    print(text, flush=True)
    if record.ok:
        shutil.rmtree(planned.folder, ignore_errors=True)
    else:
        print(f"logs: {planned.folder / 'run' / 'logs'}", flush=True)
    return 0 if record.ok else 1


def plan_run(
    args: argparse.Namespace,
    here: Here,
    model: Path,
    *,
    tokens: tuple[int, int] = TINY,
    topology: Mapping[str, Any] | None = None,
) -> Planned:
    """Plan a run on one device of this machine, or with a `topology`; `tokens` are the longest prompt and response.

    Raises what `vime plan` raises.
    """
    from vime.assemble.setups import Keys
    from vime.config.load import load_config
    from vime.models.registry import read_shape
    from vime.planning import make
    from vime.planning.needs import needs_from
    from vime.topology.load import load_topology

    folder = Path(tempfile.mkdtemp(prefix="vime-bench-"))
    path = folder / "run.yaml"
    settings = _run_file(args, here, folder, (model, tokens))
    path.write_text(yaml.safe_dump(settings | ({} if topology is None else {"topology": dict(topology)})))
    loaded = load_config(path, overrides=args.overrides)
    asked = load_topology(loaded.topology_source, platform=args.platform)
    pools = frozenset(asked.topology.pools)
    plan = make.make_plan(
        asked,
        model=read_shape(loaded.config.model.path),
        needs=needs_from(loaded.config),
        platforms={args.platform: here.platform},
        inventories=dict.fromkeys(pools, (here.node,)),
        here=make.Here(dict(os.environ), pools),
    )
    return Planned(loaded.config, plan, Keys.draw(), folder)


def _run_file(args: argparse.Namespace, here: Here, folder: Path, work: tuple[Path, tuple[int, int]]) -> dict[str, Any]:
    (model, tokens), virtual = work, here.node.virtual
    engine: dict[str, Any] = {} if virtual else {"kv_cache_memory_bytes": int(args.kv_gib * GIB)}
    engine |= {} if args.utilization is None else {"gpu_memory_utilization": args.utilization}
    pool = {"platform": "auto", **({"nodes": 1, "devices_per_node": 1} if virtual else {})}
    return {
        "run": {"dir": str(folder / "run"), "seed": 5},
        "model": {"path": str(model.resolve()), "dtype": args.dtype},
        "topology": {
            "schema": "vime.topology/v1",
            "name": "bench",
            "pools": {"node": pool},
            "roles": {"actor": {"kind": "train", "devices": 1}, "rollout": {"kind": "rollout", "devices": 1}},
            "share": [{"roles": ["actor", "rollout"], "mode": "time", "residency": args.residency}],
            "sync": [{"from": "actor", "to": "rollout"}],
        },
        "data": {"path": str(model / "prompts.jsonl"), "max_prompt_tokens": tokens[0]},
        "rollout": {
            "sampling": {"max_response_tokens": tokens[1]},
            "start_timeout_s": args.start_limit,
            "vllm": engine,
        },
        "reward": {"kind": "vime.benchmarks.even_ids:even"},
        "algorithm": {"kind": "grpo"},
        "schedule": {"num_steps": 1},
        # Nothing is trained here: small steps, so that the plan leaves the device to what is measured.
        "trainer": {"recompute": "full", "max_tokens_per_micro_batch": max(1024, sum(tokens))},
        "observe": {"tensorboard": False},
    }


# ---- processes


@asynccontextmanager
async def served(planned: Planned, clock: Clock) -> AsyncIterator[Any]:
    """A started `EngineServer`; its gate is shut."""
    from vime.rollout.engine import EngineServer

    server = EngineServer(planned.spec)
    try:
        server.start()
        await server.wait_ready(clock.left(planned.config.rollout.start_timeout_s))
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def routed(planned: Planned, server: Any, clock: Clock) -> AsyncIterator[Any]:
    """A started `RouterServer` with the engine behind it."""
    from vime.assemble.setups import router_spec
    from vime.rollout.router import RouterServer

    router = RouterServer(router_spec(planned.config, planned.plan, planned.keys))
    try:
        router.start()
        await router.wait_ready(clock.left(60))
        await router.add_worker(server.url)
        yield router
    finally:
        await asyncio.to_thread(router.stop)


def control_of(planned: Planned, server: Any, clock: Clock) -> Any:
    """An `EngineControl` of a started server."""
    from vime.weights.control import EngineControl

    keys = planned.keys
    return EngineControl(
        server.url, api_key=keys.api_key, run_token=keys.run_token, timeout_s=clock.left(120), name=server.spec.name
    )


def bounded(work: Callable[[], Awaitable[Mapping[str, Any]]], clock: Clock) -> dict[str, Any]:
    """Run the asynchronous body of a part within what is left of the benchmark's seconds."""

    async def body() -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(clock.left()):
                return await work()
        except TimeoutError:
            clock.left()
            raise

    return dict(asyncio.run(body()))


def with_logs(work: Callable[[], Mapping[str, Any]], planned: Planned) -> dict[str, Any]:
    """What the part returns; after a failure the error and the ends of the logs, as a part that is not ok."""
    try:
        return dict(work())
    except (Exception, VimeError) as error:  # noqa: BLE001  a part that fails must not cost the others
        text = f"{type(error).__name__}: {error}"[:4000]
        return {"ok": False, "error": text, "trace": traceback.format_exc()[-4000:], "logs": planned.logs()}


def as_trainer(planned: Planned) -> None:
    """From here on this process has a trainer's environment: after the engine has started, before torch is imported."""
    actor = planned.plan.actor
    for values in (actor.env, *actor.masks[:1]):
        os.environ.update(values)


# ---- what is printed


def table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    """Rows of (name, value, note) as aligned text; a row of one is a heading."""
    texts = [[_text(cell) for cell in row] for row in rows]
    width = max((len(row[0]) for row in texts if len(row) > 1), default=0)
    value = max((len(row[1]) for row in texts if len(row) > 1), default=0)
    lines = [title, "-" * len(title)]
    for row in texts:
        name = row[0].ljust(width) if len(row) > 1 else row[0]
        cells = [name, *(cell.rjust(value) for cell in row[1:2]), *row[2:]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
