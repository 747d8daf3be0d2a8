"""Tiny random models whose every tensor matters, and a decoder of ours that holds the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


def _randomise(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def randomise() -> Callable[[nn.Module, int], nn.Module]:
    """Weights of a scale that keeps signals of order 1, norms around 1: transformers' initialisation would hide mistakes."""
    return _randomise


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama():
    """A LlamaForCausalLM of 97 tokens with grouped-query attention and its head tied to the embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.tie_weights()
    return _randomise(model, 1)


@pytest.fixture(scope="session")
def llama_decoder(tiny_llama):
    from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
    from omni_bus.stages.ar.mlp import DenseConfig

    config = DecoderConfig(
        hidden=48,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=8,
        mlp=DenseConfig(intermediate=96),
        max_positions=256,
        rms_eps=tiny_llama.config.rms_norm_eps,
    )
    tensors = {name: tensor for name, tensor in tiny_llama.model.state_dict().items() if name != "embed_tokens.weight"}
    return Decoder.from_tensors(config, tensors, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Byte-level BPE of 300 ids: all 256 bytes, a few merges across characters, special and ordinary added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "hello"),
        ("Ã", "©"),
        ("ð", "Ł"),
        ("ðŁ", "ĺ"),
        ("a", "ð"),
    ]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    backend.add_tokens([AddedToken("tool call"), AddedToken("日本"), AddedToken("é")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)
