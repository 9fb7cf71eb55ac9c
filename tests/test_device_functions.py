"""What a device does for a session, function by function, against plain loops and what the host does in its place."""

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_xla import DEVICES
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from staticgen.backends import open_backend
from staticgen.cache import KVBuffers
from staticgen.device_functions import Drafts, loop_specs
from staticgen.device_loop import LOOK_EVERY, NO_LIMIT, pick, uniform
from staticgen.device_memory import DeviceBuffers, NewBuffers, call
from staticgen.functions import Function
from staticgen.layouts import Placement, RowSegment, Segment
from staticgen.rotary import Rotation
from staticgen.shapes import CacheSpec, LayerSpec, StepForm, StepShape

B, L, WINDOW = 3, 7, 4
WHOLE, SEEN, WIDE = LayerSpec(2, 6, 5), LayerSpec(2, 6, 5, WINDOW), LayerSpec(1, 8, 3)
LAYERS = (WHOLE, SEEN, WHOLE, WIDE, SEEN)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def facts(transposed, dtype=torch.float32, layers=LAYERS):
    return SimpleNamespace(cache_spec=CacheSpec(layers, dtype), form=StepForm(transposed_keys=transposed))


@cache
def functions(device, transposed, dtype=torch.float32):
    """Functions by size and name, compiled when they are first asked for; what they need besides inputs; the engine."""
    backend, known = open_backend("xla", device), {}

    def function(size, name):
        if (size, name) not in known:
            drafts = Drafts(facts(transposed, dtype), StepShape(B, *size))
            draft = drafts.move(int(name[5:])) if name.startswith("move_") else getattr(drafts, name)
            known[size, name] = backend._make(draft if name.startswith("move_") else draft())
        return known[size, name]

    def turn(length, rotations):
        known.pop(((1, length), "turn"), None)
        known[(1, length), "turn"] = backend._make(
            Drafts(facts(transposed, dtype), StepShape(B, 1, length)).turn(rotations)
        )

    return SimpleNamespace(function=function, turn=turn, weights=backend.weights, engine=backend.engine)


