"""Tiny fixed-weight models, and what transformers itself generates with them: the judge of every test.

``initializer_range`` is 0.2: with the default 0.02 a frozen position changes no greedy token, and the
tests would see nothing.
"""

from __future__ import annotations

import torch
import transformers as tf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _build(model_class, config, seed=0):
    torch.manual_seed(seed)
    return model_class(config).eval()


def llama(seed=0, **changes):
    config = tf.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes})
    return _build(tf.LlamaForCausalLM, config, seed)


def gpt2(**changes):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 128, "initializer_range": 0.2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return _build(tf.GPT2LMHeadModel, tf.GPT2Config(**{**sizes, **tokens, **changes}))


def opt(**changes):
    sizes = {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.2}
    return _build(tf.OPTForCausalLM, tf.OPTConfig(**{**sizes, **changes}))


def mistral(**changes):
    config = tf.MistralConfig(**{**SIZES, "num_key_value_heads": 2, "sliding_window": 8, **changes})
    return _build(tf.MistralForCausalLM, config)


def qwen2(**changes):
    config = tf.Qwen2Config(**{**SIZES, "num_key_value_heads": 2, **changes})
    return _build(tf.Qwen2ForCausalLM, config)


def gemma3(**changes):
    sizes = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    # Tied Gemma fixtures emit one token only, and would see nothing.
    return _build(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**{**sizes, "tie_word_embeddings": False, **changes}))


def mixtral(**changes):
    config = tf.MixtralConfig(**{**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, **changes})
    return _build(tf.MixtralForCausalLM, config)


def gpt_oss(**changes):
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "sliding_window": 8}
    return _build(tf.GptOssForCausalLM, tf.GptOssConfig(**{**sizes, **changes}))


def random_prompt(length, seed=0, low=3, high=128):
    """A list of token ids that are neither pad nor BOS."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(low, high, (length,), generator=generator).tolist()


def reference(model, prompt, new_tokens, **arguments):
    """The new tokens that transformers generates for one prompt alone, with its dynamic cache."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, **arguments}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return output[0, len(prompt) :].tolist()


def left_padded(prompts, pad=0):
    """Ids and mask, int64 [B, T]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask


def new_tokens(output, width):
    """The rows after the prompts."""
    return output[:, width:].tolist()
