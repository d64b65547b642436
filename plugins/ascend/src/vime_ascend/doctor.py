"""What usually goes wrong on this platform. Facts come from the inventory, so that a recording gives the same findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vime.errors import PlanError
from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.planning.masks import inherited_mask, visible_node
from vime_ascend.chips import generation_of_device
from vime_ascend.engine import ALLOCATOR
from vime_ascend.process import HCCL_BUFFER_MIB, VISIBLE, binding
from vime_ascend.versions import older, parse
from vime_ascend.weights import REOPENING_DRIVER, SHARING_CANN, SHARING_DRIVER

NEEDED: Mapping[str, tuple[str, ...]] = {
    "trainer": ("torch", "torch-npu", "mindspeed", "megatron-core", "ray"),
    "engine": ("vllm", "vllm-ascend", "torch", "torch-npu", "ray"),
}
_COMMUNICATORS = 10
"""About as many groups as megatron-core makes for one rank with tensor, pipeline and expert parallelism."""
_MUCH_OF_A_CHIP = 0.1
_CONNECT_RANGE_S = (120, 7200)


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings, one an id. Nothing is run and no device is touched."""
    yield _chips(ctx)
    yield _software(ctx, "trainer")
    yield _software(ctx, "engine")
    yield _torch_pair(ctx)
    yield _vllm_build(ctx)
    yield _driver(ctx)
    yield _cann(ctx)
    yield _mask(ctx)
    yield _allocator(ctx.env)
    yield _layout(ctx.env)
    yield _buffers(ctx)
    yield _connect_timeout(ctx.env)
    yield _preload(ctx.env)
    yield _tool(ctx)
    yield _language(ctx)


def _ok(name: str, finding: str) -> Check:
    return Check(f"ascend.{name}", Severity.OK, finding)


def _chips(ctx: DoctorContext) -> Check:
    sick = [f"{device.index}: {device.health}" for device in ctx.inventory.devices if device.health != "ok"]
    if not sick:
        return _ok("chips", f"{len(ctx.inventory.devices)} chips, all healthy")
    what = f"{len(sick)} of {len(ctx.inventory.devices)} chips are left out: {'; '.join(sick)}"
    fix = "look at `npu-smi info -t health -i CARD -c CHIP`; reset the chip while it is idle, or have it replaced"
    return Check("ascend.chips", Severity.ERROR, what, fix)


def _software(ctx: DoctorContext, role: str) -> Check:
    present = ctx.inventory.software.get(role, {})
    missing = [name for name in NEEDED[role] if name not in present]
    if not missing:
        return _ok(role, ", ".join(f"{name} {present[name]}" for name in NEEDED[role]))
    what = f"this node cannot be a {role}: {', '.join(missing)} not installed in this interpreter"
    fix = "use the vendor's image for this CANN, or pip install torch-npu and vllm-ascend of one release; MindSpeed from source"
    return Check(f"ascend.{role}", Severity.WARNING, what, fix)


def _torch_pair(ctx: DoctorContext) -> Check:
    """A torch-npu has to be of torch's release, in every role's interpreter."""
    wrong: dict[str, str] = {}
    for role, names in ctx.inventory.software.items():
        torch, npu = parse(names.get("torch")), parse(names.get("torch-npu"))
        if torch is not None and npu is not None and torch.release[:2] != npu.release[:2]:
            wrong[role] = f"torch {names['torch']} beside torch-npu {names['torch-npu']} ({role})"
    if not wrong:
        return _ok("torch-pair", "no torch-npu that is of another release than its torch")
    what = f"{'; '.join(wrong.values())}: built for another torch, importing it fails"
    return Check("ascend.torch-pair", Severity.ERROR, what, "pip install the torch-npu whose first two numbers are torch's")


def _vllm_build(ctx: DoctorContext) -> Check:
    build = ctx.inventory.vendor.get("vllm_ascend_build")
    found = {g.build: g for device in ctx.inventory.devices if (g := generation_of_device(device))}
    if build is None or not found:
        return _ok("vllm-build", "vllm-ascend does not say which chips it was built for, or is not here")
    if build in found:
        return _ok("vllm-build", f"vllm-ascend was built for {build}, which these chips are")
    here = ", ".join(g.name for g in found.values())
    what = f"vllm-ascend was built for {build}, the chips are {here}: every worker ends when it starts"
    fix = "use the image for these chips (tags that end in -a3 are for Atlas A3), or build with their SOC_VERSION"
    return Check("ascend.vllm-build", Severity.ERROR, what, fix)


def _driver(ctx: DoctorContext) -> Check:
    driver, cann = ctx.inventory.driver, ctx.inventory.vendor.get("cann")
    if parse(driver) is None:
        return Check("ascend.driver", Severity.WARNING, f"driver version {driver or 'not told'}", "run `npu-smi info` by hand")
    if older(driver, SHARING_DRIVER):
        newer = f"; CANN {cann} expects a newer one" if cann and not older(cann, SHARING_CANN) else ""
        what = f"driver {driver}: trainer and engine cannot share a chip before {SHARING_DRIVER}{newer}"
        return Check("ascend.driver", Severity.ERROR, what, f"update driver and firmware to {REOPENING_DRIVER} or newer")
    if older(driver, REOPENING_DRIVER):
        what = (
            f"driver {driver}: several engine workers cannot open one buffer before {REOPENING_DRIVER} (device_ipc with tp > 1)"
        )
        return Check("ascend.driver", Severity.WARNING, what, f"update driver and firmware to {REOPENING_DRIVER} or newer")
    return _ok("driver", f"driver {driver}, firmware {ctx.inventory.vendor.get('firmware') or 'not told'}")


