"""Tokenizers, a model and what samples from it, for the tests of constraints."""

import json

import models
import pytest
import torch
from models import left_padded, new_tokens
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from staticgen.constraints import read_token_mask

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ["<pad>", "<bos>", "</s>"]
TEXTS = ["the cat sat on the mat 12 345 0.5", 'a café in 世界 and "one", {"two": true}', "false null 😀 10 20 30"] * 20


def wrap(inner):
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="</s>")


def byte_tokenizer():
    """3 special tokens and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(tokenizer_models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return wrap(inner)


def merging_tokenizer():
    """Byte-level with tokens of several characters, and of parts of characters."""
    inner = Tokenizer(tokenizer_models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return wrap(inner)


def unigram_tokenizer(space=None):
    """As SentencePiece makes them: '▁' for a space, bytes where there is no piece."""
    inner = Tokenizer(tokenizer_models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.UnigramTrainer(vocab_size=330, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    inner.decoder = decoders.Sequence([space or decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    state = json.loads(inner.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = state["added_tokens"][:4]  # the trainer takes the bytes for special tokens
    return wrap(Tokenizer.from_str(json.dumps(state)))


TOKENIZERS = {"bytes": byte_tokenizer, "merges": merging_tokenizer, "unigram": unigram_tokenizer}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def any_tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    """Its vocabulary is wider than every tokenizer's here."""
    return models.llama(vocab_size=352, eos_token_id=EOS)


def read(token_mask, *, vocab=352, width=1, batch=1, logits=None, eos=None):
    return read_token_mask(
        token_mask, vocab_size=vocab, logits_size=logits or vocab, prompt_width=width, batch=batch, eos_token_ids=eos
    )


def sample(model, token_mask, prompts, seed=0, *, max_new_tokens=60, **arguments):
    """The new tokens of each row, from transformers' ``generate``; without a mask if it is None."""
    ids, attention_mask = left_padded(prompts)
    chain = LogitsProcessorList()
    if token_mask is not None:
        vocab, logits = model.get_input_embeddings().weight.shape[0], model.lm_head.out_features
        chain.append(read(token_mask, vocab=vocab, logits=logits, width=ids.shape[1], batch=len(prompts)))
    torch.manual_seed(seed)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": max_new_tokens, "logits_processor": chain, **arguments}
    return new_tokens(model.generate(ids, attention_mask=attention_mask, **settings), ids.shape[1])


def ended(row):
    """The tokens before EOS, which must be there, and after which there must be padding only."""
    end = row.index(EOS)
    assert set(row[end + 1 :]) <= {PAD}
    return row[:end]


def text(tokenizer, prompt, tokens):
    """What the tokens add to the prompt's text."""
    before = tokenizer.decode(prompt)
    after = tokenizer.decode(prompt + tokens)
    assert after.startswith(before)
    return after[len(before) :]


def digits(tokenizer, size=352):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[tokenizer.convert_tokens_to_ids(list("0123456789"))] = True
    return mask
