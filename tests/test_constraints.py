"""Token masks; transformers' own sampling is the judge."""

import re

import models
import numpy as np
import pytest
import torch
from constrained import EOS, PAD, any_tokenizer, digits, model, read, sample, tokenizer

from staticgen.constraints import regex
from staticgen.errors import NothingAllowedError


@pytest.mark.parametrize("form", ["tensor", "numpy", "list", "rows", "callable"])
def test_only_digits_come(model, tokenizer, form):
    mask = digits(tokenizer)
    forms = {
        "tensor": mask,
        "numpy": mask.numpy()[::-1].copy()[::-1],  # torch cannot share memory with this one
        "list": mask.tolist(),
        "rows": torch.stack([mask, mask]),
        "callable": lambda ids: mask.numpy(),
    }
    prompts = [[5, 6, 7], [9]]
    for seed in range(3):
        rows = sample(model, forms[form], prompts, seed, max_new_tokens=12)
        assert all(re.fullmatch("[0-9]{12}", tokenizer.decode(row)) for row in rows)
        assert any(len(set(row)) > 3 for row in rows)
    assert not all(re.fullmatch("[0-9]{12}", tokenizer.decode(row)) for row in sample(model, None, prompts, 0))


def test_rows_have_masks_of_their_own(model):
    masks = torch.zeros(2, 352, dtype=torch.bool)
    masks[0, 10:20] = masks[1, 30:40] = True
    first, second = sample(model, masks, [[5, 6, 7], [9]], max_new_tokens=20)
    assert set(first) <= set(range(10, 20))
    assert set(second) <= set(range(30, 40))


def test_a_mask_without_eos_never_ends(model):
    allowed = torch.zeros(352, dtype=torch.bool)
    allowed[[EOS, 10, 11, 12]] = True
    without = allowed.clone()
    without[EOS] = False
    lengths = {len(sample(model, allowed, [[5, 6, 7]], seed, max_new_tokens=40)[0]) for seed in range(4)}
    assert min(lengths) < 40
    for seed in range(4):
        (row,) = sample(model, without, [[5, 6, 7]], seed, max_new_tokens=40)
        assert len(row) == 40
        assert EOS not in row


def test_a_callable_gets_the_history_in_every_step(model):
    """It sees padding, prompts and what was generated: here each token must be the one after the last."""
    seen = []

    def successor(ids):
        seen.append(ids.clone())
        mask = torch.zeros(2, 352, dtype=torch.bool)
        mask[torch.arange(2), ids[:, -1] + 1] = True
        ids.zero_()  # the history is its own copy
        return mask

    rows = sample(model, successor, [[5, 6, 7], [40]], max_new_tokens=4)
    assert rows == [[8, 9, 10, 11], [41, 42, 43, 44]]
    assert [ids.shape for ids in seen] == [(2, 3), (2, 4), (2, 5), (2, 6)]
    assert seen[-1].tolist() == [[5, 6, 7, 8, 9, 10], [0, 0, 40, 41, 42, 43]]
    assert seen[0].dtype == torch.int64


@pytest.mark.parametrize("width", [259, 272])
def test_ids_beyond_the_vocabulary_are_never_allowed(tokenizer, width):
    """The head is wider than the embedding, as where it is padded."""
    model = models.llama(vocab_size=259, eos_token_id=EOS)
    torch.manual_seed(0)
    model.lm_head = torch.nn.Linear(64, 272, bias=False)
    with torch.no_grad():
        model.lm_head.weight[259:] *= 10  # unmasked, these win
    ones = torch.ones(width, dtype=torch.bool)
    rows = sample(model, ones, [[5, 6, 7]], max_new_tokens=20) + sample(model, regex("[0-9]{5}", tokenizer), [[5]])
    assert max(max(row) for row in rows) < 259
    scores = model(torch.tensor([[5, 6, 7]])).logits[:, -1]
    assert int(scores.argmax()) >= 259


