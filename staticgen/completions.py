"""From text to text: a model, its tokenizer and a session in one object that is called with prompts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from staticgen.calls import as_list, require_streamer
from staticgen.compiled import CompiledModel
from staticgen.decoding import Decoding, is_int
from staticgen.detokenize import RowText, read_stop
from staticgen.layouts import layout_class
from staticgen.limits import default_layout, new_token_count, read_overflow, require_count
from staticgen.models import longest, read_model
from staticgen.request import read_request
from staticgen.session import Session
from staticgen.sources import DEFAULT_MAX_LENGTH
from staticgen.text import encode_prompt

_SESSION = set(inspect.signature(Session).parameters) - {"model", "max_length"}
_LENGTHS = {"max_length", "max_new_tokens", "max_tokens"}


@dataclass(frozen=True)
class Completed:
    """One text that was generated.

    Attributes:
        text: without the prompt, and without the stop string that ended it.
        prompt_tokens: of its prompt.
        new_tokens: that were generated for it; the EOS, or what completed a stop string, among them.
        finish_reason: ``"stop"`` for a stop string or a caller's criterion, ``"eos"`` or ``"length"``.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: str


def check_calls(
    model: Any,
    prompts: Sequence[list[int]],
    decoding: Mapping[str, Any],
    session_arguments: Mapping[str, Any],
) -> Decoding:
    """Refuse what a session would refuse, before it is made or anything runs; the settings as it reads them.

    Args:
        model: of transformers, or compiled.
        prompts: ids of each prompt.
        decoding: for :meth:`staticgen.Session.generate`.
        session_arguments: of :class:`staticgen.Session`, with ``max_length``.

    Raises:
        ValueError, TypeError: where it is one of several prompts, the message says which.
    """
    rest = dict(decoding)
    config = rest.pop("generation_config", None)
    layout = session_arguments.get("layout") or default_layout(session_arguments.get("overflow"), model)
    overflow = rest.get("overflow") or session_arguments.get("overflow")
    policy = read_overflow(overflow, layout, layout_class(layout))

    def check(ids: list[int]) -> Decoding:
        request = read_request(model, ids, None, config, rest)
        new_token_count(request.prompts, request.settings, session_arguments["max_length"], policy)
        return request.settings

    settings = check([0])
    for index, ids in enumerate(prompts):
        try:
            check(ids)
        except ValueError as error:
            raise ValueError(f"prompt[{index}]: {error}" if len(prompts) > 1 else str(error)) from error
    return settings


def completion(model: Any, tokenizer: PreTrainedTokenizerBase | None = None, **arguments: Any) -> Completion:
    """A function from prompts to texts: ``completion(model, tokenizer)("say something")``.

    Everything is compiled here, once. See :class:`Completion` for the arguments and the errors.
    """
    return Completion(model, tokenizer, **arguments)


