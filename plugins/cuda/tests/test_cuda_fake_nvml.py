"""The fake behaves as the library does, beneath the real `pynvml`."""

from __future__ import annotations

import ctypes

import pynvml
import pytest

from vime_cuda.testing.fake_nvml import PROFILES, UnknownCall, installed, load_profile

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))


def test_devices_are_counted_named_and_sized_through_the_wrapper() -> None:
    with installed(load_profile("h200x2-vm")):
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 2
        second = pynvml.nvmlDeviceGetHandleByIndex(1)
        assert pynvml.nvmlDeviceGetName(second) == "NVIDIA H200"
        assert pynvml.nvmlDeviceGetUUID(second) == "GPU-00000000-1111-2222-3333-444444444441"
        assert pynvml.nvmlDeviceGetMemoryInfo(second).total == 150754820096
        assert pynvml.nvmlDeviceGetCudaComputeCapability(second) == (9, 0)


def test_nothing_is_answered_before_init_and_after_the_last_shutdown() -> None:
    with installed(load_profile("h200x8")) as library:
        assert library is not None
        with pytest.raises(pynvml.NVMLError_Uninitialized):  # type: ignore[attr-defined]
            pynvml.nvmlDeviceGetCount()
        pynvml.nvmlInit()
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        assert (pynvml.nvmlDeviceGetCount(), library.started) == (8, 1)
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):  # type: ignore[attr-defined]
            pynvml.nvmlDeviceGetCount()


def test_a_bad_index_is_an_invalid_argument() -> None:
    with installed(load_profile("h200-vm")):
        pynvml.nvmlInit()
        with pytest.raises(pynvml.NVMLError_InvalidArgument):  # type: ignore[attr-defined]
            pynvml.nvmlDeviceGetHandleByIndex(1)


def test_a_function_that_the_driver_lacks_is_not_found() -> None:
    with installed(load_profile("a100x8")):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):  # type: ignore[attr-defined]
            pynvml.nvmlDeviceGetAddressingMode(handle)


def test_a_question_that_the_fake_does_not_know_fails_loudly_and_is_kept() -> None:
    with installed(load_profile("h200-vm")) as library:
        assert library is not None
        pynvml.nvmlInit()
        with pytest.raises(UnknownCall, match="nvmlDeviceGetFanSpeed"):
            pynvml.nvmlDeviceGetFanSpeed(pynvml.nvmlDeviceGetHandleByIndex(0))
        assert library.unknown == ["nvmlDeviceGetFanSpeed"]


def test_calls_are_recorded_in_order() -> None:
    with installed(load_profile("h200-vm")) as library:
        assert library is not None
        pynvml.nvmlInit()
        pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
        assert library.calls == ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlShutdown"]


def test_an_older_driver_refuses_a_newer_structure() -> None:
    profile = load_profile("h200-vm")
    profile["devices"][0]["FabricV"]["version"] = 0x02000024
    with installed(profile):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError) as caught:
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(pynvml.c_nvmlGpuFabricInfo_v3_t()))
        assert caught.value.value == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH  # type: ignore[attr-defined]


def test_a_missing_library_goes_through_the_wrappers_own_loading() -> None:
    with installed(load_profile("nvml-missing")), pytest.raises(pynvml.NVMLError_LibraryNotFound):  # type: ignore[attr-defined]
        pynvml.nvmlInit()


def test_everything_is_as_before_afterwards() -> None:
    before = (pynvml.nvmlLib, pynvml.CDLL, dict(pynvml._nvmlGetFunctionPointer_cache))
    for name in ("h200x8", "nvml-missing"):
        with installed(load_profile(name)):
            assert pynvml.nvmlLib is not before[0] or name == "nvml-missing"
        assert (pynvml.nvmlLib, pynvml.CDLL, dict(pynvml._nvmlGetFunctionPointer_cache)) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile["origin"] == ("recorded" if name in ("h200-vm", "h200x2-vm") else "synthetic")
    assert profile["machine"]
    assert profile["driver"]
    assert str(profile["date"]) == "2026-11-29"
