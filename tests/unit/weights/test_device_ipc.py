"""Both halves of device_ipc, in processes of their own, over host memory."""

import importlib.util
import json
import multiprocessing
import os
import runpy
import threading
from pathlib import Path

import pytest
import torch

from vime.errors import DeadlineError, WeightSyncError
from vime.weights.buckets import plan_buckets
from vime.weights.fingerprint import word_digest
from vime.weights.transports.control_page import ControlPage
from vime.weights.transports.device_ipc import DeviceIpcEngine, HostExporter, cut
from vime.weights.transports.exporters import build_exporter
from vime.weights.transports.host_shm import sweep_segments

ROLES = Path(__file__).with_name("device_ipc_roles.py")
spec = importlib.util.spec_from_file_location("device_ipc_roles", ROLES)
assert spec is not None
assert spec.loader is not None
roles = importlib.util.module_from_spec(spec)
spec.loader.exec_module(roles)

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "vime.weights.transports.device_ipc"])


class Peer:
    """A role in a process of its own, and a pipe to it."""

    def __init__(self, role):
        self.pipe, theirs = PROCESSES.Pipe()
        names = {"PIPE": theirs, "ROLE": role}
        self.process = PROCESSES.Process(
            target=runpy.run_path, args=(str(ROLES),), kwargs={"init_globals": names, "run_name": "role"}, daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, *command):
        self.pipe.send(command if len(command) > 1 else command[0])

    def answer(self):
        assert self.pipe.poll(30), "the other process did not answer"
        return self.pipe.recv()

    def ask(self, *command):
        self.tell(*command)
        return self.answer()


@pytest.fixture
def peers():
    """`peers(role, count)` starts processes, which are ended with the test."""
    started = []

    def start(role, count=1):
        started.extend(Peer(role) for _ in range(count))
        return started[-count:]

    yield start
    for peer in started:
        peer.process.kill()
        peer.process.join()


@pytest.fixture
def trainer_of(tmp_path):
    """`trainer_of(**options)`; every half is closed at the end."""
    made = []

    def make(**options):
        made.append(roles.make_trainer(tmp_path, **options))
        return made[-1]

    yield make
    for half in made:
        half.close()


def join(half, workers):
    """Connect worker processes to the trainer's half."""
    offer = half.init_info(len(workers))
    for number, worker in enumerate(workers):
        worker.tell("connect", roles.engine_info(offer, number))
    half.connect()
    assert [worker.answer() for worker in workers] == ["connected"] * len(workers)
    return offer


def listed(weights):
    return [(name, tensor.tolist()) for name, tensor in weights.items()]


def publish(half, workers, seed, *, fingerprint=False, **options):
    """One whole update -> what each worker answers."""
    weights = roles.make_weights(seed)
    staged = half.stage(weights.items(), version=f"0.{seed}", fingerprint=fingerprint)
    for worker in workers:
        worker.tell("receive", staged, options)
    half.stream(weights.items())
    return [worker.answer() for worker in workers]


@pytest.mark.parametrize(("bucket_bytes", "buffers"), [(64, 2), (200, 1), (200, 3), (1 << 20, 2)])
def test_every_worker_gets_every_tensor_in_order(trainer_of, peers, bucket_bytes, buffers):
    """The embedding has 2,640 bytes, so with small buckets it travels in pieces; the ring wraps around many times."""
    half, workers = trainer_of(bucket_bytes=bucket_bytes, buffers=buffers), peers("engine", 2)
    json.dumps(join(half, workers))
    for seed in (1, 2, 3):
        assert publish(half, workers, seed, fingerprint=True) == [listed(roles.make_weights(seed))] * 2


def test_pieces_cover_a_bucket_and_none_is_larger_than_a_buffer():
    (bucket,) = plan_buckets(roles.manifest_of({"a": torch.zeros(100)}).tensors, 100)
    assert cut(bucket, 150) == ((0, 150), (150, 300), (300, 400))
    assert cut(bucket, 400) == ((0, 400),)


def test_a_slow_worker_holds_the_others_back_but_loses_nothing(trainer_of, peers):
    half, (slow, quick) = trainer_of(), peers("engine", 2)
    join(half, [slow, quick])
    weights = roles.make_weights(1)
    staged = half.stage(weights.items(), version="0.1", fingerprint=False)
    slow.tell("receive", staged, {"pause_s": 0.02})
    quick.tell("receive", staged, {})
    half.stream(weights.items())
    assert slow.answer() == quick.answer() == listed(weights)


