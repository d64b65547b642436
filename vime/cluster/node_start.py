"""Starts this machine as a node of a Ray cluster, offering what its platform says; or tells the command that does."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from vime.cluster import RAY_ENV
from vime.cluster.guardian import guardian_command
from vime.cluster.session import START, clean_environment, end_head, offered
from vime.errors import PlacementError

PORT = 6379
"""Ray's usual one, of a head."""

OWN_WORDS: Mapping[str, str] = {
    "--resources": "nothing: the platform says what the node offers",
    "--num-gpus": "nothing: the platform says what the node offers",
    "--labels": "nothing: the platform says what the node is",
    "--address": "--address before `--`",
    "--head": "--head before `--`",
    "--port": "--port before `--`",
    "--node-ip-address": "--host before `--`",
    "--node-name": "--name before `--`",
    "--block": "nothing: the node runs until the command is ended",
}
"""Words of `ray start` that vime gives itself, and what to write instead."""


@dataclass(frozen=True)
class NodeSpec:
    """A node to start. `address` is the cluster's, None for a head, which then listens on `port`.

    `host` is this machine's address to the other nodes (None: Ray's choice), `env` what the node's processes get, `unset` what
    they must not inherit, `extra` further words for `ray start`.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    address: str | None = None
    host: str | None = None
    port: int = PORT
    name: str | None = None
    extra: tuple[str, ...] = ()


def node_words(spec: NodeSpec) -> list[str]:
    """The words after `ray start --block`. Raises PlacementError for extra ones that vime gives itself."""
    for word in spec.extra:
        key = word.partition("=")[0]
        if key in OWN_WORDS:
            raise PlacementError(f"{key} is set by vime", where="vime node start", fix=f"instead: {OWN_WORDS[key]}")
    role = [f"--address={spec.address}"] if spec.address else ["--head", f"--port={spec.port}", "--include-dashboard=false"]
    named = [f"--node-ip-address={spec.host}"] if spec.host else []
    named += [f"--node-name={spec.name}"] if spec.name else []
    return [*role, *named, *offered(spec.resources, spec.labels), "--disable-usage-stats", *spec.extra]


def node_env(spec: NodeSpec) -> dict[str, str]:
    """Variables that the node is started with. Unlike a run's own head it may be reached from other machines."""
    return {**RAY_ENV, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", **spec.env}


def shown(spec: NodeSpec) -> str:
    """The plain command that does the same without a guardian, as a line for a shell."""
    unset = [word for name in spec.unset for word in ("-u", name)]
    env = [f"{name}={value}" for name, value in node_env(spec).items()]
    return shlex.join(["env", *unset, *env, "ray", "start", "--block", *node_words(spec)])


def run_node(spec: NodeSpec) -> int:
    """Start the node under a guardian and wait until it ends -> its exit code; 130 after an interrupt, with all of it ended."""
    env = {name: value for name, value in clean_environment(node_env(spec)).items() if name not in spec.unset}
    command = [*guardian_command(), *START, *node_words(spec)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    node = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return node.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if node.poll() is None:
            end_head(node)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
