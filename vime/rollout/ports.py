"""Free ports that stay ours until a server listens on them, and URLs that survive IPv6."""

from __future__ import annotations

import ipaddress
import socket
from types import TracebackType

from vime.errors import EngineError

LOOPBACK = "127.0.0.1"


class PortLease:
    """A port held by a bound socket that does not listen.

    Servers that set SO_REUSEADDR (vLLM and vllm-router do) can bind and listen on it meanwhile, while the kernel gives
    it to nobody who asks for any free port. Keep the lease as long as the server may be restarted on the same port.
    """

    def __init__(self, held: socket.socket, host: str) -> None:
        self._held: socket.socket | None = held
        self.host = host
        self.port: int = held.getsockname()[1]

    def url(self, scheme: str = "http") -> str:
        return url(self.host, self.port, scheme=scheme)

    def release(self) -> None:
        """Give the port back; safe to call again."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def lease_port(host: str = LOOPBACK, port: int = 0) -> PortLease:
    """Hold a free port (any with `port` 0). Raises EngineError when the port is taken, on this or on all interfaces."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((bare, port))
    except OSError as error:
        held.close()
        raise EngineError(
            f"cannot hold port {port} of {host}: {error.strerror}",
            fix="stop the process that listens there, or leave the port out so that a free one is taken",
        ) from error
    return PortLease(held, bare)


def join_host_port(host: str, port: int) -> str:
    """`host:port` with brackets around an IPv6 address exactly once."""
    bare = host.strip("[]")
    try:
        is_v6 = ipaddress.ip_address(bare.partition("%")[0]).version == 6
    except ValueError:
        is_v6 = False
    return f"[{bare}]:{port}" if is_v6 else f"{bare}:{port}"


def url(host: str, port: int, *, scheme: str = "http") -> str:
    """`scheme://host:port`, also for `tcp` init methods."""
    return f"{scheme}://{join_host_port(host, port)}"