def test_a_worker_that_stands_still_is_named_at_the_deadline(trainer_of, peers):
    half, workers = trainer_of(timeout_s=2.5), peers("engine", 1)
    join(half, workers)
    with pytest.raises(DeadlineError, match=r"no room for piece 2 within 2\.5 s: engine worker 0 has taken 0 of 2 pieces"):
        half.stream(roles.make_weights(1).items())


def test_a_worker_that_dies_is_named_and_the_next_update_goes_to_those_that_join_anew(trainer_of, peers):
    half, (dies, lives) = trainer_of(), peers("engine", 2)
    join(half, [dies, lives])
    weights = roles.make_weights(1)
    staged = half.stage(weights.items(), version="0.1", fingerprint=False)
    dies.tell("receive", staged, {"die_after": 2})
    lives.tell("receive", staged, {})
    unread = iter(weights.items())
    with pytest.raises(WeightSyncError, match=rf"engine worker 0 \(process {dies.process.pid}\) is gone"):
        half.stream(unread)
    assert list(unread) == [], "for other ranks the rest is a collective, which has to end"
    assert "the trainer gave this update up" in lives.answer()
    with pytest.raises(WeightSyncError, match="no connected engines"):
        half.stream(())
    workers = [lives, *peers("engine")]
    join(half, workers)
    assert publish(half, workers, 2) == [listed(roles.make_weights(2))] * 2


def test_a_worker_that_leaves_is_named(trainer_of, peers):
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    assert workers[0].ask("close") == "closed"
    with pytest.raises(WeightSyncError, match=r"engine worker 0 \(process \d+\) closed its half"):
        half.stream(roles.make_weights(1).items())


def test_a_trainer_that_dies_is_named(tmp_path, peers):
    (trainer,) = peers("trainer")
    offer = trainer.ask(str(tmp_path))
    engine = DeviceIpcEngine()
    engine.connect(roles.engine_info(offer))
    answer = roles.receive(engine, {})
    assert f"the trainer (process {trainer.process.pid}) is gone" in answer
    with pytest.raises(WeightSyncError, match="not connected"):
        next(iter(engine.receive({})))
    engine.close()
    dead = trainer.process.pid
    left = tuple(f"vime-{tmp_path.name}-b{n}-{dead}-w" for n in (0, 1))
    assert sweep_segments(f"vime-{tmp_path.name}-").removed == left, "the names tell a sweep whose they were"


def test_a_worker_that_gives_up_early_does_not_hold_the_trainer(trainer_of, peers):
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    (first,) = publish(half, workers, 1, stop_after=1)
    assert first == listed(roles.make_weights(1))[:1]
    assert publish(half, workers, 2) == [listed(roles.make_weights(2))]


def test_an_engine_that_restarts_gets_what_was_published_last(trainer_of, peers):
    """From the host's copy: nothing is read from the parameters, which may be parked or newer by then."""
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    publish(half, workers, 1)
    weights = roles.make_weights(1)
    half.keep(weights.items())
    for tensor in weights.values():
        tensor.zero_()
    restarted = peers("engine")
    join(half, restarted)
    restarted[0].tell("receive", {}, {})
    half.stream(())
    assert restarted[0].answer() == listed(roles.make_weights(1))


def test_workers_that_do_not_come_are_listed(trainer_of):
    half = trainer_of(timeout_s=0.2)
    half.init_info(3)
    with pytest.raises(DeadlineError, match=r"engine workers \[0, 1, 2\] of 0\.\.2 did not connect within 0\.2 s"):
        half.connect()


def test_closing_the_trainer_frees_waiting_workers_and_leaves_no_file(tmp_path, trainer_of):
    half, engine, answers = trainer_of(), DeviceIpcEngine(), []
    engine.connect(roles.engine_info(half.init_info(1)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"vime-{tmp_path.name}-c0-{os.getpid()}-w"]
    thread = threading.Thread(target=lambda: answers.append(roles.receive(engine, {})))
    thread.start()
    half.close()
    thread.join(10)
    assert "closed its half" in answers[0]
    assert list(tmp_path.iterdir()) == []
    assert list(Path("/dev/shm").glob(f"vime-{tmp_path.name}-*")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: dict(reversed(w.items())), "tensor head came where layers.0.q_proj.weight was due"),
        (lambda w: {k: v for k, v in w.items() if k != "head"}, "tensor head was due and did not come"),
        (lambda w: {**w, "norm": torch.zeros(2)}, r"tensor norm is torch.float32\[2\], its manifest entry torch.float32\[33\]"),
    ],
)
def test_what_does_not_follow_the_manifest_is_named(trainer_of, peers, change, words):
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    workers[0].tell("receive", {}, {})
    with pytest.raises(WeightSyncError, match=words):
        half.stream(change(roles.make_weights(1)).items())
    assert "gave this update up" in workers[0].answer()


