"""Token masks, regular expressions, JSON schemas and grammars; transformers' own sampling is the judge."""

import json
import re
import sys

import models
import numpy as np
import pytest
import torch
import transformers as tf
from models import left_padded, new_tokens
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from staticgen.constraints import Constraint, grammar, json_schema, read_token_mask, regex
from staticgen.errors import NothingAllowedError

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ["<pad>", "<bos>", "</s>"]
TEXTS = ["the cat sat on the mat 12 345 0.5", 'a café in 世界 and "one", {"two": true}', "false null 😀 10 20 30"] * 20


def wrap(inner):
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="</s>")


def byte_tokenizer():
    """3 special tokens and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(tokenizer_models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return wrap(inner)


def merging_tokenizer():
    """Byte-level with tokens of several characters, and of parts of characters."""
    inner = Tokenizer(tokenizer_models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return wrap(inner)


def unigram_tokenizer(space=None):
    """As SentencePiece makes them: '▁' for a space, bytes where there is no piece."""
    inner = Tokenizer(tokenizer_models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.UnigramTrainer(vocab_size=330, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    inner.decoder = decoders.Sequence([space or decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    state = json.loads(inner.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = state["added_tokens"][:4]  # the trainer takes the bytes for special tokens
    return wrap(Tokenizer.from_str(json.dumps(state)))


TOKENIZERS = {"bytes": byte_tokenizer, "merges": merging_tokenizer, "unigram": unigram_tokenizer}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def any_tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    """Its vocabulary is wider than every tokenizer's here."""
    return models.llama(vocab_size=352, eos_token_id=EOS)


def read(token_mask, *, vocab=352, width=1, batch=1, logits=None, eos=None):
    return read_token_mask(
        token_mask, vocab_size=vocab, logits_size=logits or vocab, prompt_width=width, batch=batch, eos_token_ids=eos
    )


def sample(model, token_mask, prompts, seed=0, *, max_new_tokens=60, **arguments):
    """The new tokens of each row, from transformers' ``generate``; without a mask if it is None."""
    ids, attention_mask = left_padded(prompts)
    chain = LogitsProcessorList()
    if token_mask is not None:
        vocab, logits = model.get_input_embeddings().weight.shape[0], model.lm_head.out_features
        chain.append(read(token_mask, vocab=vocab, logits=logits, width=ids.shape[1], batch=len(prompts)))
    torch.manual_seed(seed)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": max_new_tokens, "logits_processor": chain, **arguments}
    return new_tokens(model.generate(ids, attention_mask=attention_mask, **settings), ids.shape[1])


def ended(row):
    """The tokens before EOS, which must be there, and after which there must be padding only."""
    end = row.index(EOS)
    assert set(row[end + 1 :]) <= {PAD}
    return row[:end]


def text(tokenizer, prompt, tokens):
    """What the tokens add to the prompt's text."""
    before = tokenizer.decode(prompt)
    after = tokenizer.decode(prompt + tokens)
    assert after.startswith(before)
    return after[len(before) :]


def digits(tokenizer, size=352):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[tokenizer.convert_tokens_to_ids(list("0123456789"))] = True
    return mask


# Masks


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


# Constraints

PATTERNS = [
    r"[0-9]{3}-[0-9]{2}",
    r"(yes|no|maybe not)",
    r"é{1,3}",
    r"[世界]{2} ?[éàü]{0,4}",
    r"[😀-😅]{1,3}!",
    r"[^a-z]{1,5}",
    r"the( cat| mat){1,3}",
    r" [a-c]{1,4} ",
    r"",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_a_regular_expression(model, any_tokenizer, pattern):
    """Rows of different lengths, which end at different steps; one constraint for every call."""
    constraint = regex(pattern, any_tokenizer)
    prompts = [any_tokenizer.encode("the cat"), any_tokenizer.encode("é"), any_tokenizer.encode("on 10 mats 世")]
    for seed in range(4):
        for prompt, row in zip(prompts, sample(model, constraint, prompts, seed), strict=True):
            assert re.fullmatch(pattern, text(any_tokenizer, prompt, ended(row)))


def test_without_the_constraint_text_does_not_match(model, any_tokenizer):
    prompt = any_tokenizer.encode("the cat")
    for pattern in PATTERNS[:-1]:
        (row,) = sample(model, None, [prompt], max_new_tokens=20)
        assert not re.fullmatch(pattern, any_tokenizer.decode(row, skip_special_tokens=True))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "世"]}, "maxItems": 3},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "done"],
    "additionalProperties": False,
}


class Described:
    """As classes of pydantic describe themselves."""

    @classmethod
    def model_json_schema(cls):
        return SCHEMA


