"""The guide to writing a plugin says what is true of the plugin that it grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime.cli.main import COMMANDS
from vime.hooks.specs import RULES, hook_names

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "writing-a-plugin.md").read_text()
ACME = Path(__file__).parent / "acme_accelerator"
BLOCK = re.compile(r"(?:^`([^`\n]+)`:\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(file that the line above names, text) of the fenced blocks in these languages."""
    for file, language, text in BLOCK.findall(GUIDE):
        if language in languages:
            yield file, text


EXCERPTS = list(blocks("python", "toml", "yaml", "json"))


@pytest.mark.parametrize(("file", "text"), EXCERPTS, ids=[f"{n}-{Path(f).name}" for n, (f, _) in enumerate(EXCERPTS)])
def test_code_is_an_excerpt_of_the_file_that_it_names(file: str, text: str) -> None:
    assert file, f"no line above names the file of:\n{text}"
    assert text in (ACME / file).read_text()


def test_every_block_is_looked_at() -> None:
    assert len(EXCERPTS) >= 15
    assert len(BLOCK.findall(GUIDE)) == GUIDE.count("```") // 2 == len(EXCERPTS) + len(list(blocks("console")))


def test_every_hook_is_told_with_what_it_needs() -> None:
    told = dict(re.findall(r"^\| `(vime_\w+)` \| [^|]+\| (yes)? ?\|", GUIDE, re.MULTILINE))
    assert tuple(told) == hook_names()
    assert {name for name, required in told.items() if required} == {name for name, rule in RULES.items() if rule.required}


def test_every_module_of_the_plugin_is_named() -> None:
    modules = {path.name for path in (ACME / "src" / "acme_accelerator").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"{name}`" not in GUIDE} == set()


def test_commands_exist() -> None:
    from argparse import ArgumentParser

    from vime.cli import plugins

    parser = ArgumentParser()
    plugins.add_parser(parser.add_subparsers())
    commands = re.findall(
        r"\bvime ((?:plugins )?[a-z]+)\b(?= |`|$)", "\n".join(text for _, text in blocks("console")), re.MULTILINE
    )
    assert {"plugins new", "plugins list", "plugins validate", "plugins trace", "run"} <= set(commands)
    for command in commands:
        assert command.split()[0] in COMMANDS
        if command.startswith("plugins "):
            with pytest.raises(SystemExit) as asked:
                parser.parse_args([*command.split(), "--help"])
            assert asked.value.code == 0
