"""The tokenizer files: ids, one-token role words, the chat template, and the full vocabulary where it is installed."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni import tokenizer
from tests.support.lacking import lacking

TEXTS = (
    "",
    "Hello, world!",
    "你好 🌍, größer\n\n  tabs\t",
    "a's 12345 ...\r\n",
    "ünïcödé \u0000 \u2028",
    "system user assistant",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(directory, *tokenizer.tiny_vocabulary())
    return AutoTokenizer.from_pretrained(directory)


def test_305_ids_and_role_words_are_one_token_each(tiny: Any) -> None:
    assert len(tiny) == 305
    for role in tokenizer.ROLES:
        assert len(tiny(role)["input_ids"]) == 1
    assert [tiny.convert_tokens_to_ids(token) for token, _ in tokenizer.SPECIALS] == list(range(272, 305))
    assert tiny.eos_token == "<|im_end|>" and tiny.pad_token == "<|endoftext|>"
    assert tiny.audio_token == "<|audio_pad|>" and tiny.image_token == "<|image_pad|>"


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tiny: Any, text: str) -> None:
    assert tiny.decode(tiny(text)["input_ids"]) == text


def test_specials_are_left_out_only_where_they_are_special(tiny: Any) -> None:
    ids = tiny("<|im_start|>a<tool_call>b<|audio_pad|>")["input_ids"]
    assert tiny.decode(ids, skip_special_tokens=True) == "a<tool_call>b"


def test_the_chat_template_writes_media_and_turns(tiny: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "audio"}, {"type": "image"}, {"type": "video"}, {"type": "text", "text": "Hm?"}]},
        {"role": "assistant", "content": "Yes."},
    ]
    assert tiny.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>Hm?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_chat_template_writes_tools_and_their_calls(tiny: Any) -> None:
    call = {"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
    text = tiny.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n") and text.count("<|im_start|>system") == 1
    assert '<tools>\n{"type": "function", "function": {"name": "time", "parameters": {}}}\n</tools>' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
    ) in text


def test_a_missing_or_wrong_rank_file_says_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "RANK_FILES", {"omni_bus_no_such_package": "x"})
    with pytest.raises(CheckpointError, match=r"pip install --no-deps dashscope==2\.0\.2"):
        tokenizer.find_rank_file()
    package = tmp_path / "some_ranks"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(tokenizer, "RANK_FILES", {"some_ranks": "qwen.tiktoken"})
    path = tokenizer.find_rank_file()
    assert path == package / "qwen.tiktoken" and "some_ranks" not in sys.modules
    with pytest.raises(CheckpointError, match=r"not the expected qwen\.tiktoken"):
        tokenizer.full_vocabulary(path)


def test_merges_are_found_from_ranks_alone() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4, b"bc": 5}
    assert tokenizer._cut(ranks, b"abc", 4) == [b"ab", b"c"]
    assert tokenizer._cut(ranks, b"abc", 3) == [b"a", b"b", b"c"]
    assert tokenizer._cut(ranks, b"aab", 6) == [b"a", b"ab"]


def test_the_full_vocabulary_is_qwens(tmp_path: pathlib.Path) -> None:
    try:
        rank_file = tokenizer.find_rank_file()
    except CheckpointError as error:
        lacking(error.message)
    vocabulary, merges = tokenizer.full_vocabulary(rank_file)
    built = tokenizer.build(vocabulary, merges)
    assert (len(vocabulary), len(merges), built.get_vocab_size()) == (151643, 151387, 151676)
    assert [built.encode(role).ids for role in tokenizer.ROLES] == [[8948], [872], [77091]]
    assert built.token_to_id("<|im_end|>") == 151645 and built.token_to_id("<|audio_pad|>") == 151675
    for text in TEXTS:
        assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text
