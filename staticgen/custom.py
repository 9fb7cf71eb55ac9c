"""``model.generate(..., custom_generate=staticgen.custom_generate)``: transformers' front, this package's loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from staticgen.calls import Hooks
from staticgen.decoding import read_decoding
from staticgen.generation import session_for
from staticgen.limits import default_layout, new_token_count
from staticgen.models import vocab_size
from staticgen.prompts import read_prompts
from staticgen.request import Request


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    backend: str = "auto",
    layout: str | None = None,
    layout_options: Mapping[str, Any] | None = None,
    overflow: str | None = None,
    device: str | None = None,
    backend_options: Mapping[str, str] | None = None,
    **model_kwargs: Any,
) -> Any:
    """The loop that ``model.generate`` runs when it is given as ``custom_generate``.

    transformers has prepared the prompts (int64 [B, T], repeated for ``num_return_sequences``), the processors and the
    criteria; they are used as they are. The arguments from ``backend`` on are those of :func:`staticgen.generate`, and
    ``model.generate`` hands them through.

    Raises:
        ValueError: beam search, which ``staticgen.generate(num_beams=...)`` has.
    """
    config = generation_config or GenerationConfig()
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams is {config.num_beams}: custom_generate has no beam search; call staticgen.generate instead"
        )
    settings = read_decoding(
        model,
        None,
        {
            **_neutral(model),
            "do_sample": bool(config.do_sample),
            "top_k": 0,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "max_new_tokens": config.max_length - input_ids.shape[1],
            "return_dict_in_generate": bool(config.return_dict_in_generate),
            "output_scores": bool(config.return_dict_in_generate and config.output_scores),
            "output_logits": bool(config.return_dict_in_generate and config.output_logits),
        },
    )
    prompts = read_prompts(
        input_ids,
        model_kwargs.get("attention_mask"),
        vocab_size=vocab_size(model),
        pad_token_id=settings.pad_token_id,
        eos_token_ids=settings.eos_token_ids,
    )
    hooks = Hooks(list(logits_processor or ()), list(stopping_criteria or ()), streamer)
    layout = default_layout(overflow) if layout is None else layout
    new_token_count(prompts, settings, config.max_length)
    session = session_for(
        model, max_length=config.max_length, batch_size=prompts.batch, layout=layout, layout_options=layout_options,
        backend=backend, device=device, backend_options=backend_options,
    )  # fmt: skip
    return session.run_to_end(Request(prompts, settings, hooks, overflow))


def _neutral(model: Any) -> dict[str, Any]:
    """Fields that the model's own config sets, set to their defaults: transformers has made processors of them."""
    return dict.fromkeys(name for name, value in model.generation_config.to_dict().items() if value is not None)
