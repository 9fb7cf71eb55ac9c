import numpy as np
import pytest
import torch

from staticgen.prompts import read_prompts

VOCAB = 128


def read(ids, mask=None, pad=0, eos=()):
    return read_prompts(ids, mask, vocab_size=VOCAB, pad_token_id=pad, eos_token_ids=eos)


def rows(prompts):
    return [row.tolist() for row in prompts.rows]


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6, 7],
        (5, 6, 7),
        [[5, 6, 7]],
        [torch.tensor([5, 6, 7])],
        np.array([5, 6, 7]),
        np.array([[7, 6, 5]], dtype=np.int32)[:, ::-1],
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]], dtype=torch.int32),
        torch.tensor([[5], [6], [7]], dtype=torch.uint8).T,
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_every_kind_of_ids(ids):
    prompts = read(ids)
    assert rows(prompts) == [[5, 6, 7]]
    assert prompts.ids.dtype == torch.int64
    assert (prompts.batch, prompts.width, prompts.longest) == (1, 3, 3)


def test_a_ragged_list_is_left_padded():
    prompts = read([[5, 6, 7], [9]], pad=4)
    assert prompts.ids.tolist() == [[5, 6, 7], [4, 4, 9]]
    assert rows(prompts) == [[5, 6, 7], [9]]
    assert rows(read([[5, 0, 7], [9]], pad=0)) == [[5, 0, 7], [9]]  # every token of a list is real
    assert rows(read([[5, 0, 7], [9, 8, 0]], pad=0)) == [[5, 0, 7], [9, 8, 0]]  # whatever its neighbours


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16]
)
def test_mask_dtypes_mean_the_same(dtype):
    """C07."""
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]]).to(dtype)
    for given in (mask, mask.numpy(), mask.tolist(), mask.flip(1).numpy()[:, ::-1]):
        assert rows(read([[0, 0, 5], [6, 7, 8]], given)) == [[5], [6, 7, 8]]


def test_a_hole_in_the_mask_leaves_the_tokens_out():
    """C12."""
    assert rows(read([[5, 6, 7, 8]], [[1, 0, 0, 1]])) == [[5, 8]]


def test_what_stands_under_padding_does_not_matter():
    """C10."""
    for pad in (VOCAB, -1, 10**6):
        assert rows(read([[pad, pad, 5]], [[0, 0, 1]])) == [[5]]


def test_the_mask_is_inferred_as_transformers_does():
    assert rows(read(torch.tensor([[0, 0, 5], [6, 7, 8]]))) == [[5], [6, 7, 8]]
    assert rows(read(torch.tensor([[0, 5]]), pad=None)) == [[0, 5]]


def test_a_pad_that_is_eos_masks_nothing_and_says_so():
    """C08: genuine EOS tokens of a prompt stay."""
    for silent in ([[5, 7, 9, 7]], [[7, 5, 9]], [[7, 5], [7, 6]]):  # one in front may well be a BOS
        assert rows(read(torch.tensor(silent), pad=7, eos=(7,))) == silent
    for odd in ([[7, 7, 9], [5, 6, 8]], [[7, 9], [5, 6]], [[7, 7, 9]]):
        for given in (odd, torch.tensor(odd)):
            with pytest.warns(UserWarning, match="begins with the pad token 7"):
                prompts = read(given, pad=7, eos=(7,))
            assert rows(prompts) == odd


def test_inputs_are_copied():
    ids = torch.tensor([[5, 6, 7]])
    prompts = read(ids)
    prompts.ids[0, 0] = 9
    assert ids.tolist() == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("ids", "mask", "error", "words"),
    [
        ("hello", None, TypeError, "token ids.*got str"),
        (5, None, TypeError, "token ids.*got int"),
        (b"hello", None, TypeError, "token ids.*got bytes"),
        ([2**70], None, ValueError, "no token id"),
        (np.array(["a"]), None, TypeError, "integer dtype, got <U1"),
        (np.array([None]), None, TypeError, "integer dtype, got object"),
        (torch.tensor([1.5]), None, TypeError, "integer dtype, got torch.float32"),
        ([1.5], None, TypeError, "integers"),
        ([["a"]], None, TypeError, "integers"),
        ([True, False], None, TypeError, "integers"),
        ([], None, ValueError, "ids is empty"),
        ([[]], None, ValueError, "row 0 is empty"),
        ([[5, 6, 7], []], None, ValueError, "row 1 is empty"),
        (torch.empty(1, 0, dtype=torch.int64), None, ValueError, r"got \[1, 0\]"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, ValueError, r"got \[1, 1, 1\]"),
        ([[5, 6]], [[0, 0]], ValueError, "row 0 is empty"),
        ([[5, 6, 0]], [[1, 1, 0]], ValueError, "row 0 is padded on the right.*left padding"),
        (torch.tensor([[5, 6, 0]]), None, ValueError, "padded on the right"),
        ([[5, 6]], [[1, 1, 1]], ValueError, r"shape \[1, 3\], expected \[1, 2\]"),
        ([[5, 6]], [[1, 2]], ValueError, "only 1.*and 0"),
        ([[5, 6]], "11", TypeError, "attention_mask must hold numbers, got str"),
        ([[5, 6]], [[None, 1]], TypeError, "attention_mask must hold numbers"),
        ([[5, 6]], [[1], [1, 1]], ValueError, "its rows differ"),
        ([[5, 128]], None, ValueError, r"ids\[0, 1\] is 128.*vocabulary of 128"),
        ([[5], [-1]], None, ValueError, r"ids\[1, 0\] is -1"),
        ([[5], [6, 7]], [[0, 1], [1, 1]], ValueError, "ragged"),
    ],
)
def test_bad_input_names_what_is_wrong(ids, mask, error, words):
    """C09, C11 and the kind of fault behind them."""
    with pytest.raises(error, match=words):
        read(ids, mask)
