"""A fake `npu-smi`: an executable of its own on PATH that answers from a profile, and fails as the tool does.

`installed("atlas-a2x8")` puts it in place for a block, together with the host that the profile describes, so that the
inventory is the same on every machine. What the executable does is in `npu_smi_program`.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime_ascend.testing import npu_smi_program

PROFILES = Path(__file__).parent / "profiles"
_CLEARED = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_BUFFSIZE")
"""Variables of the machine that runs the test, which would show through."""
_USUAL = ("info", "info -m", "info -t topo", "info -t board -i 0", "info -t spod-info -i 0 -c 0")
_SOURCE = str(Path(__file__).resolve().parents[2])


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILES.glob("*.yaml")))


@functools.cache
def load_profile(name: str) -> dict[str, Any]:
    """A profile by name, not to be changed. Raises FileNotFoundError listing the known ones."""
    import yaml

    path = PROFILES / f"{name}.yaml"
    if not path.exists():
        raise FileNotFoundError(f"no profile {name!r}; there are {', '.join(profile_names())}")
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@contextmanager
def installed(name: str) -> Iterator[Mapping[str, str]]:
    """Put a profile's machine in place for a block; yields the environment to probe with."""
    profile = load_profile(name)
    with tempfile.TemporaryDirectory(prefix="fake-npu-") as scratch, _patched(profile, Path(scratch)) as env:
        yield env


@contextmanager
def _patched(profile: Mapping[str, Any], scratch: Path) -> Iterator[Mapping[str, str]]:
    """PATH, the toolkit's folder, the folder of vllm-ascend and the host's facts: changed, then put back."""
    from vime_ascend import probe

    changes = {"PATH": _search_path(profile, scratch), **_toolkit(profile, scratch), **profile.get("env", {})}
    kept = {
        name: os.environ.get(name)
        for name in (*changes, "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_RT_VISIBLE_DEVICES")
    }
    host, host_facts = profile["host"], probe.host_facts
    packages = _vllm_ascend(profile, scratch)
    try:
        for variable in kept:
            os.environ.pop(variable, None)
        os.environ.update(changes)
        sys.path[:0] = packages
        probe.host_facts = lambda software: _host_facts(host)
        yield dict(os.environ)
    finally:
        probe.host_facts = host_facts
        for folder in packages:
            sys.path.remove(folder)
        for variable, value in kept.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


def _search_path(profile: Mapping[str, Any], scratch: Path) -> str:
    """PATH with the fake in front; a profile without the tool gets a PATH without any `npu-smi`."""
    others = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if profile["tool"] == "missing":
        return os.pathsep.join(folder for folder in others if not Path(folder, "npu-smi").exists())
    folder = scratch / "bin"
    folder.mkdir()
    data = scratch / "profile.json"
    data.write_text(json.dumps(profile))
    program = scratch / "npu_smi.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {_SOURCE!r})\n"
        f"from vime_ascend.testing.npu_smi_program import main\nsys.exit(main(sys.argv[1:], {str(data)!r}))\n"
    )
    answers = _write_answers(profile, scratch / "answers")
    tool = folder / "npu-smi"
    tool.write_text(
        "#!/bin/sh\n# Usual questions are answered beforehand, which starts no interpreter; all others go to the program.\n"
        f'[ -f {shlex.quote(str(answers))}/"$*" ] && exec cat {shlex.quote(str(answers))}/"$*"\n'
        f'exec {shlex.quote(sys.executable)} -S {shlex.quote(str(program))} "$@"\n'
    )
    tool.chmod(0o755)
    return os.pathsep.join([str(folder), *others])


def _write_answers(profile: Mapping[str, Any], folder: Path) -> Path:
    """What the program would say to the questions that the platform asks, one file a command line."""
    folder.mkdir()
    for line in _USUAL if profile["tool"] == "works" else ():
        try:
            (folder / line).write_text(npu_smi_program.answer(profile, line.split()), encoding="utf-8")
        except npu_smi_program.MisuseError:
            continue
    return folder


def _toolkit(profile: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """CANN's install file, as its installer writes it."""
    version, arch = profile["cann"], profile["host"]["arch"]
    if version is None:
        return {}
    home = scratch / "ascend-toolkit"
    folder = home / f"{arch}-linux"
    folder.mkdir(parents=True)
    text = f"package_name=Ascend-cann-toolkit\nversion={version}\narch={arch}\nos=linux\npath={folder}\n"
    (folder / "ascend_toolkit_install.info").write_text(text)
    return {"ASCEND_HOME_PATH": str(home)}


def _vllm_ascend(profile: Mapping[str, Any], scratch: Path) -> list[str]:
    """The build information of vllm-ascend in a package that holds nothing else."""
    build = profile["vllm_ascend_build"]
    if build is None:
        return []
    package = scratch / "packages" / "vllm_ascend"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise ImportError("vllm_ascend must not be imported to look at a node")\n')
    (package / "_build_info.py").write_text(f"# Auto-generated file\n__device_type__ = '{build}'\n")
    return [str(package.parent)]


def _host_facts(host: Mapping[str, Any]) -> dict[str, Any]:
    """The host part of a profile in the shape of `vime.platforms.host.read_host`: memory nodes of equal size."""
    nodes, each = host["numa_nodes"], host["cpus"] // host["numa_nodes"]
    size = host["memory_gib"] * 2**30
    numa = [{"index": i, "cpus": list(range(i * each, (i + 1) * each)), "memory_bytes": size // nodes} for i in range(nodes)]
    return {
        "hostname": host["hostname"],
        "arch": host["arch"],
        "cpus": list(range(host["cpus"])),
        "memory_bytes": size,
        "numa": numa,
        "software": {role: dict(names) for role, names in host["software"].items()},
    }
