"""Model families, each as tiny random models with those settings that change how it attends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import transformers

# Untied, because several tied models emit one token only, and a test with them would see nothing.
SIZES = {**models.SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}

HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 8}
TURNS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED_EXPERTS = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
UNUSED = 2  # a token id that no prompt of these tests has


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


FACTORS = {"short_factor": [1 + pair / 4 for pair in range(8)], "long_factor": [8.0] * 8}
LONGROPE = {
    **rope("longrope", factor=4.0, original_max_position_embeddings=64, **FACTORS),
    "original_max_position_embeddings": 64,  # where Phi-3 has it
}
# The sdpa attention of transformers 5.5 leaves the softcap out.
SOFTCAP = {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True, eq=False)
class Family:
    """What transformers has under one model class.

    Attributes:
        name: as people call it.
        model: the class in transformers.
        settings: of the config, besides ``base``.
        variants: further settings, by what is said of them; each is a model to test.
        moves: keys can be moved to other positions, which layout "sink" needs.
        long: the variant that is tested with a long prompt.
        recent: variants that are refused with older versions of transformers, or with newer ones only.
    """

    name: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    moves: bool = True
    long: str | None = None
    recent: Sequence[str] = ()
    base: Mapping[str, Any] = field(default_factory=lambda: SIZES)

    @property
    def model_class(self):
        """None where this version of transformers does not have it."""
        return getattr(transformers, self.model, None)

    def build(self, variant=""):
        config = self.model_class.config_class(**{**self.base, **self.settings, **self.variants[variant]})
        torch.manual_seed(0)
        return self.model_class(config).eval()


ROPES = {
    "default rope": {},
    "linear": rope("linear", factor=4.0),
    "llama3": rope("llama3", factor=8.0, **LLAMA3),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "dynamic": rope("dynamic", factor=4.0),
    "longrope": LONGROPE,
}
WINDOW_OFF_AND_ON = {
    "window off": {"use_sliding_window": False},
    "on in one layer": {"use_sliding_window": True, "max_window_layers": 1},
}
GEMMA4 = {
    "own keys": {},
    "shared keys": {"num_kv_shared_layers": 2},
    "experts, keys as values": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
}
SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 96}
# With an initializer_range of 0.2 these would not see that Falcon rounds its biases.
FALCON_ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "initializer_range": 0.25}
FALCONS = {
    "rope, MQA": {},
    "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "ALiBi": {**FALCON_ALIBI, **SIX_HEADS},
    "ALiBi beyond 256 positions": {**FALCON_ALIBI, **SIX_HEADS},
}
HEAD_COUNTS = {"4 heads": {}, "6 heads": SIX_HEADS}
NEO = {
    "global and local": {"attention_types": [[["global", "local"], 1]]},
    "global": {"attention_types": [[["global"], 2]]},
}

FAMILIES = [
    Family("Apertus", "ApertusForCausalLM"),
    Family("Arcee", "ArceeForCausalLM"),
    Family("BitNet", "BitNetForCausalLM"),
    Family("Bloom", "BloomForCausalLM", {}, HEAD_COUNTS),
    Family("CodeGen", "CodeGenForCausalLM", {"rotary_dim": 8}, moves=False, recent=[""]),
    Family("Cohere", "CohereForCausalLM", {}, {"plain keys": {}, "normed keys": {"use_qk_norm": True}}),
    Family("Cohere 2", "Cohere2ForCausalLM", TURNS),
    Family("Ernie 4.5", "Ernie4_5ForCausalLM", HEADS),
    Family("EXAONE 4", "Exaone4ForCausalLM", TURNS),
    Family("Falcon", "FalconForCausalLM", {}, FALCONS, long="ALiBi beyond 256 positions"),
    Family("Gemma", "GemmaForCausalLM", HEADS),
    Family("Gemma 2", "Gemma2ForCausalLM", {**TURNS, **HEADS, **SOFTCAP}),
    Family("Gemma 3", "Gemma3ForCausalLM", {**WINDOW, **HEADS, "num_hidden_layers": 6}),
    Family(
        "Gemma 3n",
        "Gemma3nForCausalLM",
        {**TURNS, **HEADS, **PER_LAYER, "laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
        {"shared keys": {"num_kv_shared_layers": 2}},
        recent=["shared keys"],
    ),
    Family(
        "Gemma 4",
        "Gemma4ForCausalLM",
        {**TURNS, **HEADS, **PER_LAYER, **EXPERTS, "global_head_dim": 32},
        GEMMA4,
        recent=["shared keys"],
    ),
    Family("GLM", "GlmForCausalLM", HEADS),
    Family("GLM 4", "Glm4ForCausalLM", HEADS),
    Family("GLM 4 MoE", "Glm4MoeForCausalLM", {**HEADS, **GROUPED_EXPERTS}),
    Family("GPT-2", "GPT2LMHeadModel", moves=False),
    Family("GPT-BigCode", "GPTBigCodeForCausalLM", {}, {"MQA": {}, "MHA": {"multi_query": False}}, moves=False),
    Family("GPT-J", "GPTJForCausalLM", {"rotary_dim": 8}, moves=False, recent=[""]),
    Family("GPT-Neo", "GPTNeoForCausalLM", {"window_size": 8}, NEO, moves=False),
    Family("GPT-NeoX, Pythia", "GPTNeoXForCausalLM"),
    Family("GPT-OSS", "GptOssForCausalLM", {**WINDOW, **HEADS, **EXPERTS}),
    Family("Granite", "GraniteForCausalLM", {"attention_multiplier": 0.5, "residual_multiplier": 0.7}),
    Family("GraniteMoe", "GraniteMoeForCausalLM", {**EXPERTS, "attention_multiplier": 0.5}, recent=[""]),
    Family("Helium", "HeliumForCausalLM", HEADS),
    Family("Llama", "LlamaForCausalLM", {}, ROPES),
    Family("Ministral", "MinistralForCausalLM", {**TURNS, **HEADS}),
    Family("Mistral", "MistralForCausalLM", WINDOW),
    Family("Mixtral", "MixtralForCausalLM", EXPERTS),
    Family("ModernBERT decoder", "ModernBertDecoderForCausalLM", {**TURNS, "local_attention": 16}),
    Family("MPT", "MptForCausalLM", {}, {**HEAD_COUNTS, "clipped": {"attn_config": {"clip_qkv": 2.0}}}),
    Family("Nemotron", "NemotronForCausalLM", recent=[""]),
    Family("OLMo", "OlmoForCausalLM"),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM", TURNS),
    Family("OLMoE", "OlmoeForCausalLM", EXPERTS),
    Family("OPT", "OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.2}, moves=False),
    Family("Persimmon", "PersimmonForCausalLM"),
    Family("Phi", "PhiForCausalLM"),
    Family(
        "Phi-3", "Phi3ForCausalLM", {}, {"no window": {"sliding_window": None}, "window": WINDOW, "longrope": LONGROPE}
    ),
    Family("Qwen2", "Qwen2ForCausalLM", WINDOW, WINDOW_OFF_AND_ON),
    Family("Qwen3", "Qwen3ForCausalLM", {**WINDOW, **HEADS}, WINDOW_OFF_AND_ON),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", {**HEADS, **EXPERTS}),
    Family("Seed-OSS", "SeedOssForCausalLM", HEADS),
    Family("SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    Family("StableLM", "StableLmForCausalLM"),
    Family("Starcoder2", "Starcoder2ForCausalLM", {}, {"no window": {"sliding_window": None}, "window": WINDOW}),
    Family("VaultGemma", "VaultGemmaForCausalLM", {**TURNS, **HEADS, **SOFTCAP}),
    Family(
        "Gemma 3 with images, text only",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**SIZES, **WINDOW, **HEADS, "num_hidden_layers": 6},
            "vision_config": {**IMAGES, "num_hidden_layers": 1},
            "mm_tokens_per_image": 4,
            "image_token_index": UNUSED,
        },
        base={"tie_word_embeddings": False, "initializer_range": 0.2},
    ),
    Family(
        "LLaVA, text only",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **SIZES},
            "vision_config": {"model_type": "clip_vision_model", **IMAGES, "num_hidden_layers": 2},
            "image_token_index": UNUSED,
        },
        base={},
    ),
    Family(
        "Qwen2-VL, text only",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**SIZES, **rope("default", mrope_section=[2, 3, 3])},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
            "image_token_id": UNUSED,
            "video_token_id": UNUSED,
        },
        base={"tie_word_embeddings": False},
    ),
]

# Mamba, T5, BERT and BART are refused in test_step.py.
REFUSED = [
    Family("Bamba", "BambaForCausalLM", {**STATES, "attn_layer_indices": [1]}),
    Family("DeepSeek V2", "DeepseekV2ForCausalLM", {**LATENT, **GROUPED_EXPERTS}, recent=[""]),
    Family("DeepSeek V3", "DeepseekV3ForCausalLM", {**LATENT, **GROUPED_EXPERTS}, recent=[""]),
    Family("Jamba", "JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
    Family("LFM2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family(
        "Llama 4",
        "Llama4ForCausalLM",
        {**EXPERTS, **HEADS, "intermediate_size_mlp": 128},
        {"chunked": {}, "full, one layer without rope": {"attention_chunk_size": None, "no_rope_layer_interval": 2}},
    ),
    Family("Mamba 2", "Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}),
    Family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        {**EXPERTS, **HEADS, "layer_types": ["linear_attention", "full_attention"]},
    ),
    Family("RecurrentGemma", "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3}),
    Family("RWKV", "RwkvForCausalLM"),
    Family("XGLM", "XGLMForCausalLM", {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4}),
]
