"""Which tokens may come next: masks, regular expressions, JSON schemas and grammars."""

from __future__ import annotations

import importlib
import json
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from staticgen.errors import NothingAllowedError

# From the history, int64 [B, t], and the rows that run, bool [B], to what they may take, bool [B, logits size].
_Allowed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TokenMaskProcessor(LogitsProcessor):
    """Gives every token that is not allowed the score -inf; made by :func:`read_token_mask` for one call.

    It belongs behind the processors that exclude tokens (``min_length``) and before those that keep the best
    (``top_k``, ``top_p``, ``min_p``), which would otherwise choose among tokens that are not allowed.

    Attributes:
        running: bool [B], the rows that still generate; all, unless it is set. The scores of other rows stay as
            they are, and these rows are never an error.
    """

    def __init__(self, allowed: _Allowed, batch: int, logits_size: int, prompt_width: int):
        self.running = torch.ones(batch, dtype=torch.bool, device="cpu")
        self._allowed, self._shape, self._prompt_width = allowed, (batch, logits_size), prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Masked scores, float [B, L]; fresh.

        Args:
            input_ids: int64 [B, t], left-padded prompts and exactly the tokens generated since.
            scores: float [B, L], unchanged.

        Raises:
            NothingAllowedError: a running row is left without a token.
            ValueError, TypeError: a callable's mask has the wrong shape or dtype, or ``scores`` has.
        """
        if scores.shape != self._shape:
            raise ValueError(
                f"scores has shape {list(scores.shape)}, but token_mask was read for {list(self._shape)}; "
                "read it for every call (read_token_mask)"
            )
        allowed = self._allowed(input_ids, self.running)
        masked = scores.masked_fill(~allowed & self.running[:, None], -torch.inf)
        for row in (self.running & (masked == -torch.inf).all(dim=1)).nonzero()[:1, 0].tolist():
            count = int(allowed[row].sum())
            reason = (
                f"what else chooses tokens excludes all {count} that it allows (min_length and min_new_tokens exclude EOS)"
                if count
                else "it allows none"
            )
            raise _nothing_allowed(row, input_ids.shape[1] - self._prompt_width, reason)
        return masked  # type: ignore[return-value]


def read_token_mask(
    token_mask: Any,
    *,
    vocab_size: int,
    logits_size: int,
    prompt_width: int,
    batch: int,
    eos_token_ids: Collection[int] | None = None,
) -> TokenMaskProcessor:
    """Check what a caller passed as ``token_mask``, and begin a call with it.

    Args:
        token_mask: what may come next, in one of these forms. It is copied, and never changed.

            - bool [V] or [B, V], True for tokens that may come: a tensor, a numpy array or a list.
            - a callable, which gives such a mask in every step. It gets the history, int64 [B, t]: the prompts
              as the model gets them, padding at the left included, then the tokens generated so far, where rows
              that have ended go on with the pad token.
            - what :func:`regex`, :func:`json_schema` or :func:`grammar` made.
        vocab_size: V, the number of token ids that the model can embed.
        logits_size: L, the width of the model's scores. If they are wider than V, the ids beyond V are never
            allowed, and masks may have either width.
        prompt_width: T, the padded length of the prompts; the first token is chosen in step 0, at t = T.
        batch: B.
        eos_token_ids: the tokens that end a row of this call, for constraints; none if empty, the tokenizer's EOS
            if None.

    Raises:
        TypeError: not one of these forms, or not of dtype bool.
        ValueError: a wrong shape.
        NothingAllowedError: a row of the mask allows nothing.
    """

    def fit(mask: torch.Tensor) -> torch.Tensor:
        """bool [B, L] from bool [n] or [B, n]."""
        width = min(mask.shape[-1], vocab_size, logits_size)
        fitted = torch.zeros(batch, logits_size, dtype=torch.bool, device="cpu")
        fitted[:, :width] = mask[..., :width]
        return fitted

    def read(mask: Any, name: str) -> torch.Tensor:
        tensor = _as_bool(mask, name)
        widths = {vocab_size, logits_size}
        if tensor.dim() not in (1, 2) or tensor.shape[-1] not in widths or tensor.shape[:-1] not in ((), (batch,)):
            wider = f" (or {logits_size} wide, as the scores)" if logits_size != vocab_size else ""
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected [V] = [{vocab_size}] or [B, V] = [{batch}, {vocab_size}]"
                f"{wider}: a bool for each token of the model's vocabulary"
            )
        return fit(tensor)

    allowed: _Allowed
    if isinstance(token_mask, Constraint):
        matching = token_mask.begin(batch, prompt_width, eos_token_ids)

        def allowed(ids: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
            return fit(matching(ids, running))
    elif callable(token_mask):

        def allowed(ids: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
            return read(token_mask(ids.clone()), "token_mask(ids)")
    else:
        fixed = read(token_mask, "token_mask")
        for row in (~fixed.any(dim=1)).nonzero()[:1, 0].tolist():
            raise _nothing_allowed(row, 0, "it allows none")

        def allowed(ids: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
            return fixed

    return TokenMaskProcessor(allowed, batch, logits_size, prompt_width)


class Constraint:
    """What the generated text must match, by llguidance; see :func:`regex`, :func:`json_schema`, :func:`grammar`.

    It serves any number of calls and batches, at the same time too. The text is what the tokens stand for, read on
    from the prompt, and without special tokens. A row may end exactly where its text matches as a whole, and must
    end where nothing can follow. Text that is cut off by ``max_length`` is the beginning of a match.
    """

    def __init__(self, kind: str, source: str, rules: str, tokenizer: PreTrainedTokenizerBase):
        library = _llguidance()
        self._rules, self._name = rules, f"{kind}({source if len(source) <= 60 else source[:57] + '...'!r})"
        self._tokens, eos = _read_tokenizer(tokenizer), tokenizer.eos_token_id
        self._eos = () if eos is None else (int(eos),)
        failed, messages = library.LLMatcher.validate_grammar_with_warnings(rules, self._tokens)
        if failed:
            raise ValueError(f"{self._name} is refused by llguidance: {'; '.join(messages).strip()}")
        for message in messages:
            warnings.warn(f"{self._name}: {message}", stacklevel=3)

    def __repr__(self) -> str:
        return self._name

    def begin(self, batch: int, prompt_width: int, eos_token_ids: Collection[int] | None = None) -> Matching:
        """The state of one call of ``batch`` rows; see :func:`read_token_mask`."""
        eos = self._eos if eos_token_ids is None else tuple(eos_token_ids)
        # A new one for each call: copies share a table of states that only grows. log_level 0: what goes wrong
        # becomes an error here, and is not printed as well.
        matcher = _llguidance().LLMatcher(self._tokens, self._rules, log_level=0)
        return Matching(matcher, self._tokens, batch, prompt_width, eos)


class Matching:
    """A constraint in one call: what each row may take after the tokens that it has generated.

    It follows the history that it is shown, and starts again when that does not continue what it saw.
    """

    def __init__(self, matcher: Any, tokens: Any, batch: int, prompt_width: int, eos: Sequence[int]):
        self._start = matcher
        self._eos, self._library_eos = list(eos), tokens.eos_token
        self._size = max([tokens.vocab_size, *(token + 1 for token in eos)])
        self._vocab_size, self._batch, self._prompt_width = tokens.vocab_size, batch, prompt_width
        self._restart()

    def _restart(self) -> None:
        self._seen = torch.empty(self._batch, 0, dtype=torch.int64, device="cpu")
        self._matchers = [self._start.deep_copy() for _ in range(self._batch)]
        self._ended = [False] * self._batch

    def __call__(self, ids: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        """What may follow: bool [B, n], everything for rows that have ended.

        Args:
            ids: int64 [B, t], prompts and the tokens generated since.
            running: bool [B]; what other rows hold is not looked at.

        Raises:
            NothingAllowedError: a running row can neither go on nor end.
        """
        seen = self._seen.shape[1]
        if not torch.equal(ids[:, :seen], self._seen):
            self._restart()
        new = ids[:, max(self._seen.shape[1], self._prompt_width) :].tolist()
        self._seen = ids.clone()
        step = ids.shape[1] - self._prompt_width
        allowed = torch.ones(self._batch, self._size, dtype=torch.bool, device="cpu")
        for row in running.nonzero()[:, 0].tolist():
            for token in new[row]:
                self._take(row, token, step)
            if not self._ended[row]:
                allowed[row] = self._next(row, step)
        return allowed

    def _take(self, row: int, token: int, step: int) -> None:
        self._ended[row] = self._ended[row] or token in self._eos
        if not self._ended[row] and not self._matchers[row].try_consume_tokens([token]):
            raise _nothing_allowed(row, step, f"the row was given token {token}, which the constraint does not allow")

    def _next(self, row: int, step: int) -> torch.Tensor:
        """bool [n]."""
        matcher = self._matchers[row]
        mask = torch.zeros(self._size, dtype=torch.bool, device="cpu")
        mask[: self._vocab_size] = torch.from_numpy(np.frombuffer(matcher.compute_logit_bias(), np.uint8) != 0)
        # A call has EOS tokens of its own, and one of them may be text for the library.
        may_end = matcher.is_accepting()
        mask[self._library_eos] = False
        mask[self._eos] = may_end
        if not mask.any():
            said = matcher.get_error().splitlines()[:1]
            reason = ": ".join(["no token continues the text as the constraint wants", *said])
            if may_end:
                reason = "the text is complete, and no EOS token can end it; set eos_token_id or fewer max_new_tokens"
            raise _nothing_allowed(row, step, reason)
        return mask


def regex(pattern: str, tokenizer: PreTrainedTokenizerBase) -> Constraint:
    """Text that matches a regular expression as a whole, as with ``re.fullmatch``.

    Args:
        pattern: in the syntax of Rust's ``regex``: no look-around, no back-references, ``\\d`` is any Unicode
            digit, ``.`` is anything but a newline.
        tokenizer: the model's, a fast one.

    Raises:
        ImportError: llguidance is not installed.
        TypeError, ValueError: a bad pattern or tokenizer.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a string, got {type(pattern).__name__}")
    return Constraint("regex", pattern, _llguidance().LLMatcher.grammar_from_regex(pattern), tokenizer)


