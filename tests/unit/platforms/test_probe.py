from __future__ import annotations

import os
import time

from vime.facts.diagnosis import Match, ProbeContext
from vime.platforms.probe import ProbeTarget, ask, ask_all


def target(path, name: str = "acme") -> ProbeTarget:
    return ProbeTarget(name, path.stem)


def test_answers_come_back_whole_whatever_the_plugin_prints(install) -> None:
    body = "print('import noise')\n@hookimpl\ndef vime_probe(ctx):\n    print('{}')\n    return Match(NAME, 5, ctx.env['PATH'])"
    (answer,) = ask_all([target(install("acme", body))], timeout_s=20)
    assert answer.problem is None
    assert answer.match == Match("acme", 5, os.environ["PATH"])


def test_probes_run_side_by_side_under_one_limit_and_helpers_end_with_them(install, tmp_path) -> None:
    marker = tmp_path / "helper.pid"
    body = f"""
    import subprocess, sys, time
    @hookimpl
    def vime_probe(ctx):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(marker)!r}, "w").write(str(child.pid))
        time.sleep(60)
    """
    targets = [target(install("one", body), "one"), target(install("two", "import time\ntime.sleep(60)"), "two")]
    start = time.monotonic()
    answers = ask_all(targets, timeout_s=2.0)
    assert time.monotonic() - start < 6
    assert all("did not answer within 2 s" in (answer.problem or "") for answer in answers)
    assert ended(int(marker.read_text()))


def ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has reaped yet."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_exit_codes_and_output_are_told(install) -> None:
    body = "import os\n@hookimpl\ndef vime_probe(ctx):\n    os.write(2, b'cannot map registers')\n    os._exit(3)"
    (answer,) = ask_all([target(install("acme", body))], timeout_s=20)
    assert answer.match is None
    assert "exit code 3: cannot map registers" in (answer.problem or "")


def test_a_plugin_without_a_probe_does_not_match(install) -> None:
    answer = ask(target(install("acme")), ProbeContext(env={}))
    assert (answer.match, answer.problem) == (None, None)


def test_stages_tell_where_it_broke(install) -> None:
    def stage(body: str, name: str) -> tuple[str, str]:
        answer = ask(target(install(name, body), name), ProbeContext(env={}))
        assert answer.match is None
        return answer.stage, answer.problem or ""

    assert stage("1/0", "a") == ("import", "ZeroDivisionError: division by zero")
    assert stage("def vime_probe(ctx): return None", "b")[0] == "validation"
    assert stage("@hookimpl\ndef vime_probe(ctx): return 5", "c")[0] == "probe"
    assert "expected platform 'd'" in stage("@hookimpl\ndef vime_probe(ctx): return Match('x', 5, '')", "d")[1]
    assert "0 or more" in stage("@hookimpl\ndef vime_probe(ctx): return Match(NAME, -1, '')", "e")[1]


def test_only_the_plugins_own_probe_is_asked(install) -> None:
    install("parent", "@hookimpl\ndef vime_probe(): return Match(NAME, 5, '')")
    child = install("child", "@hookimpl\ndef vime_probe(): return None", parent="parent", complete=False)
    assert ask(target(child, "child"), ProbeContext(env={})).match is None
