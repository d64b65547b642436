"""Finding out what a model's loader would do, on a small model with loaders like an engine's."""

import pytest
import torch
from torch import nn

from vime.errors import WeightSyncError
from vime.weights.load_plan import plan_load
from vime.weights.manifest import build_manifest

SHAPES = {
    "embed.weight": (10, 4),
    "qkv.q_proj.weight": (4, 4),
    "qkv.k_proj.weight": (2, 4),
    "qkv.v_proj.weight": (2, 4),
    "norm.weight": (4,),
}


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))
        self.weight.weight_loader = self.load

    def load(self, param, loaded_weight, shard_id):
        start, size = {"q_proj": (0, 4), "k_proj": (4, 2), "v_proj": (6, 2)}[shard_id]
        part = param.data.narrow(0, start, size)
        assert part.shape == loaded_weight.shape
        part.copy_(loaded_weight)


class Padded(nn.Module):
    """12 rows, of which the checkpoint fills 10."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 4))
        self.weight.weight_loader = self.load

    def load(self, param, loaded_weight):
        assert loaded_weight.shape[0] == 10
        param[:10].data.copy_(loaded_weight)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))


class Model(nn.Module):
    """`silent` names are left out without an error, as some loaders do."""

    def __init__(self, silent=()):
        super().__init__()
        self.embed, self.qkv, self.norm = Padded(), Fused(), Norm()
        self.silent = silent

    def load_weights(self, weights):
        for name, tensor in weights:
            if name.startswith(self.silent):
                continue
            module, *shard, _ = name.split(".")
            if module not in self._modules:
                raise ValueError(f"there is no module {module}")
            param = getattr(self, module).weight
            if shard:
                param.weight_loader(param=param, loaded_weight=tensor, shard_id=shard[0])
            elif hasattr(param, "weight_loader"):
                param.weight_loader(param, tensor)
            else:
                param.data.copy_(tensor)


def plan(model, shapes, twins=None):
    manifest = build_manifest((name, "float32", shape) for name, shape in shapes.items())
    return plan_load(model, model.load_weights, manifest, twins or {})


def never(name):
    return False


def test_a_whole_checkpoint_fits_and_the_model_is_not_touched():
    model = Model()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    plan(model, SHAPES).check(may_skip=never)
    for name, param in model.named_parameters():
        assert param.data_ptr() == before[name][0]
        assert torch.equal(param, before[name][1])
    assert model.qkv.weight.weight_loader == model.qkv.load
    assert not hasattr(model.norm.weight, "weight_loader")


def test_all_unknown_names_are_listed():
    with pytest.raises(WeightSyncError, match=r"cannot take 2 of 7 tensors: module\.embed\.weight .* module\.norm\.weight"):
        plan(Model(), SHAPES | {"module.embed.weight": (10, 4), "module.norm.weight": (4,)})


def test_a_wrong_shape_names_the_tensor():
    with pytest.raises(WeightSyncError, match=r"cannot take 1 of 5 tensors: qkv\.k_proj\.weight \("):
        plan(Model(), SHAPES | {"qkv.k_proj.weight": (3, 4)})
    with pytest.raises(WeightSyncError, match=r"norm\.weight \(shape \[5\] instead of \[4\]\)") as caught:
        plan(Model(), SHAPES | {"norm.weight": (5,)})
    assert caught.value.__cause__ is not None, "what the model's loader raised stays in the trace"


def test_tensors_that_a_loader_leaves_out_are_an_error_unless_allowed():
    shapes = SHAPES | {"lm_head.weight": (10, 4)}
    found = plan(Model(silent=("lm_head",)), shapes)
    assert found.untouched == ("lm_head.weight",)
    with pytest.raises(WeightSyncError, match=r"1 tensors match no parameter .* lm_head\.weight"):
        found.check(may_skip=never)
    found.check(may_skip=lambda name: name == "lm_head.weight")
    found.check(may_skip=never, whole_model=False)


def test_nothing_matched_is_an_error_even_where_skipping_is_allowed():
    found = plan(Model(silent=("module.",)), {"module.norm.weight": (4,)})
    with pytest.raises(WeightSyncError, match=r"none of the 1 tensors matches a parameter: module\.norm\.weight"):
        found.check(may_skip=never, whole_model=False)


def test_a_fused_parameter_filled_in_part_is_an_error():
    found = plan(Model(), {name: shape for name, shape in SHAPES.items() if "v_proj" not in name})
    with pytest.raises(WeightSyncError, match=r"qkv\.weight has only qkv\.k_proj\.weight, qkv\.q_proj\.weight"):
        found.check(may_skip=never)


def test_a_parameter_that_nothing_fills_is_an_error():
    found = plan(Model(), {name: shape for name, shape in SHAPES.items() if name != "norm.weight"})
    with pytest.raises(WeightSyncError, match=r"no tensor fills 1 of the parameters: norm\.weight"):
        found.check(may_skip=never)
    found.check(may_skip=never, all_filled=False)


def test_emptied_live_parameters_are_judged_by_their_twins():
    model = Model()
    twin = model.qkv.weight.data.to("meta")
    twin.weight_loader = model.qkv.load
    model.qkv.weight = nn.Parameter(torch.empty(0))
    plan(model, SHAPES, {id(model.qkv.weight): twin}).check(may_skip=never)
    with pytest.raises(WeightSyncError, match="cannot take"):
        plan(model, SHAPES)


class Biased(nn.Module):
    """A bias whose loader finds its part by an attribute, and a parameter that is computed from others."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.bias.output_dim = 0
        self.bias.weight_loader = self.load
        self.derived = nn.Parameter(torch.zeros(2))

    def load(self, param, loaded_weight, shard_id):
        dim = getattr(param, "output_dim", None)
        part = param.data if dim is None else param.data.narrow(dim, 4 * shard_id, 4)
        assert part.shape == loaded_weight.shape
        part.copy_(loaded_weight)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.bias.weight_loader(self.bias, tensor, int(name[-1]))


def test_loaders_read_a_parameters_attributes_and_what_is_derived_needs_no_tensor():
    model = Biased()
    manifest = build_manifest([("bias.0", "float32", (4,)), ("bias.1", "float32", (4,))])
    plan = plan_load(model, model.load_weights, manifest, {})
    with pytest.raises(WeightSyncError, match="no tensor fills 1 of the parameters: derived"):
        plan.check(may_skip=lambda _name: False)
    plan.check(may_skip=lambda _name: False, derived={"derived"})
    assert model.bias.abs().max() == 0
