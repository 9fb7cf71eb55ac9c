import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staticgen import UnknownNameError, register_layout
from staticgen.cache import KVBuffers, KVCache
from staticgen.layouts import LAYOUTS, Placement, Ring, Segment, Shift, Sink, layout_class
from staticgen.shapes import EMPTY, CacheSpec, LayerSpec

SPEC = CacheSpec((LayerSpec(2, 3, 3), LayerSpec(1, 4, 2), LayerSpec(2, 3, 3)), torch.float32)
WINDOWED = CacheSpec((LayerSpec(2, 3, 3), LayerSpec(2, 3, 3, window=3)), torch.float32)


def columns(count, rows=1, first=0):
    return torch.arange(first, first + count).expand(rows, -1)


def test_ring_goes_on_where_it_stopped_and_wraps():
    ring = Ring(5)
    assert ring.place(columns(5), source=2) == Placement(0, (Segment(0, 2, 3),))
    assert ring.place(columns(3)) == Placement(0, (Segment(3, 0, 2), Segment(0, 2, 1)))
    assert ring.place(columns(1)) == Placement(0, (Segment(1, 0, 1),))
    ring.reset()
    assert ring.place(columns(1)).segments[0].slot == 0


def test_shift_puts_the_newest_at_the_right_end():
    assert Shift(5).place(columns(3), source=1) == Placement(2, (Segment(3, 1, 2),))


def test_registered_layouts():
    assert LAYOUTS.names() == ["ring", "shift", "sink", "none"]


@pytest.mark.parametrize("name", ["dynamic", "STATIC", " Static "])
def test_names_of_transformers_caches_say_what_to_use(name):
    with pytest.raises(UnknownNameError, match=r"expected one of ring, shift, sink, none \(.*'ring' gives the same"):
        layout_class(name)
    with pytest.raises(ValueError, match="name of a cache of transformers"):
        register_layout(name, Ring)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sink_tokens": 12}, r"num_sink_tokens is 12, which leaves no room in max_length=12"),
        ({"num_sink_tokens": -1}, r"num_sink_tokens is -1, expected a whole number of at least 0"),
        ({"window_length": 0}, r"window_length is 0, expected a whole number of at least 1"),
        ({"window_length": True}, r"window_length is True"),
        ({"window_length": 9, "num_sink_tokens": 4}, r"are 13 slots together, more than max_length=12"),
    ],
)
def test_parameters_of_sink_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sink(12, **options)


@given(data=st.data(), sinks=st.integers(0, 3), window=st.integers(1, 6), pads=st.integers(0, 6))
def test_sink_holds_the_first_and_the_newest_tokens_of_each_row(data, sinks, window, pads):
    """Positions as a session gives them: below the capacity in steps of any size, then one token at a time."""
    capacity = sinks + window
    spare = data.draw(st.integers(0, 3), label="slots that the layout does not use")
    chunks = data.draw(st.lists(st.integers(1, 4), max_size=6), label="chunks")
    cache = KVCache(SPEC, 2, capacity + spare, lambda length: Sink(length, window, sinks), rotations=[None] * 3)
    tokens = [[], []]  # of each row, by the column they came in
    column = 0
    for count in [c for i, c in enumerate(chunks) if sum(chunks[: i + 1]) <= capacity] + [1] * 12:
        if column + count > capacity and count > 1:
            continue
        wide = torch.arange(column, column + count)
        places = torch.stack([wide, (wide - pads).clamp(min=EMPTY)])
        positions = cache.make_room(places)
        assert (positions < capacity).all()
        cache.write(numbered(count, column), positions)
        for row, offset in ((0, 0), (1, pads)):
            tokens[row] += [c for c in wide.tolist() if c >= offset]
        column += count
        for row, seen in enumerate(tokens):
            kept = seen if len(seen) <= capacity else seen[:sinks] + seen[-window:]
            found = held(cache)[row]
            assert set(found) == set(range(len(kept)))
            for position, number in enumerate(kept):
                keys, values = found[position]
                assert set(keys[0]) == {number}
                assert set(values[2]) == {-(2000 + number)}


def numbered(count, first, transposed=False, spec=SPEC):
    """New keys and values in which every number tells layer, token and kind."""
    new = KVBuffers(spec, batch=2, length=count, transposed_keys=transposed)
    for layer in range(len(spec.layers)):
        for token in range(count):
            column = (..., token) if transposed else (..., token, slice(None))
            new.keys[layer][column] = 1000 * layer + first + token
            new.values[layer][..., token, :] = -(1000 * layer + first + token)
    return new


