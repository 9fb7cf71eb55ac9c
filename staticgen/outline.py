"""What a model holds and caches, found from its config alone: no weight is loaded, and no number is computed.

The model is built on torch's ``meta`` device, where tensors have sizes and no contents, and runs one step there.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from staticgen.attention import ATTENTION_NAME, StepCache, register_attention
from staticgen.errors import UnsupportedModelError
from staticgen.legacy import adapt_legacy_attention
from staticgen.shapes import CacheSpec, StepForm
from staticgen.step import cache_spec_of, freeze_rotary_embeddings, position_limit, require_known_layers
from staticgen.text import locate_model

# What configs call the number of experts, and how many of them a token goes through.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token")


@dataclass(frozen=True)
class Matrices:
    """Weights of one kind.

    Attributes:
        numbers: how many.
        rows: output channels, which have a scale each when the weights are compressed.
    """

    numbers: int = 0
    rows: int = 0

    def __add__(self, other: Matrices) -> Matrices:
        return Matrices(self.numbers + other.numbers, self.rows + other.rows)


@dataclass(frozen=True)
class Outline:
    """A model without its numbers.

    Of a model with other parts, for images say, only the one that reads text counts.

    Attributes:
        model_type: as its config says.
        dtype: of its weights.
        cache_spec: what every layer caches, as :attr:`staticgen.step.Step.cache_spec` has it.
        layers: matrices that every token is multiplied with, experts apart.
        head: the matrix that gives the logits; it may be the embedding too.
        tables: embeddings, of which a token reads one row; without that which is the head.
        experts: matrices of all experts.
        vectors: numbers that are in no matrix: norms, biases.
        tied: the head is the embedding of the tokens.
        expert_count: experts of a layer, 0 where there are none.
        experts_per_token: how many of them a token goes through.
        heads: query heads of a layer.
        logits_size: numbers per row of logits.
        trained_length: positions that its config speaks of, None where it does not.
        position_limit: how many positions it has at most, None where nothing limits them.
    """

    model_type: str
    dtype: torch.dtype
    cache_spec: CacheSpec
    layers: Matrices
    head: Matrices
    tables: Matrices
    experts: Matrices
    vectors: int
    tied: bool
    expert_count: int
    experts_per_token: int
    heads: int
    logits_size: int
    trained_length: int | None
    position_limit: int | None

    @property
    def parameters(self) -> int:
        """Numbers of the model; a tied embedding counts once."""
        matrices = self.layers + self.head + self.tables + self.experts
        return matrices.numbers + self.vectors

    @property
    def active_parameters(self) -> int:
        """Numbers that one token meets: all without those experts that it does not go through."""
        idle = self.experts.numbers * (self.expert_count - self.experts_per_token) // max(1, self.expert_count)
        return self.parameters - idle


def load_outline(source: str | Path | None = None, dtype: torch.dtype = torch.float32) -> Outline:
    """The outline of a model, from its config file.

    Args:
        source: a hub id, a folder, or a GGUF file; None for :func:`staticgen.text.default_model_file`.
        dtype: that the weights would be loaded in.

    Raises:
        FileNotFoundError: a path that does not exist.
        OSError, ValueError: transformers cannot find or read the config, or has no causal decoder for it.
        UnsupportedModelError: the model cannot be a static step. Not all such models are noticed here: that its
            logits are right is what :class:`staticgen.step.Step` checks with the weights.
    """
    place, files = locate_model(source)
    config: Any = AutoConfig.from_pretrained(place, **files)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it speaks of the file; the weights are dequantised
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return outline_of(model)


@torch.no_grad()
def outline_of(model: PreTrainedModel) -> Outline:
    """The outline of a model on the ``meta`` device, which is changed and of no use afterwards; see :func:`load_outline`."""
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"meta"}:
        raise ValueError(
            f"model is on {', '.join(sorted(devices))}, expected one that was built on torch.device('meta')"
        )
    require_known_layers(model.config)
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    decoder = model if config is model.config else model.get_decoder()
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    expert_count = _first(config, _EXPERTS)
    sums = {"layers": Matrices(), "head": Matrices(), "tables": Matrices(), "experts": Matrices()}
    vectors = 0
    parameters = {id(tensor): (name, tensor) for name, tensor in decoder.named_parameters()}
    parameters.setdefault(id(head), ("head", head))
    for name, tensor in parameters.values():
        if tensor is head:
            kind = "head"
        elif id(tensor) in tables:
            kind = "tables"
        elif ".experts." in name or (tensor.dim() == 3 and tensor.shape[0] == expert_count):
            kind = "experts"
        elif tensor.dim() > 1:
            kind = "layers"
        else:
            vectors += tensor.numel()
            continue
        sums[kind] += Matrices(tensor.numel(), tensor.numel() // tensor.shape[-1])
    per_token = _first(config, _EXPERTS_PER_TOKEN)
    has_experts = sums["experts"].numbers > 0
    if has_experts and not (expert_count and per_token):
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} has experts, but its config does not say how many a token goes "
            f"through, by any of the names {', '.join(_EXPERTS_PER_TOKEN)}"
        )
    spec, logits_size = _run(model, has_experts)
    return Outline(
        model_type=model.config.model_type,
        dtype=head.dtype,
        cache_spec=spec,
        vectors=vectors,
        tied=head is model.get_input_embeddings().weight,
        expert_count=expert_count if has_experts else 0,
        experts_per_token=min(per_token, expert_count) if has_experts else 0,
        heads=config.num_attention_heads,
        logits_size=logits_size,
        trained_length=getattr(config, "max_position_embeddings", None),
        position_limit=position_limit(model),
        **sums,
    )


class _OutlineCache(StepCache):
    """Biases without contents: those of :class:`StepCache` are made on the CPU."""

    def alibi(self, layer: int, slopes: tuple[float, ...], coarse: bool = False) -> torch.Tensor:
        held = self.key_positions(layer)
        return torch.zeros(1, len(slopes), 1, held.shape[1], device="meta")


def _run(model: PreTrainedModel, has_experts: bool) -> tuple[CacheSpec, int]:
    """What a step without contents caches, and the size of its logits."""
    register_attention()
    model.eval()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            part: Any = module
            part.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would look among the ids
    freeze_rotary_embeddings(model)
    _fill_windows(model)
    legacy = adapt_legacy_attention(model)
    if legacy is None:
        model.set_attn_implementation(ATTENTION_NAME)
    else:
        model.config._attn_implementation_internal = ATTENTION_NAME
    if has_experts:
        model.set_experts_implementation("batched_mm")  # others count the tokens of each expert
    parameters = inspect.signature(type(model).forward).parameters
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    cache = _OutlineCache(StepForm(), tokens)
    arguments: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache}
    if "position_ids" in parameters:
        arguments["position_ids"] = tokens
    try:
        output = model(input_ids=tokens, use_cache=True, **arguments, **(legacy or {}))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} cannot run as a static step: {error}"
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} cannot be outlined without its weights "
            f"({type(error).__name__}: {error})"
        ) from error
    layers = model.config.get_text_config().num_hidden_layers
    if set(range(layers)) - set(cache.windows):
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} cannot run as a static step: some of its {layers} layers do not use "
            "attention through transformers' AttentionInterface and Cache"
        )
    return cache_spec_of(cache), output.logits.shape[-1]


def _fill_windows(model: nn.Module) -> None:
    """GPT-Neo's windows stand in buffers that have no contents here; their last rows say all."""
    for module in model.modules():
        if type(module).__name__ == "GPTNeoSelfAttention":
            own: Any = module
            size = own.bias.shape[-1]
            window = own.config.window_size if own.attention_type == "local" else size
            own.bias = (torch.arange(size, device="cpu") >= size - window)[None, None, None]


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first number that a config has by one of these names, or 0."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)
