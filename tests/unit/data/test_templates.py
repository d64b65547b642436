"""Rendering and tokenizing prompts and labels."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import processors

from vime.data.templates import check_template, encode_label, encode_prompt, load_tokenizer
from vime.data.tiny_model import byte_tokenizer, save_tokenizer
from vime.errors import DataError

BOS = "<|im_start|>"
BOS_ID, EOS_ID = 1, 3
BOS_CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tokenizer(byte_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose post-processor adds both ends, and whose chat template prints the begin itself."""
    folder = tmp_path_factory.mktemp("bos")
    encoder = byte_tokenizer()
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A <|im_end|>", special_tokens=[(BOS, BOS_ID), ("<|im_end|>", EOS_ID)]
    )
    save_tokenizer(encoder, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": BOS, "chat_template": BOS_CHAT}))
    return folder


def test_without_a_template_the_text_gets_the_tokenizers_own_begin_once(with_bos: Path) -> None:
    tokenizer = load_tokenizer(with_bos)
    assert tokenizer.prefix == (BOS_ID,)
    for text in ("hi", BOS + "hi"):
        _, ids = encode_prompt(tokenizer, text)
        assert ids.count(BOS_ID) == 1
        assert ids[0] == BOS_ID
        assert EOS_ID not in ids


def test_a_format_that_prints_the_begin_has_it_once(with_bos: Path) -> None:
    tokenizer = load_tokenizer(with_bos)
    text, ids = encode_prompt(tokenizer, "hi", BOS + "{prompt}?")
    assert text == BOS + "hi?"
    assert ids.count(BOS_ID) == 1


def test_a_chat_template_that_prints_the_begin_has_it_once(with_bos: Path) -> None:
    tokenizer = load_tokenizer(with_bos, template="chat")
    text, ids = encode_prompt(tokenizer, "hi", "chat")
    assert text == BOS + "[user]hi"
    assert ids.count(BOS_ID) == 1
    assert ids == encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], "chat")[1]


def test_the_ids_are_those_of_transformers(plain: Path, with_bos: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for folder in (plain, with_bos):
        ours, theirs = load_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        for text in ("2 + 3 = é", "<|im_start|>x<|sep|>", ""):
            assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False)
        assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)


def test_a_chat_template_must_be_there(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="has no chat template"):
        load_tokenizer(tmp_path, template="chat")


def test_messages_that_the_chat_template_refuses_are_a_data_error(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    refusing = json.loads(path.read_text()) | {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    path.write_text(json.dumps(refusing))
    with pytest.raises(DataError, match="roles must alternate"):
        encode_prompt(load_tokenizer(tmp_path, template="chat"), "hi", "chat")


def test_add_bos_token_of_the_config_counts_where_the_tokenizer_file_has_no_post_processor(plain: Path, tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": {"content": BOS}, "add_bos_token": True}
    path.write_text(json.dumps(config))
    assert encode_prompt(load_tokenizer(tmp_path), "a")[1][0] == BOS_ID
    assert load_tokenizer(plain).prefix == ()


def test_a_format_replaces_the_prompt_and_nothing_else(plain: Path) -> None:
    tokenizer = load_tokenizer(plain)
    text, ids = encode_prompt(tokenizer, "{x} {prompt}", "<|im_start|>{prompt}<|sep|>")
    assert text == "<|im_start|>{x} {prompt}<|sep|>"
    assert ids[0] == 1
    assert ids[-1] == 2
    assert len(ids) == 2 + len("{x} {prompt}")


def test_the_chat_template_opens_the_assistants_turn(plain: Path) -> None:
    text, _ = encode_prompt(load_tokenizer(plain, template="chat"), "hi", "chat")
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_templates_that_cannot_work_are_errors(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \{prompt\}"):
        check_template("no place")
    with pytest.raises(DataError, match="only a chat template renders"):
        encode_prompt(load_tokenizer(plain), [{"role": "user", "content": "a"}])
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_label_ends_with_the_end_of_sequence(plain: Path) -> None:
    tokenizer = load_tokenizer(plain)
    assert encode_label(tokenizer, "-57") == (*tokenizer.encode("-57"), EOS_ID)
    assert encode_label(tokenizer, "") == (EOS_ID,)


def test_digits_apart_ignores_merges() -> None:
    from tokenizers import Tokenizer, models

    from vime.data.templates import PromptTokenizer

    merging = Tokenizer(models.BPE(vocab={"1": 0, "7": 1, "17": 2, "<end>": 3}, merges=[("1", "7")]))
    tokenizer = PromptTokenizer(merging, eos_id=3)
    assert encode_label(tokenizer, "17") == (2, 3)
    assert encode_label(tokenizer, "17", digits_apart=True) == (0, 1, 3)


def test_a_label_without_an_end_of_sequence_is_refused() -> None:
    from vime.data.templates import PromptTokenizer

    with pytest.raises(DataError, match="names no eos_token"):
        encode_label(PromptTokenizer(byte_tokenizer()), "1")


def test_decoding_leaves_special_tokens_out_unless_asked(plain: Path) -> None:
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(plain)))
    ids = (*tokenizer.encode("42é"), EOS_ID)
    assert tokenizer.decode(ids) == "42é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "42é<|im_end|>"


def test_only_a_chat_template_imports_transformers_and_nothing_imports_torch(plain: Path) -> None:
    code = (
        "import sys; import vime.data.prompts; from vime.data.templates import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "print(sorted({'torch', 'transformers', 'ray', 'vllm', 'pyarrow'} & set(sys.modules)));"
        "load_tokenizer(sys.argv[1], template='chat'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(plain)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
