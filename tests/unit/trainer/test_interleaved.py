"""What a virtual pipeline needs of megatron-core's settings, and pieces handled as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vime.errors import ConfigError
from vime.trainer.megatron.model import check_interleaved
from vime.trainer.megatron.wrapping import Wrapped

RIGHT = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@pytest.mark.parametrize(
    ("changes", "name"), [({"batch_p2p_comm": True}, "batch_p2p_comm"), ({"overlap_p2p_comm": False}, "overlap_p2p_comm")]
)
def test_settings_that_mix_up_tensors_are_refused_where_stages_are_in_pieces(changes: dict[str, Any], name: str) -> None:
    check_interleaved(2, RIGHT)
    check_interleaved(1, {**RIGHT, **changes})
    with pytest.raises(ConfigError, match=f"trainer.megatron.{name} is {changes[name]}") as caught:
        check_interleaved(2, {**RIGHT, **changes})
    assert caught.value.fix == f"remove {name} from trainer.megatron, or vpp from the topology"


def part(name: str, calls: list[str]) -> Any:
    def gather(*, force_sync: bool) -> None:
        assert force_sync
        calls.append(name)

    return SimpleNamespace(buffers=[f"{name} dense"], expert_parallel_buffers=[f"{name} experts"], start_param_sync=gather)


def test_parameters_are_gathered_in_every_piece_and_only_where_an_update_leaves_them_apart() -> None:
    calls: list[str] = []
    parts = [part("first", calls), part("second", calls)]
    Wrapped(parts).settle()
    assert calls == []
    Wrapped(parts, overlaps=True).settle()
    assert calls == ["first", "second"]
    assert Wrapped(parts).buffers == ["first dense", "first experts", "second dense", "second experts"]
