"""What a node can do, how Ray and masks name its devices, and the environment of its processes."""

from __future__ import annotations

from acme_accelerator.weights import PROTOCOL
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.process import EnvMode, EnvValue, RoleKind, RoleRequest

CAPABILITIES = Capabilities(
    device_type="cpu",
    dtypes=("float32", "bfloat16"),
    default_dtype="float32",
    collectives=("gloo",),
    deterministic=("trainer", "engine"),
    engine_frees_memory=False,
    absent={
        "float16": "the A1 has no half-precision units",
        "fp8_recipes": "the A1 has no 8-bit units",
        "ipc": "one process cannot open another's device memory; weights travel over acme_link",
        "engine_frees_memory": "vLLM's CPU platform, on which the engine runs, only pauses",
    },
)

MASK = "ACME_VISIBLE_DEVICES"
BINDING = RayBinding(
    resource="ACME",
    visible_env=(MASK,),
    noset_env=(f"RAY_EXPERIMENTAL_NOSET_{MASK}",),
    labels={"acme.example/generation": "a1"},
    id_kind="index",
)
"""A mask holds numbers of devices. Ray knows no such device and leaves the mask alone; should it learn, it is told not to."""

FRAME_VARIABLE = "ACME_LINK_FRAME_BYTES"
FRAME_BYTES = 1 << 20


def environment(request: RoleRequest) -> dict[str, EnvValue]:
    """Environment rules for one process of a role; each says why."""
    threads = EnvValue(str(request.threads), "the role's share of the processors that compute for the device")
    rules = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": EnvValue("false", "tokenizer threads do not survive the forks of engine and graders"),
        FRAME_VARIABLE: EnvValue(str(FRAME_BYTES), "both ends cut frames alike", scope="both_equal", protocols=(PROTOCOL,)),
        "ACME_LAZY_COPY": EnvValue("1", "a copy that returns early would let the next step overwrite weights", EnvMode.FORBID),
        "TORCHDYNAMO_DISABLE": EnvValue("1", "compiling for the device would need a C++ compiler"),
    }
    if request.kind is RoleKind.ENGINE:
        why = "the first log-prob request would compile kernels for many seconds"
        rules["TORCHDYNAMO_DISABLE"] = EnvValue("1", why, EnvMode.REQUIRE)
    return rules
