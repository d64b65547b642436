"""Makes typeset answers comparable: full-width and styled characters, other minus signs, Markdown emphasis."""

from __future__ import annotations

import re
import unicodedata

# Emphasis only where Markdown sees it: `2**3` has a word character before the stars.
_EMPHASIS = re.compile(r"(?<![\w*)\]}])(\*\*\*|\*\*|__)(?=\S)([^\n]+?)(?<=\S)\1(?![\w*])")
_SUPERSCRIPTS = re.compile("[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+")
_MEANINGFUL = ("<super>", "<sub>", "<fraction>")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-"})


def plain_text(text: str) -> str:
    """Compatibility characters become plain ones (NFKC) and Markdown emphasis goes.

    Superscripts become exponents, x² is x^{2} and not NFKC's x2; subscripts and fractions keep their own characters.
    """
    if not text.isascii():
        text = _SUPERSCRIPTS.sub(lambda run: "^{" + unicodedata.normalize("NFKC", run.group()) + "}", text)
        text = "".join(_plain(c) for c in unicodedata.normalize("NFC", text)).translate(_MINUS)
    return _EMPHASIS.sub(r"\2", text) if "**" in text or "__" in text else text


def _plain(character: str) -> str:
    if character.isascii() or unicodedata.decomposition(character).startswith(_MEANINGFUL):
        return character
    return unicodedata.normalize("NFKC", character)
