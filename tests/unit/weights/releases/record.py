"""Reads from a vLLM release's source what vime touches of it, and writes it as JSON. Nothing of vLLM is imported.

    python tests/unit/weights/releases/record.py VLLM_FOLDER RELEASE ROUTES OUT.json

ROUTES is `source`, or a JSON file `{"origin": "...", "routes": [...]}` with the `routes` of a live server's
`/vime/identity`.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

TOUCHED: dict[str, tuple[str, ...]] = {
    "config/vllm.py": ("set_current_vllm_config",),
    "config/weight_transfer.py": ("WeightTransferConfig",),
    "distributed/weight_transfer/base.py": ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
    "distributed/weight_transfer/factory.py": ("WeightTransferEngineFactory",),
    "entrypoints/scale_out/token_in_token_out/protocol.py": (
        *("GenerateRequest", "GenerateResponseChoice", "GenerateChoiceBase", "GenerateTokensChoice"),
        *("GenerateResponse", "GenerateResponseBase"),
    ),
    "logprobs.py": ("Logprob",),
    "model_executor/model_loader/reload/layerwise.py": (
        *("get_layerwise_info", "initialize_layerwise_reload", "finalize_layerwise_processing"),
    ),
    "model_executor/model_loader/reload/sanitize.py": ("restore_layer_refs",),
    "model_executor/model_loader/reload/types.py": ("LayerReloadingInfo",),
    "renderers/base.py": ("BaseRenderer",),
    "sampling_params.py": ("SamplingParams",),
    "v1/engine/core_client.py": ("AsyncMPClient",),
    "v1/worker/gpu_worker.py": ("Worker",),
    "v1/worker/worker_base.py": ("WorkerBase",),
}
METHODS = frozenset(
    {
        *("__init__", "register_engine", "create_engine", "init_weight_transfer_engine", "start_weight_update"),
        *("update_weights", "finish_weight_update", "sleep", "wake_up", "pause_scheduler_async", "clear_mm_cache_async"),
    }
)
"""Methods whose parameters are kept, besides the abstract ones."""
VARIABLES = ("VLLM_SERVER_DEV_MODE", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_NO_USAGE_STATS", "VLLM_API_KEY", "VLLM_PLUGINS")


def described(node: ast.stmt) -> dict[str, Any]:
    """Of a function its parameters; of a class its bases, fields, kept methods and which of them are abstract."""
    if isinstance(node, Function):
        return {"parameters": parameters(node)}
    assert isinstance(node, ast.ClassDef)
    methods = [m for m in node.body if isinstance(m, Function)]
    abstract = [m.name for m in methods if any(ast.unparse(d) == "abstractmethod" for d in m.decorator_list)]
    names = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "fields": [name for name in names if not name.startswith("_")],
        "abstract": abstract,
        "methods": {m.name: parameters(m) for m in methods if m.name in METHODS or m.name in abstract},
    }


def parameters(function: Function) -> list[str]:
    """Names in order; `*` begins those given by name, `=` ends one with a default."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    least = len(plain) - len(a.defaults)
    named = [p.arg + ("=" if d is not None else "") for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return [p.arg + ("=" if i >= least else "") for i, p in enumerate(plain)] + (["*", *named] if named else [])


def routes_in(folder: Path) -> list[str]:
    """Paths in decorators such as `@router.post("/pause")`, whether a server attaches them or not."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, Function) else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("get", "post"):
                    found |= {a.value for a in call.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return sorted(found)


def record(root: Path, release: str, routes: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for file, wanted in TOUCHED.items():
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in wanted:
                names[node.name] = described(node)
    live = None if routes == "source" else json.loads(Path(routes).read_text(encoding="utf-8"))
    variables = (root / "envs.py").read_text(encoding="utf-8")
    modules = ("entrypoints/openai/api_server.py", "entrypoints/launchers/api_server/entry.py")
    return {
        "release": release,
        "origin": "read from source",
        "routes_origin": live["origin"] if live else "read from source",
        "routes": live["routes"] if live else routes_in(root / "entrypoints"),
        "servers": ["vllm." + m.removesuffix(".py").replace("/", ".") for m in modules if (root / m).is_file()],
        "variables": [name for name in VARIABLES if f'"{name}"' in variables],
        "names": names,
    }


if __name__ == "__main__":
    source, release, routes, out = sys.argv[1:5]
    Path(out).write_text(json.dumps(record(Path(source), release, routes), indent=1) + "\n", encoding="utf-8")
