"""Puts questions to platforms and writes down which were asked."""

from __future__ import annotations

from typing import Any

from vime.planning.plan import PlatformAnswers


class Asker:
    """Asks hooks by method name; `asked` is the list, in order, as `platform.hook(subject)`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, platform: PlatformAnswers, hook: str, *arguments: Any) -> Any:
        """The platform's answer. Whatever the hook raises travels."""
        self.asked.append(f"{platform.name}.{hook}({_subject(arguments)})")
        return getattr(platform, hook)(*arguments)


def _subject(arguments: tuple[Any, ...]) -> str:
    first = arguments[0]
    for name in ("role", "hostname"):
        if hasattr(first, name):
            return str(getattr(first, name))
    return f"{first.trainer.role} -> {first.engine.role}, {arguments[1]}"