def held(cache, group=0):
    """What each row's cache says of every position it holds: {position: numbers of all layers of the group}."""
    layers = [i for i, layer in enumerate(cache.buffers.spec.layers) if layer.window == cache.groups[group].window]
    rows = []
    for row in range(2):
        tokens = {}
        for slot, position in enumerate(cache.slot_positions[group][row].tolist()):
            if position != EMPTY:
                column = (slice(None), slice(None), slot) if cache.buffers.transposed_keys else (slice(None), slot)
                keys = [cache.buffers.keys[layer][row][column].flatten().tolist() for layer in layers]
                values = [cache.buffers.values[layer][row][:, slot].flatten().tolist() for layer in layers]
                assert position not in tokens
                tokens[position] = (keys, values)
        rows.append(tokens)
    return rows


@pytest.mark.parametrize("transposed", [False, True])
@given(data=st.data(), length=st.integers(1, 12))
def test_every_layout_holds_the_newest_tokens_of_each_row(transposed, data, length):
    """Whatever the step sizes and however often the cache wraps: the last ``length`` columns, pads left out."""
    pads = data.draw(st.integers(0, length), label="pads of row 1")
    steps = data.draw(st.lists(st.integers(1, length + 2), max_size=8), label="step sizes")
    caches = {}
    for layout in (Ring, Shift):
        cache, column = KVCache(SPEC, 2, length, layout, transposed_keys=transposed), 0
        for count in steps:
            wide = torch.arange(column, column + count)
            positions = torch.stack([wide, (wide - pads).clamp(min=EMPTY)])
            cache.write(numbered(count, column), positions)
            column += count
        found = caches[layout] = held(cache)
        newest = cache.groups[0].layout.newest(min(length, column))
        oldest = max(0, column - length)
        assert cache.slot_positions[0][0, newest].tolist() == list(range(oldest, column))
        for row, offset in ((0, 0), (1, pads)):
            assert set(found[row]) == {c - offset for c in range(oldest, column) if c >= offset}
            for position, (keys, values) in found[row].items():
                for layer in range(3):
                    number = 1000 * layer + position + offset
                    assert set(keys[layer]) == {number}
                    assert set(values[layer]) == {-number}
    assert caches[Ring] == caches[Shift]


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True), count=st.integers(1, 12))
def test_tokens_move_to_a_cache_of_another_length(lengths, count):
    caches = [KVCache(WINDOWED, 2, length, layout) for length, layout in zip(lengths, (Ring, Ring), strict=True)]
    for column in range(count):
        caches[0].write(numbered(1, column, spec=WINDOWED), torch.full((2, 1), column))
    fitting = min(count, *lengths)
    caches[1].take_over(caches[0], fitting)
    for group in range(2):
        slots = min(fitting, *(cache.groups[group].layout.length for cache in caches))
        assert set(held(caches[1], group)[0]) == set(range(count - slots, count))
        for position, (keys, _) in held(caches[1], group)[1].items():
            assert set(keys[0]) == {1000 * group + position}


def test_skipped_columns_take_no_slot():
    cache = KVCache(SPEC, 2, 4)
    positions = torch.tensor([[-1, -1, 0, 1]] * 2)
    cache.write(numbered(4, 0), positions, skip=2)
    assert cache.slot_positions[0].tolist() == [[0, 1, -1, -1]] * 2
    assert cache.buffers.values[0][0, 0, :2, 0].tolist() == [-2, -3]


def test_a_layer_with_a_window_has_slots_for_that_only():
    cache = KVCache(WINDOWED, 2, 6)
    assert [tuple(positions.shape) for positions in cache.slot_positions] == [(2, 6), (2, 3)]
    assert [key.shape[2] for key in cache.buffers.keys] == [6, 3]
    assert cache.buffers.nbytes == WINDOWED.nbytes(2, 6)
    cache.write(numbered(5, 0, spec=WINDOWED), torch.arange(5).expand(2, -1))
    assert set(held(cache, 1)[0]) == {2, 3, 4}


def test_clear_empties_every_slot_and_layers_of_one_size_share_memory():
    cache = KVCache(SPEC, 2, 4)
    cache.slot_positions[0].fill_(3)
    cache.clear()
    assert (cache.slot_positions[0] == EMPTY).all()
    storage = [key.untyped_storage().data_ptr() for key in cache.buffers.keys]
    assert storage[0] == storage[2] != storage[1]
    assert cache.buffers.nbytes == SPEC.nbytes(2, 4)
