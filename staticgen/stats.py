"""Counters of a session: what was compiled, what was replayed, and how long the last call took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CallStats:
    """One call of a session.

    Attributes:
        prompt_tokens: real tokens of all prompts.
        reused_tokens: how many of them did not run, because their keys and values were there: those of
            ``past_key_values`` or of a prefix. A learned prefix counts with its length in each row.
        new_tokens: tokens that were generated in each row, its EOS included.
        finish_reasons: per row ``"eos"``, ``"length"``, or ``""`` while it runs or was cancelled.
        steps: decode steps that ran; the first token comes out of prefill.
        first_token_seconds: from the call to its first token.
        decode_seconds: for all tokens after the first, as far as they were asked for.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    steps: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Mean time of a decode step; 0 when none ran."""
        return self.decode_seconds / self.steps if self.steps else 0.0


@dataclass
class CacheStats:
    """What a session found in the compile cache.

    Attributes:
        hits, misses: entries that were there, or not: the converted model, and its programs where the compiler's
            work is kept. Both 0 where the cache is off.
        reason: why the first one that was missing was: the fields in which the most similar entry differs.
    """

    hits: int = 0
    misses: int = 0
    reason: str = ""


@dataclass
class SessionStats:
    """A session since it was made.

    Attributes:
        compiles: programs compiled, one per step size; constant after warm-up.
        replays: program runs.
        compile_seconds: time that conversion and compilation took.
        loads: programs read from files: a bundle's, or the compile cache's. Those of which there is nothing compiled
            for this device are compiled, and count as compiles too.
        load_seconds: time that reading them took; they are read in another thread.
        compile_cache: what was there already.
        cache_bytes: size of the key/value cache.
        prefix_hits, prefix_misses: prompts of which the prefix cache knew at least the first token, or nothing.
        prefix_bytes: size of what the prefix cache holds.
        last: the newest call.
    """

    compiles: int = 0
    replays: int = 0
    compile_seconds: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0
    compile_cache: CacheStats = field(default_factory=CacheStats)
    cache_bytes: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_bytes: int = 0
    last: CallStats = field(default_factory=CallStats)
