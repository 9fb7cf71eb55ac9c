"""The null graph by itself: what it refuses and what it spoils is what shows errors where there is no GPU."""

import pytest
import torch

from staticgen.graphs import NullGraphs


def nothing(result):
    """What work that is recorded returns."""


def replay(graphs, graph, *given):
    with graphs.scope():
        graph.replay(*given)


def doubled(graphs, number=2):
    own, result = torch.zeros(3), torch.zeros(3)
    return own, result, graphs.record(lambda: nothing(result.copy_(own * number + own.sum())), [own], [result])


def test_a_replay_is_what_was_recorded_on_what_it_is_given():
    own, result, graph = doubled(NullGraphs())
    assert result.isnan().all() and own.isnan().all()  # nothing has run yet, whatever warm-up left there
    graph.replay(torch.tensor([1.0, 2.0, 3.0]))
    assert result.tolist() == [8.0, 10.0, 12.0]
    assert own.isnan().all()  # what is not given again is not there
    held = result
    graph.replay(torch.zeros(3))
    assert held.tolist() == [0.0, 0.0, 0.0]  # it belonged to the graph


def test_numbers_of_python_are_those_of_the_recording():
    factor, result = [2], torch.zeros(1)
    own = torch.zeros(1)
    graph = NullGraphs().record(lambda: nothing(result.copy_(own * factor[0])), [own], [result])
    factor[0] = 100
    graph.replay(torch.ones(1))
    assert result.item() == 2.0


def test_a_tensor_that_nobody_holds_is_gone():
    held, result = [torch.ones(3)], torch.zeros(3)
    graph = NullGraphs().record(lambda: nothing(result.copy_(held[0])), outputs=[result])
    graph.replay()
    assert result.tolist() == [1.0, 1.0, 1.0]
    held.clear()
    with pytest.raises(RuntimeError, match="reads a tensor that is gone"):
        graph.replay()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda a: nothing(a.add_(torch.tensor([1.0]))), "made from numbers of the host"),
        (lambda a: a + 1, "must return nothing"),
    ],
)
def test_what_a_capture_would_take_in_as_it_was_or_lose(work, message):
    own = torch.ones(1)
    with pytest.raises(RuntimeError, match=message):
        NullGraphs().record(lambda: work(own), [own])


def test_a_replay_takes_all_inputs_or_none():
    graphs, own, result = NullGraphs(), [torch.zeros(1), torch.zeros(1)], torch.zeros(1)
    graph = graphs.record(lambda: nothing(result.copy_(own[0] - own[1])), own, [result])
    with pytest.raises(ValueError, match="shorter"):
        replay(graphs, graph, torch.ones(1))
    replay(graphs, graph, torch.ones(1), torch.full((1,), 3.0))
    assert result.item() == -2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_not_given_or_not_written_is_spoilt(dtype):
    """Floats are NaN; whole numbers neither token, position nor slot, nor the -1 of an empty one; a bool is set."""

    def spoilt(tensor):
        if dtype.is_floating_point:
            return bool(tensor.isnan().all())
        return bool(tensor.all()) if dtype == torch.bool else bool((tensor < -(2**31)).all())

    graphs, own, result = NullGraphs(), torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    graph = graphs.record(lambda: nothing(result[:2].copy_(own[:2])), [own], [result])  # forgets one of three
    assert spoilt(own) and spoilt(result)
    for _ in range(2):
        result.zero_()
        replay(graphs, graph, torch.zeros(3, dtype=dtype))
        assert result[:2].tolist() == [0, 0]
        assert spoilt(own) and spoilt(result[2:])


def test_weights_that_have_gradients_leave_none_in_the_buffers():
    graphs, result = NullGraphs(), torch.zeros(2)
    weight = torch.ones(2, requires_grad=True)
    graph = graphs.record(lambda: nothing(result.copy_(weight * 2)), outputs=[result])
    assert not result.requires_grad
    replay(graphs, graph)
    assert not result.requires_grad
    assert result.tolist() == [2.0, 2.0]


def test_tensors_are_arguments_by_name_and_in_lists_too():
    graphs, own, result = NullGraphs(), torch.zeros(2), torch.zeros(4)

    def work():
        torch.cat([own + 1, own], out=result)

    graph = graphs.record(work, [own], [result])
    replay(graphs, graph, torch.tensor([1.0, 2.0]))
    assert result.tolist() == [2.0, 3.0, 1.0, 2.0]


def test_a_result_that_has_died_is_not_taken_for_another_tensor():
    """One that no operation has made may be where a result was: it is gone at the replay, as any that nobody holds."""
    graphs, own, result = NullGraphs(), torch.zeros(2), torch.zeros(2)

    def work():
        own * 2
        result.copy_(torch.nn.Parameter(own))

    graph = graphs.record(work, [own], [result])
    with pytest.raises(RuntimeError, match="reads a tensor that is gone"):
        replay(graphs, graph, torch.ones(2))


ASKS = {
    "item": lambda a: a.sum().item(),
    "float": lambda a: float(a[0]),
    "if": lambda a: 1 if (a > 0).all() else 0,
    "nonzero": lambda a: a.nonzero(),
    "where": lambda a: torch.where(a > 1),
    "equal": lambda a: torch.equal(a, a),
    "allclose": lambda a: torch.allclose(a, a),
    "masked_select": lambda a: a.masked_select(a > 1),
    "unique": lambda a: a.unique(),
    "unique of a dimension": lambda a: a[None].unique(dim=0),
    "unique_consecutive": lambda a: a.unique_consecutive(),
    "unique_consecutive of a dimension": lambda a: a[None].unique_consecutive(dim=0),
    "bincount": lambda a: a.long().bincount(),
    "repeat_interleave": lambda a: a.repeat_interleave(a.long()),
    "index": lambda a: a[a > 1],
    "index by bytes": lambda a: a[(a > 1).byte()],
    "index, second": lambda a: a[None][:, a > 1],
    "index_put": lambda a: a.clone().index_put_((a > 1,), a[1:]),
    "tolist": lambda a: a.tolist(),
    "numpy": lambda a: a.numpy(),
    "__array__": lambda a: a.__array__(),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ASKS)
def test_what_asks_for_numbers_is_refused(name, inference):
    """Whatever mode the caller is in."""
    own = torch.tensor([1.0, 2.0, 3.0])
    ASKS[name](own)  # it is fine otherwise
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="while work is recorded"):
        NullGraphs().record(lambda: nothing(ASKS[name](own)))


def test_masks_that_fill_and_counts_that_are_known_are_recorded():
    graphs, own, result, seven = NullGraphs(), torch.ones(3), torch.zeros(3), torch.tensor(7.0)

    def work():
        result.copy_(own)
        result[own > 1] = seven
        result.add_(torch.repeat_interleave(own, own.long(), output_size=3))

    graph = graphs.record(work, [own], [result])
    replay(graphs, graph, torch.tensor([1.0, 2.0, 0.0]))
    assert result.tolist() == [2.0, 9.0, 2.0]
