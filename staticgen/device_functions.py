"""What a device does for a session, as functions of tensors without state: lowered once for each size, then only called.

The cache is one stack of keys and one of values for each size of layer, [layers, B, K, L, D] each, by the names
``keys.0``, ``values.0`` ...; slots and their positions go by window, ``slot_positions.0`` ...  Whole numbers are int32
at the border, since some devices emulate 64 bits.

==========  ====================================================================================================
step        the step at one size: logits, and the new keys and values
put         new keys and values of T tokens into slots of a cache
greedy      one step of the decode loop, :func:`staticgen.device_loop.advance`, on the best token
sampled     the same on a drawn one
arrange     the rows and slots of a cache in another order
move_L      slots of a cache of L slots into one of this length
row         one row of a cache, to be looked at
exact       a float32 copy of 16-bit keys, brought up to date in some slots
turn        keys turned back by one position
==========  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from staticgen.cache import KVBuffers, KVMemory, members_of, stack_shapes
from staticgen.device_loop import LOOK_EVERY, MOST_EOS, advance, past_of
from staticgen.facts import StepFacts
from staticgen.functions import TensorSpec
from staticgen.rotary import Rotation
from staticgen.shapes import StepShape, slots_of

Tensors = dict[str, torch.Tensor]
RunStep = Callable[..., tuple[torch.Tensor, ...]]  # Step.forward, over the weights that it is to have
MOVE = "move_"  # names of functions that move tokens begin so
# Inputs of the loop that no step of it changes, and those that it does.
SETTINGS = ("window", "eos", "fill")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
CHANGING = ("token_ids", "position_ids", "finished", "generated", "column", "drawn")


@dataclass(frozen=True)
class Draft:
    """A function before it is lowered.

    Attributes:
        name: see the module.
        inputs: by name, without weights.
        call: computes the outputs by name; it may write to its inputs, which are its own.
        kept: outputs that take the memory of the input of the same name.
        weighs: it needs the step's weights.
    """

    name: str
    inputs: Mapping[str, TensorSpec]
    call: Callable[[Tensors], Tensors]
    kept: Sequence[str] = field(default_factory=tuple)
    weighs: bool = False


class Drafts:
    """The functions of one step at one size.

    Args:
        facts: of the step.
        shape: its size.
        run_step: runs the step, for those that do.
    """

    def __init__(self, facts: StepFacts, shape: StepShape, run_step: RunStep | None = None):
        self._shape, self._run_step = shape, run_step
        self._spec, self._turned = facts.cache_spec, facts.form.transposed_keys
        self._token_dim = 4 if self._turned else 3  # of stacks of keys

    def step(self) -> Draft:
        """Logits float32 [B, V] of the last token, and ``new_keys.i``, ``new_values.i`` [layers, B, K, T, D]."""

        def call(given: Tensors) -> Tensors:
            memory = self._memory(given)
            assert self._run_step is not None
            inputs = given["token_ids"], given["position_ids"], given["first_positions"]
            logits, *new = self._run_step(*inputs, *past_of(memory))
            stacks: Tensors = {"logits": logits}
            for index, members in enumerate(members_of(self._spec).values()):
                stacks[f"new_keys.{index}"] = torch.stack([new[member] for member in members])
                stacks[f"new_values.{index}"] = torch.stack(
                    [new[len(self._spec.layers) + member] for member in members]
                )
            return stacks

        whole = _whole(self._shape.batch, self._shape.tokens)
        tokens = dict.fromkeys(("token_ids", "position_ids", "first_positions"), whole)
        return Draft("step", {**tokens, **self.positions(), **self.cache()}, call, weighs=True)

    def loop(self, sampled: bool) -> Draft:
        """One token of every row, as :func:`staticgen.device_loop.advance` has it."""

        def call(given: Tensors) -> Tensors:
            memory = self._memory(given)
            names = (*CHANGING, *SETTINGS, *(SAMPLING if sampled else ()))
            state = SimpleNamespace(**{name: given[name] for name in names})
            state.slots = [given[f"slots.{index}"] for index in range(len(self._spec.windows))]
            if sampled:
                low, high = state.seed.long().unbind()
                state.seed = (high << 32) | (low & 0xFFFFFFFF)
            assert self._run_step is not None
            advance(self._run_step, state, memory, sampled, torch.float32, writes_last=True)
            changed = {name: getattr(state, name) for name in CHANGING}
            changed |= {f"slots.{index}": slot for index, slot in enumerate(state.slots)}
            changed |= {f"slot_positions.{index}": held for index, held in enumerate(memory.slot_positions)}
            return changed | dict(zip(self.cache(), memory.buffers.stacks, strict=True))

        state = loop_specs(self._shape.batch, len(self._spec.windows), sampled)
        inputs = {**state, **self.positions(), **self.cache()}
        # The tokens so far are looked at while later steps run, so that they keep their memory.
        settings = (*SETTINGS, *SAMPLING, "generated")
        kept = [name for name in inputs if name not in settings]
        return Draft("sampled" if sampled else "greedy", inputs, call, kept, weighs=True)

    def put(self) -> Draft:
        """Write ``at.g`` slots [T] of each window: with the column ``column.g`` [B, T] of the new ones; -1 leaves it."""

        def call(given: Tensors) -> Tensors:
            changed = {}
            for name, group, dim in self._parts():
                slots, columns, new = given[f"at.{group}"].long(), given[f"column.{group}"], given[f"new_{name}"]
                where = columns.clamp(min=0).long()[None, :, None, :, None]
                chosen = new.gather(3, where.expand(new.shape[0], -1, new.shape[2], -1, new.shape[4]))
                chosen = chosen.transpose(3, 4) if dim == 4 else chosen
                held = given[name].index_select(dim, slots)
                changed[name] = given[name].index_copy(
                    dim, slots, torch.where(_by_slot(columns >= 0, dim), chosen, held)
                )
            return changed

        batch, tokens = self._shape.batch, self._shape.tokens
        inputs: dict[str, TensorSpec] = {}
        for group, count in enumerate(self.writable()):
            inputs |= {f"at.{group}": _whole(count), f"column.{group}": _whole(batch, count)}
        for index, size in enumerate(members_of(self._spec)):
            heads = (len(members_of(self._spec)[size]), batch, size.heads, tokens)
            inputs[f"new_keys.{index}"] = TensorSpec((*heads, size.key_dim), self._spec.dtype)
            inputs[f"new_values.{index}"] = TensorSpec((*heads, size.value_dim), self._spec.dtype)
        return Draft("put", {**inputs, **self.cache()}, call, list(self.cache()))

    def arrange(self) -> Draft:
        """Row i becomes what row ``rows`` [B] i was, and slot j what slot ``slots.g`` [slots] j was."""

        def call(given: Tensors) -> Tensors:
            rows = given["rows"].long()
            return self._in_order(given | {name: given[name].index_select(1, rows) for name in self.cache()})

        inputs = {"rows": _whole(self._shape.batch), **self._orders(), **self.cache()}
        return Draft("arrange", inputs, call, list(self.cache()))

    def move(self, length: int) -> Draft:
        """A cache of this length, whose slot j is slot ``slots.g`` [slots] j of one of ``length`` slots."""
        return Draft(move_name(length), {**self._orders(), **self.cache(length)}, self._in_order)

    def row(self) -> Draft:
        """One row, ``row`` [1], of every stack: [layers, 1, K, L, D]."""

        def call(given: Tensors) -> Tensors:
            return {name: given[name].index_select(1, given["row"].long()) for name in self.cache()}

        return Draft("row", {"row": _whole(1), **self.cache()}, call)

    def exact(self) -> Draft:
        """``exact.i``, float32, becomes what the keys are, in the slots ``written.g`` bool [B, slots]."""

        def call(given: Tensors) -> Tensors:
            changed = {}
            for name, group, dim in self._parts():
                if name.startswith("keys"):
                    written, kept = given[f"written.{group}"], given[_exact_of(name)]
                    changed[_exact_of(name)] = torch.where(_by_slot(written, dim), given[name].float(), kept)
            return changed

        written = {
            f"written.{group}": TensorSpec((self._shape.batch, count), torch.bool)
            for group, count in enumerate(self._slots())
        }
        keys = {_keys_of(name): self.cache()[_keys_of(name)] for name in self.exact_keys()}
        return Draft("exact", {**written, **keys, **self.exact_keys()}, call, list(self.exact_keys()))

    def turn(self, rotations: Sequence[Rotation | None]) -> Draft:
        """Keys of ``rows`` bool [B] turned back by one position, in each window's slots from ``first.g`` [1] on."""
        name_of = _exact_of if self.exact_keys() else lambda name: name

        def call(given: Tensors) -> Tensors:
            changed = {}
            for index, (size, members) in enumerate(members_of(self._spec).items()):
                source = given[name_of(f"keys.{index}")]
                group, token_dim = self._spec.windows.index(size.window), -1 if self._turned else -2
                turned = source.clone()
                mine = [rotations[member] for member in members]
                if all(rotation is mine[0] for rotation in mine):
                    if mine[0] is not None:
                        mine[0].apply_(turned, -1, token_dim)
                else:
                    for place, rotation in enumerate(mine):
                        if rotation is not None:
                            rotation.apply_(turned[place], -1, token_dim)
                slots = torch.arange(source.shape[token_dim], dtype=torch.int32, device=source.device)
                chosen = given["rows"][:, None] & (slots >= given[f"first.{group}"])[None]
                where = _by_slot(chosen, self._token_dim)
                result = torch.where(where, turned, source)
                changed[name_of(f"keys.{index}")] = result
                if self.exact_keys():
                    changed[f"keys.{index}"] = torch.where(where, result.to(self._spec.dtype), given[f"keys.{index}"])
            return changed

        keys = {name: spec for name, spec in self.cache().items() if name.startswith("keys")}
        first = {f"first.{group}": _whole(1) for group in range(len(self._spec.windows))}
        stacks = {**keys, **self.exact_keys()}
        rows = TensorSpec((self._shape.batch,), torch.bool)
        return Draft("turn", {"rows": rows, **first, **stacks}, call, list(stacks))

    def cache(self, length: int | None = None) -> dict[str, TensorSpec]:
        """The stacks of a cache, of this size or of another length."""
        slots = self._shape.cache_length if length is None else length
        shapes = stack_shapes(self._spec, self._shape.batch, slots, self._turned, windowed=True)
        names = [f"{kind}.{index}" for index in range(len(shapes) // 2) for kind in ("keys", "values")]
        return {name: TensorSpec(shape, self._spec.dtype) for name, shape in zip(names, shapes, strict=True)}

    def exact_keys(self) -> dict[str, TensorSpec]:
        """The stacks of exact keys; none where keys are float32 themselves."""
        if self._spec.dtype == torch.float32:
            return {}
        return {
            _exact_of(name): TensorSpec(spec.shape, torch.float32)
            for name, spec in self.cache().items()
            if name.startswith("keys")
        }

    def positions(self) -> dict[str, TensorSpec]:
        """The positions in the slots of each window."""
        batch = self._shape.batch
        return {f"slot_positions.{group}": _whole(batch, count) for group, count in enumerate(self._slots())}

    def writable(self) -> list[int]:
        """How many slots of each window one ``put`` writes."""
        return [min(self._shape.tokens, count) for count in self._slots()]

    def _slots(self) -> list[int]:
        return [slots_of(window, self._shape.cache_length) for window in self._spec.windows]

    def _orders(self) -> dict[str, TensorSpec]:
        """For each window, which slot comes to each place."""
        return {f"slots.{group}": _whole(count) for group, count in enumerate(self._slots())}

    def _in_order(self, given: Tensors) -> Tensors:
        """The stacks, with their slots in the order of :meth:`_orders`."""
        return {
            name: given[name].index_select(dim, given[f"slots.{group}"].long()) for name, group, dim in self._parts()
        }

    def _parts(self) -> list[tuple[str, int, int]]:
        """Of each stack its name, its window, and the dimension of its slots."""
        parts = []
        for index, size in enumerate(members_of(self._spec)):
            group = self._spec.windows.index(size.window)
            parts += [(f"keys.{index}", group, self._token_dim), (f"values.{index}", group, 3)]
        return parts

    def _memory(self, given: Tensors) -> KVMemory:
        """The cache among the inputs, to be read and written in place."""
        buffers = KVBuffers(
            self._spec,
            self._shape.batch,
            self._shape.cache_length,
            self._turned,
            windowed=True,
            stacks=[given[name] for name in self.cache()],
        )
        return KVMemory.of(buffers, [given[name] for name in self.positions()])


def loop_specs(batch: int, windows: int, sampled: bool) -> dict[str, TensorSpec]:
    """What the loop is given besides the cache; see :class:`staticgen.device_loop.LoopState`."""
    specs: dict[str, TensorSpec] = {
        "token_ids": _whole(batch, 1),
        "position_ids": _whole(batch, 1),
        "finished": TensorSpec((batch,), torch.bool),
        "generated": _whole(LOOK_EVERY, batch),
        **{name: _whole(1) for name in ("column", "drawn", "window", "fill")},
        "eos": _whole(MOST_EOS),
        **{f"slots.{group}": _whole(1) for group in range(windows)},
    }
    if sampled:
        real = TensorSpec((1,), torch.float32)
        specs |= {"temperature": real, "top_p": real, "min_p": real, "top_k": _whole(1), "seed": _whole(2)}
    return specs


def move_name(length: int) -> str:
    """The name of the function that moves tokens from a cache of ``length`` slots."""
    return f"{MOVE}{length}"


def _by_slot(chosen: torch.Tensor, dim: int) -> torch.Tensor:
    """What is said of the slots of each row, [B, slots], for stacks whose slots are this dimension."""
    return chosen[None, :, None, None] if dim == 4 else chosen[None, :, None, :, None]


def _whole(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.int32)


def _exact_of(name: str) -> str:
    return name.replace("keys", "exact")


def _keys_of(name: str) -> str:
    return name.replace("exact", "keys")
