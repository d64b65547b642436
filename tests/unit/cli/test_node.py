"""`vime node start`: what a node is started with."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.main import main
from vime.cluster.node_start import NodeSpec, node_words, shown
from vime.cluster.session import clean_environment
from vime.errors import PlacementError
from vime.testing.tiny_models import make_tiny_qwen3


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["node", "start", "--platform", "cpu", "--print", *words]) == 0
    return shlex.split(capsys.readouterr().out)


def test_a_head_and_a_node_offer_what_the_platform_says(capsys: pytest.CaptureFixture[str]) -> None:
    head = printed(capsys, "--head", "--slots", "3")
    assert head[head.index("ray") :][:3] == ["ray", "start", "--block"]
    assert {"--head", "--port=6379", "--num-gpus=0", '--resources={"vime_cpu_slot": 3.0}'} <= set(head)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1" in head
    node = printed(capsys, "--address", "10.0.0.5:7000", "--host", "10.0.0.6", "--name", "n6", "--", "--num-cpus=2")
    assert {"--address=10.0.0.5:7000", "--node-ip-address=10.0.0.6", "--node-name=n6", "--num-cpus=2"} <= set(node)
    assert not {"--head", "--port=6379"} & set(node)
    (resources,) = [word for word in node if word.startswith("--resources=")]
    assert json.loads(resources.partition("=")[2])["vime_cpu_slot"] >= 1


def test_a_binding_reaches_the_command_whole() -> None:
    """Ray's own accelerator resource has a word of its own; flags are set and forbidden variables taken out."""
    spec = NodeSpec({"GPU": 4.0}, {"rack": "3"}, {"NOSET": "1"}, ("OLD",), address="h:1")
    words = shlex.split(shown(spec))
    assert words[:3] == ["env", "-u", "OLD"]
    assert {"NOSET=1", "--num-gpus=4", "--resources={}", "--labels=rack=3", "--address=h:1"} <= set(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--head", "--slots", "0"], "cpu has no device to offer here"),
        (["--address", "h:1", "--port", "7"], "--port is of a head"),
        (["--head", "--", "--labels=a=b"], "--labels is set by vime"),
        (["--head", "--", "--resources={}"], "--resources is set by vime"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "start", "--platform", "cpu", "--print", *words]) == 1
    assert told in capsys.readouterr().err


def test_extra_words_are_checked_where_they_are_used() -> None:
    with pytest.raises(PlacementError, match="--port is set by vime"):
        node_words(NodeSpec({}, extra=("--port=1",)))


def test_starting_a_node_needs_no_torch() -> None:
    code = "import sys; from vime.cli.main import main; main(['node', 'start', '--platform', 'cpu', '--head', '--print']);"
    code += "sys.exit(' '.join({'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ray-address", "10.0.0.5"], "expected HOST:PORT, such as 10.0.0.5:6379, got '10.0.0.5'"),
        (["cluster.address=auto"], "expected HOST:PORT"),
        (["--ray-address", "10.0.0.5:99999"], "expected HOST:PORT"),
        (["--ray-address", "10.0.0.5:6379"], "give --platform NAME, that of the cluster's nodes"),
        (["--ray-address", "127.0.0.1:9", "--platform", "cpu"], "no Ray cluster answers at 127.0.0.1:9: Connection refused"),
    ],
)
def test_a_run_that_cannot_join_is_told_before_it_begins(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder / "run.yaml"), *words]) == 1
    assert told in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run file whose model and data are all right."""
    make_tiny_qwen3(tmp_path / "model", seed=1)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "label": "2"}))
    sections = "run: {dir: out}\nmodel: {path: model}\ndata: {path: d.jsonl}\nschedule: {num_steps: 2}\n"
    (tmp_path / "run.yaml").write_text(sections + "reward: {kind: exact}\n")
    return tmp_path


def test_a_cluster_of_the_environment_is_not_taken_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert "RAY_ADDRESS" not in clean_environment()
