"""Regular expressions, JSON schemas and grammars as what may come next."""

import json
import re
import sys

import pytest
import torch
import transformers as tf
from constrained import (
    EOS,
    PAD,
    any_tokenizer,
    byte_tokenizer,
    ended,
    model,
    read,
    sample,
    text,
    tokenizer,
    unigram_tokenizer,
    wrap,
)
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from staticgen.constraints import Constraint, grammar, json_schema, regex
from staticgen.errors import NothingAllowedError

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
