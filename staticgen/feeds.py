"""What the host works out for a step that gets no positions: embeddings, rotary tables and masks.

A target that computes in float16 has no exact positions above 2048, and its angles would be off long before. So
the host looks the embeddings up and computes what follows from positions, in float32, and feeds it. :class:`Feeds`
is made for a step by :mod:`staticgen.fed`, or of a description and tensors from files; it needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save

from staticgen.masks import alibi_scores, visible_keys
from staticgen.shapes import EMPTY, StepShape, slots_of


@dataclass(frozen=True)
class HostInputs:
    """What a program is called with, besides keys and values.

    token_ids, position_ids, first_positions: int64 [B, T].
    slot_positions: int64 [B, slots] of each window.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    first_positions: torch.Tensor
    slot_positions: Sequence[torch.Tensor]

    def key_positions(self, group: int) -> torch.Tensor:
        """int64 [B, slots + T]: positions of the keys of layers of one window."""
        return torch.cat([self.slot_positions[group], self.position_ids], dim=1)


@dataclass(frozen=True)
class TokenIds:
    """The token ids themselves: int64 [B, T]."""

    kind: ClassVar[str] = "token_ids"
    dtype: ClassVar[torch.dtype] = torch.int64

    @property
    def name(self) -> str:
        return self.kind

    def size(self, shape: StepShape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (shape.batch, shape.tokens)

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        out.copy_(inputs.token_ids)


@dataclass(frozen=True)
class PositionIds(TokenIds):
    """The positions themselves, for a model that looks them up: int64 [B, T], 0 where a token is padding."""

    kind: ClassVar[str] = "position_ids"

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        torch.clamp(inputs.position_ids, min=0, out=out)


@dataclass(frozen=True)
class Embeddings:
    """Rows of the tensor ``embedding`` [V, E], times ``scale``: [B, T, E] in the tensor's dtype."""

    kind: ClassVar[str] = "embeddings"
    scale: float | None = None

    @property
    def name(self) -> str:
        return self.kind

    def size(self, shape: StepShape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (shape.batch, shape.tokens, tensors["embedding"].shape[1])

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        torch.index_select(tensors["embedding"], 0, inputs.token_ids.flatten(), out=out.view(-1, out.shape[2]))
        if self.scale is not None:
            out.mul_(torch.tensor(self.scale, dtype=out.dtype, device="cpu"))


@dataclass(frozen=True)
class Rotary:
    """``scale`` x cos or sin of position x ``frequencies.{table}`` (float32 [R]): [B, T, R]."""

    kind: ClassVar[str] = "rotary"
    function: str
    table: int
    scale: float
    precision: str

    @property
    def name(self) -> str:
        return f"{self.function}.{self.table}"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    def size(self, shape: StepShape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (shape.batch, shape.tokens, len(tensors[f"frequencies.{self.table}"]))

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        # Models multiply in float32 too; float64 would be nearer to the truth and further from them.
        angles = inputs.position_ids.clamp(min=0)[..., None].float() * tensors[f"frequencies.{self.table}"]
        out.copy_((angles.cos() if self.function == "cos" else angles.sin()) * self.scale)


@dataclass(frozen=True)
class Mask:
    """Where queries may look among the keys of one window's layers: bool [B, T, slots + T].

    Attributes:
        group: which slot_positions.
        held: the window that those slots are for.
        window: what the queries see at most.
    """

    kind: ClassVar[str] = "mask"
    dtype: ClassVar[torch.dtype] = torch.bool
    number: int
    group: int
    held: int | None
    window: int | None

    @property
    def name(self) -> str:
        return f"mask.{self.number}"

    def size(self, shape: StepShape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (shape.batch, shape.tokens, slots_of(self.held, shape.cache_length) + shape.tokens)

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        held = inputs.key_positions(self.group)
        visible_keys(held, inputs.position_ids, inputs.first_positions, self.window, out)


@dataclass(frozen=True)
class Alibi:
    """ALiBi's scores for the keys of one window's layers: float32 [B, H, 1, slots + T]; see :class:`Mask`."""

    kind: ClassVar[str] = "alibi"
    dtype: ClassVar[torch.dtype] = torch.float32
    number: int
    group: int
    held: int | None
    slopes: tuple[float, ...]
    coarse: bool

    @property
    def name(self) -> str:
        return f"alibi.{self.number}"

    def size(self, shape: StepShape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        return (shape.batch, len(self.slopes), 1, slots_of(self.held, shape.cache_length) + shape.tokens)

    def write_(self, out: torch.Tensor, inputs: HostInputs, tensors: Mapping[str, torch.Tensor]) -> None:
        out.copy_(alibi_scores(inputs.key_positions(self.group), tuple(self.slopes), self.coarse))


Feed = TokenIds | PositionIds | Embeddings | Rotary | Mask | Alibi
_KINDS: dict[str, Any] = {cls.kind: cls for cls in (TokenIds, PositionIds, Embeddings, Rotary, Mask, Alibi)}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Feeds:
    """The inputs of a fed program before its keys and values, and how the host works them out.

    Args:
        parts: the inputs, in the program's order.
        tensors: what they are worked out from: ``embedding`` [V, E], which may be mapped from a file, and
            ``frequencies.0`` ..., float32 [R].
    """

    def __init__(self, parts: Sequence[Feed], tensors: Mapping[str, torch.Tensor]):
        self.parts, self.tensors = tuple(parts), dict(tensors)

    @property
    def names(self) -> list[str]:
        """The names of the inputs, in order."""
        return [part.name for part in self.parts]

    def describe(self) -> list[dict[str, Any]]:
        """The parts as plain values that JSON can hold; :meth:`load` takes them."""
        return [{"kind": part.kind, **asdict(part)} for part in self.parts]

    @classmethod
    def load(cls, description: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> Feeds:
        """The feeds that :meth:`describe` described, over these tensors.

        Raises:
            ValueError: a part is of an unknown kind or has wrong fields, or a tensor is missing; the message names it.
        """
        parts = []
        for entry in description:
            fields = dict(entry)
            kind = fields.pop("kind", None)
            if kind not in _KINDS:
                raise ValueError(f"feeds: a part is of kind {kind!r}, expected one of {', '.join(_KINDS)}")
            if "slopes" in fields:
                fields["slopes"] = tuple(fields["slopes"])
            try:
                parts.append(_KINDS[kind](**fields))
            except TypeError as error:
                raise ValueError(f"feeds: the part {dict(entry)} is not a {kind}: {error}") from error
        feeds = cls(parts, tensors)
        wanted = {"embedding"} if any(isinstance(part, Embeddings) for part in parts) else set()
        wanted |= {f"frequencies.{part.table}" for part in parts if isinstance(part, Rotary)}
        if missing := sorted(wanted - set(tensors)):
            raise ValueError(f"feeds: the tensor {missing[0]!r} is missing; there are {sorted(tensors)}")
        return feeds

    def sizes(self, shape: StepShape) -> list[list[int]]:
        """The sizes of the inputs of a program of this size."""
        return [list(part.size(shape, self.tensors)) for part in self.parts]

    def buffers(self, shape: StepShape) -> list[torch.Tensor]:
        """The inputs of a program of this size, zeroed."""
        parts = zip(self.parts, self.sizes(shape), strict=True)
        return [torch.zeros(size, dtype=self._dtype(part), device="cpu") for part, size in parts]

    def write_(self, buffers: Sequence[torch.Tensor], inputs: HostInputs) -> None:
        """Work out the inputs of one step, into :meth:`buffers` of its size."""
        for part, out in zip(self.parts, buffers, strict=True):
            part.write_(out, inputs, self.tensors)

    def example(self, shape: StepShape) -> list[torch.Tensor]:
        """The inputs for tokens 0 at positions 0, 1 ... over an empty cache."""
        size = (shape.batch, shape.tokens)
        ids = torch.zeros(size, dtype=torch.int64, device="cpu")
        reaches = {part.group: part.held for part in self.parts if isinstance(part, (Mask, Alibi))}
        slots = [
            torch.full((shape.batch, slots_of(reaches.get(group), shape.cache_length)), EMPTY, device="cpu")
            for group in range(max(reaches, default=-1) + 1)
        ]
        positions = torch.arange(shape.tokens, device="cpu").expand(size)
        buffers = self.buffers(shape)
        self.write_(buffers, HostInputs(ids, positions, ids, slots))
        return buffers

    def _dtype(self, part: Feed) -> torch.dtype:
        return self.tensors["embedding"].dtype if isinstance(part, Embeddings) else part.dtype


def write_feeds(feeds: Feeds, folder: Path) -> dict[str, Path]:
    """Write ``feeds.json`` and ``feeds.safetensors``; their paths, as ``feeds`` and ``feed_tensors``."""
    paths = {"feeds": folder / "feeds.json", "feed_tensors": folder / "feeds.safetensors"}
    paths["feeds"].write_text(json.dumps(feeds.describe(), indent=1) + "\n", encoding="utf-8")
    # Not save_file, whose files only their owner can read.
    paths["feed_tensors"].write_bytes(save({name: tensor.contiguous() for name, tensor in feeds.tensors.items()}))
    return paths


def read_feeds(description: Path, tensors: Path) -> Feeds:
    """The feeds that :func:`write_feeds` wrote; the tensors stay in their file, which is mapped into memory.

    Raises:
        ValueError: see :meth:`Feeds.load`.
    """
    return Feeds.load(json.loads(description.read_text(encoding="utf-8")), load_file(tensors))
