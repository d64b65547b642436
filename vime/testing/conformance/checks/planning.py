"""What a plan is made from: nominal devices, capabilities, binding, rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.inventory import DeviceProfile
from vime.facts.perf import UNITS, Provenance
from vime.testing.conformance.registry import NotRun, check, require
from vime.testing.conformance.scheduler import masked_resources
from vime.testing.conformance.subject import Subject

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
PROVENANCES = ("spec", "measured", "derived", "nominal")
_UNITS = ("bytes/s", "FLOP/s", "s", "bytes", "1/s", "W", "tokens/s", "share")


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once."""
    seen = list(names)
    return sorted({name for name in seen if seen.count(name) > 1})


@check("C15", hooks=["vime_profiles"], title="nominal devices are whole")
def profiles_are_whole(subject: Subject) -> None:
    """Every nominal device has a name of its own, the platform's name, sizes, the host's and (unless it is virtual) its own
    architecture, and says where its numbers come from."""
    profiles = subject.ask("vime_profiles")
    require(profiles, "vime_profiles lists nothing, so that no plan can be made without the machine", "describe one device")
    twice = repeated(profile.name for profile in _own_profiles(subject))
    require(not twice, f"profiles share a name: {', '.join(twice)}", "give every profile a name of its own")
    for profile in profiles:
        at = f"profile {profile.name!r}"
        require(profile.name and profile.name == profile.name.strip(), f"{at} has no plain name", "name it as people do")
        known = profile.platform in subject.platform.lineage
        require(known, f"{at} is of platform {profile.platform!r}", f"write {subject.name!r}")
        sized = profile.memory_bytes > 0 and profile.node_memory_bytes > 0 and profile.numa_nodes > 0
        require(sized, f"{at} has a size of 0 or less", "give memory_bytes, node_memory_bytes and numa_nodes")
        counted = profile.virtual or (profile.devices_per_node or 0) > 0
        require(counted, f"{at} does not say how many devices a node has", "give devices_per_node")
        require(profile.arch, f"{at} has no host architecture", "give arch: x86_64, aarch64")
        require(profile.virtual or profile.device_arch, f"{at} has no device_arch", "give the device's instruction set")
        domain, each = profile.domain_devices, profile.devices_per_node
        fits = domain is None or each is None or (domain > 0 and (domain % each == 0 or domain < each))
        require(fits, f"{at} has domains of {domain} devices and nodes of {each}", "a domain holds whole nodes")
        known = profile.provenance in PROVENANCES
        require(known, f"{at} has provenance {profile.provenance!r}", f"write one of {', '.join(PROVENANCES)}")


def _own_profiles(subject: Subject) -> list[DeviceProfile]:
    """The leaf's own contribution: a child may replace its parent's profile by one of the same name."""
    own = [hook.call for hook in subject.platform.plugins[-1].hooks if hook.hook == "vime_profiles" and not hook.wrapper]
    return [profile for call in own for profile in call() or ()]


@check("C16", hooks=["vime_capabilities"], title="capabilities are consistent")
def capabilities_are_consistent(subject: Subject) -> None:
    """Capabilities name torch's device type, contain the default dtype and a collective backend, agree with the inventory on
    virtual devices, and give a reason for what is absent."""
    for case in subject.cases:
        found: Capabilities = subject.ask("vime_capabilities", case.inventory)
        at = f"for {case.name}"
        require(found.device_type.strip(), f"device_type is empty {at}", "give torch's name of the device")
        default = found.default_dtype in found.dtypes
        require(default, f"default_dtype {found.default_dtype!r} is not in dtypes {found.dtypes} {at}", "list it")
        require(found.collectives, f"no collective backend {at}", "list the backends that torch.distributed can use")
        agree = found.virtual_devices == case.inventory.virtual
        what = f"virtual_devices is {found.virtual_devices} {at}, the inventory says {case.inventory.virtual}"
        require(agree, what, "make both say the same")
        for name in ("fp8_recipes", "ipc"):
            explained = getattr(found, name) or found.absent.get(name)
            require(explained, f"{name} is empty {at} and absent gives no reason", f"put {name!r} and why into absent")
        frees = found.engine_frees_memory or found.absent.get("engine_frees_memory")
        require(frees, f"engine_frees_memory is false {at} and absent gives no reason", "put it and why into absent")
        empty = [name for name, why in found.absent.items() if not why.strip()]
        require(not empty, f"absent gives no reason for {', '.join(empty)} {at}", "say why")


@check("C17", hooks=["vime_ray_binding"], title="the binding names devices")
def binding_names_devices(subject: Subject) -> None:
    """The binding names a Ray resource; for hardware also the variables that mask devices and, where Ray knows the resource and
    would set them, those that keep it from that. Entries of a mask are indexes or ids."""
    for case in subject.cases:
        binding: RayBinding = subject.ask("vime_ray_binding", case.inventory)
        at = f"for {case.name}"
        require(binding.resource.strip(), f"the binding names no resource {at}", "name the Ray resource of one device")
        require(binding.id_kind in ("index", "uuid"), f"id_kind is {binding.id_kind!r} {at}", "write index or uuid")
        same = binding.virtual == case.inventory.virtual
        require(same, f"virtual is {binding.virtual} {at}, the inventory says {case.inventory.virtual}", "make both equal")
        if not binding.virtual:
            require(binding.visible_env, f"no variable masks devices {at}", "give visible_env")
            free = binding.noset_env or binding.resource not in masked_resources()
            require(free, f"nothing keeps Ray from setting the masks of {binding.resource} {at}", "give noset_env")
        names = (*binding.visible_env, *binding.noset_env, *binding.unset_env)
        odd = [name for name in names if not VARIABLE.match(name)]
        require(not odd, f"{odd} are no names of environment variables {at}", "write the variable's name")
        both = sorted(set(binding.visible_env) & set(binding.unset_env))
        require(not both, f"{', '.join(both)} must be set and unset {at}", "keep it in one of visible_env and unset_env")
        require(not repeated(names), f"{repeated(names)} are listed twice {at}", "list each variable once")


@check("C33", hooks=["vime_perf_model"], title="rates say where they come from")
def rates_say_where_they_come_from(subject: Subject) -> None:
    """Every rate has its unit, a provenance and a source in words; an unknown one has no value, and no other is without."""
    seen = 0
    for case in subject.cases:
        table = subject.ask("vime_perf_model", case.inventory)
        for name, rate in table.quantities.items():
            seen += 1
            at = f"{name} for {case.name}"
            unit = UNITS.get(name)
            measured = rate.unit == unit if unit else rate.unit in _UNITS
            require(measured, f"{at} has unit {rate.unit!r}", f"write {unit or ', '.join(_UNITS)}")
            unknown = rate.provenance is Provenance.UNKNOWN
            what = f"{at} is {rate.value} with provenance {rate.provenance}"
            require(unknown == (rate.value is None), what, "None goes with unknown, a number with spec, measured or derived")
            sane = rate.value is None or (rate.value > 0 and math.isfinite(rate.value))
            require(sane, what, "give a positive number")
            require(unknown or rate.source.strip(), f"{at} has no source", "say in words where the number comes from")
    if not seen:
        raise NotRun("the platform gives no rates: every estimate of a plan is unknown")
