"""Masks as an argument of a session; what they do by themselves is in test_constraints."""

import pytest
import torch
from models import new_tokens, random_prompt

from staticgen import NothingAllowedError, Session


def test_a_mask_holds_in_every_kind_of_call(tiny_llama, backend):
    mask = torch.zeros(128, dtype=torch.bool)
    mask[40:50] = True
    prompts = [random_prompt(3), random_prompt(9)]
    session = Session(tiny_llama, max_length=48, batch_size=4, **backend)
    compiles = session.stats.compiles
    settings = {"do_sample": True, "top_k": 5, "max_new_tokens": 12, "token_mask": mask}
    output = session.generate(prompts, num_return_sequences=2, seed=0, **settings)
    assert {token for row in new_tokens(output, 9) for token in row} <= set(range(40, 50))
    for tokens in session.stream(prompts, **settings):
        assert mask[tokens].all()
    for text, prompt in zip(session.generate_many(prompts, **settings), prompts, strict=True):
        assert mask[text[len(prompt) :]].all()
    assert session.stats.compiles == compiles


def test_a_callable_gets_the_history_and_gives_each_row_its_mask(tiny_llama):
    seen = []

    def odd_then_even(ids):
        seen.append(tuple(ids.shape))
        parity = (torch.arange(128) % 2)[None] == torch.tensor([[1], [0]])
        return parity if ids.shape[1] % 2 else ~parity

    session = Session(tiny_llama, max_length=48, batch_size=2, backend="eager")
    output = session.generate([random_prompt(3), random_prompt(9)], max_new_tokens=6, token_mask=odd_then_even)
    assert seen == [(2, 9 + step) for step in range(6)]
    assert (output[:, 9:] % 2).tolist() == [[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]


def test_rows_that_have_ended_ask_for_nothing(tiny_llama):
    def eos_first_for_row_0(ids):
        mask = torch.zeros(2, 128, dtype=torch.bool)
        mask[0, 7] = ids.shape[1] == 5  # afterwards it leaves row 0 nothing
        mask[1, 20:] = True
        return mask

    session = Session(tiny_llama, max_length=48, batch_size=2, backend="eager")
    prompts = [random_prompt(5), random_prompt(5, 1)]
    output = session.generate(prompts, max_new_tokens=6, eos_token_id=7, token_mask=eos_first_for_row_0)
    assert output[0, 5:].tolist() == [7, 0, 0, 0, 0, 0]
    assert session.stats.last.finish_reasons == ["eos", "length"]


def test_an_error_leaves_the_session_usable(tiny_llama):
    session = Session(tiny_llama, max_length=48, batch_size=2, backend="eager")
    expected = session.generate(random_prompt(5), max_new_tokens=6)

    def nothing_at_step_3(ids):
        return torch.full((128,), ids.shape[1] < 8)

    with pytest.raises(NothingAllowedError, match="no token for row 0 at step 3"):
        session.generate(random_prompt(5), max_new_tokens=6, token_mask=nothing_at_step_3)
    replays = session.stats.replays
    with pytest.raises(ValueError, match="token_mask"):
        session.generate(random_prompt(5), max_new_tokens=6, token_mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_beams above 1 does not go with token_mask"):
        session.generate(random_prompt(5), num_beams=2, token_mask=torch.ones(128, dtype=torch.bool))
    assert session.stats.replays == replays
    assert torch.equal(session.generate(random_prompt(5), max_new_tokens=6), expected)