class Completion:
    """Completes prompts, any number of times, with one session.

    Args:
        model: of transformers, on the CPU; or the folder of a bundle.
        tokenizer: the model's; a bundle has its own.
        samples: None for one text a prompt; a number for a list of that many, which takes ``do_sample`` or
            ``num_beams``.
        stop: a string or several. A text ends at the token that completes one, and does not hold it; see
            :class:`staticgen.detokenize.RowText`.
        max_tokens: new tokens at most; transformers' name for it, ``max_new_tokens``, does as well.
        skip_special_tokens: whether special tokens are left out of the text.
        max_length: tokens of prompt and text together, padding included; sizes the session. None for 512, or for
            the model's positions if they are fewer. The session of a bundle has the bundle's, and this may be less.
        arguments: all others of :class:`staticgen.Session` (``backend``, ``batch_size``, ``layout`` ...) and of
            :meth:`staticgen.Session.generate` (``do_sample``, ``temperature``, ``seed``, ``generation_config`` ...).
            These, and those above, may also be given for one call, and win there; only what the session was made
            with stays.

    Attributes:
        tokenizer: as given.
        session: what runs; another one after the model's weights have changed.

    Raises:
        ValueError, TypeError: a bad argument.
        UnsupportedModelError, BackendUnavailableError, CompileError: see :class:`staticgen.Session`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        samples: int | None = None,
        stop: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        skip_special_tokens: bool = True,
        max_length: int | None = None,
        **arguments: Any,
    ):
        if isinstance(model, str | os.PathLike):
            model = read_model(model)
        compiled = model if isinstance(model, CompiledModel) else None
        if tokenizer is None and compiled is not None:
            tokenizer = compiled.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}, expected the model's transformers tokenizer")
        model = read_model(model)
        if max_length is None:
            max_length = longest(model, DEFAULT_MAX_LENGTH)
        elif compiled is not None:
            arguments.setdefault("max_length", max_length)  # of calls; the session has the bundle's
            max_length = compiled.max_length
        self._model, self.tokenizer = model, tokenizer
        self._session_arguments: dict[str, Any] = {"max_length": max_length}
        self._session_arguments |= {name: arguments.pop(name) for name in _SESSION & set(arguments)}
        self._defaults = {"samples": samples, "stop": stop, "skip_special_tokens": skip_special_tokens, **arguments}
        if max_tokens is not None:
            self._defaults["max_tokens"] = max_tokens
        require_count("max_length", max_length, least=2)
        beams = self._check([], self._read({})).num_beams
        if compiled is None:
            self._session_arguments.setdefault("batch_size", beams)
        self.session = Session(model, **self._session_arguments)

    def __repr__(self) -> str:
        return f"Completion({self.session!r})"

    def __call__(self, prompt: Any, *, streamer: Any = None, **arguments: Any) -> Any:
        """Complete one prompt or several.

        Args:
            prompt: a string; or the messages of a chat, a list of dicts with ``role`` and ``content``; or a list of
                either. More than ``batch_size`` texts run in turns.
            streamer: of transformers, for one text: it is put the prompt, then every token, those of a stop string
                among them. It is ended also when there is an error, so that nobody waits for it in vain.
            arguments: see :class:`Completion`. With ``seed``, turn i draws with ``seed + i``.

        Returns:
            What was given: a string for one prompt, a list of strings for a list. With ``samples`` a list of strings
            stands in the place of each string.

        Raises:
            ValueError, TypeError: bad input; nothing has run then.
            SessionBusyError: this thread still holds an open stream.
        """
        require_streamer(streamer)
        try:
            settings = self._read(arguments)
            prompts, alone = _as_list(prompt)
            results = list(self._run(prompts, settings, streamer))
        finally:
            if streamer is not None:
                streamer.end()
        texts: list[Any] = [[one.text for one in samples] for samples in results]
        if settings.samples is None:
            texts = [text for (text,) in texts]
        return texts[0] if alone else texts

    def stream(self, prompt: Any, **arguments: Any) -> Generator[str, None, None]:
        """The text for one prompt in pieces, each as soon as it is final; joined they are what a call returns.

        Everything is checked when this is called. The session is in use until the stream ends or is closed. With
        ``num_beams`` the text comes in one piece: the best is known at the end only.

        Args:
            prompt: a string, or the messages of a chat.
            arguments: see :class:`Completion`.

        Raises:
            ValueError: several prompts, or ``samples``, whose pieces would come mixed.
            ValueError, TypeError: as a call raises them; nothing has run then.
        """
        settings = self._read(arguments)
        prompts, alone = _as_list(prompt)
        if not alone or settings.samples is not None:
            raise ValueError(
                "stream makes one text: call it once for each prompt, without samples, or call the completion itself"
            )
        ids = encode_prompt(self.tokenizer, prompts[0])
        read = self._check([ids], settings)
        if read.num_beams > 1:
            return (one.text for one in self._search_beams(ids, settings, read.eos_token_ids))
        return _first_of_each(self._steps(*self._open([ids], settings)))

    def results(self, prompts: Sequence[Any], **arguments: Any) -> Iterator[list[Completed]]:
        """For each prompt of a list its texts and how they ended, as soon as they are there.

        Everything is checked when this is called.

        Args:
            prompts: strings, or chats.
            arguments: see :class:`Completion`.

        Returns:
            lists of one :class:`Completed`, or of as many as ``samples``.

        Raises:
            ValueError, TypeError: as a call raises them; nothing has run then.
        """
        listed, alone = _as_list(prompts)
        if alone:
            raise TypeError(f"prompts is one prompt, expected a list of them: [{prompts!r}]")
        return self._run(listed, self._read(arguments))

    def _read(self, arguments: Mapping[str, Any]) -> _Settings:
        """The settings of one call: its own before those of the completion."""
        fixed = _SESSION.intersection(arguments) - {"overflow"}  # a call may have its own overflow
        if fixed:
            raise TypeError(f"{min(fixed)} belongs to the session: give it to staticgen.completion, not to a call")
        defaults = self._defaults
        if _LENGTHS.intersection(arguments):  # a length that is given replaces all of the completion's
            defaults = {name: value for name, value in defaults.items() if name not in _LENGTHS}
        decoding = {**defaults, **arguments}
        samples, stop, skip = (decoding.pop(name) for name in ("samples", "stop", "skip_special_tokens"))
        if "num_return_sequences" in decoding:
            raise ValueError("num_return_sequences is called samples here: samples=3 makes a list of three texts")
        if samples is not None and (not is_int(samples) or samples < 1):
            raise ValueError(f"samples is {samples!r}, expected a whole number of at least 1, or None for one text")
        if "max_tokens" in decoding:
            if "max_new_tokens" in decoding:
                raise ValueError("max_tokens and max_new_tokens are the same; give one")
            decoding["max_new_tokens"] = decoding.pop("max_tokens")
        return _Settings(None if samples is None else int(samples), read_stop(stop), bool(skip), decoding)

    def _check(self, prompts: Sequence[list[int]], settings: _Settings) -> Decoding:
        """Refuse what cannot run; ids of each prompt."""
        read = check_calls(self._model, prompts, settings.decoding, self._session_arguments)
        if settings.count > 1 and read.num_beams == 1 and not read.do_sample:
            raise ValueError(f"samples is {settings.count}, but greedy decoding makes one text: pass do_sample=True")
        return read

    def _run(self, prompts: Sequence[Any], settings: _Settings, streamer: Any = None) -> Iterator[list[Completed]]:
        """Check all prompts, then complete them in turns of ``batch_size`` rows."""
        count = settings.count
        ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        read = self._check(ids, settings)
        if streamer is not None and (len(prompts) * count != 1 or read.num_beams > 1):
            raise ValueError(
                f"streamer takes one text as it comes, got {len(prompts)} prompts with samples={settings.samples} and "
                f"num_beams={read.num_beams}"
            )
        if read.num_beams > 1:
            return (self._search_beams(one, settings, read.eos_token_ids) for one in ids)
        ids = [one for one in ids for _ in range(count)]
        size = self.session.batch_size
        turns = [ids[start : start + size] for start in range(0, len(ids), size)]
        opened = [self._open(turn, settings, number) for number, turn in enumerate(turns)]

        def complete() -> Iterator[list[Completed]]:
            done: list[Completed] = []
            for turn, (stream, rows) in zip(turns, opened, strict=True):
                if streamer is not None:
                    streamer.put(torch.tensor(turn, device="cpu"))
                for _ in self._steps(stream, rows, streamer):
                    pass
                done += [row.completed() for row in rows]
                while len(done) >= count:
                    yield done[:count]
                    del done[:count]

        return complete()

    def _search_beams(self, ids: list[int], settings: _Settings, eos: Sequence[int]) -> list[Completed]:
        """The best texts of one prompt; stop strings cut them afterwards."""
        self._renew()
        output = self.session.generate(ids, num_return_sequences=settings.count, **settings.decoding)
        rows = []
        for tokens in output[:, len(ids) :].tolist():
            row = self._row(ids, settings)
            for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
                row.take(token)
                row.settle("eos" if token in eos else "" if left else "length")
            rows.append(row.completed())
        return rows

    def _renew(self) -> None:
        """Compile anew if the model has changed."""
        if not self.session.is_current(self._model):
            self.session = Session(self._model, **self._session_arguments)

    def _open(
        self, ids: list[list[int]], settings: _Settings, turn: int = 0
    ) -> tuple[Iterator[torch.Tensor], list[_Row]]:
        """A stream of the session, which is checked and has not begun, and the texts that it will fill."""
        self._renew()
        rows = [self._row(one, settings) for one in ids]

        def stopped(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """A criterion of the session: rows that hold a stop string with the newest tokens."""
            ends = [row.take(token) for row, token in zip(rows, history[:, -1].tolist(), strict=True)]
            return torch.tensor(ends, device="cpu")

        decoding = dict(settings.decoding)
        if turn and decoding.get("seed") is not None:
            decoding["seed"] += turn
        criteria = [*as_list(decoding.pop("stopping_criteria", None)), stopped]
        return self.session.stream(ids, stopping_criteria=criteria, **decoding), rows

    def _row(self, ids: list[int], settings: _Settings) -> _Row:
        return _Row(RowText(self.tokenizer, settings.stop, settings.skip_special_tokens), len(ids))

    def _steps(
        self, stream: Iterator[torch.Tensor], rows: Sequence[_Row], streamer: Any = None
    ) -> Generator[list[str], None, None]:
        """Run a stream; the new text of every row, step by step."""
        with closing(stream):  # type: ignore[type-var]
            for tokens in stream:
                if streamer is not None:
                    streamer.put(tokens)
                reasons = self.session.stats.last.finish_reasons
                yield [row.settle(reason) for row, reason in zip(rows, reasons, strict=True)]


@dataclass(frozen=True)
class _Settings:
    """What one call asks for; ``decoding`` is for the session."""

    samples: int | None
    stop: tuple[str, ...]
    skip_special_tokens: bool
    decoding: dict[str, Any]

    @property
    def count(self) -> int:
        """Texts of each prompt."""
        return self.samples or 1


@dataclass
class _Row:
    """One text while it grows; ``finish_reason`` is empty until it has ended."""

    text: RowText
    prompt_tokens: int
    new_tokens: int = 0
    finish_reason: str = ""
    said: list[str] = field(default_factory=list)
    new: str = ""

    def take(self, token: int) -> bool:
        """Take in the token of a step, unless it is padding; whether the row has stopped."""
        self.new = ""
        if not self.finish_reason:
            self.new_tokens += 1
            self.new = self.text.put(token)
        return self.text.stopped

    def settle(self, reason: str) -> str:
        """End a step, with which the session ended the row if there is a reason; the text that is final now."""
        if not self.finish_reason:
            if reason and not self.text.stopped:
                self.new += self.text.end()
            self.finish_reason = "stop" if self.text.stopped else reason
            self.said.append(self.new)
        return self.new

    def completed(self) -> Completed:
        return Completed("".join(self.said), self.prompt_tokens, self.new_tokens, self.finish_reason)


def _first_of_each(steps: Generator[list[str], None, None]) -> Generator[str, None, None]:
    """The texts of a stream of one row, without empty ones."""
    with closing(steps):
        for (new,) in steps:
            if new:
                yield new


def _as_list(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether what was given is one.

    Raises:
        TypeError, ValueError: it is neither text nor a chat nor a list of these.
    """
    if _is_prompt(prompt):
        return [prompt], True
    if not isinstance(prompt, (list, tuple)):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}, expected a string, the messages of a chat, or a list of either"
        )
    for index, one in enumerate(prompt):
        if not _is_prompt(one):
            raise TypeError(
                f"prompt[{index}] is {one!r}, expected a string or the messages of a chat: a list of dicts with role and "
                "content"
            )
    return list(prompt), False


def _is_prompt(prompt: Any) -> bool:
    """A text, or messages: mappings with a role."""
    if isinstance(prompt, str):
        return True
    messages = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return messages and all(isinstance(message, Mapping) and "role" in message for message in prompt)
