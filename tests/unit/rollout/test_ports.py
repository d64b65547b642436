from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from vime.errors import EngineError
from vime.rollout.ports import join_host_port, lease_port, url


def test_ports_leased_at_the_same_time_are_distinct() -> None:
    with ThreadPoolExecutor(16) as pool:
        leases = list(pool.map(lambda _: lease_port(), range(16)))
    try:
        assert len({lease.port for lease in leases}) == 16
    finally:
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_on_one_or_all_interfaces_is_refused(address: str) -> None:
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot hold port {port} of 127.0.0.1"):
            lease_port(port=port)


def test_a_server_may_listen_on_a_leased_port_and_nobody_is_given_it_meanwhile() -> None:
    with lease_port() as lease, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((lease.host, lease.port))
        server.listen()
        with socket.create_connection((lease.host, lease.port), timeout=1):
            pass
        others = [lease_port() for _ in range(200)]
        assert lease.port not in {other.port for other in others}
        for other in others:
            other.release()


def test_a_released_port_can_be_leased_again() -> None:
    lease = lease_port()
    lease.release()
    lease.release()
    with lease_port(port=lease.port) as again:
        assert again.url() == f"http://127.0.0.1:{lease.port}"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("fd00::1", "[fd00::1]:8000"),
        ("[fd00::1]", "[fd00::1]:8000"),
        ("fe80::1%eth0", "[fe80::1%eth0]:8000"),
        ("127.0.0.1", "127.0.0.1:8000"),
        ("node-7.local", "node-7.local:8000"),
    ],
)
def test_only_ipv6_addresses_get_brackets_and_only_once(host: str, expected: str) -> None:
    assert join_host_port(host, 8000) == expected
    assert url(host, 8000) == f"http://{expected}"
    assert url(host, 8000, scheme="tcp") == f"tcp://{expected}"
