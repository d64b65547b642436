"""What the seconds of a step rest on beside a platform's rates: named values, each with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from vime.errors import ConfigError
from vime.facts.perf import PerfTable
from vime.planning.amounts import given
from vime.planning.needs import PlanNeeds

NO_WORDS: Mapping[str, float] = MappingProxyType({})
YOURS = "yours"
Tables = tuple[PerfTable, PerfTable]
NO_TABLES: Tables = (PerfTable(), PerfTable())

_DEFAULT_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Assumption:
    """`provenance` is measured, derived, assumed or yours."""

    name: str
    value: float
    unit: str
    provenance: str
    source: str

    @property
    def is_share(self) -> bool:
        return self.unit == "share"


Assumptions = Mapping[str, Assumption]


def assumptions(
    needs: PlanNeeds, words: Mapping[str, float] = NO_WORDS, *, layers: int = 1, tables: Tables = NO_TABLES
) -> Assumptions:
    """Every assumption by name: the defaults for a run, what the platforms know over them, and the user's `words` over both.

    `tables` are those of the trainer's and of the engines' platform.

    Raises:
        ConfigError: an unknown name, or a value that makes no sense.
    """
    found = {a.name: a for a in (*_lengths(needs), *_engine(needs, layers, tables[1]), *_trainer(tables[0]))}
    for name, value in words.items():
        if name not in found:
            raise ConfigError(f"--assume: no assumption is called {name!r}", fix=f"use one of {', '.join(found)}")
        found[name] = replace(found[name], value=value, provenance=YOURS, source="--assume")
    if "response_tokens" in words and "longest_tokens" not in words:
        longest = found["longest_tokens"]
        found["longest_tokens"] = replace(longest, value=max(longest.value, words["response_tokens"]))
    _check(found)
    return found


def parse_words(words: Sequence[str], *, option: str = "--assume", example: str = "response_tokens=4096") -> dict[str, float]:
    """`NAME=VALUE` words of a command's option as numbers. Raises ConfigError."""
    values: dict[str, float] = {}
    for word in words:
        name, equals, text = word.partition("=")
        try:
            values[name] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"{option}: expected NAME=NUMBER, got {word!r}", fix=f"for example {option} {example}")
    return values


def _check(found: Assumptions) -> None:
    for one in found.values():
        top = 1.0 if one.is_share else float("inf")
        least = 0.0 if one.unit == "s" or one.name == "prompt_tokens" else 1e-9
        if not least <= one.value <= top or one.value == float("inf"):
            allowed = "above 0 and at most 1" if one.is_share else "0 or more" if least == 0.0 else "above 0"
            raise ConfigError(f"--assume: {one.name} must be {allowed}, got {one.value:g}", fix="give another number")
    mean, longest = found["response_tokens"].value, found["longest_tokens"].value
    if mean > longest:
        what = f"--assume: response_tokens {mean:g} is the mean, but longest_tokens is only {longest:g}"
        raise ConfigError(what, fix="raise longest_tokens")


def _lengths(needs: PlanNeeds) -> Iterator[Assumption]:
    limit, longest = needs.max_prompt_tokens, needs.max_response_tokens
    prompt = _DEFAULT_PROMPT if limit is None else limit / 2
    told = "nothing in the run says" if limit is None else "half of data.max_prompt_tokens"
    yield Assumption("prompt_tokens", prompt, "tokens", "assumed", f"mean of a prompt; {told}")
    half = "mean of a response; half of max_response_tokens"
    yield Assumption("response_tokens", max(1, longest / 2), "tokens", "assumed", half)
    why = "longest response of a batch; max_response_tokens, which one of many reaches"
    yield Assumption("longest_tokens", longest, "tokens", "assumed", why)
    kept = (0.7, "assumed", "groups that the filter keeps") if needs.filtered else (1.0, "derived", "there is no filter")
    yield Assumption("groups_kept", kept[0], "share", kept[1], kept[2])


def _engine(needs: PlanNeeds, layers: int, perf: PerfTable) -> Iterator[Assumption]:
    yield _known(perf, "memory_share", 0.7, "share", "of device_memory that is reached")
    yield _known(perf, "prefill_share", 0.4, "share", "of matmul that a prefill reaches")
    if given(needs.vllm, "enforce_eager"):
        layer = _known(perf, "eager_layer", 1e-3, "s", "beside a decode step's reads, without captured graphs, for each layer")
        yield replace(layer, name="decode_step_s", value=layer.value * layers)
    else:
        yield Assumption("decode_step_s", 1e-3, "s", "assumed", "beside a decode step's reads: scheduler, launches, sampling")
    yield Assumption("all_reduce_s", 15e-6, "s", "assumed", "latency of a reduction over tp; two a layer")


def _trainer(perf: PerfTable) -> Iterator[Assumption]:
    yield _known(perf, "trainer_share", 0.4, "share", "of matmul that training reaches")
    yield Assumption("expert_share", 0.5, "share", "assumed", "products of experts against dense ones: they are small")
    yield _known(perf, "matmul_share", 0.8, "share", "of a data sheet's matmul that one large product reaches")
    rest = _known(perf, "step_rest", 0.5, "s", "publication beside update and switches, rewards, packing")
    yield replace(rest, name="other_s")


def _known(perf: PerfTable, name: str, default: float, unit: str, what: str) -> Assumption:
    """The platform's value, or the default as an assumption."""
    quantity = perf.get(name)
    if quantity.value is None:
        return Assumption(name, default, unit, "assumed", what)
    return Assumption(name, quantity.value, unit, str(quantity.provenance), f"{what}; {quantity.source}")
