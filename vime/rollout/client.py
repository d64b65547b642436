"""Token in, token out: one request to an engine or the router, with the log-probs and versions of what was sampled."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from vime.data.routing import Ids, decode_ids
from vime.errors import DeadlineError, EngineError
from vime.facts.engine import ANSWER_KEY, EXPERTS_KEY, FLAT_ANSWER, TOKEN_ROUTE
from vime.types import PolicyVersion, SampleStatus, VersionSpan
from vime.weights.answers import error_text

GENERATE_ROUTE = TOKEN_ROUTE
SESSION_HEADER = "x-session-id"
WHOLE_ANSWER: Mapping[str, Any] = {"output_kind": 2, "flat_logprobs": True}
"""vLLM's `FINAL_ONLY`, log-probs in flat lists. Without the first, vLLM 0.26 wakes a request's task for every token and answers
a request of several responses with those alone that ended in the last step; both spare its server work for each token."""

_NO_LOG_PROB = -9999.0
_RETRYABLE_STATUS = frozenset({429, 500, 502, 503, 504})
"""500 is what a dying engine core answers, and what the router says when its engine broke off."""
_FINISH: Mapping[str, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


class RetryableError(EngineError):
    """Nobody could take the request now: another try, perhaps on another engine, may succeed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. `log_probs` are the sampler's (after temperature), one a token, the end-of-sequence token included.

    `routed_experts` [prompt and response tokens - 1, layers, top_k] are the engine's rows, where they were asked for and came.
    """

    index: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: SampleStatus
    version_labels: tuple[tuple[str, int, int], ...] = ()
    """(engine's label, start, end) of response tokens; the label is no policy version before the first publication."""
    routed_experts: Ids | None = field(default=None, compare=False)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which policy sampled which tokens. Raises EngineError where the engine does not say, or serves no policy yet."""
        try:
            spans = tuple(VersionSpan(PolicyVersion.parse(label), start, end) for label, start, end in self.version_labels)
        except ValueError:
            labels = ", ".join(label for label, _, _ in self.version_labels)
            raise EngineError(
                f"tokens were sampled by weights labelled {labels!r}, which names no policy version",
                fix="publish weights to the engine before sampling from it",
            ) from None
        if sum(span.end - span.start for span in spans) != len(self.token_ids):
            raise EngineError(
                f"the engine gives versions for {spans} of {len(self.token_ids)} tokens",
                fix="the engine's weights changed while the request ran, or nobody told its gate a version: sample again",
            )
        return spans


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one request: its choices in order of index."""

    request_id: str
    choices: tuple[Completion, ...]


class GenerateClient:
    """Sends requests to one base URL over kept connections, as many at once as are asked for.

    Proxy variables are ignored. `timeout_s` is the deadline of a request from sending to the last byte: time at a shut gate, or
    frozen in an engine during an update, counts.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout_s: float, model: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int = 1,
        params: Mapping[str, Any],
        seed: int | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> Generation:
        """Sample `n` responses; response j uses `seed` + j. `params` are those of `vime.rollout.sampling.sampling_params`.

        Raises:
            RetryableError: no engine could be reached, or the router has none to give.
            DeadlineError: no answer within `timeout_s`.
            EngineError: the engine refused the request (its own message), or answered without a log-prob for each token.
            RolloutError: what came as experts is no array of ids.
        """
        extra_args = {**(params.get("extra_args") or {}), ANSWER_KEY: FLAT_ANSWER}
        sampling = {**WHOLE_ANSWER, **params, "n": n, "extra_args": extra_args}
        if seed is not None:
            sampling["seed"] = seed
        body: dict[str, Any] = {"token_ids": list(prompt_ids), "sampling_params": sampling}
        if self._model is not None:
            body["model"] = self._model
        if request_id is not None:
            body["request_id"] = request_id
        headers = {SESSION_HEADER: session_id} if session_id is not None else None
        answer = await self._post(GENERATE_ROUTE, body, headers)
        return parse_generation(answer, n=n, where=self.base_url, experts=EXPERTS_KEY in extra_args)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _post(self, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> Any:
        data = json.dumps(body, separators=(",", ":")).encode()
        try:
            async with self._open().post(self.base_url + route, data=data, headers=headers) as response:
                payload = await response.read()
                status = response.status
        except TimeoutError as error:
            raise DeadlineError(
                f"no answer within {self.timeout_s:g} s",
                where=self.base_url,
                fix="see the engine's log; raise rollout.request_timeout_s for long responses or long updates of the weights",
            ) from error
        except aiohttp.ClientError as error:
            raise RetryableError(f"the connection failed: {error or type(error).__name__}", where=self.base_url) from error
        if status != 200:
            kind = RetryableError if status in _RETRYABLE_STATUS else EngineError
            raise kind(f"answered {status}: {error_text(payload)}", where=self.base_url)
        try:
            return json.loads(payload)
        except ValueError as error:
            raise EngineError(f"the answer is not JSON: {payload[:200]!r}", where=self.base_url) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                trust_env=False,
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            )
        return self._session


def parse_generation(answer: Any, *, n: int, where: str = "engine", experts: bool = False) -> Generation:
    """Read the generate route's JSON, ids of experts only with `experts`.

    Raises EngineError where a choice or a log-prob is missing (zeros would train), RolloutError for ids that cannot be read.
    """
    try:
        found = [_completion(choice, where, experts=experts) for choice in answer["choices"]]
        choices = tuple(sorted(found, key=lambda completion: completion.index))
        request_id = str(answer.get("request_id", ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the answer has another shape than expected: {error!r}", where=where) from error
    if tuple(choice.index for choice in choices) != tuple(range(n)):
        raise EngineError(f"{n} responses were asked for, {[c.index for c in choices]} came", where=where)
    return Generation(request_id, choices)


def _completion(choice: Mapping[str, Any], where: str, *, experts: bool) -> Completion:
    token_ids = tuple(choice["token_ids"])
    log_probs = tuple(choice["log_probs"] if "log_probs" in choice else _server_log_probs(choice))
    bad = [value for value in log_probs if value is None or value == _NO_LOG_PROB or not math.isfinite(value)]
    if len(log_probs) != len(token_ids) or bad:
        raise EngineError(
            f"{len(token_ids)} tokens came with {len(log_probs) - len(bad)} log-probs",
            where=where,
            fix="the engine must run with logprobs_mode processed_logprobs and finite logits",
        )
    spans = choice.get("weight_versions") or ()
    rows = choice.get("routed_experts") if experts else None
    return Completion(
        index=choice["index"],
        token_ids=token_ids,
        log_probs=log_probs,
        finish=_FINISH.get(choice["finish_reason"], SampleStatus.FAILED),
        version_labels=tuple((str(span["version"]), span["start"], span["end"]) for span in spans),
        routed_experts=None if rows is None else decode_ids(rows),
    )


def _server_log_probs(choice: Mapping[str, Any]) -> Iterator[Any]:
    """Of the form in which a server without vime's gate answers."""
    return (entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ())
