"""The tokenizer files of a fixture checkpoint: byte-level BPE in Qwen's form, with the special tokens of Qwen3-Omni.

`tiny` knows the 256 bytes and the three role words; `full` is Qwen's own vocabulary, rebuilt from the rank file `qwen.tiktoken`
(Apache-2.0) that ships in the PyPI packages dashscope and qwen-agent; `padded` is the tiny one with the full one's ids. All have the same specials, in the same order, behind
their base vocabulary, so that 151643 … 151675 of the real model are 272 … 304 of the tiny one.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni.chat_template import CHAT_TEMPLATE

RANK_FILE_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
RANK_FILES = {"dashscope": "resources/qwen.tiktoken", "qwen_agent": "utils/qwen.tiktoken"}  # package → path inside it
FULL_BASE = 151_643  # tokens of Qwen's vocabulary before the specials
ROLES = ("system", "user", "assistant")
SPECIALS: tuple[tuple[str, bool], ...] = (  # (token, left out by decode(skip_special_tokens=True)), in the order of their ids
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_start|>", True),
    ("<|audio_end|>", True),
    ("<tts_pad>", True),
    ("<tts_text_bos>", True),
    ("<tts_text_eod>", True),
    ("<tts_text_bos_single>", True),
    ("<|audio_pad|>", True),
)
NAMED_SPECIALS = {
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
# How Qwen2 cuts text before BPE: contractions, words with one leading mark, single digits, runs of marks, line ends, spaces.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where Latin-1 prints it, else the next character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + rank) for rank, byte in enumerate(hidden)}


_BYTE_CHARACTERS = _byte_characters()


def _characters(token: bytes) -> str:
    return "".join(_BYTE_CHARACTERS[byte] for byte in token)


def tiny_vocabulary() -> tuple[Vocabulary, Merges]:
    """256 bytes, and the merges that make each role word one token."""
    vocabulary = {_characters(bytes([byte])): byte for byte in range(256)}
    merges: Merges = []
    for role in ROLES:
        for end in range(2, len(role) + 1):
            if role[:end] not in vocabulary:
                vocabulary[role[:end]] = len(vocabulary)
                merges.append((role[: end - 1], role[end - 1]))
    return vocabulary, merges


def padded_vocabulary() -> tuple[Vocabulary, Merges]:
    """The tiny vocabulary in the id space of the full one: the ids between have made-up tokens ("~1234") that no text is cut into."""
    vocabulary, merges = tiny_vocabulary()
    return vocabulary | {f"~{token}": token for token in range(len(vocabulary), FULL_BASE)}, merges


def find_rank_file() -> pathlib.Path:
    """`qwen.tiktoken` of an installed package; the package itself is not imported. CheckpointError says what to install."""
    for package, inside in RANK_FILES.items():
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            path = pathlib.Path(folder, inside)
            if path.is_file():
                return path
    raise CheckpointError(
        "Qwen's vocabulary (qwen.tiktoken) is not installed; run `pip install --no-deps dashscope==2.0.2` (or qwen-agent==0.0.34)"
    )


def full_vocabulary(rank_file: pathlib.Path) -> tuple[Vocabulary, Merges]:
    """Qwen's 151,643 ranks; each merge is found by cutting its token with the ranks below its own."""
    content = rank_file.read_bytes()
    if hashlib.sha256(content).hexdigest() != RANK_FILE_SHA256:
        raise CheckpointError(f"{rank_file} is not the expected qwen.tiktoken; install dashscope==2.0.2 or qwen-agent==0.0.34")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines() if line)}
    merges: Merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _cut(ranks, token, rank)
            merges.append((_characters(left), _characters(right)))
    return {_characters(token): rank for token, rank in ranks.items()}, merges


def _cut(ranks: Mapping[bytes, int], token: bytes, below: int) -> list[bytes]:
    """`token` as byte pair encoding leaves it when only merges with a rank under `below` are known."""
    pieces = [token[index : index + 1] for index in range(len(token))]
    while True:
        best = min(
            ((ranks.get(pieces[i] + pieces[i + 1], below), i) for i in range(len(pieces) - 1)),
            default=(below, 0),
        )
        if best[0] >= below:
            return pieces
        pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]


def build(vocabulary: Vocabulary, merges: Merges) -> Tokenizer:
    """The tokenizer with its specials behind the base vocabulary."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in SPECIALS])
    assert [tokenizer.token_to_id(token) for token, _ in SPECIALS] == [len(vocabulary) + i for i in range(len(SPECIALS))]
    return tokenizer


def write(directory: pathlib.Path, vocabulary: Vocabulary, merges: Merges) -> Tokenizer:
    """tokenizer.json, tokenizer_config.json (with the chat template), vocab.json and merges.txt; returns the tokenizer."""
    tokenizer = build(vocabulary, merges)
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(len(vocabulary) + index): {
            "content": token,
            "special": special,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for index, (token, special) in enumerate(SPECIALS)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "unk_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "errors": "replace",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "added_tokens_decoder": added,
        "extra_special_tokens": NAMED_SPECIALS,
        "chat_template": CHAT_TEMPLATE,
        **NAMED_SPECIALS,
    }
    _write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    _write_text(directory / "vocab.json", json.dumps(vocabulary, ensure_ascii=False))
    _write_text(directory / "merges.txt", "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    return tokenizer


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
