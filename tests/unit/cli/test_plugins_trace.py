from __future__ import annotations

import json

from vime.hooks.specs import RULES


def test_a_command_is_run_and_its_hook_calls_are_counted(vime, tmp_path) -> None:
    file = tmp_path / "calls.jsonl"
    done = vime("plugins", "trace", "--file", str(file), "--", "vime", "doctor", "--platform", "cpu")
    assert "platform: cpu" in done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert lines[0] == ["HOOK", "CALLS", "PLATFORM", "IMPLEMENTED", "BY", "FAILED"]
    table = {line[0]: line[1:] for line in lines[1:-1]}
    assert table == {"vime_inventory": ["1", "cpu", "cpu", "0"], "vime_doctor_checks": ["1", "cpu", "cpu", "0"]}
    missing = done.stdout.splitlines()[-1].partition(": ")[2].split(", ")
    assert missing == [name for name, rule in RULES.items() if rule.runtime and name != "vime_inventory"]
    again = vime("plugins", "trace", "--file", str(file))
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_the_exit_code_is_that_of_the_command(vime) -> None:
    done = vime("plugins", "trace", "--json", "--", "doctor", "--platform", "nobody")
    assert done.returncode == 1
    assert "no platform named 'nobody' is installed" in done.stderr
    assert json.loads(done.stdout) == {
        "exit_code": 1,
        "hooks": [],
        "runtime_hooks_not_asked": [name for name, rule in RULES.items() if rule.runtime],
    }


def test_rows_count_platforms_apart_and_name_who_implements_from_the_leaf_up(vime, tmp_path) -> None:
    file = tmp_path / "calls.jsonl"
    calls = [
        {"platform": "a", "hook": "vime_transports", "plugins": ["base", "a"], "error": None},
        {"platform": "a", "hook": "vime_transports", "plugins": ["base", "a"], "error": "OSError: gone"},
        {"platform": "b", "hook": "vime_transports", "plugins": ["base"], "error": None},
    ]
    file.write_text("".join(json.dumps({**call, "arguments": {}, "answer": None, "pid": 7}) + "\n" for call in calls))
    rows = json.loads(vime("plugins", "trace", "--file", str(file), "--json").stdout)["hooks"]
    assert rows == [
        {"hook": "vime_transports", "calls": 2, "platform": "a", "plugins": ["a", "base"], "failed": 1},
        {"hook": "vime_transports", "calls": 1, "platform": "b", "plugins": ["base"], "failed": 0},
    ]


def test_without_command_or_record_it_says_what_to_write(vime, tmp_path) -> None:
    assert "there is no command to trace" in vime("plugins", "trace").stderr
    (tmp_path / "other.jsonl").write_text("{}\n")
    done = vime("plugins", "trace", "--file", str(tmp_path / "other.jsonl"))
    assert done.returncode == 1
    assert "not a record of hook calls" in done.stderr
