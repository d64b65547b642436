"""What the devices can do, how they are named to Ray and HIP, the environment of a process, and its process groups."""

from __future__ import annotations

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import NodeInventory
from vime.facts.process import EnvValue, RoleKind, RoleRequest
from vime_rocm.devices import GFX942, GFX950, common_kind

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
VISIBLE = (HIP, CUDA)
"""Both get the same list: vLLM copies the first into the second and refuses when they differ, Ray reads the first."""

NOSET = tuple(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in (HIP, CUDA, ROCR))

FNUZ, OCP = "e4m3fnuz", "e4m3fn"
FP8_RECIPES = {GFX942: (FNUZ,), GFX950: (OCP, "mxfp8", "mxfp6", "mxfp4")}
"""8-bit and smaller formats with matrix instructions, by architecture."""

_ABSENT = {
    "deterministic": "nobody has shown that RCCL, attention kernels and atomics repeat bit for bit here",
    "virtual_devices": "devices are hardware; a partition of a chip is listed as what it is",
    "fabric": "xGMI ends at the node: no set of nodes reaches each other at that speed",
}
_PINNED_KIB = str(4 * 2**20)
_PINNED_WHY = (
    "below this size (KiB, so 4 GiB) copies from mapped weight files are staged; above it HIP registers the pages, which "
    "makes the driver suspend queues. vLLM sets it in its first process only, so every process gets it here"
)


def arches(inventory: NodeInventory) -> set[str | None]:
    """Instruction sets of a node's devices."""
    return {device.arch for device in inventory.devices}


def capabilities(inventory: NodeInventory) -> Capabilities:
    """By architecture. Of a node with several, what all of them can do."""
    absent = dict(_ABSENT)
    sets = [FP8_RECIPES.get(arch or "", ()) for arch in sorted(arches(inventory), key=str)]
    recipes = tuple(r for r in (sets[0] if sets else ()) if all(r in other for other in sets))
    if not recipes:
        absent["fp8_recipes"] = "the architecture of the devices is unknown, or they have no 8-bit format in common"
    elif recipes == FP8_RECIPES[GFX942]:
        absent[OCP] = f"{GFX942} computes with {FNUZ}: the same bits mean half the value; a checkpoint in {OCP} is rescaled"
    return Capabilities(
        device_type="cuda",
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16",
        fp8_recipes=recipes,
        ipc=("hip_ipc",),
        collectives=("nccl", "gloo"),
        absent=absent,
    )


def ray_binding(inventory: NodeInventory) -> RayBinding:
    """HIP and CUDA variables get one list, ROCR's is removed, Ray sets none of the three.

    Masks hold numbers, which every release takes. Importers of device memory see the whole node,
    because a memory handle carries the exporter's number and is resolved in the importer's list.
    """
    kind = common_kind(inventory.devices)
    return RayBinding(
        resource="GPU",
        visible_env=VISIBLE,
        noset_env=NOSET,
        unset_env=(ROCR,),
        labels={"ray.io/accelerator-type": kind.ray_type} if kind is not None else {},
        id_kind="index",
        full_node_mask=True,
    )


def environment(request: RoleRequest) -> dict[str, EnvValue]:
    """Environment rules for one process of a role. What an engine's sleep needs is in `engine.sleep`."""
    rules = {
        "GPU_PINNED_MIN_XFER_SIZE": EnvValue(_PINNED_KIB, _PINNED_WHY),
        "TOKENIZERS_PARALLELISM": EnvValue("false", "tokenizer threads do not survive the forks of engine and graders"),
    }
    if request.kind is RoleKind.TRAINER:
        rules["OMP_NUM_THREADS"] = EnvValue(str(request.threads), "the role's share of the host's processors")
        if request.parallel.tp > 1 or request.parallel.cp > 1:
            why = "one hardware queue keeps communication and computation in the order that megatron-core issues them"
            rules["CUDA_DEVICE_MAX_CONNECTIONS"] = EnvValue("1", why)
    return rules


def collective(group: GroupRequest) -> CollectiveSpec:
    """RCCL under the name that torch gives it; the host's side of a trainer's group is gloo."""
    weight_sync = group.purpose == "weight_sync"
    return CollectiveSpec(
        backend="nccl" if weight_sync else "cpu:gloo,cuda:nccl",
        timeout_s=300.0 if weight_sync else 1800.0,
        reduce_ops=("sum", "avg", "max", "min", "product"),
        limits={
            "two ranks on one device": "RCCL refuses the group",
            "variables of MSCCL or MSCCL++": "they have no effect: RCCL no longer contains these",
            "buffers of a group": "they are outside torch's allocator and stay on the device while a role is parked",
        },
    )