def test_a_tensor_too_many_is_named_once_all_others_have_arrived(trainer_of, peers):
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    weights = roles.make_weights(1)
    workers[0].tell("receive", {}, {})
    with pytest.raises(WeightSyncError, match="tensor more came where nothing was due"):
        half.stream([*weights.items(), ("more", torch.zeros(1))])
    assert workers[0].answer() == listed(weights)


def test_other_ranks_only_take_part_in_gathering(trainer_of):
    half = trainer_of(rank=1)
    weights = iter(roles.make_weights(1).items())
    assert half.stage(weights, version="0.1", fingerprint=True) == {"version": "0.1", "tensors": 0}
    assert list(weights) == []
    for step in (half.stream, half.keep):
        again = iter(roles.make_weights(1).items())
        step(again)
        assert list(again) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_staging_without_digests_reads_nothing(trainer_of, rank):
    weights = iter(roles.make_weights(1).items())
    staged = trainer_of(rank=rank).stage(weights, version="0.1", fingerprint=False)
    assert staged == {"version": "0.1", "tensors": 0 if rank else len(roles.make_weights(1))}
    assert len(list(weights)) == len(roles.make_weights(1)), "where gathering is a collective, no rank may begin it alone"


def test_digests_are_those_of_tensors_in_manifest_order(trainer_of):
    weights = roles.make_weights(1)
    staged = trainer_of().stage(weights.items(), version="0.1", fingerprint=True)
    assert staged["digests"] == {name: word_digest(tensor) for name, tensor in weights.items()}
    with pytest.raises(WeightSyncError, match="tensor head came where"):
        trainer_of().stage(reversed(weights.items()), version="0.1", fingerprint=True)


def test_a_copy_that_fails_leaves_none(trainer_of, peers):
    half, workers = trainer_of(), peers("engine")
    join(half, workers)
    publish(half, workers, 1)
    half.keep(roles.make_weights(1).items())
    with pytest.raises(WeightSyncError, match="1 of 16 tensors came to be kept"):
        half.keep([*roles.make_weights(2).items()][:1])
    with pytest.raises(WeightSyncError, match="no published weights are kept"):
        half.stream(())


def test_steps_in_the_wrong_order_are_errors(trainer_of):
    half = trainer_of()
    offer = half.init_info(1)
    with pytest.raises(WeightSyncError, match="no connected engines"):
        half.stream(())
    for weights, words in (((), "no published weights are kept"), (iter(()), r"q_proj\.weight was due and did not come")):
        offer = half.init_info(1)
        engine = DeviceIpcEngine()
        engine.connect(roles.engine_info(offer))
        half.connect()
        with pytest.raises(WeightSyncError, match=words):
            half.stream(weights)
        engine.close()
    with pytest.raises(WeightSyncError, match="not connected"):
        list(DeviceIpcEngine().receive({}))
    with pytest.raises(WeightSyncError, match="buffers"):
        trainer_of(buffers=0)


def test_a_seat_is_taken_once_and_only_where_there_is_one(trainer_of, tmp_path):
    half = trainer_of()
    offer = half.init_info(1)
    first, second = DeviceIpcEngine(), DeviceIpcEngine()
    first.connect(roles.engine_info(offer))
    with pytest.raises(WeightSyncError, match=f"joined already .process {os.getpid()}"):
        second.connect(roles.engine_info(offer))
    with pytest.raises(WeightSyncError, match="worker 1 is not one of the 1 expected"):
        second.connect(roles.engine_info(offer, 1))
    first.close()
    second.connect(roles.engine_info(offer))
    second.close()
    with pytest.raises(WeightSyncError, match="share /dev/shm"):
        ControlPage.open(tmp_path / "absent")
    (tmp_path / "other").write_bytes(bytes(200))
    with pytest.raises(WeightSyncError, match="no control page"):
        ControlPage.open(tmp_path / "other")


def test_an_exporter_that_is_not_installed_is_named():
    with pytest.raises(WeightSyncError, match="cannot build the exporter nowhere:Exporter"):
        build_exporter("nowhere:Exporter", name="x")


def test_host_buffers_are_files_that_go_with_their_exporter(tmp_path):
    ours, theirs = HostExporter(name="vime-x", directory=tmp_path), HostExporter()
    buffer = ours.allocate(10)
    handle = json.loads(json.dumps(ours.export(buffer)))
    opened = theirs.open(handle)
    buffer.fill_(7)
    assert opened.tolist() == [7] * 10
    ours.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightSyncError, match="one host"):
        theirs.open(handle)