def _cann(ctx: DoctorContext) -> Check:
    cann = ctx.inventory.vendor.get("cann")
    if cann is None:
        what = "CANN is not found: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME leads to its install file"
        fix = "source /usr/local/Ascend/ascend-toolkit/set_env.sh before starting Ray and vime"
        return Check("ascend.cann", Severity.WARNING, what, fix)
    if older(str(cann), SHARING_CANN):
        what = (
            f"CANN {cann}: memory of a chip is shared with listed processes only before {SHARING_CANN} (device_ipc is left out)"
        )
        return Check("ascend.cann", Severity.WARNING, what, f"install CANN {SHARING_CANN} or newer, with torch-npu to match")
    return _ok("cann", f"CANN {cann}")


def _mask(ctx: DoctorContext) -> Check:
    """The mask as a plan reads it."""
    names, chips = binding(ctx.inventory), len(ctx.inventory.devices)
    fix = f"unset {VISIBLE}, or list logical ids of `npu-smi info -m`; in a container they start at 0"
    try:
        shown = len(visible_node(names, ctx.inventory, ctx.env).devices)
    except PlanError as error:
        return Check("ascend.mask", Severity.ERROR, error.what, fix)
    if inherited_mask(names, ctx.env) is None:
        return _ok("mask", f"{VISIBLE} is not set: every chip is visible")
    if not shown:
        return Check("ascend.mask", Severity.ERROR, f"{VISIBLE}={ctx.env[VISIBLE]!r} hides every chip", fix)
    return _ok("mask", f"{VISIBLE} shows {shown} of {chips} chips")


def _allocator(env: Mapping[str, str]) -> Check:
    options = [option.strip() for option in env.get(ALLOCATOR, "").split(",")]
    if "expandable_segments:True" in options:
        what = f"{ALLOCATOR} switches expandable segments on; vime switches them off for engines that sleep, as they must be"
        fix = f"nothing for vime; servers started by hand with sleep mode need {ALLOCATOR}=expandable_segments:False"
        return Check("ascend.allocator", Severity.INFO, what, fix)
    return _ok("allocator", f"{ALLOCATOR} does not switch expandable segments on")


def _layout(env: Mapping[str, str]) -> Check:
    value = env.get("VLLM_ASCEND_ENABLE_NZ", "").strip()
    if value in ("", "0"):
        return _ok("layout", "weights stay in ND layout")
    what = f"VLLM_ASCEND_ENABLE_NZ={value}: weights in FRACTAL_NZ layout cannot be updated, and an engine refuses to wake"
    return Check("ascend.layout", Severity.ERROR, what, "unset VLLM_ASCEND_ENABLE_NZ, or set it to 0")


def _buffers(ctx: DoctorContext) -> Check:
    text = ctx.env.get("HCCL_BUFFSIZE", str(HCCL_BUFFER_MIB))
    if not text.isdecimal() or int(text) < 1:
        what = f"HCCL_BUFFSIZE={text!r} is not a whole number of MiB"
        return Check("ascend.buffers", Severity.ERROR, what, f"unset HCCL_BUFFSIZE, or set it to {HCCL_BUFFER_MIB}")
    taken = 2 * int(text) * _COMMUNICATORS
    smallest = min((d.memory_bytes for d in ctx.inventory.devices), default=0) // 2**20
    sum_of = f"{_COMMUNICATORS} communicators x 2 x {text} MiB = {taken} MiB of {smallest} MiB a chip"
    if smallest and taken > _MUCH_OF_A_CHIP * smallest:
        fix = f"set HCCL_BUFFSIZE to {HCCL_BUFFER_MIB}, or give topology limits.device_reserve that much"
        return Check("ascend.buffers", Severity.WARNING, f"{sum_of}, which torch's counters do not show", fix)
    return _ok("buffers", sum_of)


def _connect_timeout(env: Mapping[str, str]) -> Check:
    text, (low, high) = env.get("HCCL_CONNECT_TIMEOUT"), _CONNECT_RANGE_S
    if text is None or (text.isdecimal() and low <= int(text) <= high):
        return _ok("connect-timeout", f"HCCL_CONNECT_TIMEOUT is {text or 'left to vime'}")
    what = f"HCCL_CONNECT_TIMEOUT={text!r} is outside of {low} to {high} seconds"
    return Check("ascend.connect-timeout", Severity.ERROR, what, "unset HCCL_CONNECT_TIMEOUT")


def _preload(env: Mapping[str, str]) -> Check:
    preload = env.get("LD_PRELOAD", "")
    if "torch_memory_saver" in preload:
        what = f"LD_PRELOAD={preload}: torch_memory_saver's library hooks another vendor's allocator"
        return Check("ascend.preload", Severity.WARNING, what, "unset LD_PRELOAD: vime parks a trainer without preloading")
    return _ok("preload", "no library of another vendor's allocator is preloaded")


def _tool(ctx: DoctorContext) -> Check:
    problems = dict(ctx.inventory.vendor.get("problems") or {})
    if not problems:
        return _ok("tool", f"npu-smi {ctx.inventory.vendor.get('npu_smi') or ''} answered every question".replace("  ", " "))
    what = "; ".join(f"{name}: {problem}" for name, problem in sorted(problems.items()))
    fix = "run the commands by hand; without them links, processors near a chip or firmware stay unknown"
    return Check("ascend.tool", Severity.WARNING, what, fix)


def _language(ctx: DoctorContext) -> Check:
    if not ctx.inventory.vendor.get("translated"):
        return _ok("language", "npu-smi answers untranslated")
    what = "npu-smi answers in another language though it was asked with LC_ALL=C; vime reads numbers, not labels"
    fix = "nothing for vime; other programs that read its labels (vllm-ascend's binding of processors) need LC_ALL=C to work"
    return Check("ascend.language", Severity.INFO, what, fix)
