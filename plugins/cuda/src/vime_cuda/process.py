"""What a node can do, its names in Ray, its process environment and its process groups."""

from __future__ import annotations

from collections.abc import Mapping

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import Device, NodeInventory
from vime.facts.process import EnvMode, EnvValue, RoleKind, RoleRequest
from vime_cuda.inventory import oldest_arch, product

_HOPPER, _BLACKWELL = 90, 100

_FP8_RECIPES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (_BLACKWELL, ("mxfp8", "nvfp4")),
    (_HOPPER, ("blockwise", "tensorwise")),
    (89, ("tensorwise",)),
)
"""Scaling recipes that the tensor cores run themselves, best first, from the named instruction set on."""

_DETERMINISTIC = "nothing of this platform has been compared bit for bit on hardware"


def capabilities(inventory: NodeInventory) -> Capabilities:
    """What all usable devices of the node can do: of mixed ones, what the oldest can."""
    arch = oldest_arch(inventory.devices)
    recipes = fp8_recipes(arch)
    absent = {"deterministic": _DETERMINISTIC}
    if arch is None:
        absent["fp8_recipes"] = "the instruction set of a device is unknown"
    elif not recipes:
        absent["fp8_recipes"] = f"sm{arch} has no 8-bit tensor cores; they begin with sm89"
    elif arch >= _BLACKWELL:
        absent["blockwise"] = "Hopper's 128 x 128 blocks are emulated through mxfp8 here: use mxfp8"
    whole = all(device.partition is None for device in inventory.devices)
    if not whole:
        absent["ipc"] = "instances of a split device (MIG) cannot open each other's memory"
    return Capabilities(
        device_type="cuda",
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16",
        fp8_recipes=recipes,
        ipc=("cuda_ipc",) if whole else (),
        collectives=("nccl", "gloo"),
        absent=absent,
    )


def fp8_recipes(arch: int | None) -> tuple[str, ...]:
    """Native recipes of an instruction set, best first."""
    return next((recipes for least, recipes in _FP8_RECIPES if arch is not None and arch >= least), ())


def ray_binding(inventory: NodeInventory) -> RayBinding:
    """Ray's `GPU`, masked by index.

    Index rather than UUID, because several releases of vLLM read the entries of the mask as numbers. The numbers are NVML's,
    which CUDA follows under `CUDA_DEVICE_ORDER=PCI_BUS_ID`; `environment` requires that. Processes see the whole node, their
    own devices first: an engine's workers open a buffer on the device of the trainer's first rank.
    """
    return RayBinding(
        resource="GPU",
        visible_env=("CUDA_VISIBLE_DEVICES",),
        noset_env=("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",),
        labels=_labels(inventory.devices),
        id_kind="index",
        full_node_mask=True,
    )


def _labels(devices: tuple[Device, ...]) -> dict[str, str]:
    """Ray's own name for the product, where all devices are of one."""
    kinds = {product(device.name) for device in devices if device.health == "ok"}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {} if kind is None else {"ray.io/accelerator-type": kind}


def environment(request: RoleRequest) -> Mapping[str, EnvValue]:
    """Environment rules for one process of a role. What only engines need as servers is in `engine`."""
    threads = str(request.threads)
    rules = {
        "CUDA_DEVICE_ORDER": EnvValue(
            "PCI_BUS_ID", "the mask's numbers are NVML's, which count by PCI bus; CUDA's own order is by speed", EnvMode.REQUIRE
        ),
        "OMP_NUM_THREADS": EnvValue(threads, "the role's share of the host's processors"),
        "TOKENIZERS_PARALLELISM": EnvValue("false", "tokenizer threads do not survive the forks of engine and graders"),
        "TORCHINDUCTOR_COMPILE_THREADS": EnvValue(
            threads, "torch compiles with a process for every core of the node otherwise"
        ),
    }
    if request.kind is RoleKind.TRAINER:
        rules |= _trainer_rules(request)
    return rules


def _trainer_rules(request: RoleRequest) -> dict[str, EnvValue]:
    arch = oldest_arch(device for node in request.inventories for device in node.devices)
    split = request.parallel.tp > 1 or request.parallel.cp > 1
    if not split or arch is None or arch >= _BLACKWELL:
        return {}
    why = "megatron-core overlaps communication of split layers with products by the order of one queue (before Blackwell)"
    return {"CUDA_DEVICE_MAX_CONNECTIONS": EnvValue("1", why)}


def collective(request: RoleRequest, group: GroupRequest) -> CollectiveSpec:
    """NCCL for tensors on devices; trainers keep gloo beside it for objects and host tensors."""
    limits = {
        "two ranks of a group on one device": "NCCL refuses with `Duplicate GPU detected`: trainer and engine that share a "
        "device pass weights by handle (device_ipc)",
        "NCCL_CUMEM_ENABLE or NCCL_NVLS_ENABLE differ between the ranks of a group": "NCCL fails or hangs when it starts",
        "devices are nearly full": "NCCL's buffers are outside torch's allocator: it runs out of memory, not torch",
    }
    arch = oldest_arch(device for node in request.inventories for device in node.devices)
    if arch is not None and arch >= _HOPPER:
        limits["the fabric manager does not run, or a virtual machine has no multicast"] = (
            "NVLS (reduction in the switch, NCCL's automatic choice from Hopper on) cannot start: set NCCL_NVLS_ENABLE=0"
        )
    syncs = group.purpose == "weight_sync"
    return CollectiveSpec(
        backend="nccl" if syncs else "cpu:gloo,cuda:nccl",
        timeout_s=120.0 if syncs else 1800.0,
        reduce_ops=("sum", "avg", "max", "min", "product"),
        limits=limits,
    )
