"""The fake amdsmi answers to the real package's names and behaves like it."""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from vime_rocm.testing import fake_amdsmi
from vime_rocm.testing.fake_amdsmi import PROFILES, FakeModule, installed, load_profile

API: dict[str, Any] = json.loads((Path(__file__).parent / "amdsmi_api.json").read_text())
"""Names, parameters (`=`: has a default), keys of answers, enumerations and status texts, read from the real package."""


@pytest.fixture
def amdsmi() -> Any:
    module = FakeModule(load_profile("mi300x8"))
    module.amdsmi_init()
    return module


def test_every_function_is_the_real_ones_and_takes_its_parameters(amdsmi: Any) -> None:
    named = {name for name in vars(amdsmi) if name.startswith("amdsmi_")}
    assert named == set(API["functions"])
    for name, parameters in API["functions"].items():
        found = inspect.signature(getattr(amdsmi, name)).parameters.values()
        assert [p.name + ("=" if p.default is not p.empty else "") for p in found] == parameters, name


def test_answers_have_the_real_keys(amdsmi: Any) -> None:
    one, other = amdsmi.amdsmi_get_processor_handles()[:2]
    for name, keys in API["answers"].items():
        answer = getattr(amdsmi, name)(*((one, other) if "_topo_" in name else (one,)))
        assert sorted({*answer, *answer.get("cap", {})}) == keys, name


def test_enumerations_and_status_texts_are_the_real_ones() -> None:
    for name, members in API["enums"].items():
        kind: type[IntEnum] = getattr(fake_amdsmi, name)
        assert {member.name: int(member) for member in kind} == members
    assert {str(code): text for code, text in fake_amdsmi.STATUS.items()} == API["status"]


def test_nothing_answers_before_initialisation_and_after_shutting_down(amdsmi: Any) -> None:
    amdsmi.amdsmi_init()
    amdsmi.amdsmi_shut_down()
    (handle, *_) = amdsmi.amdsmi_get_processor_handles()
    amdsmi.amdsmi_shut_down()
    for call in (
        amdsmi.amdsmi_get_processor_handles,
        amdsmi.amdsmi_shut_down,
        lambda: amdsmi.amdsmi_get_gpu_device_bdf(handle),
    ):
        with pytest.raises(amdsmi.AmdSmiLibraryException) as raised:
            call()
        assert raised.value.get_error_code() == 32


def test_wrong_handles_are_errors(amdsmi: Any) -> None:
    with pytest.raises(amdsmi.AmdSmiParameterException):
        amdsmi.amdsmi_get_gpu_device_uuid(0)
    (old, *_) = amdsmi.amdsmi_get_processor_handles()
    amdsmi.amdsmi_shut_down()
    amdsmi.amdsmi_init()
    with pytest.raises(amdsmi.AmdSmiLibraryException, match="Invalid parameters"):
        amdsmi.amdsmi_get_gpu_device_uuid(old)


def test_the_p2p_type_is_a_c_integer(amdsmi: Any) -> None:
    one, other = amdsmi.amdsmi_get_processor_handles()[:2]
    kind = amdsmi.amdsmi_topo_get_p2p_status(one, other)["type"]
    assert isinstance(kind, ctypes.c_uint32)
    assert kind.value == 2


def test_a_function_that_an_older_package_lacks_is_absent() -> None:
    assert not hasattr(FakeModule(load_profile("mi300x1-old-amdsmi")), "amdsmi_get_gpu_enumeration_info")


@pytest.mark.parametrize("profile", ["mi300x8", "amdsmi-import-error"])
def test_the_block_leaves_no_trace(profile: str) -> None:
    marker: Any = FakeModule(load_profile("mi355x8"))
    finders = list(sys.meta_path)
    sys.modules["amdsmi"] = marker
    try:
        with installed(profile):
            assert sys.modules.get("amdsmi") is not marker
        assert sys.modules["amdsmi"] is marker
        assert sys.meta_path == finders
    finally:
        del sys.modules["amdsmi"]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_says_where_it_comes_from(path: Path) -> None:
    profile = load_profile(path.stem)
    assert profile["origin"] == "synthetic"
    assert all(profile[name] for name in ("machine", "date", "driver"))
