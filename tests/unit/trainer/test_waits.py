"""How often a step asks the device for a value, which waits for everything queued before: never once a layer."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vime.config.schema import OptimizerSection, SftSection, TrainerSection
from vime.facts.process import Factory, MegatronAdaptation
from vime.trainer.megatron.varlen import VarlenCoreAttention
from vime.types import TrainSample, UpdateWork

READS = {
    getattr(torch.Tensor, name): name
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
} | {torch.nonzero: "nonzero", torch.masked_select: "masked_select"}


class Reads(TorchFunctionMode):
    """Counts what would wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.tensor:
            self.seen["tensor of tensors"] += tensors_in(args[0])
        elif name := READS.get(func):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def tensors_in(value) -> int:
    if isinstance(value, list):
        return sum(map(tensors_in, value))
    return int(isinstance(value, torch.Tensor))


def no_reads(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """In place of a kernel: something that depends on all inputs."""
    assert type(max_q) is int
    groups = query.shape[1] // key.shape[1]
    return query * scale + (key + value).repeat_interleave(groups, dim=1)


class Attention(VarlenCoreAttention):
    def __init__(self, *args, **options):
        super().__init__(*args, kernel=no_reads, **options)


def reads_of_a_step(worker_of, folder, *, layers, recompute):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    pieces = {
        "norm": Factory("vime.trainer.megatron.attention:RmsNorm"),
        "optimizer": Factory("vime.platforms.cpu.fused_adam:HostFusedAdam"),
    }
    worker = worker_of(
        folder,
        algorithm=SftSection(),
        adaptation=MegatronAdaptation(core_attention=Factory(f"{__name__}:Attention"), **pieces),
        trainer=TrainerSection(optimizer=OptimizerSection(lr=1e-3, clip_grad=1e-3), recompute=recompute),
    )
    rows = tuple(TrainSample((1, 2), (3,) * size, (), (1,) * size, None, ()) for size in (3, 5))
    with Reads() as reads:
        worker.train_step([UpdateWork((rows, rows), num_rollouts=4, num_tokens=16)])
    return reads.seen


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_number_of_waits_does_not_grow_with_layers(worker_of, model_of, tmp_path, recompute):
    one, four = (
        reads_of_a_step(worker_of, model_of(tmp_path / str(layers)), layers=layers, recompute=recompute) for layers in (1, 4)
    )
    assert one == four
    assert sum(one.values()) < 30


def test_what_waits_is_counted():
    x = torch.arange(3.0)
    with Reads() as reads:
        x.tolist()
        float(x[0])
        if x.sum() > 1:
            torch.tensor([x[0], x[1]])
        torch.tensor([1.0, 2.0])
    assert reads.seen == {"tolist": 1, "__float__": 1, "__bool__": 1, "tensor of tensors": 2}
