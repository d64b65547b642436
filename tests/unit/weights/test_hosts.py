"""Which host a process is on, and that every engine is offered what is on its own host."""

import subprocess
import sys

import publisher_parts as parts
import pytest

from vime.errors import WeightSyncError
from vime.types import PolicyVersion
from vime.weights.hosts import host_identity
from vime.weights.manifest import build_manifest, manifest_to_json, pack_manifest, unpack_manifest
from vime.weights.protocol import ProbeSettings, Publisher

ASK = [sys.executable, "-c", "from vime.weights.hosts import host_identity; print(host_identity())"]


# ---- identity


def test_processes_that_share_memory_are_on_one_host():
    other = subprocess.run(ASK, check=True, capture_output=True, text=True).stdout.strip()
    assert other == host_identity()


@pytest.mark.parametrize("apart", [["--mount", "mount -t tmpfs none /dev/shm && "], ["--mount --pid --fork", ""]], ids=str)
def test_a_container_with_memory_or_process_ids_of_its_own_is_another_host(apart):
    """Namespaces as a container has them; where this process may not make any, the test has nothing to run."""
    words, before = apart
    command = ["unshare", *words.split(), "sh", "-c", f'{before}exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"this process may not run `unshare {words}`")
    other = subprocess.run([*command, *ASK], check=True, capture_output=True, text=True).stdout.strip()
    assert other.split("/")[0] == host_identity().split("/")[0], "it is the same machine"
    assert other != host_identity()


# ---- offers


def publisher_on(hosts, places):
    """A publisher, its link with ranks on `hosts`, and engines of one and two workers in turn on `places`."""
    log = []
    link = parts.Link(log)
    link.hosts = hosts
    engines = [parts.Engine(f"e{n}", log, size=1 + n % 2) for n in range(len(places))]
    for engine, place in zip(engines, places, strict=True):
        engine.place = place
    publisher = Publisher(link, probe=ProbeSettings(ids=parts.IDS))
    publisher.set_engines(engines)
    return publisher, link, engines


async def test_every_engine_gets_its_hosts_offer_and_a_number_on_its_host():
    publisher, link, engines = publisher_on(("A", "B", "C"), "ABBA")
    await publisher.publish(PolicyVersion(0, 1))
    assert link.groups == [{"A": 3, "B": 3}]
    assert [(e.told["info"]["of"], e.offset) for e in engines] == [("A", 0), ("B", 0), ("B", 2), ("A", 1)]


async def test_an_engine_without_a_rank_on_its_host_is_named():
    publisher, _, engines = publisher_on(("A",), "AB")
    with pytest.raises(WeightSyncError, match="no trainer rank is on the host of e1"):
        await publisher.publish(PolicyVersion(0, 1))
    assert [engine.told for engine in engines] == [None, None], "nobody was initialised"


async def test_all_engines_are_sent_one_packed_manifest():
    publisher, _, engines = publisher_on((), ["", ""])
    report = await publisher.publish(PolicyVersion(0, 1))
    assert engines[0].told["manifest"] is engines[1].told["manifest"]
    rows = [["a", "float32", [2], 0, 8], ["b", "float32", [1], 64, 4]]
    assert (unpack_manifest(engines[0].told["manifest"]), report.nbytes) == (rows, 12)


# ---- packing


def test_a_packed_manifest_comes_back_whole_and_is_short():
    names = [f"model.layers.{i}.{p}_proj.weight" for i in range(100) for p in ("q", "k", "v", "gate", "up", "down")]
    rows = manifest_to_json(build_manifest((name, "bfloat16", (7 + n % 5, 3)) for n, name in enumerate(names)))
    packed = pack_manifest(rows)
    assert unpack_manifest(packed) == rows
    assert len(packed) * 10 < len(str(rows))


def test_places_that_do_not_follow_from_the_order_are_not_packed():
    with pytest.raises(WeightSyncError, match="places are not those of its order"):
        pack_manifest([["a", "float32", [2], 64, 8]])


@pytest.mark.parametrize("text", ["", "no text of ours", "eJyLBQAAXwBe", "////"])
def test_a_text_that_is_no_manifest_is_refused(text):
    with pytest.raises(WeightSyncError, match="not a packed manifest"):
        unpack_manifest(text)
