"""Which models are updated by writing into their live parameters."""

import pytest
import torch

vllm_ext = pytest.importorskip("vime.weights.vllm_ext")


class UnquantizedLinearMethod:
    pass


class UnquantizedEmbeddingMethod:
    pass


class Fp8LinearMethod:
    pass


class Layer(torch.nn.Module):
    def __init__(self, method):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.quant_method = method


class Attention(torch.nn.Module):
    """Sets scales once all weights are loaded."""

    def __init__(self, sinks=None):
        super().__init__()
        self.impl = type("Impl", (), {"sinks": sinks})()

    def process_weights_after_loading(self, dtype):
        raise AssertionError("nothing is processed to decide")


class MLAAttention(Attention):
    """Computes projections once all weights are loaded."""


def model_of(*layers):
    model = torch.nn.Sequential(*layers)
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    return model


def dense(*more):
    return model_of(Layer(UnquantizedEmbeddingMethod()), Layer(UnquantizedLinearMethod()), *more)


def test_a_plain_dense_model_is_written_in_place():
    assert vllm_ext._live_parameters_are_used(dense(Attention()))


@pytest.mark.parametrize(
    "layer",
    [Layer(Fp8LinearMethod()), MLAAttention(), Attention(sinks=torch.zeros(2))],
    ids=["a quantized layer", "absorbed projections", "sinks"],
)
def test_a_model_that_derives_something_from_its_weights_is_reloaded(layer):
    assert not vllm_ext._live_parameters_are_used(dense(layer))


def test_a_model_whose_parameters_were_packed_is_reloaded():
    model = dense()
    packed = model.get_submodule("1")
    packed.weight = torch.nn.Parameter(torch.zeros(2, 4).t(), requires_grad=False)
    assert not vllm_ext._live_parameters_are_used(model)
