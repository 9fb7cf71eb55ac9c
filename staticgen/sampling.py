"""From logits to tokens: transformers' logits processors, in the order in which its ``generate`` applies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from staticgen.decoding import Decoding
from staticgen.device_loop import draw, signed, uniform


class GeneratedPenalty(LogitsProcessor):
    """Lowers the scores of tokens that were generated before: once, and for every time (as OpenAI's API does)."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self._begin, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores float32 [1, V] of a row whose history is int64 [1, t]."""
        counts = torch.zeros_like(scores)
        generated = input_ids[:, self._begin :]
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - counts * self._frequency - (counts > 0) * self._presence  # type: ignore[return-value]


def row_processors(decoding: Decoding, prompt_length: int, new_tokens: int) -> LogitsProcessorList:
    """Processors of one row that look at its history, for a prompt of so many real tokens.

    A row's own chain sees the row without padding, so that no processor ever counts a pad.

    Raises:
        ValueError: transformers refuses a setting.
    """
    chain, eos = LogitsProcessorList(), list(decoding.eos_token_ids)
    if decoding.sequence_bias is not None:
        chain.append(SequenceBiasLogitsProcessor(decoding.sequence_bias))
    if decoding.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(float(decoding.repetition_penalty)))
    if decoding.frequency_penalty or decoding.presence_penalty:
        chain.append(GeneratedPenalty(prompt_length, decoding.frequency_penalty, decoding.presence_penalty))
    if decoding.no_repeat_ngram_size > 0:
        chain.append(NoRepeatNGramLogitsProcessor(int(decoding.no_repeat_ngram_size)))
    if decoding.bad_words_ids is not None:
        chain.append(NoBadWordsLogitsProcessor(decoding.bad_words_ids, eos or None))
    if eos and decoding.min_length > 0 and decoding.min_new_tokens is None:
        chain.append(MinLengthLogitsProcessor(int(decoding.min_length), eos))
    if eos and decoding.min_new_tokens:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, int(decoding.min_new_tokens), eos))
    if decoding.forced_bos_token_id is not None:
        chain.append(ForcedBOSTokenLogitsProcessor(decoding.forced_bos_token_id))
    if decoding.forced_eos_token_id is not None:
        chain.append(ForcedEOSTokenLogitsProcessor(prompt_length + new_tokens, decoding.forced_eos_token_id))
    if decoding.remove_invalid_values:
        chain.append(InfNanRemoveLogitsProcessor())
    if decoding.exponential_decay_length_penalty is not None:
        chain.append(ExponentialDecayLengthPenalty(decoding.exponential_decay_length_penalty, eos, prompt_length))
    if decoding.suppress_tokens is not None:
        chain.append(SuppressTokensLogitsProcessor(decoding.suppress_tokens))
    if decoding.begin_suppress_tokens is not None:
        forced = decoding.forced_bos_token_id is not None and prompt_length == 1
        chain.append(SuppressTokensAtBeginLogitsProcessor(decoding.begin_suppress_tokens, prompt_length + int(forced)))
    return chain


def warpers(decoding: Decoding) -> LogitsProcessorList:
    """Processors of all rows that look at nothing but the scores; they come last."""
    chain = LogitsProcessorList()
    if decoding.do_sample:
        if decoding.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(float(decoding.temperature)))
        if decoding.top_h is not None:
            chain.append(TopHLogitsWarper(float(decoding.top_h)))
        if decoding.top_k != 0:
            chain.append(TopKLogitsWarper(int(decoding.top_k)))
        if decoding.top_p < 1.0:
            chain.append(TopPLogitsWarper(float(decoding.top_p)))
        if decoding.min_p is not None:
            chain.append(MinPLogitsWarper(float(decoding.min_p)))
        if decoding.typical_p < 1.0:
            chain.append(TypicalLogitsWarper(float(decoding.typical_p)))
        if decoding.epsilon_cutoff > 0.0:
            chain.append(EpsilonLogitsWarper(float(decoding.epsilon_cutoff)))
        if decoding.eta_cutoff > 0.0:
            chain.append(EtaLogitsWarper(float(decoding.eta_cutoff)))
    if decoding.renormalize_logits:
        chain.append(LogitNormalization())
    return chain


class Sampler:
    """Chooses the next token of every row.

    Args:
        decoding: the settings.
        rows: int64 [t] each, the prompts without padding.
        new_tokens: how many each row may get.
        processors: a caller's own, called once for all rows with the padded history, between the rows' chains and
            the warpers. One of a kind that a setting asks for too takes its place, as in transformers.
        counted: draw by random numbers that follow from a seed and a count alone, as the loop on a device does; a call
            without a seed takes one from torch's global generator.

    Attributes:
        seed, drawn: of counted random numbers, and how many each row has had.
    """

    def __init__(
        self,
        decoding: Decoding,
        rows: Sequence[torch.Tensor],
        new_tokens: int,
        processors: Sequence[LogitsProcessor] = (),
        counted: bool = False,
    ):
        self._do_sample = decoding.do_sample
        self._custom, given = processors, {type(processor) for processor in processors}
        self._chains = [
            LogitsProcessorList(p for p in row_processors(decoding, len(row), new_tokens) if type(p) not in given)
            for row in rows
        ]
        self._warpers = LogitsProcessorList(p for p in warpers(decoding) if type(p) not in given)
        self._histories = [row[None] for row in rows] if self._chains[0] else None
        self.seed, self.drawn, self._counted = 0, 0, counted
        if counted and decoding.do_sample:
            drawn = decoding.seed is None
            self.seed = int(torch.randint(2**62, (1,), device="cpu")) if drawn else int(decoding.seed or 0)
        self._generator = None if decoding.seed is None else torch.Generator("cpu").manual_seed(int(decoding.seed))

    def process(self, logits: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
        """Scores float32 [B, V] from logits [B, V], which are not changed.

        ``padded`` int64 [B, t] is the left-padded history, which a caller's own processors get.
        """
        scores = logits
        if self._histories is not None:
            scores = torch.cat(
                [
                    chain(history, row[None].clone())  # type: ignore[arg-type]
                    for chain, history, row in zip(self._chains, self._histories, logits, strict=True)
                ]
            )
        if (self._custom or self._warpers) and scores is logits:
            scores = logits.clone()  # some write in place
        for processor in self._custom:
            scores = processor(padded, scores)
        for processor in self._warpers:
            scores = processor(padded, scores)
        return scores

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Next tokens, int64 [B], from the scores [B, V]."""
        if self._do_sample and self._counted:
            seed, drawn = (torch.tensor([number], device="cpu") for number in (signed(self.seed), self.drawn))
            tokens = draw(scores, uniform(seed, drawn, len(scores)))
            self.drawn += 1
        elif self._do_sample:
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator)[:, 0]
        else:
            # numpy's, which stays in this thread: torch would start its own beside those of the backend, and
            # they spin on through the next step (6% of a decode step on two cores).
            tokens = torch.from_numpy(scores.numpy().argmax(axis=1))
        if self._histories is not None:
            self._histories = [
                torch.cat([h, t[None, None]], dim=1) for h, t in zip(self._histories, tokens, strict=True)
            ]
        return tokens
