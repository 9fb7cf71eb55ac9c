"""Beam search: transformers' own, over the programs of a session.

Beam search is a matter of scores and of which rows go on; transformers has it, with all its settings. Here it is given a
model whose forward replays the session's programs, and a cache that is the session's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from staticgen.calls import Hooks
from staticgen.contexts import Context
from staticgen.decoding import Decoding
from staticgen.facts import StepFacts
from staticgen.request import Request
from staticgen.sampling import GeneratedPenalty

# What this release of transformers calls the cache.
_CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# Settings that transformers' generate takes by the same name.
_PASSED_ON = (
    "min_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "num_return_sequences",
    "num_beams", "length_penalty", "early_stopping", "output_scores", "output_logits",
)  # fmt: skip


class _SessionCache(Cache):
    """What transformers believes to be the cache: the session's context."""

    def __init__(self, context: Context):
        super().__init__(layers=[])
        self.context, self.length = context, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i of the beams goes on from row ``beam_idx[i]``."""
        self.context.select_rows(beam_idx.tolist())


class _SessionModel(PreTrainedModel, GenerationMixin):
    """What transformers believes to be the model: it replays the session's programs."""

    def __init__(self, config: Any, batch_size: int):
        super().__init__(copy.deepcopy(config))
        self._batch_size = batch_size
        self._place = torch.nn.Parameter(torch.zeros(0, device="cpu"))  # transformers asks for a device

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "session_cache": kwargs[_CACHE_ARGUMENT]}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        session_cache: _SessionCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        assert input_ids is not None
        assert session_cache is not None
        rows, width = input_ids.shape
        if session_cache.length == 0:
            logits = session_cache.context.prefill([input_ids[0]], copies=rows)[:rows]
        else:
            token_ids = torch.zeros(self._batch_size, 1, dtype=torch.int64, device="cpu")
            position_ids = torch.full_like(token_ids, -1)
            token_ids[:rows], position_ids[:rows] = input_ids[:, -1:], width - 1
            logits = session_cache.context.decode(token_ids, position_ids)[:rows]
        session_cache.length = width
        kept: dict[str, Any] = {_CACHE_ARGUMENT: session_cache}
        return CausalLMOutputWithPast(logits=logits[:, None].clone(), **kept)


def search_beams(
    context: Context,
    step: StepFacts,
    batch_size: int,
    prompt: torch.Tensor,
    settings: Decoding,
    new_tokens: int,
    hooks: Hooks,
) -> Any:
    """Beam search from one prompt, int64 [t] without padding.

    Returns:
        transformers' ``GenerateBeamDecoderOnlyOutput``; its sequences are int64 [num_return_sequences, t + new].
    """
    chosen = {name: getattr(settings, name) for name in _PASSED_ON}
    generation_config = GenerationConfig(
        **chosen,
        max_new_tokens=new_tokens,
        eos_token_id=list(settings.eos_token_ids) or None,
        pad_token_id=settings.fill_token_id,
        return_dict_in_generate=True,
    )
    processors = LogitsProcessorList(hooks.logits_processor)
    if settings.frequency_penalty or settings.presence_penalty:
        processors.append(GeneratedPenalty(len(prompt), settings.frequency_penalty, settings.presence_penalty))
    model = _SessionModel(step.config, batch_size)
    with torch.random.fork_rng(devices=[], enabled=settings.seed is not None):
        if settings.seed is not None:
            torch.manual_seed(int(settings.seed))
        return model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            generation_config=generation_config,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList(hooks.stopping_criteria),
            **{_CACHE_ARGUMENT: _SessionCache(context)},
        )


def require_beams(request: Request, batch_size: int) -> None:
    """Refuse what does not go with beams.

    Raises:
        ValueError: the message names the argument.
    """
    settings, hooks = request.settings, request.hooks
    if settings.num_beams > batch_size:
        raise ValueError(
            f"num_beams is {settings.num_beams}, more than the session's batch_size of {batch_size}; make a session with "
            "a larger batch_size"
        )
    given = {
        "past_key_values or a prefix": request.past_key_values,
        "streamer": hooks.streamer,
        "token_mask": hooks.token_mask,
    }
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"num_beams above 1 does not go with {name}; leave one of them out")
    if settings.return_dict_in_generate and request.prompts.batch > 1:
        raise ValueError(
            f"return_dict_in_generate with num_beams takes one prompt, got {request.prompts.batch}; call it for each"
        )


def search_all(context: Context, step: StepFacts, batch_size: int, request: Request, new_tokens: int) -> Any:
    """Beam search from all prompts of a call, one after the other, so that none sees another's padding or end.

    Returns:
        int64 [B * num_return_sequences, T + new], or transformers' output where the settings ask for it.
    """
    prompts, settings = request.prompts, request.settings
    outputs = [
        search_beams(context, step, batch_size, row, settings, new_tokens, request.hooks) for row in prompts.rows
    ]
    lengths = [len(row) for row in prompts.rows]
    sequences = _joined(outputs, prompts.ids, lengths, settings.fill_token_id)
    if not settings.return_dict_in_generate:
        return sequences
    outputs[0].sequences = sequences
    return outputs[0]


def _joined(outputs: Sequence[Any], prompts: torch.Tensor, lengths: Sequence[int], fill: int) -> torch.Tensor:
    """Sequences int64 [B * num_return_sequences, T + new] of all prompts, which come as they were given."""
    news = [output.sequences[:, length:] for output, length in zip(outputs, lengths, strict=True)]
    width = max(new.shape[1] for new in news)
    rows = []
    for prompt, new in zip(prompts, news, strict=True):
        padded = torch.full((new.shape[0], width), fill, dtype=torch.int64, device="cpu")
        padded[:, : new.shape[1]] = new
        rows.append(torch.cat([prompt[None].expand(len(new), -1), padded], dim=1))
    return torch.cat(rows)
