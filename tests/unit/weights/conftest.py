"""A publisher, its trainer and its engines, in memory."""

import pytest
from publisher_parts import IDS, Engine, Link

from vime.weights.protocol import ProbeSettings, Publisher


@pytest.fixture
def log():
    return []


@pytest.fixture
def engines(log):
    return [Engine("e0", log, size=2), Engine("e1", log)]


@pytest.fixture
def streaming(log, engines):
    """A trainer whose transport streams, and its publisher."""
    link = Link(log, streams=True)
    for engine in engines:
        engine.link = link
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS))
    publisher.set_engines(engines)
    return link, publisher


@pytest.fixture
def link(log):
    return Link(log)


@pytest.fixture
def publisher(link, engines):
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS))
    publisher.set_engines(engines)
    return publisher
