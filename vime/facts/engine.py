"""What a release of vLLM's server can do, as far as vime acts on it: known from the version before a start, from the routes
of a server that runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

TOKEN_ROUTE = "/inference/v1/generate"
VERSION_ROUTE = "/update_weight_version"
RESET_ROUTE = "/reset_prefix_cache"
WITHDRAWN_STATUS = 410
"""Of an answer that weights sampled which a probe refused. A router does not try such a request again."""
ANSWER_KEY, FLAT_ANSWER = "vime_answer", "flat"
"""What a request's `sampling_params.extra_args` says to get plain lists of log-probs from a server with vime's gate."""
EXPERTS_KEY = "vime_routed_experts"
"""What it says beside `ANSWER_KEY` where such an answer must carry the experts of every token."""
NEEDED_ROUTES = frozenset(
    {TOKEN_ROUTE, "/pause", "/resume", "/abort_requests", "/is_paused", "/get_world_size", "/collective_rpc"}
)
"""Routes that vime cannot work without; those of the weights are reached through `/collective_rpc`."""
IN_FLIGHT_ROUTES = frozenset({VERSION_ROUTE, RESET_ROUTE})
"""Routes without which no request can be kept through an update: versions by token, and caches that are computed anew."""


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """One release.

    `launch` is the module that `python -m` runs. `token_flag` is the argument (underscores) without which the
    token-in, token-out route is missing, None where it is always there. `versions` says that the server keeps a label of
    its weights (`/update_weight_version`) and reports in each choice which label sampled which tokens.
    """

    release: str
    launch: str
    token_flag: str | None
    versions: bool

    @property
    def in_flight(self) -> bool:
        """Requests may run on through an update: each of their tokens still has its version."""
        return self.versions


RELEASES: tuple[EngineFeatures, ...] = (
    EngineFeatures("0.26.0", "vllm.entrypoints.openai.api_server", token_flag=None, versions=False),
    EngineFeatures("0.32.0", "vllm.entrypoints.launchers.api_server.entry", token_flag="enable_scale_out", versions=True),
)
"""The releases that vime is made for, oldest first."""


def features_of(version: str | None) -> EngineFeatures:
    """Features of an installed version: those of the newest release in `RELEASES` that is not newer than it.

    A version older than all of them counts as the oldest, an unknown one as the newest.
    """
    release = _release(version)
    if release is None:
        return RELEASES[-1]
    known = [features for features in RELEASES if Version(features.release) <= release]
    return known[-1] if known else RELEASES[0]


def _release(version: str | None) -> Version | None:
    """Without local parts and pre-release marks: a development build of 0.32 has what 0.32 has."""
    try:
        return Version(Version(version).base_version) if version is not None else None
    except InvalidVersion:
        return None


def missing_routes(routes: Collection[str], *, in_flight: bool = False) -> tuple[str, ...]:
    """What a server with these routes lacks of `NEEDED_ROUTES`, with `in_flight` of `IN_FLIGHT_ROUTES` too; ordered by name."""
    needed = NEEDED_ROUTES | IN_FLIGHT_ROUTES if in_flight else NEEDED_ROUTES
    return tuple(sorted(needed.difference(routes)))