def test_text_is_json_that_the_schema_allows(model, any_tokenizer):
    constraint = json_schema(SCHEMA, any_tokenizer, whitespace=False)
    prompts = [any_tokenizer.encode("the cat"), any_tokenizer.encode("é")] * 2
    tags = 0
    for seed in range(2):
        for prompt, row in zip(prompts, sample(model, constraint, prompts, seed, max_new_tokens=200), strict=True):
            value = json.loads(text(any_tokenizer, prompt, ended(row)))
            assert {"name", "count", "done"} <= set(value) <= set(SCHEMA["properties"])
            assert isinstance(value["name"], str)
            assert len(value["name"]) <= 5
            assert type(value["count"]) is int
            assert 0 <= value["count"] <= 99
            assert type(value["done"]) is bool
            assert set(value.get("tags", [])) <= {"a", "é", "世"}
            assert len(value.get("tags", [])) <= 3
            tags += "tags" in value
    assert tags > 0


@pytest.mark.parametrize("schema", [json.dumps(SCHEMA), Described], ids=["text", "class"])
def test_a_schema_may_be_text_or_a_class(model, tokenizer, schema):
    expected = sample(model, json_schema(SCHEMA, tokenizer), [[5, 6, 7]])
    assert sample(model, json_schema(schema, tokenizer), [[5, 6, 7]]) == expected
    assert sample(model, json_schema({}, tokenizer), [[5, 6, 7]]) != expected


def test_whitespace_in_json_is_a_choice(tokenizer):
    space, quote = tokenizer.encode(' "')
    brace = tokenizer.encode("{")[0]
    for whitespace in (True, False):
        processor = read(json_schema(SCHEMA, tokenizer, whitespace=whitespace))
        (row,) = processor(torch.tensor([[5, brace]]), torch.zeros(1, 352)) == 0
        assert row[quote]
        assert bool(row[space]) is whitespace


def test_text_follows_a_grammar(model, any_tokenizer):
    """Nested brackets, which no regular expression describes."""
    constraint = grammar('start: "(" start? ")" | "[" start? "]"', any_tokenizer)
    prompt, depths = any_tokenizer.encode("the cat"), set()
    for seed in range(6):
        (row,) = sample(model, constraint, [prompt], seed, max_new_tokens=40)
        if EOS not in row:
            continue
        brackets = left = text(any_tokenizer, prompt, ended(row))
        while "()" in left or "[]" in left:
            left = left.replace("()", "").replace("[]", "")
        assert brackets
        assert left == ""
        depths.add(len(brackets))
    assert len(depths) > 1


def allowed_after(constraint, tokenizer, string, eos=None):
    """The ids that may follow ``string``."""
    ids = torch.tensor([[5, *tokenizer.encode(string)]])
    return set((read(constraint, eos=eos)(ids, torch.zeros(1, 352)) == 0).nonzero()[:, 1].tolist())


def test_eos_is_allowed_exactly_where_the_text_is_complete(tokenizer):
    (a,) = tokenizer.encode("a")
    constraint = regex("a{2,3}", tokenizer)
    assert [allowed_after(constraint, tokenizer, "a" * n) for n in range(4)] == [{a}, {a}, {a, EOS}, {EOS}]


def test_the_eos_of_the_call_counts(tokenizer):
    """Not the tokenizer's own; several; and one that is text as well, and would cut the text in the middle."""
    a, b, other = *tokenizer.encode("ab"), 300
    constraint = regex("ab?", tokenizer)
    assert allowed_after(constraint, tokenizer, "a", eos=[other]) == {b, other}
    assert allowed_after(constraint, tokenizer, "a", eos=[EOS, other]) == {b, EOS, other}
    assert allowed_after(constraint, tokenizer, "a", eos=[]) == {b}
    assert allowed_after(regex("aba", tokenizer), tokenizer, "", eos=[other, b]) == {a}
    with pytest.raises(NothingAllowedError, match=r"row 0 at step 1 .*no token continues"):
        allowed_after(regex("aba", tokenizer), tokenizer, "a", eos=[other, b])


def test_complete_text_without_any_eos_is_an_error(model, tokenizer):
    with pytest.raises(NothingAllowedError, match=r"row 0 at step 2 .*text is complete, and no EOS token"):
        allowed_after(regex("[0-9]{2}", tokenizer), tokenizer, "12", eos=[])


def test_a_grammar_that_derives_nothing_is_an_error(tokenizer):
    with pytest.raises(NothingAllowedError, match=r"row 0 at step 0 .*no token continues"):
        allowed_after(grammar('start: start "a"', tokenizer), tokenizer, "")


def test_one_constraint_serves_calls_of_different_batches(model, tokenizer):
    constraint = regex("[0-9]{4}", tokenizer)
    one = sample(model, constraint, [[5, 6, 7]])
    three = sample(model, constraint, [[5], [6, 7], [8, 9, 10, 11]])
    again = sample(model, constraint, [[5, 6, 7]])
    assert one == again
    assert all(re.fullmatch("[0-9]{4}", tokenizer.decode(ended(row))) for row in one + three)


