"""model.generate(..., custom_generate=staticgen.custom_generate) gives what model.generate gives."""

import models
import pytest
import torch
from models import left_padded, random_prompt

import staticgen
from staticgen.generation import _sessions

CALLS = [
    {},
    {"eos_token_id": list(range(40, 60))},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 1.5, "top_k": 9},
    {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9},
    {"min_new_tokens": 8, "eos_token_id": 7, "suppress_tokens": list(range(60, 100))},
]


@pytest.mark.parametrize("arguments", CALLS, ids=str)
def test_the_tokens_are_those_of_generate(tiny_llama, backend, arguments):
    ids, mask = left_padded([random_prompt(3), random_prompt(9)])
    settings = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **arguments}
    torch.manual_seed(1)
    expected = tiny_llama.generate(ids, **settings)
    torch.manual_seed(1)
    output = tiny_llama.generate(ids, custom_generate=staticgen.custom_generate, **settings, **backend)
    assert output.tolist() == expected.tolist()
    assert any(session.stats.replays for session in _sessions[tiny_llama].values())


def test_settings_of_the_models_own_config_count_once():
    model = models.llama(seed=2, initializer_range=0.1)
    model.generation_config.update(repetition_penalty=1.4, do_sample=True, top_k=3, temperature=0.8)
    ids = torch.tensor([random_prompt(6)])
    torch.manual_seed(1)
    expected = model.generate(ids, max_new_tokens=16, attention_mask=torch.ones_like(ids))
    torch.manual_seed(1)
    output = model.generate(
        ids,
        max_new_tokens=16,
        attention_mask=torch.ones_like(ids),
        custom_generate=staticgen.custom_generate,
        backend="eager",
    )
    assert output.tolist() == expected.tolist()


def test_scores_policies_and_refusals(tiny_llama):
    ids = torch.tensor([random_prompt(9)])
    through = {"custom_generate": staticgen.custom_generate, "backend": "eager", "attention_mask": torch.ones_like(ids)}
    settings = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    expected = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    output = tiny_llama.generate(ids, **through, **settings)
    assert output.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(output.scores, expected.scores)
    sunk = tiny_llama.generate(ids, max_new_tokens=6, do_sample=False, overflow="sink", **through)
    assert sunk.tolist() == expected.sequences.tolist()
    with pytest.raises(ValueError, match="num_beams is 2: custom_generate has no beam search"):
        tiny_llama.generate(ids, num_beams=2, max_new_tokens=6, **through)
