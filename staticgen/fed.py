"""A step that gets its embeddings, rotary tables and masks from the host, for a compiler to trace.

Nothing is known of a model beforehand. A few tokens are run through it to see what its token embedding and its
rotary embeddings give; what the host gives just as well is fed, and the rest stays in the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from staticgen.attention import AlibiKey, MaskKey, Past, StepCache
from staticgen.errors import UnsupportedModelError
from staticgen.feeds import Alibi, Embeddings, Feed, Feeds, HostInputs, Mask, PositionIds, Rotary, TokenIds
from staticgen.shapes import StepShape
from staticgen.step import Step

_TOKENS, _SLOTS = 8, 4  # of the run that shows what a model computes


@dataclass(frozen=True)
class _Plan:
    """How a step is fed.

    feeds: what the host works out.
    rotaries: by the name of a rotary module, the number of the table that each of its calls returns.
    """

    feeds: Feeds
    rotaries: dict[str, list[int]] = field(default_factory=dict)


# A plan holds tensors of the step and not the step, so that an entry dies with its step.
_plans: weakref.WeakKeyDictionary[Step, _Plan] = weakref.WeakKeyDictionary()


class FedStep(nn.Module):
    """A step with the inputs of :func:`find_feeds` in place of token ids and positions; see :class:`staticgen.step.Step`.

    Its outputs are those of the step.
    """

    def __init__(self, step: Step):
        super().__init__()
        self.step = step
        self._plan = _plan_of(step)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step over fed inputs, then past keys and past values of the N layers."""
        feeds = self._plan.feeds
        fed = dict(zip(feeds.names, inputs[: len(feeds.parts)], strict=True))
        past = inputs[len(feeds.parts) :]
        keys, values = past[: self.step.layers], past[self.step.layers :]
        return _run_fed(self.step, self._plan, fed, keys, values)


def find_feeds(step: Step) -> Feeds:
    """What the host works out for this step.

    Raises:
        UnsupportedModelError: the step does not give its own logits when it is fed.
    """
    return _plan_of(step).feeds


def fed_inputs(step: Step, shape: StepShape) -> tuple[torch.Tensor, ...]:
    """Inputs of a :class:`FedStep` of the right sizes, with an empty cache, to trace with."""
    past = step.example_inputs(shape)[3 + len(step.cache_spec.windows) :]
    return (*find_feeds(step).example(shape), *past)


@torch.no_grad()
def _plan_of(step: Step) -> _Plan:
    if step not in _plans:
        _plans[step] = _find_plan(step)
    return _plans[step]


