"""Keys and values of the prompts so far, in a tree over their tokens, so that what is known need not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from staticgen.ready import ReadyKeys, ready_from_spans
from staticgen.shapes import EMPTY, CacheSpec
from staticgen.spans import KVSpan, usable_lengths
from staticgen.stats import SessionStats


class _Node:
    """Some tokens that follow those of ``parent``, with their keys and values."""

    def __init__(self, tokens: np.ndarray, span: KVSpan, parent: _Node | None, used: int):
        self.tokens, self.span, self.parent, self.used = tokens, span, parent, used
        self.children: dict[int, _Node] = {}  # by their first token

    @property
    def start(self) -> int:
        return self.span.stop - len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.span.nbytes + self.tokens.nbytes


class PrefixCache:
    """A radix tree of token sequences and of their keys and values, within a budget of bytes.

    A prefix that several sequences have in common is held once. What is found is found by comparing tokens. When
    the budget is used up, the sequences' ends that were used longest ago are forgotten first; a sequence that
    exceeds the budget by itself is not kept.

    Layers with a window are held for the last tokens of each sequence that was kept only, as far as the next token
    sees them: of a model with such layers, a sequence is found up to its end, and not up to a place in its middle.

    Args:
        budget: bytes of keys, values and token ids.
        spec: what the model caches.
        stats: where hits, misses and bytes are counted.
    """

    def __init__(self, budget: int, spec: CacheSpec, stats: SessionStats):
        self.budget = budget
        self._spec, self._stats = spec, stats
        self._root = _Node(np.empty(0, dtype=np.int64), KVSpan(0, {}), None, 0)
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(node.nbytes for node in self._nodes())

    def find(self, rows: Sequence[torch.Tensor], batch: int, most: int) -> ReadyKeys | None:
        """What is known of the first tokens of prompts, int64 [t] each; the last token of each always runs.

        Args:
            rows: the prompts.
            batch: rows of the session.
            most: tokens of a row that may be taken over.
        """
        spans, usable = [], []
        for row in rows:
            path, match = self._walk(row.numpy())
            spans.append([node.span for node in path])
            known = usable_lengths(spans[-1], match)[: min(len(row) - 1, most) + 1]
            usable.append(known)
            if known[1:].any():
                self._stats.prefix_hits += 1
                self._touch(path)
            else:
                self._stats.prefix_misses += 1
        return ready_from_spans(spans, usable, [len(row) for row in rows], self._spec, batch)

    def add(self, tokens: np.ndarray, read: Callable[[int], KVSpan | None]) -> None:
        """Keep a sequence.

        Args:
            tokens: int64 [n].
            read: gives its keys and values from a position on, or None when they are gone; see ``Context.read``.
        """
        path, match = self._walk(tokens)
        self._touch(path)
        if match == len(tokens) and usable_lengths([node.span for node in path], match)[match]:
            return
        if path and match < path[-1].span.stop:
            path[-1] = self._split(path[-1], match)
        needed = self._bytes(match, len(tokens))
        if sum(node.nbytes for node in path) + needed > self.budget:
            return
        self._make_room(needed, path)
        span = read(match)
        if span is not None:
            if match < len(tokens):
                parent = path[-1] if path else self._root
                new = _Node(tokens[match:].copy(), span.cut(match, len(tokens)), parent, self._clock)
                parent.children[int(new.tokens[0])] = new
            for node in path:
                self._complete(node, span)
        self._stats.prefix_bytes = self.nbytes

    def _walk(self, tokens: np.ndarray) -> tuple[list[_Node], int]:
        """The nodes that hold the first tokens, the last one perhaps in part, and how many tokens these are."""
        path: list[_Node] = []
        node, match = self._root, 0
        while match < len(tokens) and (child := node.children.get(int(tokens[match]))) is not None:
            count = min(len(child.tokens), len(tokens) - match)
            differ = np.flatnonzero(child.tokens[:count] != tokens[match : match + count])
            path.append(child)
            match += int(differ[0]) if len(differ) else count
            if match < child.span.stop:
                break
            node = child
        return path, match

    def _touch(self, path: Sequence[_Node]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock

    def _split(self, node: _Node, at: int) -> _Node:
        """Make two nodes of one, which part at position ``at``; the first of them."""
        assert node.parent is not None
        start, count = node.start, at - node.start
        first = _Node(node.tokens[:count].copy(), node.span.cut(start, at), node.parent, node.used)
        node.parent.children[int(node.tokens[0])] = first
        first.children[int(node.tokens[count])] = node
        node.tokens, node.span, node.parent = node.tokens[count:].copy(), node.span.cut(at, node.span.stop), first
        return first

    def _complete(self, node: _Node, span: KVSpan) -> None:
        """Take over what a node lacks of the layers with windows."""
        mine = span.cut(node.start, node.span.stop)
        for size in node.span.parts:
            if mine.held_from(size) < node.span.held_from(size):
                node.span.parts[size] = mine.parts[size]

    def _make_room(self, needed: int, path: Sequence[_Node]) -> None:
        """Forget ends of sequences, those used longest ago first, but none of ``path``."""
        held = self.nbytes
        while held + needed > self.budget:
            ends = [node for node in self._nodes() if not node.children and node not in path]
            if not ends:
                return  # the path alone is within the budget
            oldest = min(ends, key=lambda node: node.used)
            assert oldest.parent is not None
            del oldest.parent.children[int(oldest.tokens[0])]
            held -= oldest.nbytes

    def _bytes(self, start: int, stop: int) -> int:
        """What the tokens of a sequence from ``start`` on take at most."""
        numbers = 0
        for layer in self._spec.layers:
            held = stop - start if layer.window is None else min(layer.window, stop)
            numbers += layer.heads * (layer.key_dim + layer.value_dim) * held
        return numbers * self._spec.dtype.itemsize + (stop - start) * 8

    def _nodes(self) -> list[_Node]:
        found, left = [], [*self._root.children.values()]
        while left:
            node = left.pop()
            found.append(node)
            left += node.children.values()
        return found


class Recorder:
    """Keeps what one call computes in a prefix cache: its prompts, and what was generated from them.

    Args:
        cache: where to.
        rows: the prompts, int64 [t] each.
        most: positions from here on may have seen less than all tokens before them, and are not kept.
    """

    def __init__(self, cache: PrefixCache, rows: Sequence[torch.Tensor], most: int):
        self._cache, self._most = cache, most
        self._rows = [row.tolist() for row in rows]

    def feed(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """A decode step has run; int64 [B, 1] both, as it was fed."""
        ids, positions = token_ids[:, 0].tolist(), position_ids[:, 0].tolist()
        for row, token, position in zip(self._rows, ids, positions, strict=False):
            if position != EMPTY:
                row.append(token)

    def keep(self, read: Callable[..., KVSpan | None]) -> None:
        """Keep the rows as far as they have run; ``read`` is ``Context.read``."""
        for index, row in enumerate(self._rows):
            if len(row) <= self._most:
                self._cache.add(np.array(row, dtype=np.int64), partial(read, index, stop=len(row)))