def test_a_mask_is_copied_and_scores_are_not_changed():
    mask = torch.zeros(8, dtype=torch.bool)
    mask[3] = True
    processor = read(mask, vocab=8)
    mask[:] = True
    scores = torch.zeros(1, 8)
    assert processor(torch.tensor([[5]]), scores).tolist() == [[-torch.inf] * 3 + [0.0] + [-torch.inf] * 4]
    assert scores.tolist() == [[0.0] * 8]


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        ([1, 0, 1, 0], TypeError, r"token_mask has dtype int64, expected bool"),
        (torch.ones(4), TypeError, r"token_mask has dtype torch.float32, expected torch.bool"),
        ([[True] * 4, [True] * 3], ValueError, r"token_mask has rows of different lengths"),
        (
            torch.ones(3, dtype=torch.bool),
            ValueError,
            r"shape \[3\], expected \[V\] = \[4\] or \[B, V\] = \[2, 4\] \(or 6",
        ),
        (np.ones((3, 4), dtype=bool), ValueError, r"token_mask has shape \[3, 4\], expected"),
        (torch.ones(1, 2, 4, dtype=torch.bool), ValueError, r"token_mask has shape \[1, 2, 4\], expected"),
        (torch.tensor(True), ValueError, r"token_mask has shape \[\], expected"),
        ("[0-9]+", TypeError, r"token_mask is of type str, expected .* regex, json_schema or grammar"),
        (7, TypeError, r"token_mask is of type int, expected"),
        ([[True] * 4, [False] * 4], NothingAllowedError, r"token_mask leaves no token for row 1 at step 0"),
        (
            [[True] * 6, [False] * 4 + [True] * 2],
            NothingAllowedError,
            r"token_mask leaves no token for row 1 at step 0 \(after 0 new tokens\): it allows none",
        ),
    ],
)
def test_a_bad_mask_is_refused_at_once(mask, error, words):
    with pytest.raises(error, match=words):
        read(mask, vocab=4, logits=6, batch=2)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        ([1, 0, 1, 0], TypeError, r"token_mask\(ids\) has dtype int64"),
        (torch.ones(3, dtype=torch.bool), ValueError, r"token_mask\(ids\) has shape \[3\], expected"),
        (None, TypeError, r"token_mask\(ids\) is of type NoneType, expected a tensor"),
    ],
)
def test_a_bad_mask_of_a_callable_is_named(mask, error, words):
    processor = read(lambda ids: mask, vocab=4)
    with pytest.raises(error, match=words):
        processor(torch.tensor([[3]]), torch.zeros(1, 4))


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scores has shape \[3, 4\], but token_mask was read for \[2, 4\]"):
        read([True] * 4, vocab=4, batch=2)(torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 4))


# Nothing left


def test_a_mask_that_leaves_nothing_names_row_and_step(model):
    def mask(ids):
        allowed = torch.zeros(2, 352, dtype=torch.bool)
        allowed[:, 10:20] = True
        allowed[1] &= ids.shape[1] < 3 + 5
        return allowed

    with pytest.raises(NothingAllowedError, match=r"^token_mask leaves no token for row 1 at step 5 \(after 5 new"):
        sample(model, mask, [[5, 6, 7], [9]])
    assert issubclass(NothingAllowedError, ValueError)
    assert len(sample(model, mask, [[5, 6, 7], [9]], max_new_tokens=5)[1]) == 5


def test_what_other_processors_exclude_is_nothing_either(model, tokenizer):
    with pytest.raises(NothingAllowedError, match=r"row 0 at step 2 .* excludes all 1 that it allows"):
        sample(model, regex("[0-9]{2}", tokenizer), [[5]], min_new_tokens=10)


def test_rows_that_have_ended_are_left_alone():
    processor = read(lambda ids: [[False] * 4, [False, True, True, False]], vocab=4, batch=2)
    processor.running = torch.tensor([False, True])
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    masked = processor(torch.ones(2, 1, dtype=torch.int64), scores).tolist()
    assert masked == [[0.0, 1.0, 2.0, 3.0], [-torch.inf, 5.0, 6.0, -torch.inf]]
    assert (
        processor(torch.ones(2, 1, dtype=torch.int64), torch.tensor([[-torch.inf] * 4, [0.0] * 4]))[0, 0] == -torch.inf
    )
    processor.running = torch.tensor([True, True])
    with pytest.raises(NothingAllowedError, match="row 0 at step 0"):
        processor(torch.ones(2, 1, dtype=torch.int64), scores)


def test_a_constraint_does_not_look_at_rows_that_have_ended(tokenizer):
    """However they ended: here without EOS, in the middle of a match."""
    (one,) = tokenizer.encode("1")
    history, scores = torch.tensor([[5, PAD], [5, one]]), torch.zeros(2, 352)
    processor = read(regex("[0-9]{3}", tokenizer), batch=2)
    processor.running = torch.tensor([False, True])
    masked = processor(history, scores)
    assert (masked[0] == 0).all()
    assert (masked[1] == 0).sum() == 10
    with pytest.raises(NothingAllowedError, match=rf"row 0 at step 1 .*was given token {PAD}, which the constraint"):
        read(regex("[0-9]{3}", tokenizer), batch=2)(history, scores)
