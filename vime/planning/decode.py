"""Seconds of sampling in one engine. Pure arithmetic over a model's sizes, lengths of responses and a device's rates.

A decode step reads the weights of its tokens and the cache of their sequences: it is bound by memory. For a mixture of experts
the weights are those of the experts that the batch touches, with tokens sent evenly: 1 - (1 - k/E)^b of them for b tokens.

Lengths follow P(length > t) = (1 - t/L)^k with k = L/mean - 1: all equal for mean = L, spread evenly for mean = L/2, and with a
longer tail below. L is the longest response, so that the end of a batch has few sequences and little use of the weights' reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.amounts import expert_parameters, token_bytes

_SLICES = 128


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: mean prompt, mean response, longest response."""

    prompt: float
    mean: float
    longest: float

    @property
    def _k(self) -> float:
        return self.longest / self.mean - 1

    def running(self, at: float) -> float:
        """Share of responses that are longer than `at` tokens."""
        return (1 - at / self.longest) ** self._k if at < self.longest else 0.0

    @property
    def context(self) -> float:
        """Mean tokens that a decoded token looks back at."""
        return self.prompt + self.longest / (self._k + 2)

    @property
    def squared(self) -> float:
        """Mean of (prompt + response)^2."""
        square = 2 * self.longest**2 / ((self._k + 1) * (self._k + 2))
        return self.prompt**2 + 2 * self.prompt * self.mean + square


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Reached rates of one device: memory and links in bytes/s, products in FLOP/s, fixed parts in seconds.

    `expert_share` is the rate of experts' products against others'. `link` None: no tensor parallelism.
    """

    memory: float
    products: float
    expert_share: float
    step_s: float
    all_reduce_s: float
    link: float | None


@dataclass(frozen=True, slots=True)
class Engine:
    """A model in an engine, and the bytes of an entry of its weights (`width`, 2 in 16 bits)."""

    model: ModelShape
    parallel: Parallel
    dtype: str
    width: int
    rates: EngineRates

    @property
    def workers(self) -> int:
        return self.parallel.tp * self.parallel.pp * self.parallel.dp


def dense_parameters(model: ModelShape) -> int:
    """Parameters that every token meets: without experts, and without an embedding that only is looked up."""
    looked_up = 0 if model.tied_embeddings else model.vocab * model.hidden
    return model.parameters - expert_parameters(model) - looked_up


def chosen_parameters(model: ModelShape) -> float:
    """Parameters of the experts that one token goes to."""
    return expert_parameters(model) * model.experts_per_token / model.experts if model.experts else 0.0


def weighed_parameters(model: ModelShape, expert_share: float) -> float:
    """Active parameters of a token, those of experts counted by the time that they take."""
    return dense_parameters(model) + chosen_parameters(model) / expert_share


def attention_share(model: ModelShape) -> float:
    """A square: a sequence of n tokens takes the work of n + square n^2 tokens without attention, by operations counted."""
    attention = model.layers * model.heads * (model.head_dim + model.value_dim)
    return attention / (2 * weighed_parameters(model, 1.0))


def prefill_seconds(engine: Engine, sequences: float, lengths: Lengths) -> float:
    """2 FLOP a parameter and token, the head left out; causal attention 2 x layers x query width x length^2 a prompt."""
    model = engine.model
    each = weighed_parameters(model, engine.rates.expert_share) - model.vocab * model.hidden
    attention = model.layers * model.heads * (model.head_dim + model.value_dim) * lengths.prompt
    flops = sequences * lengths.prompt * (2 * each + attention)
    return flops / (engine.rates.products * engine.workers)


def decode_step_seconds(engine: Engine, sequences: float, cached: float) -> float:
    """One token for `sequences` of an engine with `cached` tokens of context together."""
    model, parallel, rates = engine.model, engine.parallel, engine.rates
    batch, split = sequences / parallel.dp, parallel.tp * parallel.pp
    weights = read_weights(model, sequences, engine.width) / split
    if parallel.dp > 1 and model.experts:
        spared = expert_parameters(model) * touched(model, sequences) * engine.width / split
        weights -= spared * (1 - 1 / parallel.dp)
    cache = cached / parallel.dp * token_bytes(model, engine.dtype, parallel)
    flops = 2 * batch * weighed_parameters(model, rates.expert_share) / split
    busy = max((weights + cache) / rates.memory, flops / rates.products)
    return busy * parallel.pp + _reductions(engine, batch) + rates.step_s


def touched(model: ModelShape, tokens: float) -> float:
    """Share of a layer's experts that `tokens` reach when they are sent evenly."""
    return 1 - (1 - model.experts_per_token / model.experts) ** tokens if model.experts else 0.0


def read_weights(model: ModelShape, tokens: float, width: int) -> float:
    """Bytes of all weights that a decode step of `tokens` reads."""
    return width * (dense_parameters(model) + expert_parameters(model) * touched(model, tokens))


def _reductions(engine: Engine, batch: float) -> float:
    tp, model = engine.parallel.tp, engine.model
    if tp == 1 or not engine.rates.link:
        return 0.0
    sent = 2 * (tp - 1) / tp * batch * model.hidden * engine.width
    return 2 * model.layers * (engine.rates.all_reduce_s + sent / engine.rates.link)


def decode_seconds(engine: Engine, sequences: float, lengths: Lengths, *, at_once: float) -> tuple[float, float]:
    """Seconds with full batches, and of the last batch down to its longest response.

    `at_once` sequences run together; as long as more wait, a place that becomes free is taken.
    """
    running = min(sequences, at_once)
    steps = (sequences - running) * lengths.mean / running
    full = steps * decode_step_seconds(engine, running, running * lengths.context) if steps else 0.0
    width, last = lengths.longest / _SLICES, 0.0
    for index in range(_SLICES):
        at = (index + 0.5) * width
        left = max(1.0, running * lengths.running(at))
        last += width * decode_step_seconds(engine, left, left * (lengths.prompt + at))
    return full, last
