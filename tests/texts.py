"""Tokenizers built here, and a model that says what a test wants to hear."""

from __future__ import annotations

import models
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**options):
    """A byte-level tokenizer without merges, 3 special tokens and 256 bytes; it adds BOS to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *alphabet])}
    inner = Tokenizer(tokenizer_models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, **SPECIAL, **options)


def byte_level_with_added_tokens():
    """Added tokens are text like any other, whether their characters stand for bytes or not; some are special."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<é>", "<世>", " x", AddedToken("<|end|>", special=True)])
    return tokenizer


def unigram(decoder=None, **options):
    """A SentencePiece-like tokenizer with byte fallback: some words, some parts of words, and signs."""
    parts = [
        *"▁abcdefghijklmnopqrstuvwxyz.,?!:'é",
        "▁th",
        "▁br",
        "own▁",
        "fox",
        "▁dog",
        "▁jum",
        "ps",
        "▁n't",
        "'t",
        "▁'s",
        "'re",
    ]
    pieces = [(token, 0.0) for token in ("<unk>", *SPECIAL.values())]
    pieces += [(part, -5.0 / len(part)) for part in parts] + [(token, -20.0) for token in BYTE_TOKENS]
    inner = Tokenizer(tokenizer_models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    inner.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **SPECIAL, **options)


def forced_bpe(**options):
    """A BPE tokenizer that transformers makes clean up."""
    return byte_level(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
        **options,
    )


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level with added tokens": byte_level_with_added_tokens,
    "byte-level in a sequence": lambda: _decoding_with(byte_level(), decoders.Sequence([decoders.ByteLevel()])),
    "byte-level cleaning up": forced_bpe,
    "byte fallback": unigram,
    "byte fallback cleaning up": lambda: unigram(clean_up_tokenization_spaces=True),
    "byte fallback without strip": lambda: unigram(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "byte fallback, strip of two": lambda: unigram(
        decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]
        )
    ),
    "metaspace": lambda: unigram(decoders.Metaspace()),
    "metaspace without prefix": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "metaspace cleaning up": lambda: unigram(decoders.Metaspace(), clean_up_tokenization_spaces=True),
    "metaspace and byte fallback": lambda: unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "no decoder": lambda: _decoding_with(unigram(), None),
    "word piece": lambda: unigram(decoders.WordPiece(prefix="▁")),
    "BPE suffix": lambda: unigram(decoders.BPEDecoder(suffix="e")),
    "CTC": lambda: unigram(decoders.CTC()),
}
# Those that decode the whole row for every token.
UNKNOWN_DECODERS = ("word piece", "BPE suffix", "CTC")


def _decoding_with(tokenizer, decoder):
    tokenizer.backend_tokenizer.decoder = decoder
    return tokenizer


def scripted(scripts, vocab_size=259, positions=256, **changes):
    """A GPT-2 that says what it is told, whatever the prompt: ``{2: ids}`` says ``ids`` to prompts of two tokens.

    It works by its position embeddings alone: that of position p makes the token that stands at p + 1.
    """
    model = models.gpt2(
        vocab_size=vocab_size, n_positions=positions, n_embd=positions, n_layer=1, tie_word_embeddings=False, **changes
    )
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.lm_head.weight.zero_()
        for prompt_tokens, ids in scripts.items():
            for index, token in enumerate(ids):
                model.lm_head.weight[token, prompt_tokens - 1 + index] = 1.0
    return model