def json_schema(schema: Any, tokenizer: PreTrainedTokenizerBase, *, whitespace: bool = True) -> Constraint:
    """A JSON value that a schema allows; the properties of objects come in the schema's order.

    Args:
        schema: a dict, JSON text of one, or a class with ``model_json_schema()``, such as pydantic's models.
        tokenizer: the model's, a fast one.
        whitespace: whether there may be whitespace between the parts, any amount; False for none, which
            keeps a weak model from writing it without end.

    Raises:
        ImportError: llguidance is not installed.
        TypeError, ValueError: a bad schema or tokenizer; keywords that would not be obeyed are refused.
    """
    described = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    if isinstance(described, str):
        try:
            described = json.loads(described)
        except json.JSONDecodeError as error:
            raise ValueError(f"schema is {schema!r}, which is no JSON: {error}") from None
    if not isinstance(described, dict):
        raise TypeError(
            f"schema must be a dict, JSON text of one or a class with model_json_schema(), got {type(described).__name__}"
        )
    text = json.dumps(described, ensure_ascii=False)
    rules = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": bool(whitespace)})
    return Constraint("json_schema", text, rules, tokenizer)


def grammar(text: str, tokenizer: PreTrainedTokenizerBase) -> Constraint:
    """Text that a context-free grammar derives from its rule ``start``.

    Args:
        text: in llguidance's variant of Lark's syntax. It should not name EOS, which is allowed where ``start`` is
            complete.
        tokenizer: the model's, a fast one.

    Raises:
        ImportError: llguidance is not installed.
        TypeError, ValueError: a bad grammar or tokenizer.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a grammar as a string, got {type(text).__name__}")
    return Constraint("grammar", text, _llguidance().LLMatcher.grammar_from_lark(text), tokenizer)


def _llguidance() -> Any:
    try:
        library = importlib.import_module("llguidance")
        importlib.import_module("llguidance.hf")
    except ImportError as error:
        raise ImportError(
            f"regex, json_schema and grammar need the library llguidance ({error}): pip install 'staticgen[constraints]'"
        ) from error
    return library


# Reading the vocabulary takes up to a second. Tokens may be added to a tokenizer, hence the size.
_TOKENIZERS: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _read_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer as llguidance sees it: the bytes of every token."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"tokenizer must be a fast tokenizer of transformers, got {type(tokenizer).__name__}")
    stamp = (len(tokenizer), tokenizer.eos_token_id)
    known, tokens = _TOKENIZERS.get(tokenizer, (None, None))
    if known == stamp:
        return tokens
    try:
        tokens = _llguidance().hf.from_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer is one that llguidance cannot read: {error}") from error
    ids = tokenizer.encode("a b", add_special_tokens=False)
    if "▁" in tokens.decode_str(ids) and "▁" not in tokenizer.decode(ids):
        raise ValueError(
            "tokenizer is one that llguidance misreads: it takes the tokenizer's '▁' for that character, not for a space; "
            "give the tokenizer a decoder with Replace('▁', ' ') in place of Metaspace"
        )
    if tokenizer.eos_token_id is None and not tokens.is_special_token(tokens.eos_token):
        raise ValueError(
            f"tokenizer has no EOS token, and llguidance would take {tokenizer.convert_ids_to_tokens(tokens.eos_token)!r} "
            "for it, which is text; set tokenizer.eos_token"
        )
    _TOKENIZERS[tokenizer] = (stamp, tokens)
    return tokens


def _nothing_allowed(row: int, step: int, reason: str) -> NothingAllowedError:
    return NothingAllowedError(
        f"token_mask leaves no token for row {row} at step {step} (after {step} new tokens): {reason}"
    )


def _as_bool(mask: Any, name: str) -> torch.Tensor:
    """A tensor of dtype bool on the CPU; of any shape, and possibly the caller's own."""
    expected = "True for each token that may come, [V] or [B, V]"
    if isinstance(mask, (np.ndarray, Sequence)) and not isinstance(mask, (str, bytes)):
        try:
            array = np.array(mask, order="C")
        except ValueError:
            raise ValueError(f"{name} has rows of different lengths, expected {expected}") from None
        if array.dtype != np.bool_:
            raise TypeError(f"{name} has dtype {array.dtype}, expected bool: {expected}")
        return torch.from_numpy(array)
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"{name} is of type {type(mask).__name__}, expected a tensor, a numpy array or a list of bools ({expected})"
            + ("" if name.endswith(")") else ", a callable, or what regex, json_schema or grammar made")
        )
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}, expected torch.bool: {expected}")
    return mask.detach().cpu()
