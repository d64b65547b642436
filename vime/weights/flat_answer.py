"""Token answers made from the engine's own output, without the server's log-prob objects.

vLLM's token route describes every token by an object of its text, bytes and alternatives: about 160 bytes of JSON and 10 µs
of the one process that also feeds the engine. Token ids and a list of numbers are all that training reads.

A request asks for it with `sampling_params.extra_args.vime_answer: "flat"`, which passes a router unchanged and means nothing
to a server without the gate. What this cannot serve as the server would (streams, images, defaults that only the server
knows) is left to the server.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vime.facts.engine import ANSWER_KEY, EXPERTS_KEY, FLAT_ANSWER
from vime.weights.asgi import Receive

_KNOWN = frozenset({"token_ids", "sampling_params", "request_id"})
_CLIENT_LEFT = 499


def flat_request(body: bytes) -> Mapping[str, Any] | None:
    """The request, where it asks for a flat answer and nothing else that only the server knows.

    Its marks are taken out of `sampling_params`; that for experts stays, beside them.
    """
    if ANSWER_KEY.encode() not in body:
        return None
    try:
        request = json.loads(body)
        sampling = dict(request["sampling_params"])
        extra = dict(sampling.pop("extra_args"))
        wanted = extra.pop(ANSWER_KEY) == FLAT_ANSWER
        experts = bool(extra.pop(EXPERTS_KEY, False))
    except (ValueError, KeyError, TypeError):
        return None
    # A router adds `"stream": false`.
    whole = (
        all(key in _KNOWN or not value for key, value in request.items())
        and sampling.get("max_tokens") is not None
        and sampling.get("logprobs") is not None
    )
    if not wanted or not whole or sampling.get("prompt_logprobs") is not None:
        return None
    if extra:
        sampling["extra_args"] = extra
    return {**request, "sampling_params": sampling, EXPERTS_KEY: experts}


async def answer_flat(
    client: Any, request: Mapping[str, Any], receive: Receive, *, version: Callable[[], str | None]
) -> tuple[int, bytes] | None:
    """(status, body) of one request to vLLM's engine client; a client that leaves ends its generation.

    None where the engine refuses the request: the server says in its own words why.

    Args:
        version: the label of the weights, asked when the answer is whole, where the engine gives none itself; None for none.
    """
    gone = asyncio.ensure_future(_until_gone(receive))
    work = asyncio.ensure_future(_final(client, request))
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return _CLIENT_LEFT, b""
        return 200, _encoded(request, work.result(), version())
    except Exception as error:  # noqa: BLE001 (whatever the engine raises becomes the answer, as the server does it)
        if isinstance(error, _refusals()):
            return None
        return 500, json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode()
    finally:
        for task in (gone, work):
            task.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that is wrong: an error of its own from 0.32 on."""
    import vllm.exceptions

    own = getattr(vllm.exceptions, "VLLMClientError", ValueError)
    return (ValueError, TypeError, own)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _final(client: Any, request: Mapping[str, Any]) -> Any:
    """The engine's last output of a request, which holds all its responses."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils import random_uuid

    sampling: dict[str, Any] = {**request["sampling_params"], "output_kind": RequestOutputKind.FINAL_ONLY}
    params = SamplingParams(**sampling)
    prompt, vocab = list(request["token_ids"]), client.model_config.get_vocab_size()
    if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(f"token ids must be in [0, {vocab})")
    if params.n > client.vllm_config.scheduler_config.max_num_seqs:
        raise ValueError("the server refuses more responses than it runs at once")
    name = f"vime-{request.get('request_id') or random_uuid()}"
    final = None
    async for output in client.generate({"prompt_token_ids": prompt}, params, name):
        final = output
    if final is None:
        raise RuntimeError("the engine ended the request without an output")
    return final


def _encoded(request: Mapping[str, Any], final: Any, version: str | None) -> bytes:
    import msgspec

    choices = [_choice(output, version) for output in final.outputs]
    if request[EXPERTS_KEY]:
        for choice, output in zip(choices, final.outputs, strict=True):
            rows = getattr(output, "routed_experts", None)
            # Bytes become base64 in JSON: the form in which the server answers too.
            choice["routed_experts"] = None if rows is None else _npy(rows)
    return msgspec.json.encode({"request_id": str(request.get("request_id") or ""), "choices": choices})


def _npy(array: Any) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _choice(output: Any, version: str | None) -> dict[str, Any]:
    tokens = list(output.token_ids)
    choice = {
        "index": output.index,
        "token_ids": tokens,
        "log_probs": sampled_log_probs(output.logprobs, tokens),
        "finish_reason": output.finish_reason or "stop",
    }
    spans = getattr(output, "weight_versions", None)
    if spans:
        choice["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in spans]
    elif version is not None and tokens:
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(tokens)}]
    return choice


def sampled_log_probs(log_probs: Any, tokens: Sequence[int]) -> list[float]:
    """The sampled tokens' own, of vLLM's flat or nested form. Raises RuntimeError where one is missing."""
    found: list[float]
    starts = getattr(log_probs, "start_indices", None)
    if starts is None:
        found = [position[token].logprob for position, token in zip(log_probs or (), tokens, strict=False) if token in position]
    else:
        own, ids = log_probs.logprobs, log_probs.token_ids
        found = [own[at] for at, token in zip(starts, tokens, strict=False) if at < len(ids) and ids[at] == token]
    if len(found) != len(tokens):
        raise RuntimeError(f"the engine gave log-probs for {len(found)} of {len(tokens)} tokens")
    return found