def test_calls_of_one_constraint_do_not_disturb_each_other(tokenizer):
    constraint = regex("ab", tokenizer)
    a, b = tokenizer.encode("ab")
    first, second = read(constraint), read(constraint)
    for processor, history, expected in ((first, [5], a), (second, [5], a), (first, [5, a], b), (second, [5, a], b)):
        masked = processor(torch.tensor([history]), torch.zeros(1, 352))
        assert (masked == 0).nonzero().tolist() == [[0, expected]]


def test_another_history_begins_anew(tokenizer):
    """A shorter one, another of the same length, and several tokens at once."""
    a, b, c, d = tokenizer.encode("abcd")
    processor = read(regex("(ab|bc)d", tokenizer), width=2)
    for history, expected in (
        ([5, 6, a], {b}),
        ([5, 6], {a, b}),
        ([5, 7, a], {b}),
        ([5, 7, b], {c}),
        ([5, 7, b], {c}),
        ([5, 7, a, b], {d}),
        ([5, 7, b, c, d], {EOS}),
    ):
        masked = processor(torch.tensor([history]), torch.zeros(1, 352))
        assert set((masked == 0).nonzero()[:, 1].tolist()) == expected


def test_tokens_that_are_added_later_count():
    tokenizer = byte_tokenizer()
    before = allowed_after(regex("hello|bye", tokenizer), tokenizer, "")
    tokenizer.add_tokens(["hello"])
    after = allowed_after(regex("hello|bye", tokenizer), tokenizer, "")
    assert after - before == {tokenizer.convert_tokens_to_ids("hello")}


def test_a_constraint_names_itself(tokenizer):
    assert repr(regex("[0-9]+", tokenizer)) == "regex('[0-9]+')"
    assert len(repr(json_schema(SCHEMA, tokenizer))) < 80
    assert isinstance(regex("a", tokenizer), Constraint)


# Refusals


@pytest.mark.parametrize(
    ("make", "value", "error", "words"),
    [
        (regex, "[a", ValueError, r"regex\('\[a'\) is refused by llguidance: .*\n.*\n.*\n.*unclosed character class"),
        (regex, r"a(?=b)", ValueError, "look-around"),
        (regex, 7, TypeError, "pattern must be a string, got int"),
        (json_schema, {"type": "foo"}, ValueError, "Invalid type: foo"),
        (json_schema, {"type": "array", "uniqueItems": True}, ValueError, "Unimplemented keys: .*uniqueItems"),
        (json_schema, {"type": "integer", "minimum": 5, "maximum": 3}, ValueError, "Unsatisfiable"),
        (json_schema, "{'type'}", ValueError, "which is no JSON"),
        (json_schema, "true", TypeError, "schema must be a dict"),
        (json_schema, 7, TypeError, "schema must be a dict, JSON text of one or a class .*got int"),
        (json_schema, {"const": object()}, TypeError, "not JSON serializable"),
        (grammar, "start: a", ValueError, 'refused by llguidance: .*unknown name: "a"'),
        (grammar, b"start: a", TypeError, "text must be a grammar as a string, got bytes"),
    ],
)
def test_bad_rules_are_refused_at_once(tokenizer, make, value, error, words):
    with pytest.raises(error, match=words):
        make(value, tokenizer)


def test_tokenizers_that_cannot_be_read_are_refused():
    with pytest.raises(TypeError, match="tokenizer must be a fast tokenizer of transformers, got str"):
        regex("a", "gpt2")
    with pytest.raises(TypeError, match="got ByT5Tokenizer"):
        regex("a", tf.ByT5Tokenizer())
    words = Tokenizer(tokenizer_models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2, "<bos>": 3}))
    with pytest.raises(ValueError, match=r"tokenizer is one that llguidance cannot read: .*decoder"):
        regex("a", wrap(words))


def test_a_tokenizer_without_eos_needs_another_special_token(model, tokenizer):
    """The library must have an EOS, and takes the first token if it finds none."""
    inner = Tokenizer(tokenizer_models.BPE({token: i for i, token in enumerate("ab")}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match="no EOS token, and llguidance would take 'a' for it"):
        regex("a+", PreTrainedTokenizerFast(tokenizer_object=inner))
    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    constraint = regex("[0-9]{3}", PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>"))
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(sample(model, constraint, [[5]], max_new_tokens=3)[0]))
    with pytest.raises(NothingAllowedError, match=r"row 0 at step 3 .*no EOS token can end it"):
        sample(model, constraint, [[5]], max_new_tokens=4)


def test_a_tokenizer_whose_spaces_would_be_misread_is_refused():
    """With this decoder the library takes '▁' for itself, and 'no space' would let spaces pass."""
    with pytest.raises(ValueError, match="llguidance misreads"):
        regex("[^ ]+", unigram_tokenizer(decoders.Metaspace()))


def test_without_the_library_masks_work_and_constraints_say_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert (read([True] * 4, vocab=4)(torch.tensor([[1]]), torch.zeros(1, 4)) == 0).all()
    for make, value in ((regex, "a"), (json_schema, {}), (grammar, 'start: "a"')):
        with pytest.raises(ImportError, match=r"pip install 'staticgen\[constraints\]'"):
            make(value, tokenizer)
