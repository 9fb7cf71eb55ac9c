"""The text of one row while its tokens come: never half a character, nothing that may still change, no stop string.

What has been said cannot be taken back, so a token's text is said once no later token can change it. When that is
depends on the tokenizer's decoder, which is therefore carried out here in steps that keep what is open; its result is
``tokenizer.decode`` of all tokens.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNFINISHED = "\ufffd"  # what decode shows for bytes that are no character, or none yet
# A decoder that is not known here is taken to change no more than this many characters at the end.
_MAY_CHANGE = 24
# transformers' PreTrainedTokenizerBase.clean_up_tokenization, in its order.
_CLEAN_UP = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s", " 've": "'ve",
    " 're": "'re",
}  # fmt: skip


class Detokenizer:
    """Turns the tokens of one row into text as they come.

    The texts that :meth:`put` and finally :meth:`end` return, joined, are ``tokenizer.decode`` of all ids. A token
    costs the same however long the text is, except with a tokenizer whose decoder is not known here (one written in
    Python, WordPiece, CTC ...): that one decodes the whole row for each token, and says all but the last 24 characters.

    Ids without a token are dropped, as ``tokenizer.decode`` does.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        steps = _decoder_steps(tokenizer)
        self._decoder: _Steps | _Whole
        if steps is None:
            self._decoder = _Whole(tokenizer, skip_special_tokens)
        else:
            self._decoder = _Steps(tokenizer, skip_special_tokens, steps)

    def put(self, ids: Iterable[int]) -> str:
        """Take in tokens; the text that they make final."""
        return self._decoder.put(ids)

    def peek(self) -> str:
        """What would follow if no token came any more, up to a character that is not finished."""
        return self._decoder.rest().partition(UNFINISHED)[0]

    def end(self) -> str:
        """The rest of the text; an unfinished character is shown as ``decode`` shows it."""
        return self._decoder.rest()


class RowText:
    """The text of one row up to a stop string.

    The row has stopped at the token with which its text, as ``decode`` shows it, holds one of the stop strings; they
    may begin and end within tokens. What is returned ends before the stop string; where one token completes several,
    before the one that begins first. A special token that is itself a stop string stops the row too, though it has no
    text. Only tokens that are put in count, not the prompt.

    Args:
        tokenizer: the model's.
        stop: the stop strings, as :func:`read_stop` returns them.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        stopped: a stop string has come; further tokens are ignored.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), skip_special_tokens: bool = True):
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._stop_ids: set[int] = set()
        if stop and skip_special_tokens:
            self._stop_ids = {token_id for token, token_id in tokenizer.get_added_vocab().items() if token in stop}
        self._held = ""  # final, but perhaps the beginning of a stop string
        self.stopped = False

    def put(self, token_id: int) -> str:
        """Take in a token; the text that can be said now."""
        if self.stopped:
            return ""
        if token_id in self._stop_ids:
            text = self.end()
            self.stopped = True
            return text
        self._held += self._detokenizer.put([token_id])
        if not self._stop:
            text, self._held = self._held, ""
            return text
        text = self._held + self._detokenizer.peek()
        if self._cut(text) is not None:
            return self._finish(text)
        keep = max(_open_length(self._held, stop) for stop in self._stop)
        said = len(self._held) - keep
        text, self._held = self._held[:said], self._held[said:]
        return text

    def end(self) -> str:
        """No token comes any more; the rest of the text."""
        return "" if self.stopped else self._finish(self._held + self._detokenizer.end())

    def _finish(self, text: str) -> str:
        cut = self._cut(text)
        self._held, self.stopped = "", cut is not None
        return text[:cut]

    def _cut(self, text: str) -> int | None:
        """Where the first stop string begins in ``text``."""
        return min((index for stop in self._stop if (index := text.find(stop)) >= 0), default=None)


def read_stop(stop: Any) -> tuple[str, ...]:
    """Stop strings from what a caller passed: None, a string or a list of strings.

    Raises:
        ValueError: anything else, or an empty string.
    """
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(one, str) and one for one in strings):
        raise ValueError(f"stop is {stop!r}, expected a string that is not empty, a list of them, or None")
    return tuple(strings)


def _open_length(text: str, pattern: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``pattern``, which is longer than they are."""
    longest = min(len(text), len(pattern) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(pattern[:length])), 0)


class _Whole:
    """Any decoder, by decoding the row anew for every token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._said = 0

    def put(self, ids: Iterable[int]) -> str:
        self._ids += ids
        rest = self.rest()
        new = rest.rstrip(UNFINISHED + " \t\r\n")[:-_MAY_CHANGE]
        self._said += len(new)
        return new

    def rest(self) -> str:
        text: Any = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return text[self._said :]


class _Steps:
    """A decoder of ``tokenizers``, by its steps."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, steps: list[_Step]):
        backend = tokenizer.backend_tokenizer
        self._token = backend.id_to_token
        added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = {token.content for token in added if token.special}
        self._steps = steps

    def put(self, ids: Iterable[int]) -> str:
        named = (self._token(token_id) for token_id in ids)
        pieces = [token for token in named if token is not None and token not in self._skipped]
        for step in self._steps:
            pieces = [out for piece in pieces for out in step.put(piece)]
        return "".join(pieces)

    def rest(self) -> str:
        pieces: list[str] = []
        for step in map(copy.copy, self._steps):  # what is left of one goes through the next, and changes neither
            pieces = [out for piece in pieces for out in step.put(piece)] + step.rest()
        return "".join(pieces)


