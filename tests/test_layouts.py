import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staticgen.cache import EMPTY, KVBuffers, KVCache, Placement, Segment
from staticgen.layouts import LAYOUTS, Ring, Shift
from staticgen.shapes import CacheSpec, LayerSpec

SPEC = CacheSpec((LayerSpec(2, 3, 3), LayerSpec(1, 4, 2), LayerSpec(2, 3, 3)), torch.float32)


def test_ring_goes_on_where_it_stopped_and_wraps():
    ring = Ring(5)
    assert ring.place(3, source=2) == Placement(0, (Segment(0, 2, 3),))
    assert ring.place(3) == Placement(0, (Segment(3, 0, 2), Segment(0, 2, 1)))
    assert ring.place(1) == Placement(0, (Segment(1, 0, 1),))
    ring.reset()
    assert ring.place(1).segments[0].slot == 0


def test_shift_puts_the_newest_at_the_right_end():
    assert Shift(5).place(2, source=1) == Placement(2, (Segment(3, 1, 2),))


def test_registered_layouts():
    assert LAYOUTS.names() == ["shift", "ring"]


def numbered(count, first, transposed=False):
    """New keys and values in which every number tells layer, token and kind."""
    new = KVBuffers(SPEC, batch=2, length=count, transposed_keys=transposed)
    for layer in range(3):
        for token in range(count):
            column = (..., token) if transposed else (..., token, slice(None))
            new.keys[layer][column] = 1000 * layer + first + token
            new.values[layer][..., token, :] = -(1000 * layer + first + token)
    return new


def held(cache):
    """What each row's cache says of every position it holds: {position: numbers of all layers}."""
    rows = []
    for row in range(2):
        tokens = {}
        for slot, position in enumerate(cache.slot_positions[row].tolist()):
            if position != EMPTY:
                column = (slice(None), slice(None), slot) if cache.buffers.transposed_keys else (slice(None), slot)
                keys = [key[row][column].flatten().tolist() for key in cache.buffers.keys]
                values = [value[row][:, slot].flatten().tolist() for value in cache.buffers.values]
                tokens[position] = (keys, values)
        rows.append(tokens)
    return rows


@pytest.mark.parametrize("transposed", [False, True])
@given(data=st.data(), length=st.integers(1, 12))
def test_every_layout_holds_the_newest_tokens_of_each_row(transposed, data, length):
    """Whatever the step sizes and however often the cache wraps: the last ``length`` columns, pads left out."""
    pads = data.draw(st.integers(0, length), label="pads of row 1")
    steps = data.draw(st.lists(st.integers(1, length), max_size=8), label="step sizes")
    caches = {}
    for name in LAYOUTS.names():
        cache, layout, column = KVCache(SPEC, 2, length, transposed), LAYOUTS.get(name)(length), 0
        for count in steps:
            columns = torch.arange(column, column + count)
            positions = torch.stack([columns, (columns - pads).clamp(min=EMPTY)])
            cache.write(layout.place(count), numbered(count, column), positions)
            column += count
        caches[name] = held(cache)
        newest = layout.newest(min(length, column))
        oldest = max(0, column - length)
        assert cache.slot_positions[0, newest].tolist() == list(range(oldest, column))
        newest = range(max(0, column - length), column)
        for row, offset in ((0, 0), (1, pads)):
            assert set(caches[name][row]) == {c - offset for c in newest if c >= offset}
            for position, (keys, values) in caches[name][row].items():
                for layer in range(3):
                    number = 1000 * layer + position + offset
                    assert set(keys[layer]) == {number}
                    assert set(values[layer]) == {-number}
    assert caches["ring"] == caches["shift"]


def test_skipped_columns_take_no_slot():
    cache, ring = KVCache(SPEC, 2, 4), Ring(4)
    positions = torch.tensor([[-1, -1, 0, 1]] * 2)
    cache.write(ring.place(2, source=2), numbered(4, 0), positions)
    assert cache.slot_positions.tolist() == [[0, 1, -1, -1]] * 2
    assert cache.buffers.values[0][0, 0, :2, 0].tolist() == [-2, -3]


def test_clear_empties_every_slot_and_layers_of_one_size_share_memory():
    cache = KVCache(SPEC, 2, 4)
    cache.slot_positions.fill_(3)
    cache.clear()
    assert (cache.slot_positions == EMPTY).all()
    storage = [key.untyped_storage().data_ptr() for key in cache.buffers.keys]
    assert storage[0] == storage[2] != storage[1]
    assert cache.buffers.nbytes == SPEC.nbytes(2, 4)
