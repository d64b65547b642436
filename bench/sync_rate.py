"""Publications of a 100M-parameter model over shared memory: bytes per second beside a plain copy of the same bytes.

Runs `vime run` for a few steps on random weights, then copies as many bytes with torch in this process. Prints JSON; the
time of a publication is from the pause to the open gate, staging included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

VIME = Path(sys.executable).with_name("vime")
SIZES = ("--hidden", "768", "--layers", "12", "--heads", "12", "--kv-heads", "12", "--head-dim", "64", "--ffn", "2304")
STEPS = 8


def run(folder: Path) -> list[dict[str, float]]:
    """Seconds and bytes of the publications of one run, the first two left out."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} plus {n} is", "label": str(2 * n)}) + "\n" for n in range(200)))
    subprocess.run([VIME, "data", "tiny-model", "--out", folder / "model", "--prompts", prompts, *SIZES], check=True)
    config = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(prompts)},
        "rollout": {"batch_size": 2, "group_size": 2, "sampling": {"max_response_tokens": 4}},
        "reward": {"kind": "exact"},
        "schedule": {"num_steps": STEPS},
        "weights": {"probe": {"first": 1, "every": 0}, "fingerprint": {"first": 1, "every": 0}},
        "observe": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    subprocess.run([VIME, "run", "--platform", "cpu", folder / "run.yaml"], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    synced = [row for row in rows if row["kind"] == "sync"][2:]
    return [{"nbytes": row["metrics"]["perf/update_weights_wire_bytes"], **row["seconds"]} for row in synced]


def copy_seconds(nbytes: int) -> float:
    """Median of a plain copy by one thread."""
    torch.set_num_threads(1)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    spans = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="vime-sync-") as folder:
        published = run(Path(folder))
    nbytes = int(published[0]["nbytes"])
    phases = {name: statistics.median(p[name] for p in published) for name in published[0] if name != "nbytes"}
    copied = copy_seconds(nbytes)
    print(
        json.dumps(
            {
                "bytes": nbytes,
                "publication_s": phases,
                "bytes_per_s": nbytes / phases["sync"],
                "copy_bytes_per_s": nbytes / copied,
                "ratio_to_copy": copied / phases["sync"],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