class _Step(ABC):
    """One step of a decoder: pieces of text in, pieces out. Its attributes are never changed in place."""

    @abstractmethod
    def put(self, piece: str) -> list[str]:
        """What comes out now that ``piece`` has come in."""

    def rest(self) -> list[str]:
        """What would come out if nothing came in any more."""
        return []


class _Replace(_Step):
    """Replaces within each piece."""

    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def put(self, piece: str) -> list[str]:
        return [piece.replace(self._old, self._new)]


class _ReplaceAcross(_Step):
    """Replaces in the text that the pieces make together."""

    def __init__(self, old: str, new: str):
        self._old, self._new, self._open = old, new, ""

    def put(self, piece: str) -> list[str]:
        *done, tail = (self._open + piece).split(self._old)
        keep = len(tail) - _open_length(tail, self._old)
        self._open = tail[keep:]
        return [self._new.join([*done, tail[:keep]])]

    def rest(self) -> list[str]:
        return [self._open]


class _Strip(_Step):
    """Takes up to ``count`` of a character off the beginning of the text that the pieces make together."""

    def __init__(self, character: str, count: int):
        self._character, self._left = character, count

    def put(self, piece: str) -> list[str]:
        while self._left and piece:
            if not piece.startswith(self._character):
                self._left = 0
                break
            piece, self._left = piece[1:], self._left - 1
        return [piece]


class _Metaspace(_Step):
    """Spaces for the sign that stands for them, but none in the first piece."""

    def __init__(self, sign: str, first: str):
        self._sign, self._space = sign, first

    def put(self, piece: str) -> list[str]:
        space, self._space = self._space, " "
        return [piece.replace(self._sign, space)]


class _Join(_Step):
    """Spaces between the pieces: what ``tokenizers`` does without a decoder."""

    _space = ""

    def put(self, piece: str) -> list[str]:
        space, self._space = self._space, " "
        return [space + piece]


class _ByteFallback(_Step):
    """Text of tokens like <0xE4>.

    One byte that is no UTF-8 makes every byte token beside it, before and after, U+FFFD, so that nothing of a run of
    them is final before another token ends it.
    """

    _token = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

    def __init__(self) -> None:
        self._run = b""

    def put(self, piece: str) -> list[str]:
        byte = self._token.fullmatch(piece)
        if byte:
            self._run += bytes([int(byte[1], 16)])
            return []
        pieces = [*self.rest(), piece]
        self._run = b""
        return pieces

    def rest(self) -> list[str]:
        try:
            return [self._run.decode()] if self._run else []
        except UnicodeDecodeError:
            return [UNFINISHED] * len(self._run)


class _ByteLevel(_Step):
    """Text of tokens in which every character stands for a byte; others stand for themselves."""

    def __init__(self) -> None:
        self._open = b""

    def put(self, piece: str) -> list[str]:
        try:
            new = bytes([_BYTES[character] for character in piece])
        except KeyError:
            new = piece.encode()
        data = self._open + new
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return [text]

    def rest(self) -> list[str]:
        return [self._open.decode(errors="replace")]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: themselves where they can be seen, and else those from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[_Step] | None:
    """The steps of the tokenizer's decoder; None if they are not known here."""
    if not _decodes_plainly(tokenizer):
        return None
    backend = tokenizer.backend_tokenizer
    steps: list[_Step] = []
    if backend.decoder is None:
        steps.append(_Join())
    else:
        try:
            state = json.loads(backend.decoder.__getstate__())
        except Exception:  # a decoder written in Python cannot say what it does
            return None
        fused = False  # the steps so far make one piece of all
        for part in state["decoders"] if state["type"] == "Sequence" else [state]:
            if part["type"] == "Fuse" or (part["type"] == "ByteLevel" and not fused):
                steps += [_ByteLevel()] if part["type"] == "ByteLevel" else []
                fused = True
                continue
            step = _fused_step(part) if fused else _piece_step(part)
            if step is None:
                return None
            steps.append(step)
    if tokenizer.clean_up_tokenization_spaces and _cleans_up(tokenizer):
        steps += [_ReplaceAcross(old, new) for old, new in _CLEAN_UP.items()]
    return steps


def _piece_step(part: Mapping[str, Any]) -> _Step | None:
    """A step that works on each token."""
    if part["type"] == "ByteFallback":
        return _ByteFallback()
    if part["type"] == "Metaspace":
        return _Metaspace(part["replacement"], " " if part["prepend_scheme"] == "never" else "")
    if part["type"] == "Replace" and part["pattern"].get("String"):
        return _Replace(part["pattern"]["String"], part["content"])
    return None


def _fused_step(part: Mapping[str, Any]) -> _Step | None:
    """A step that works on the text of all tokens."""
    if part["type"] == "Strip" and part["stop"] == 0:
        return _Strip(part["content"], part["start"])
    if part["type"] == "Replace" and part["pattern"].get("String"):
        return _ReplaceAcross(part["pattern"]["String"], part["content"])
    return None


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``tokenizer.decode`` is what ``tokenizers`` decodes and perhaps cleans up, and nothing else."""
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(getattr(tokenizer, name), "__func__", None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode", "clean_up_tokenization")
    )


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether transformers heeds ``clean_up_tokenization_spaces``: with BPE only where it is forced."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