def numbers(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def filled(buffers, seed):
    for place, stack in enumerate(buffers.stacks):
        stack.copy_(numbers(stack, 100 * seed + place))
    return buffers


class Pair:
    """The same cache twice: on a device, and on the host, whose code is the reference."""

    def __init__(self, device, transposed=False, dtype=torch.float32, length=L, seed=1):
        self.made, self.facts = functions(device, transposed, dtype), facts(transposed, dtype)
        self.spec = self.facts.cache_spec
        self.host = filled(KVBuffers(self.spec, B, length, transposed, windowed=True), seed)
        weights = self.made.weights
        self.device = DeviceBuffers(self.made.engine, self.made.function, weights, self.facts, B, length)
        self.device.puts = {1, 3}
        names = list(self.device.held)
        self.device.held = {
            name: self.made.engine.upload(stack) for name, stack in zip(names, self.host.stacks, strict=True)
        }

    def new(self, tokens, seed):
        """Keys and values of a step, for both."""
        host = filled(KVBuffers(self.spec, B, tokens), seed)
        device = NewBuffers(self.made.engine, self.spec, B, tokens)
        names = [f"new_{kind}.{index}" for index in range(3) for kind in ("keys", "values")]
        device.take({name: self.made.engine.upload(stack) for name, stack in zip(names, host.stacks, strict=True)})
        return host, device

    def found(self):
        return [self.made.engine.download(buffer) for buffer in self.device.held.values()]

    def check(self, tolerance=0.0):
        for mine, reference in zip(self.found(), self.host.stacks, strict=True):
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


# One by one.


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_put_takes_each_slot_from_its_column(device, transposed, seed):
    pair, tokens, chance = Pair(device, transposed), 3, np.random.default_rng(seed)
    before, (new, given) = [stack.clone() for stack in pair.host.stacks], pair.new(tokens, 7)
    where, engine = {}, pair.made.engine
    for group, slots in enumerate((L, WINDOW)):
        where[f"at.{group}"] = torch.from_numpy(chance.permutation(slots)[:tokens].astype(np.int32))
        where[f"column.{group}"] = torch.from_numpy(chance.integers(-1, tokens, (B, tokens), dtype=np.int32))
    inputs = {name: engine.upload(tensor) for name, tensor in where.items()}
    changed = call(
        pair.made.function((tokens, L), "put"), {**pair.made.weights, **inputs, **given.held, **pair.device.held}
    )
    for place, (kind, index, stack) in enumerate(zip("kv" * 3, (0, 0, 1, 1, 2, 2), before, strict=True)):
        group, turned = index % 2, transposed and kind == "k"
        for row in range(B):
            for slot, column in zip(where[f"at.{group}"], where[f"column.{group}"][row], strict=True):
                if column >= 0:
                    token = new.stacks[place][:, row, :, column]
                    stack[(slice(None), row, slice(None), *((slice(None), slot) if turned else (slot,)))] = token
        name = f"{'keys' if kind == 'k' else 'values'}.{index}"
        assert torch.equal(engine.download(changed[name]), stack), name


@pytest.mark.parametrize("transposed", [False, True])
def test_arrange_move_and_row(device, transposed):
    pair, longer = Pair(device, transposed), Pair(device, transposed, length=10, seed=2)
    pair.host.select_rows_([0, 2], [2, 1])
    pair.device.select_rows_([0, 2], [2, 1])
    pair.check()
    for row in range(B):
        slots = {None: torch.tensor([6, 0, 3]), WINDOW: torch.tensor([1, 2])}
        mine, reference = (buffers.read(row, slots, 9) for buffers in (pair.device, pair.host))
        assert mine.stop == 9
        for size in (WHOLE, SEEN, WIDE):
            assert all(map(torch.equal, mine.parts[size], reference.parts[size]))
    moves = {None: ([8, 9, 0, 1, 2], [0, 1, 2, 3, 6]), WINDOW: ([3, 0, 1], [0, 1, 3])}
    kept = [stack.clone() for stack in longer.host.stacks]
    pair.host.copy_slots_(longer.host, moves)
    pair.device.copy_slots_(longer.device, moves)
    for place, mine in enumerate(pair.found()):
        put = moves[None if place in (0, 1, 4, 5) else WINDOW][1]
        dim = 4 if transposed and place % 2 == 0 else 3
        slots = torch.tensor(put)
        assert torch.equal(mine.index_select(dim, slots), pair.host.stacks[place].index_select(dim, slots))
    assert all(map(torch.equal, longer.found(), kept))  # the smaller cache is made of it, and leaves it


SEGMENTS = {
    "in the middle": ((Segment(2, 0, 3),), (Segment(1, 0, 3),)),
    "around the end": ((Segment(6, 0, 1), Segment(0, 1, 2)), (Segment(3, 0, 1), Segment(0, 1, 2))),
    "the newest only": ((Segment(3, 2, 1),), (Segment(0, 1, 2),)),
    "none in one window": ((Segment(0, 0, 3),), ()),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("where", list(SEGMENTS))
def test_segments(device, transposed, shift, where):
    pair = Pair(device, transposed)
    whole, seen = SEGMENTS[where]
    placements = {None: Placement(shift, whole), WINDOW: Placement(shift and 1, seen)}
    host, given = pair.new(3, 5)
    pair.host.write_(host, placements)
    pair.device.write_(given, placements)
    if shift:  # what the last slots hold then is of the tokens before, and given up
        placed = Placement(0, (Segment(0, 0, 3), Segment(4, 0, 3), Segment(3, 0, 1)))
        rest = {None: placed, WINDOW: Placement(0, (Segment(1, 0, 3),))}
        pair.host.write_(host, rest)
        pair.device.write_(given, rest)
    pair.check()


@pytest.mark.parametrize("transposed", [False, True])
def test_segments_of_rows(device, transposed):
    pair = Pair(device, transposed)
    host, given = pair.new(3, 5)
    runs = (RowSegment(0, 5, 0, 2), RowSegment(0, 0, 2, 1), RowSegment(2, 1, 0, 3))
    placements = {None: Placement(0, (), runs), WINDOW: Placement(0, (), (RowSegment(1, 0, 1, 2),))}
    pair.host.write_(host, placements)
    pair.device.write_(given, placements)  # more slots than one put takes
    pair.check()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_keys_and_values_of_the_host_go_in_pieces(device, tokens):
    pair = Pair(device)
    host, _ = pair.new(tokens, 5)
    runs = min(tokens, WINDOW)
    seen = Placement(0, (Segment(0, tokens - runs, runs),))
    placements = {None: Placement(0, (Segment(0, 0, tokens),)), WINDOW: seen}
    pair.host.write_(host, placements)
    pair.device.write_(host, placements)
    pair.check()


def test_late_tokens_come_between_those_of_a_step(device):
    pair = Pair(device)
    host, given = pair.new(3, 5)
    late, _ = pair.new(4, 6)
    chosen = torch.tensor([[True, False], [False, False], [True, True]])
    for buffers in (host, given):
        buffers.merge_(late, chosen, 1, 2)
    placements = {None: Placement(0, (Segment(1, 0, 3),)), WINDOW: Placement(0, (Segment(1, 0, 3),))}
    pair.host.write_(host, placements)
    pair.device.write_(given, placements)
    pair.check()


# Keys that turn.

SLOW, FAST = torch.tensor([0.9, 0.3], dtype=torch.float64), torch.tensor([1.3, 0.2, 0.05], dtype=torch.float64)
TURNS = {
    "halves": [Rotation(FAST, False)] * 5,
    "interleaved": [Rotation(SLOW, True)] * 5,
    "mixed": [Rotation(FAST, False), Rotation(SLOW, True), None, Rotation(SLOW, False), Rotation(FAST, True)],
    "one layer only": [None, None, None, Rotation(FAST, True), None],
}


def turned(keys, rotation, delta):
    """Keys [..., D] as complex numbers, times the unit of each pair's angle: float64."""
    half = len(rotation.frequencies)
    first, second = (
        (range(0, 2 * half, 2), range(1, 2 * half, 2)) if rotation.interleaved else (range(half), range(half, 2 * half))
    )
    result = keys.double().clone()
    pairs = torch.complex(result[..., list(first)], result[..., list(second)])
    pairs = pairs * torch.exp(1j * rotation.frequencies * delta)
    result[..., list(first)], result[..., list(second)] = pairs.real, pairs.imag
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", list(TURNS))
def test_keys_turn_back_in_some_rows_and_slots(device, kind, transposed, dtype):
    """As often as the oldest token is dropped: 16-bit keys must not be rounded each time."""
    pair, rotations, times = Pair(device, transposed, dtype), TURNS[kind], 60
    before = pair.found()
    pair.made.turn(L, rotations)
    rows, first = torch.tensor([True, False, True]), {None: 2, WINDOW: 1}
    for _ in range(times):
        pair.device.rotate_(rotations, rows, first, -1)
    after = pair.found()
    members = [(0, 0), (2, 0), (0, 1), (4, 0), (2, 1)]  # of each layer its stack of keys, and its place there
    for (place, member), rotation, layer in zip(members, rotations, LAYERS, strict=True):
        old, new = (stacks[place][member].transpose(-1, -2 if transposed else -1) for stacks in (before, after))
        begin = first[layer.window]
        expected = old.double().clone()
        if rotation is not None:
            expected[rows, :, begin:] = turned(old[rows][:, :, begin:], rotation, -times)
        precision = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(new.double(), expected, rtol=precision, atol=precision)
        assert torch.equal(new[~rows], old[~rows]) and torch.equal(new[:, :, :begin], old[:, :, :begin])
        if rotation is not None:
            assert not torch.allclose(new[rows][:, :, begin:], old[rows][:, :, begin:], atol=0.1)
    assert all(torch.equal(after[place], before[place]) for place in (1, 3, 5))


@pytest.mark.parametrize("transposed", [False, True])
def test_new_keys_turn_as_exactly_as_old_ones(device, transposed):
    """What is written between two turns takes the place of the float32 copy, too."""
    pair, rotations = Pair(device, transposed, torch.bfloat16), TURNS["halves"]
    pair.made.turn(L, rotations)
    rows, first = torch.ones(B, dtype=torch.bool), {None: 0, WINDOW: 0}
    for step in range(12):
        host, given = pair.new(1, step)
        row = RowSegment(step % B, (step + 3) % WINDOW, 0)
        placements = {None: Placement(0, (Segment(step % L, 0, 1),)), WINDOW: Placement(0, (), (row,))}
        for buffers, new in ((pair.host, host), (pair.device, given)):
            buffers.write_(new, placements)
            buffers.rotate_(rotations, rows, first, -1)
        if step == 6:
            pair.host.select_rows_([0], [1])
            pair.device.select_rows_([0], [1])
    pair.check(tolerance=2.0**-6)  # the device makes its exact copy anew when rows move: one rounding more


# All of it, in any order.

COLUMNS = st.lists(st.integers(0, 2), min_size=3, max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_writes_and_moves(one_thread, data):
    pair = Pair("null", data.draw(st.booleans()))
    for step in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            sources = data.draw(COLUMNS)
            pair.host.select_rows_(range(B), sources)
            pair.device.select_rows_(range(B), sources)
        tokens = data.draw(st.sampled_from([1, 2, 3, 5]))
        host, given = pair.new(tokens, step)
        placements = {}
        for window, slots in ((None, L), (WINDOW, WINDOW)):
            count = data.draw(st.integers(1, min(tokens, slots)))
            begin = data.draw(st.integers(0, slots - 1))
            source, end = tokens - count, min(count, slots - begin)
            runs = [(begin, source, end), (0, source + end, count - end)]
            runs = [run for run in runs if run[2]]
            if data.draw(st.booleans()):
                placements[window] = Placement(0, tuple(Segment(*run) for run in runs))
            else:
                rows = data.draw(st.sets(st.integers(0, B - 1), min_size=1))
                placements[window] = Placement(0, (), tuple(RowSegment(row, *run) for row in rows for run in runs))
        pair.host.write_(host, placements)
        pair.device.write_(given if tokens in (1, 3) else host, placements)
        pair.check()


# The loop.

V = 23
TABLE = 3 * torch.randn(V, V, generator=torch.Generator().manual_seed(5))


class Loop:
    """The loop over a model that is a table: the logits after a token. What it caches is its token."""

    def __init__(self, device, sampled, batch=B, table=TABLE):
        self._backend = open_backend("xla", device)
        engine = self._backend.engine
        held, self.spec, layers = engine.upload(table), CacheSpec((WHOLE, SEEN), torch.float32), (WHOLE, SEEN)

        def run(token_ids, position_ids, first_positions, *past):
            token = token_ids.float()[:, :, None, None] + first_positions.float()[:, :, None, None] / 64
            keys = [token.expand(batch, layer.heads, 1, layer.key_dim) for layer in layers]
            values = [-token.expand(batch, layer.heads, 1, layer.value_dim) for layer in layers]
            return held.index_select(0, token_ids[:, 0].long()), *keys, *values

        drafts = Drafts(facts(False, layers=layers), StepShape(batch, 1, L), run)
        self._executable = self._backend._make(drafts.loop(sampled))
        specs = {**loop_specs(batch, 2, sampled), **drafts.positions(), **drafts.cache()}
        self._state = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        self.held = {}

    def begin(self, **state):
        for key, value in state.items():
            name = key.replace("__", ".")
            self._state[name] = torch.as_tensor(value, dtype=self._state[name].dtype).expand_as(self._state[name])
        upload = self._backend.engine.upload
        self.held = {name: upload(tensor.contiguous()) for name, tensor in self._state.items()}

    def step(self):
        self.held |= call(self._executable, {**self._backend.weights, **self.held})

    def get(self, name):
        return self._backend.engine.download(self.held[name])


NEUTRAL = {"temperature": 1.0, "top_k": NO_LIMIT, "top_p": 1.0, "min_p": 0.0}


def test_the_loop_chooses_caches_ends_and_goes_around(device):
    table = TABLE + 20 * torch.eye(V).roll(5, dims=1)  # five further on, so that the rows end one after the other
    loop, tokens, fill = Loop(device, sampled=False, table=table), [3, 9, 4], 21
    walks = [[(token + 5 * step) % V for step in range(20)] for token in tokens]
    eos = [walks[1][4], -1] + [-1] * 14
    loop.begin(
        token_ids=[[token] for token in tokens],
        position_ids=[[5], [6], [7]],
        slot_positions__0=-1,
        slot_positions__1=-1,
        slots__0=5,
        slots__1=2,
        eos=eos,
        fill=fill,
        window=3,
        generated=-5,
    )
    ends = [walk.index(eos[0]) if eos[0] in walk[1:] else math.inf for walk in walks]
    assert any(end < 10 for end in ends) and any(end > 10 for end in ends)
    shown, given = {}, [[], [], []]
    for step in range(13):
        for row, walk in enumerate(walks):
            over = step >= ends[row]
            position = -1 if over else 5 + row + step
            given[row].append((0 if over else walk[step], position, max(0, position - 2)))
            shown[step % LOOK_EVERY, row] = fill if over else walk[step + 1]
        loop.step()
        for (place, row), token in shown.items():
            assert int(loop.get("generated")[place, row]) == token
        for index, (slots, begin) in enumerate(((L, 5), (WINDOW, 2))):
            keys, values, held = (loop.get(f"{name}.{index}") for name in ("keys", "values", "slot_positions"))
            for past in range(max(0, step + 1 - slots), step + 1):
                slot = (begin + past) % slots
                for row in range(B):
                    token, position, first = given[row][past]
                    assert int(held[row, slot]) == position
                    assert torch.equal(keys[0, row, :, slot], torch.full((2, 6), token + first / 64))
                    assert torch.equal(values[0, row, :, slot], torch.full((2, 5), -token - first / 64))
            if step + 1 < slots:
                assert int((held[0] == -1).sum()) == slots - step - 1
    assert loop.get("finished").tolist() == [end <= 13 for end in ends]
    assert int(loop.get("drawn")) == 13 and int(loop.get("column")) == 13 % LOOK_EVERY


SETTINGS = [
    {"temperature": 0.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@cache
def sampling(device):
    return Loop(device, sampled=True, batch=200, table=TABLE[7].expand(V, V).contiguous())


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_tokens_are_drawn_as_often_as_transformers_would(device, chosen):
    """Its warpers say which tokens, and how often; chi squared says whether it is so."""
    drawn = {}
    for kind in dict.fromkeys(("null", device)):
        loop = sampling(kind)
        loop.begin(eos=-1, window=NO_LIMIT, seed=[5, -3], **{**NEUTRAL, **chosen})
        drawn[kind] = []
        for _ in range(40):
            loop.step()
            drawn[kind].append(loop.get("token_ids")[:, 0])
    tokens = torch.stack(drawn[device])
    assert torch.equal(tokens, torch.stack(drawn["null"]))
    chain = LogitsProcessorList([WARPERS[name](value) for name, value in chosen.items()])
    shares = torch.softmax(chain(None, TABLE[None, 7].clone()), dim=-1)[0].double()
    seen = torch.bincount(tokens.flatten().long(), minlength=V).double()
    assert not seen[shares == 0].any()
    expected = shares * seen.sum()
    often = expected >= 5
    chi = float(((seen - expected)[often] ** 2 / expected[often]).sum())
    freedom = int(often.sum()) - 1
    assert freedom >= 2 and chi < freedom + 4 * math.sqrt(2 * freedom) + 6  # beyond 1 in 1000 for each of these


def test_numbers_of_24_bits_are_those_of_53_cut_off():
    seed = torch.tensor([-7])
    for count in (0, 3, 10**6):
        exact, short = (uniform(seed, torch.tensor([count]), 500, kind) for kind in (torch.float64, torch.float32))
        assert short.dtype == torch.float32 and float(short.max()) < 1
        assert torch.equal(short.double(), (exact * 2**24).floor() / 2**24)
    scores = torch.tensor([[0.1, 0.0, 0.5, 0.4]]).log()
    ordered, order = scores.sort(dim=-1, stable=True)
    for edge, token in ((0.0, 0), (1 - 2.0**-24, 2), (0.05, 0), (0.3, 3), (0.7, 2)):
        assert int(pick(ordered, order, torch.tensor([edge], dtype=torch.float32))) == token


# What the null device sees.


def test_the_null_device_takes_what_a_device_would(one_thread):
    pair = Pair("null")
    old = dict(pair.device.held)
    pair.device.select_rows_([0], [1])
    assert all(bool(buffer.isnan().all()) for buffer in old.values())
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[3\], expected"):
        call(pair.made.function((1, L), "arrange"), {**pair.device.held, "rows": torch.arange(3)} | SLOTS)


SLOTS = {"slots.0": torch.arange(L, dtype=torch.int32), "slots.1": torch.arange(WINDOW, dtype=torch.int32)}
CHANGES = {
    "an alias of another shape": lambda table: table["inputs"][3].__setitem__(1, [1]),
    "two take one": lambda table: table["aliases"].update({"keys.0": "values.0", "values.0": "values.0"}),
    "an alias of nothing": lambda table: table["aliases"].update({"keys.0": "keys.9"}),
    "a dtype that none has": lambda table: table["outputs"][0].__setitem__(2, "int64"),
    "a size below nothing": lambda table: table["inputs"][0].__setitem__(1, [-1]),
    "a name that is none": lambda table: table["inputs"][0].__setitem__(0, 5),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_describes_no_function_is_refused(one_thread, change):
    function = functions("null", False).function((1, L), "arrange").function
    table = function.to_dict()
    assert Function.from_dict(table) == function
    CHANGES[change](table)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Function.from_dict(table)
