"""Backend ``cuda`` through the null graph: what it holds on the device and counts, and what it leaves as it was."""

import gc

import models
import pytest
import torch
from models import new_tokens, random_prompt, reference

from staticgen import CompileError, Session
from staticgen.backends import cuda, open_backend
from staticgen.cache import KVCache
from staticgen.errors import DoesNotFitError
from staticgen.shapes import StepShape
from staticgen.step import step_for

NULL = {"backend": "cuda", "device": "null", "prefill_buckets": [8]}

pytestmark = pytest.mark.usefixtures("one_thread")


def places(size):
    """Where tensors of this size are, of all that anybody holds."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.shape == size]
    return {tensor.untyped_storage().data_ptr() for tensor in found}


def test_weights_are_on_the_device_once_for_all_programs():
    """In another place than the model's own, as on a GPU."""
    model = models.llama(vocab_size=131, tie_word_embeddings=True)
    size = model.lm_head.weight.shape
    before = places(size)
    session = Session(model, max_length=24, cache_sizes=[12], **NULL)
    assert session.stats.compiles == 3
    assert len(places(size) - before) == 1


def test_weights_that_are_views_of_one_tensor():
    model = models.llama()
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table[0] = 1.0 + 0.1 * torch.arange(64).remainder(7)
        model.model.norm.weight = torch.nn.Parameter(table.detach()[0])
    prompt = random_prompt(5)
    session = Session(model, max_length=24, **NULL)
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 5) == [reference(model, prompt, 12)]


@pytest.fixture
def backend():
    return open_backend("cuda", "null")


def test_a_program_is_bound_to_one_memory(tiny_llama, backend):
    step = step_for(tiny_llama, backend.form)
    inputs = [torch.zeros(2, 1, dtype=torch.int64)] * 3
    programs = {batch: backend.compile(step, StepShape(batch, 1, 24)) for batch in (1, 2)}
    for batch, program in programs.items():
        memory = backend.memory(step, batch, 24)
        assert all((held == -1).all() for held in memory.slot_positions)  # what recording has left is no token
        logits, _ = program(*[one[:batch] for one in inputs], KVCache(step.cache_spec, batch, 24, memory=memory))
        assert logits.shape == (batch, 128) and logits.isfinite().all()
    with pytest.raises(ValueError, match="bound to the memory of its backend's own cache"):
        programs[2](*inputs, KVCache(step.cache_spec, 2, 24))


def test_a_program_that_cannot_be_recorded_leaves_the_cache_empty(tiny_llama, backend, monkeypatch):
    def ask(*arguments):
        original(*arguments)
        arguments[1].token_ids.sum().item()

    original = cuda.advance
    monkeypatch.setattr(cuda, "advance", ask)
    step, shape = step_for(tiny_llama, backend.form), StepShape(2, 1, 24)
    with pytest.raises(CompileError, match=r"cannot record the step .*the host cannot ask for numbers"):
        backend.compile(step, shape)
    memory = backend.memory(step, 2, 24)
    assert all((held == -1).all() for held in memory.slot_positions)


def test_a_model_that_cannot_be_exported_is_named():
    model = models.llama()
    plain = model.model.norm.forward
    model.model.norm.forward = lambda hidden: plain(hidden) if hidden.sum() > 0 else hidden
    with pytest.raises(CompileError, match=r"torch cannot export the step .* in torch\.float32"):
        Session(model, max_length=24, **NULL)


def test_what_the_caller_has_set_is_as_it_was():
    model = models.mixtral()
    model.set_experts_implementation("eager")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        Session(model, max_length=24, **NULL)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert model.config._experts_implementation == "eager"


def smallest(backend, step, batch, sizes):
    """Bytes that must be free for these programs."""

    def fits(free):
        backend._graphs._free = free
        try:
            backend.reserve(step, batch, sizes)
        except DoesNotFitError:
            return False
        return True

    few, enough = -1, 1 << 40
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if fits(middle) else (middle, enough)
    backend._graphs._free = None
    return enough


def test_weights_and_every_cache_are_counted_once(tiny_llama, backend):
    step = step_for(tiny_llama, backend.form)
    spec, weights = step.cache_spec, sum(tensor.nbytes for tensor in tiny_llama.parameters())
    least = weights + spec.nbytes(2, 512) + spec.nbytes(2, 1024)
    alone = smallest(backend, step, 2, [(2, 1024), (1, 512), (1, 1024)])
    assert least <= alone - cuda._CONTEXT <= 1.4 * least
    # A prefill of many tokens has their scores against all slots and each other, of every head.
    scores = 2 * 4 * 1024 * (1024 + 1024) * 4
    assert smallest(backend, step, 2, [(1024, 1024), (1, 1024)]) >= scores + weights + cuda._CONTEXT


def test_what_the_backend_holds_already_need_not_be_free(tiny_llama, backend):
    """A session whose layout changes reserves again, while its memory is there."""
    step, sizes = step_for(tiny_llama, backend.form), [(8, 1024), (1, 1024)]
    alone = smallest(backend, step, 2, sizes)
    backend.compile(step, StepShape(2, 8, 1024))
    held = sum(tensor.nbytes for tensor in tiny_llama.parameters()) + step.cache_spec.nbytes(2, 1024)
    assert alone - smallest(backend, step, 2, sizes) == pytest.approx(held, rel=0.01)