class _SeenCache(StepCache):
    """Notes which masks a model asks for."""

    def _once(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.asked: dict[Any, None] = getattr(self, "asked", {})
        self.asked[key] = None
        return super()._once(key, make)


class _FedCache(StepCache):
    """Has its masks from outside."""

    def __init__(self, *arguments: Any, given: Mapping[Any, torch.Tensor]):
        super().__init__(*arguments)
        self._given = given

    def _once(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._given[key]


def _find_plan(step: Step) -> _Plan:
    shape = StepShape(1, _TOKENS if step.position_limit is None else min(_TOKENS, step.position_limit), _SLOTS)
    _, positions, first, *cache = step.example_inputs(shape)
    groups = len(step.cache_spec.windows)
    slots, past = cache[:groups], cache[groups:]
    keys, values = past[: step.layers], past[step.layers :]
    far = 200 if step.position_limit is None else min(200, step.position_limit - 1)
    spread = torch.linspace(0, far, shape.tokens, device="cpu").round().long()[None]
    ids = (torch.arange(shape.tokens, device="cpu")[None] * 7 + 1).remainder(step.vocab_size)
    inputs = HostInputs(ids, positions, first, slots)

    seen = _SeenCache(step.form, positions, first, step._past(slots, keys, values))
    expected = step._run(ids, positions, seen)
    masks = _mask_parts(step, seen.asked)
    with _outputs(step.model, _table_names(step.model)) as outputs:  # positions far apart tell frequencies apart
        step._run(ids, spread, StepCache(step.form, spread, first, step._past(slots, keys, values)))
    embeddings, rotaries = _embedding_part(step, outputs, ids), _rotary_parts(step, outputs, spread)
    # A model may look at its ids or positions elsewhere too: they are left out where other ones change nothing.
    for taken in ((embeddings, rotaries), (embeddings, _Rotaries()), (None, rotaries), (None, _Rotaries())):
        parts, tensors = _parts_of(step, *taken)
        plan = _Plan(Feeds([TokenIds(), PositionIds(), *parts, *masks], tensors), taken[1].calls)
        logits = _feed(step, plan, inputs, keys, values)
        near = 1e-5 if step.dtype == torch.float32 else 0.02
        if not (logits - expected).abs().max() <= near * expected.abs().max():
            continue
        # Ids are left out only if any others would do; positions far out change what scales with them, and are no index.
        others = [(TokenIds(), (ids + 3).remainder(step.vocab_size)), (PositionIds(), positions + 1_000_003)]
        for part, other in others:
            if _matters(step, plan, part, other, (inputs, keys, values), logits):
                parts.insert(0, part)
        return _Plan(Feeds([*parts, *masks], tensors), plan.rotaries)
    raise UnsupportedModelError(
        f"model_type {step.model.config.model_type!r} cannot be fed from the host: its logits change when its masks "
        "come from outside"
    )


def _matters(step: Step, plan: _Plan, part: Feed, other: torch.Tensor, run: Any, logits: torch.Tensor) -> bool:
    inputs, keys, values = run
    changed = HostInputs(other, other, inputs.first_positions, inputs.slot_positions)
    try:
        return not torch.equal(logits, _feed(step, plan, inputs, keys, values, {part.name: changed}))
    except (IndexError, RuntimeError):
        return True


@dataclass
class _Rotaries:
    """The rotary tables of a model: frequencies, and cos and sin of each, and which call gives which."""

    tables: list[tuple[torch.Tensor, float, torch.dtype]] = field(default_factory=list)
    calls: dict[str, list[int]] = field(default_factory=dict)


def _parts_of(
    step: Step, embeddings: Embeddings | None, rotaries: _Rotaries
) -> tuple[list[Feed], dict[str, torch.Tensor]]:
    parts: list[Feed] = []
    tensors: dict[str, torch.Tensor] = {}
    if embeddings is not None:
        parts.append(embeddings)
        tensors["embedding"] = _token_embedding(step.model).weight.detach()
    for table, (frequencies, scale, dtype) in enumerate(rotaries.tables):
        precision = str(dtype).removeprefix("torch.")
        parts += [Rotary(function, table, scale, precision) for function in ("cos", "sin")]
        tensors[f"frequencies.{table}"] = frequencies
    return parts, tensors


def _feed(
    step: Step,
    plan: _Plan,
    inputs: HostInputs,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    instead: Mapping[str, HostInputs] | None = None,
) -> torch.Tensor:
    """Logits of a fed step; the parts that ``instead`` names are worked out from other inputs."""
    batch, tokens = inputs.token_ids.shape
    shape = StepShape(batch, tokens, _SLOTS)
    fed = {}
    for part in plan.feeds.parts:
        (out,) = Feeds([part], plan.feeds.tensors).buffers(shape)
        part.write_(out, (instead or {}).get(part.name, inputs), plan.feeds.tensors)
        fed[part.name] = out
    return _run_fed(step, plan, fed, keys, values)[0]


def _run_fed(
    step: Step,
    plan: _Plan,
    fed: Mapping[str, torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    given: dict[Any, torch.Tensor] = {}
    for part in plan.feeds.parts:
        if isinstance(part, Mask):
            given[MaskKey(part.group, part.window)] = fed[part.name]
        elif isinstance(part, Alibi):
            given[AlibiKey(part.group, part.slopes, part.coarse)] = fed[part.name]
    embeddings = fed.get("embeddings")
    first_mask = next(tensor for key, tensor in given.items() if isinstance(key, MaskKey))
    nothing = torch.zeros_like(first_mask[:, :, 0], dtype=torch.int64)  # [B, T]
    ids, positions = fed.get("token_ids", nothing), fed.get("position_ids", nothing)
    # Slot positions are not read, because every mask is given.
    slots = [nothing] * len(step.cache_spec.windows)
    past: dict[int, Past] = step._past(slots, keys, values)
    cache = _FedCache(step.form, positions, None, past, given=given)
    with _replaced(step.model, plan, embeddings, fed):
        logits = step._run(ids, positions, cache)
    new = [
        tensors[index] for tensors in (cache.new_keys, cache.new_values) for index in sorted(tensors)
    ]  # keys, then values
    return (logits, *new)


@contextmanager
def _outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """What the modules of these names, and the token embedding as ``""``, return inside the block."""
    seen: dict[str, list[Any]] = {}
    modules = {"": _token_embedding(model), **{name: model.get_submodule(name) for name in names}}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: seen.setdefault(name, []).append(output))
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(
    model: nn.Module, plan: _Plan, embeddings: torch.Tensor | None, fed: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Inside the block the token embedding and the rotary embeddings return what is fed."""
    handles = []
    if embeddings is not None:
        handles.append(_token_embedding(model).register_forward_hook(lambda *_: embeddings))
    for name, calls in plan.rotaries.items():
        turns = iter(calls)

        def hook(*_: Any, turns: Iterator[int] = turns) -> tuple[torch.Tensor, torch.Tensor]:
            table = next(turns)
            return fed[f"cos.{table}"], fed[f"sin.{table}"]

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask_parts(step: Step, asked: Mapping[Any, None]) -> list[Feed]:
    windows = step.cache_spec.windows
    parts: list[Feed] = []
    for key in asked:
        if isinstance(key, MaskKey):
            number = sum(isinstance(part, Mask) for part in parts)
            parts.append(Mask(number, key.group, windows[key.group], key.window))
        elif isinstance(key, AlibiKey):
            number = sum(isinstance(part, Alibi) for part in parts)
            parts.append(Alibi(number, key.group, windows[key.group], key.slopes, key.coarse))
    return parts


def _embedding_part(step: Step, outputs: Mapping[str, list[Any]], ids: torch.Tensor) -> Embeddings | None:
    """How the token embedding's output follows from its weight; None where the host could not say."""
    given = outputs.get("", [])
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        return None
    embedding = _token_embedding(step.model)
    rows, output = embedding.weight.detach()[ids], given[0]
    if output.shape != rows.shape or output.dtype != rows.dtype:
        return None
    if torch.equal(output, rows):
        return Embeddings()
    largest = int(rows.abs().flatten().argmax())
    scale = float(output.flatten()[largest] / rows.flatten()[largest])
    buffers = [float(buffer) for buffer in embedding.buffers() if buffer.numel() == 1]
    for candidate in (*buffers, scale):
        if torch.equal(output, rows * torch.tensor(candidate, dtype=rows.dtype, device="cpu")):
            return Embeddings(candidate)
    return None


def _token_embedding(model: Any) -> nn.Embedding:
    return model.get_input_embeddings()


def _table_names(model: nn.Module) -> list[str]:
    """The modules that hold rotary frequencies."""
    return [
        name
        for name, module in model.named_modules()
        if any(own.endswith("inv_freq") for own, _ in module.named_buffers(recurse=False))
    ]


def _rotary_parts(step: Step, outputs: Mapping[str, list[Any]], positions: torch.Tensor) -> _Rotaries:
    """The tables that the rotary embeddings return; modules that return something else are left in the step."""
    found = _Rotaries()
    for name, calls in outputs.items():
        if not name:
            continue
        buffers = step.model.get_submodule(name).named_buffers(recurse=False)
        frequencies = [buffer.detach().float() for own, buffer in buffers if own.endswith("inv_freq")]
        tables = [_table(output, frequencies, positions) for output in calls]
        if any(table is None for table in tables):
            continue
        found.calls[name] = [_number(found.tables, table) for table in tables if table is not None]
    return found


_Table = tuple[torch.Tensor, float, torch.dtype]


def _table(output: Any, known: Sequence[torch.Tensor], positions: torch.Tensor) -> _Table | None:
    """Frequencies of each number, scale and dtype of a (cos, sin) pair; None where none of ``known`` explains it."""
    if not (isinstance(output, tuple) and len(output) == 2 and all(isinstance(one, torch.Tensor) for one in output)):
        return None
    cos, sin = output
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[:2] != positions.shape:
        return None
    scale = float(cos[0, 0].float().max())  # the first position is 0
    for inverse in known:
        for numbers in (inverse, torch.cat([inverse, inverse]), inverse.repeat_interleave(2)):
            if len(numbers) != cos.shape[2]:
                continue
            angles = positions[..., None].float() * numbers
            near = 1e-5 if cos.dtype == torch.float32 else 0.01
            if all(
                torch.allclose(turn(angles) * scale, one.float(), rtol=0, atol=near * scale)
                for turn, one in ((torch.cos, cos), (torch.sin, sin))
            ):
                return numbers.clone(), scale, cos.dtype
    return None


def _number(tables: list[_Table], table: _Table) -> int:
    """The index of a table among those known, added when it is new."""
    for index, known in enumerate(tables):
        if known[1:] == table[1:] and torch.equal(known[0], table[0]):
            return index
    tables.append(table)
    return len(tables) - 1
