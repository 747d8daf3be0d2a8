"""Sampling without a generator object: each draw's noise is a function of the row's seed and the draw's number.

A row's tokens then depend neither on the batch it is in nor on the order of kernels, nothing is read back, and a captured graph
can be replayed for ever. The noise is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) of
key = seed and counter = (column, draw low, draw high, 0); the draw is Gumbel's: the argmax of score + noise over what top_k and
top_p leave in. This file is the plain form; triton_sampler.py computes the same in one kernel, triton_vocab_sampler.py where a row is
too long for that.
"""

from __future__ import annotations

import torch

ROUNDS = 10
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
LOW = 0xFFFFFFFF
MAX_FUSED_VOCAB = 4096  # a row of the kernel lies in one program's registers


def sample(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """One token a row: scores [rows, vocab] of any floating dtype → int64 [rows]. No host synchronisation.

    seeds and draws int64 [rows] name the noise; temperature float32 (0: the first highest score, nothing else is read), top_k int64
    (0 = off), top_p float32 (1 = off), each [rows]. Scores equal to the last one that stays in stay in with it.
    """
    if scores.device.type == "cuda":
        from omni_bus.stages.ar import triton_sampler, triton_vocab_sampler

        kernels = triton_sampler if scores.shape[1] <= MAX_FUSED_VOCAB else triton_vocab_sampler
        tokens: torch.Tensor = kernels.sample(scores, seeds, draws, temperature, top_k, top_p)
        return tokens
    return sample_plain(scores, seeds, draws, temperature, top_k, top_p)


def adjust(
    scores: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    penalty: torch.Tensor,
    banned: torch.Tensor,
    ending: torch.Tensor,
    no_eos: torch.Tensor,
) -> torch.Tensor:
    """What may be drawn, and how gladly: scores [rows, vocab] of any floating dtype → float32 [rows, vocab].

    The repetition penalty (float32 [rows], 1 = none) is laid on what the row's slot (int64 [rows]) has seen (bool [slots, vocab]);
    ids banned (bool [vocab]), and ids of an ending (bool [vocab]) in rows with no_eos (bool [rows]), come to -inf.
    """
    if scores.device.type == "cuda":
        from omni_bus.stages.ar import triton_sampler

        adjusted: torch.Tensor = triton_sampler.adjust(scores, seen, slots, penalty, banned, ending, no_eos)
        return adjusted
    return adjust_plain(scores, seen, slots, penalty, banned, ending, no_eos)


def adjust_plain(
    scores: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    penalty: torch.Tensor,
    banned: torch.Tensor,
    ending: torch.Tensor,
    no_eos: torch.Tensor,
) -> torch.Tensor:
    """`adjust` in torch operators."""
    scores, factor = scores.float(), penalty[:, None]
    punished = torch.where(scores < 0, scores * factor, scores / factor)
    scores = torch.where(seen.index_select(0, slots), punished, scores)
    return scores.masked_fill(banned | (ending & no_eos[:, None]), -torch.inf)


def sample_plain(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """`sample` in torch operators."""
    scores, vocab = scores.float(), scores.shape[1]
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1.0, temperature)[:, None]
    ordered = scaled.sort(dim=-1, descending=True).values
    places = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1
    least = ordered.gather(1, places[:, None])
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    probs = ordered.softmax(dim=-1)
    above = probs.cumsum(dim=-1) - probs  # what lies above a token; it stays in while that does not reach top_p
    nucleus = torch.where((above < top_p[:, None]) | (top_p >= 1)[:, None], ordered, torch.inf).amin(dim=-1, keepdim=True)
    stays = scaled >= torch.maximum(least, nucleus)
    noise = gumbel(seeds, draws, vocab) if vocab <= MAX_FUSED_VOCAB else fine_gumbel(seeds, draws, vocab)
    noisy = torch.where(stays, scaled + noise, -torch.inf)
    return torch.where(greedy, scores.argmax(dim=-1), noisy.argmax(dim=-1))


def gumbel(seeds: torch.Tensor, draws: torch.Tensor, vocab: int) -> torch.Tensor:
    """-log(-log(u)), float32 [rows, vocab], of the 23 high bits of each column's first Philox word: u in (0, 1), never 0 or 1."""
    words = philox(seeds, draws, vocab)
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def fine_gumbel(seeds: torch.Tensor, draws: torch.Tensor, vocab: int) -> torch.Tensor:
    """-log(-log(1 - v)), float32 [rows, vocab], of all 32 bits: v in (0, 1), finest near 0, where the highest noise is.

    For many columns: of 150,000 times 23 bits the two highest are equal in one draw of a hundred, and the first column would win.
    """
    tail = ((philox(seeds, draws, vocab).to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    near = tail * (1 + tail * (1 / 2 + tail * (1 / 3 + tail / 4)))  # -log(1 - v), whose 1 - v would cut v's bits off
    return -torch.where(tail < 2.0**-8, near, -(1 - tail).log()).log()


def philox(seeds: torch.Tensor, draws: torch.Tensor, columns: int) -> torch.Tensor:
    """The first 32-bit word of every column's block: int64 [rows, columns]. Products wrap modulo 2^64, and so keep all bits."""
    key0, key1 = seeds[:, None] & LOW, (seeds[:, None] >> 32) & LOW
    word0 = torch.arange(columns, device=seeds.device)[None].expand(len(seeds), columns)
    word1, word2 = draws[:, None] & LOW, (draws[:, None] >> 32) & LOW
    word3 = torch.zeros_like(word1)
    for _ in range(ROUNDS):
        product0, product2 = word0 * ROUND_A, word2 * ROUND_B
        word0 = ((product2 >> 32) & LOW) ^ word1 ^ key0
        word2 = ((product0 >> 32) & LOW) ^ word3 ^ key1
        word1, word3 = product2 & LOW, product0 & LOW
        key0, key1 = (key0 + KEY_A) & LOW, (key1 + KEY_B) & LOW
    return word0
