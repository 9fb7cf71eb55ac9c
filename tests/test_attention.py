"""The attention function against torch's own scaled_dot_product_attention on joined keys."""

import pytest
import torch

from staticgen.attention import MASKED, Past, StepCache, static_attention
from staticgen.shapes import StepForm

FORMS = [StepForm(attention, turned) for attention in ("split", "concat") for turned in (False, True)]


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(form, query, past, new, positions, slots, **arguments):
    past_key, past_value = past
    past_key = past_key.transpose(2, 3).contiguous() if form.transposed_keys else past_key
    cache = StepCache(form, positions, None, {0: Past(past_key, past_value, slots, 0)})
    key, value = cache.update(*new, 0)
    return static_attention(Layer(), query, key, value, None, **arguments)[0]


def case(heads, kv_heads, tokens=3, slots=7, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    shape = (batch, kv_heads, slots, 8)
    past = torch.randn(shape), torch.randn(shape)
    new = torch.randn(batch, kv_heads, tokens, 8), torch.randn(batch, kv_heads, tokens, 8)
    query = torch.randn(batch, heads, tokens, 8)
    slot_positions = torch.tensor([[4, 5, -1, 1, 2, 3, 0], [-1, -1, -1, 0, 1, -1, -1]])
    positions = torch.tensor([[6, 7, 8], [-1, 2, 3]])
    return query.to(dtype), [t.to(dtype) for t in past], [t.to(dtype) for t in new], positions, slot_positions


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_equals_sdpa_on_joined_keys(form, heads, kv_heads, window):
    query, past, new, positions, slots = case(heads, kv_heads)
    output = attend(form, query, past, new, positions, slots, sliding_window=window)
    held = torch.cat([slots, positions], 1)[:, None, None, :]
    asked = positions[:, None, :, None]
    visible = (held >= 0) & (held <= asked) & ((asked - held < window) if window else True)
    keys, values = (torch.cat(pair, 2).repeat_interleave(heads // kv_heads, 1) for pair in zip(past, new, strict=True))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible).transpose(1, 2)
    real = positions >= 0
    torch.testing.assert_close(output[real], expected[real])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_may_see_nothing_stay_finite(form, dtype):
    query, past, new, _, _ = case(4, 2, dtype=dtype)
    nothing = torch.full((2, 3), -1), torch.full((2, 7), -1)
    output = attend(form, 50 * query, past, new, *nothing)
    assert torch.isfinite(output).all()
    assert output.dtype == dtype


def test_softcap_and_scaling():
    query, past, new, positions, slots = case(4, 4)
    output = attend(FORMS[0], query, past, new, positions, slots, softcap=2.0, scaling=0.7)
    keys, values = (torch.cat(pair, 2) for pair in zip(past, new, strict=True))
    scores = torch.tanh(query @ keys.transpose(2, 3) * 0.7 / 2.0) * 2.0
    held = torch.cat([slots, positions], 1)[:, None, None, :]
    asked = positions[:, None, :, None]
    scores = scores.masked_fill(~((held >= 0) & (held <= asked)), float("-inf"))
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    real = positions >= 0
    torch.testing.assert_close(output[real], expected[real])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_sink_takes_weight_and_has_no_value(form):
    query, past, new, positions, slots = case(4, 2)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = attend(form, query, past, new, positions, slots, s_aux=sink)
    keys, values = (torch.cat(pair, 2).repeat_interleave(2, 1) for pair in zip(past, new, strict=True))
    held = torch.cat([slots, positions], 1)[:, None, None, :]
    asked = positions[:, None, :, None]
    scores = (query @ keys.transpose(2, 3) * 8**-0.5).masked_fill(~((held >= 0) & (held <= asked)), float("-inf"))
    weights = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 3, 1)], -1).softmax(-1)[..., :-1]
    real = positions >= 0
    torch.testing.assert_close(output[real], (weights @ values).transpose(1, 2)[real])


def test_the_mask_value_survives_half_precision():
    assert torch.tensor(MASKED, dtype=torch.float16).item() == torch.finfo(torch.float16).min


def test_an_argument_that_would_be_ignored_is_refused():
    from staticgen import UnsupportedModelError

    query, past, new, positions, slots = case(4, 4)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        attend(FORMS[0], query, past, new, positions, slots, position_bias=torch.zeros(4))


PARTS = {
    "plain": {},
    "window": {"sliding_window": 150},
    "softcap": {"softcap": 2.0},
    "sink": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": torch.linspace(-3, 0, 4)[None, :, None, None] * torch.linspace(1, 0, 385)},
}


@pytest.mark.parametrize("arguments", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_parts(arguments, dtype):
    """One token over three parts: one of them empty in the first row, half of one, and all three, in the second."""
    torch.manual_seed(0)
    past = [torch.randn(2, 2, 384, 8, dtype=dtype) for _ in range(2)]
    new = [torch.randn(2, 2, 1, 8, dtype=dtype) for _ in range(2)]
    query = 3 * torch.randn(2, 4, 1, 8, dtype=dtype)
    held = torch.stack([torch.randperm(384), torch.full((384,), -1)])
    held[0, 128:256] = -1
    held[1, 40:104] = torch.arange(64)
    positions = torch.tensor([[384], [64]])
    output = attend(StepForm("spread"), query, past, new, positions, held, **arguments)

    keys, values = (torch.cat(pair, 2).repeat_interleave(2, 1).double() for pair in zip(past, new, strict=True))
    scores = query.double() @ keys.transpose(2, 3) * 8**-0.5
    if softcap := arguments.get("softcap"):
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + arguments.get("bias", 0)
    columns = torch.cat([held, positions], 1)[:, None, None]
    reach = arguments.get("sliding_window", 1000)
    scores = scores.masked_fill((columns < 0) | (positions[:, None, None] - columns >= reach), -torch.inf)
    if (sink := arguments.get("s_aux")) is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(2, -1, 1, 1)], dim=3)
    expected = (scores.softmax(dim=3)[..., :385] @ values).transpose(1, 2)
    assert output.dtype == dtype
    exact = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(output.double(), expected, **exact)


def test_in_parts_a_row_that_may_see_nothing_stays_finite():
    past, new = ([torch.full((1, 2, length, 8), 100.0) for _ in range(2)] for length in (256, 1))
    nothing = torch.full((1, 1), -1), torch.full((1, 256), -1)
    output = attend(StepForm("spread"), torch.ones(1, 4, 1, 8), past, new, *nothing)
    assert torch.isfinite(output).all()
