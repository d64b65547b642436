"""From a prompt to token ids: chat templates, format strings, plain text. The begin-of-sequence token stands exactly once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from vime.errors import DataError

CHAT = "chat"
PLACEHOLDER = "{prompt}"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

Messages = Sequence[Mapping[str, Any]]


class TextEncoder(Protocol):
    """The part of a fast tokenizer (`tokenizers.Tokenizer`) that is used here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = ...) -> Any: ...

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = ...) -> list[Any]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class ChatRenderer(Protocol):
    """The part of a transformers tokenizer that renders messages."""

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...


@dataclass(frozen=True)
class PromptTokenizer:
    """A model's tokenizer as prompts, labels and graders need it.

    `prefix` are the ids that the tokenizer itself puts before a text (its begin of sequence; often none).
    `chat` is None unless a chat template was asked for.
    """

    encoder: TextEncoder
    prefix: tuple[int, ...] = ()
    eos_id: int | None = None
    pad_id: int | None = None
    chat: ChatRenderer | None = None
    name: str = ""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone, nothing added."""
        return tuple(self.encoder.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """`encode` of each text, several threads at once."""
        return [tuple(e.ids) for e in self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.encoder.decode(list(ids), skip_special_tokens=skip_special_tokens)


def load_tokenizer(directory: str | Path, *, template: str | None = None) -> PromptTokenizer:
    """The tokenizer of a Hugging Face folder.

    Reads `tokenizer.json` with the `tokenizers` library. transformers is imported only for `template="chat"` (about a
    second), or where the folder has no `tokenizer.json` (which may import torch too).

    Raises:
        DataError: the folder holds no usable tokenizer, or no chat template although one is asked for.
    """
    folder = Path(directory)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise _no_tokenizer(folder, "none of its files is there")
    if not (folder / "tokenizer.json").is_file():
        return _from_transformers(folder, chat=template == CHAT)
    tokenizer = _from_tokenizers(folder)
    if template != CHAT:
        return tokenizer
    return replace(tokenizer, chat=_with_chat_template(_load_with_transformers(folder, "PreTrainedTokenizerFast"), folder))


def _from_tokenizers(folder: Path) -> PromptTokenizer:
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"not a tokenizer: {error}", where=str(folder / "tokenizer.json")) from error
    encoder.no_padding()
    encoder.no_truncation()
    config = _tokenizer_config(folder)
    ids = {key: _special_id(encoder, config.get(f"{key}_token")) for key in ("bos", "eos", "pad")}
    prefix = _own_prefix(encoder)
    if config.get("add_bos_token") and not prefix and ids["bos"] is not None:
        prefix = (ids["bos"],)
    return PromptTokenizer(encoder, prefix=prefix, eos_id=ids["eos"], pad_id=ids["pad"], name=str(folder))


def _from_transformers(folder: Path, *, chat: bool) -> PromptTokenizer:
    tokenizer = _load_with_transformers(folder, "AutoTokenizer")
    encoder = getattr(tokenizer, "backend_tokenizer", None)
    if encoder is None:
        raise DataError("the tokenizer has no fast (tokenizers) form", where=str(folder), fix="add a tokenizer.json")
    encoder.no_padding()
    encoder.no_truncation()
    return PromptTokenizer(
        encoder,
        prefix=_own_prefix(encoder),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        chat=_with_chat_template(tokenizer, folder) if chat else None,
        name=str(folder),
    )


def _load_with_transformers(folder: Path, class_name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DataError("chat templates need transformers", fix="pip install 'vime[rollout]'") from error
    try:
        return getattr(transformers, class_name).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _no_tokenizer(folder, str(error)) from error


def _no_tokenizer(folder: Path, why: str) -> DataError:
    fix = "give model.path a Hugging Face folder with tokenizer.json"
    return DataError(f"no usable tokenizer in the model folder: {why}", where=str(folder), fix=fix)


def _with_chat_template(tokenizer: Any, folder: Path) -> ChatRenderer:
    if not tokenizer.chat_template:
        raise DataError(
            "data.template is `chat` but the tokenizer has no chat template",
            where=str(folder),
            fix="use a format such as `{prompt}`, or a model with a chat template",
        )
    return tokenizer


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                merged |= json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise DataError(f"not a JSON mapping: {error}", where=str(path)) from error
    return merged


def _special_id(encoder: Any, token: object) -> int | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return encoder.token_to_id(text) if isinstance(text, str) else None


def _own_prefix(encoder: TextEncoder) -> tuple[int, ...]:
    """What the post-processor puts before a text; what it puts behind would end a prompt and is left out."""
    bare = list(encoder.encode("a", add_special_tokens=False).ids)
    dressed = list(encoder.encode("a", add_special_tokens=True).ids)
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return tuple(dressed[:start])
    return ()


def check_template(template: str | None, *, where: str | None = None) -> None:
    """Raise DataError unless the template is None, `chat` or a format that holds `{prompt}`."""
    if template is None or template == CHAT or PLACEHOLDER in template:
        return
    raise DataError(
        f"data.template {template!r} has no {PLACEHOLDER}",
        where=where,
        fix="use `chat`, null, or a format such as `<s>{prompt}</s>`",
    )


def render_prompt(prompt: str | Messages, template: str | None, chat: ChatRenderer | None = None) -> str:
    """The text that is tokenized.

    `chat` renders messages (a bare text becomes one user turn) and opens the assistant's turn; a format replaces
    `{prompt}`; None takes the text as it is.

    Raises:
        DataError: messages without the chat template, or messages that the chat template refuses.
    """
    if template == CHAT:
        if chat is None:
            raise DataError("a chat template is asked for, but the tokenizer was loaded without one")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        try:
            return chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is foreign code and raises what it likes
            raise DataError(f"the chat template refuses the messages: {error}") from error
    if not isinstance(prompt, str):
        raise DataError("the prompt is a list of messages, which only a chat template renders", fix="set data.template: chat")
    return prompt if template is None else template.replace(PLACEHOLDER, prompt)


def with_prefix(ids: tuple[int, ...], tokenizer: PromptTokenizer, template: str | None) -> tuple[int, ...]:
    """Put the tokenizer's own begin of sequence before `ids`, unless the text brought it or a chat template decided."""
    prefix = tokenizer.prefix
    if template == CHAT or not prefix or ids[: len(prefix)] == prefix:
        return ids
    return prefix + ids


def encode_prompt(
    tokenizer: PromptTokenizer, prompt: str | Messages, template: str | None = None
) -> tuple[str, tuple[int, ...]]:
    """Render and tokenize one prompt: (text, ids). See `render_prompt` and `with_prefix`."""
    text = render_prompt(prompt, template, tokenizer.chat)
    return text, with_prefix(tokenizer.encode(text), tokenizer, template)


def encode_label(tokenizer: PromptTokenizer, label: str, *, digits_apart: bool = False) -> tuple[int, ...]:
    """The ids of a supervised answer, end of sequence included.

    Args:
        digits_apart: encode character by character, which is how a sampler writes numbers.

    Raises:
        DataError: the tokenizer has no end-of-sequence token, so that nothing would teach the model to stop.
    """
    if tokenizer.eos_id is None:
        raise DataError("the tokenizer names no eos_token", where=tokenizer.name, fix="add it to tokenizer_config.json")
    pieces = list(label) if digits_apart else [label]
    return (*(i for piece in pieces for i in tokenizer.encode(piece)), tokenizer.eos_id)
