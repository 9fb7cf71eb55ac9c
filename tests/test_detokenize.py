"""Text from tokens as they come is what ``tokenizer.decode`` makes of all of them: C39, C42, C43, C44."""

import random

import pytest
import texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import ByT5Tokenizer

from staticgen.detokenize import UNFINISHED, Detokenizer, RowText, read_stop


@pytest.fixture(scope="module")
def byte_level():
    return texts.byte_level()


@pytest.fixture(scope="module")
def fallback():
    return texts.unigram()


@pytest.fixture(scope="module", params=list(texts.TOKENIZERS))
def named(request):
    return request.param, texts.TOKENIZERS[request.param]()


@pytest.fixture(scope="module", params=[name for name in texts.TOKENIZERS if name not in texts.UNKNOWN_DECODERS])
def known(request):
    """A tokenizer whose decoder is carried out step by step."""
    return texts.TOKENIZERS[request.param]()


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def byte_tokens(tokenizer, data):
    return [tokenizer.convert_tokens_to_ids(texts.BYTE_TOKENS[byte]) for byte in data]


def chunks(tokenizer, ids, **options):
    """What is said after each token, and at the end."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.put([one]) for one in ids), detokenizer.end()]


def check(tokenizer, ids, skip):
    said = chunks(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_chunks_are_what_decode_says(named, data):
    """Any ids: special ones, halves of characters, and some that no token has."""
    _, tokenizer = named
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=60))
    check(tokenizer, ids, data.draw(st.booleans()))


SIGNS = [
    "▁",
    " ",
    "Ġ",
    *"'.,?!sntmrve",
    "▁n't",
    "'t",
    "▁'s",
    "'re",
    "own▁",
    "<bos>",
    *(f"<0x{ord(c):02X}>" for c in " .'nts"),
]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_chunks_of_spaces_and_signs(named, data):
    """What a decoder or cleaning up joins or strips, far more often than by chance."""
    _, tokenizer = named
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in SIGNS if token in vocabulary]
    check(tokenizer, data.draw(st.lists(st.sampled_from(ids), max_size=40)), data.draw(st.booleans()))


def test_everything_that_cleaning_up_changes():
    tokenizer = texts.forced_bpe()
    ids = encode(tokenizer, "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're ' .  . ' 've n 't ' ' ' '")
    assert tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    check(tokenizer, ids, skip=True)


def test_200_random_sequences_keep_their_spaces():
    """C44."""
    for options in ({}, {"clean_up_tokenization_spaces": True}):
        tokenizer = texts.unigram(**options)
        draw = random.Random(0)
        for _ in range(200):
            ids = [draw.randrange(len(tokenizer)) for _ in range(40)]
            check(tokenizer, ids, skip=True)
            check(tokenizer, ids, skip=False)


TEXT = "ab 世界 é 🙂 end"


@pytest.mark.parametrize("make", [texts.byte_level, texts.unigram, ByT5Tokenizer], ids=["bytes", "fallback", "python"])
def test_no_chunk_holds_half_a_character(make):
    """C42."""
    tokenizer = make()
    ids = encode(tokenizer, TEXT)
    said = chunks(tokenizer, ids)
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert not any(UNFINISHED in chunk for chunk in said)


def test_a_character_is_said_with_its_last_byte(byte_level):
    said = chunks(byte_level, encode(byte_level, "a世🙂"))
    assert said == ["a", "", "", "世", "", "", "", "🙂", ""]


def test_text_after_a_genuine_replacement_character_does_not_wait(byte_level, fallback):
    """C42: whether it is the character U+FFFD itself, or bytes that are none."""
    said = chunks(byte_level, encode(byte_level, "a\ufffdb"))
    assert said == ["a", "", "", "\ufffd", "b", ""]
    broken = [*encode(byte_level, "世")[:2], *encode(byte_level, "b")]
    assert chunks(byte_level, broken) == ["", "", "\ufffdb", ""]
    ids = [*byte_tokens(fallback, b"\xe4\xb8"), *encode(fallback, "dog")]
    said = chunks(fallback, ids)
    assert "".join(said) == fallback.decode(ids)
    assert "\ufffd\ufffd" in "".join(said[:-1])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_character_is_flushed_as_decode_shows_it(byte_level, fallback, cut):
    """C42."""
    for tokenizer, ids in (
        (byte_level, encode(byte_level, "x🙂")[:-cut]),
        (fallback, [*encode(fallback, "dog"), *byte_tokens(fallback, "🙂".encode()[:-cut])]),
    ):
        *said, rest = chunks(tokenizer, ids)
        assert UNFINISHED not in "".join(said)
        assert UNFINISHED in rest
        assert "".join(said) + rest == tokenizer.decode(ids)


def test_a_byte_token_spoils_the_ones_before_it(fallback):
    """Bytes in a row are text or none of them is, so that the first of them cannot be said yet."""
    ids = byte_tokens(fallback, "A世".encode() + b"\x80")
    assert fallback.decode(ids) == UNFINISHED * 5
    assert chunks(fallback, ids) == ["", "", "", "", "", UNFINISHED * 5]


def test_byte_tokens_as_tokenizers_reads_them(fallback):
    fallback = texts.unigram()
    fallback.add_tokens(["<0x+F>", "<0x 9>", "<0xg0>", "<0x41>"])
    check(fallback, fallback.convert_tokens_to_ids(["<0x+F>", "<0x 9>", "<0xg0>", "<0x41>"]), skip=True)


def test_ids_without_a_token_are_dropped(known):
    """C39: a model's last layer may be wider than the tokenizer."""
    a, b = encode(known, "t")[-1], encode(known, "e")[-1]
    ids = [a, len(known) + 5, b]
    assert "".join(chunks(known, ids)) == known.decode(ids) == known.decode([a, b])


def test_the_row_is_not_decoded_again_for_each_token(known, monkeypatch):
    detokenizer = Detokenizer(known)
    monkeypatch.setattr(known, "decode", None)
    monkeypatch.setattr(known, "_tokenizer", None)
    assert "".join(detokenizer.put([one]) for one in range(4, 200))


@pytest.mark.parametrize("name", texts.UNKNOWN_DECODERS)
def test_a_decoder_that_is_not_known_streams_too(name):
    tokenizer = texts.TOKENIZERS[name]()
    *said, rest = chunks(tokenizer, encode(tokenizer, "the brown fox jumps over the lazy dog"))
    assert len("".join(said)) > 8
    assert len(rest) > 8


def test_a_decoder_written_in_python_or_changed_is_not_guessed(byte_level):
    class Louder:
        def decode_chain(self, tokens):
            return [token.upper() for token in tokens]

    class Polite(type(byte_level)):
        def _decode(self, *arguments, **options):
            return "please " + super()._decode(*arguments, **options)

    louder = texts.byte_level()
    louder.backend_tokenizer.decoder = decoders.Decoder.custom(Louder())
    polite = Polite(tokenizer_object=byte_level.backend_tokenizer)
    ids = encode(byte_level, "hello " * 20)
    assert "".join(chunks(louder, ids)).startswith("HELLO")
    assert "".join(chunks(polite, ids)).startswith("please hello hello")


# Stop strings


def run(tokenizer, ids, stop, **options):
    """What is said after each token until the row stops or ends; how many tokens it took; whether it stopped."""
    row = RowText(tokenizer, read_stop(stop), **options)
    said = []
    for one in ids:
        said.append(row.put(one))
        if row.stopped:
            break
    taken = len(said)
    return [*said, row.end()], taken, row.stopped


def test_a_stop_string_in_characters_of_several_tokens(byte_level):
    """C43; generation ends with the last byte of the last character."""
    ids = encode(byte_level, "ab 世界 more")
    said, taken, stopped = run(byte_level, ids, ["世界"])
    assert ("".join(said), taken, stopped) == ("ab ", len(encode(byte_level, "ab 世界")), True)


def test_a_stop_string_in_byte_tokens(fallback):
    """C43: the bytes are not final before another token comes, but the match is."""
    ids = [*encode(fallback, "dog"), *byte_tokens(fallback, "🙂🙂".encode()), *encode(fallback, "dog")]
    said, taken, stopped = run(fallback, ids, "🙂")
    assert ("".join(said), taken, stopped) == ("dog", len(encode(fallback, "dog")) + 4, True)


def test_a_stop_string_that_begins_and_ends_within_tokens(fallback):
    """C43."""
    ids = encode(fallback, "the brown fox jumps")
    assert fallback.convert_ids_to_tokens(ids) == ["▁th", "e", "▁br", "own▁", "fox", "▁jum", "ps"]
    said, taken, stopped = run(fallback, ids, ["own fox"])
    assert ("".join(said), taken, stopped) == ("the br", 5, True)
    for stop, before in (("n f", "the brow"), ("he b", "t"), ("x ju", "the brown fo")):
        assert "".join(run(fallback, ids, stop)[0]) == before


def test_what_may_become_a_stop_string_is_held_back(byte_level):
    said, _, stopped = run(byte_level, encode(byte_level, "a END b ENDE"), ["ENDE"])
    assert said == ["a", " ", "", "", "", "END ", "b", " ", "", "", "", "", ""]
    assert stopped
    said, _, stopped = run(byte_level, encode(byte_level, "a EN"), ["END"])
    assert (said[-1], "".join(said), stopped) == ("EN", "a EN", False)
    said, *_ = run(byte_level, encode(byte_level, "aabaabaac"), ["aabaac"])
    assert "".join(said) == "aab"


def test_of_two_stop_strings_that_one_token_completes_the_one_that_begins_first_counts(byte_level):
    ids = encode(byte_level, "say abc more")
    for stop in (["bc", "abc"], ["abc", "bc"], ["c", "bc", "abc"]):
        assert "".join(run(byte_level, ids, stop)[0]) == "say "
    assert "".join(run(byte_level, ids, ["bc", "abc more"])[0]) == "say a"  # the first to be complete ends the row


def test_a_special_token_as_stop_string(byte_level):
    ids = [*encode(byte_level, "ab"), byte_level.eos_token_id, *encode(byte_level, "cd")]
    assert run(byte_level, ids, "<eos>") == (["a", "b", "", ""], 3, True)
    assert "".join(run(byte_level, ids, "<eos>", skip_special_tokens=False)[0]) == "ab"
    half = [*encode(byte_level, "世")[:2], byte_level.eos_token_id]
    assert "".join(run(byte_level, half, "<eos>")[0]) == UNFINISHED


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, b"a", [5], {"a": 1}], ids=repr)
def test_bad_stop_strings_are_named(stop):
    with pytest.raises(ValueError, match=r"^stop is "):
        read_stop(stop)


def test_stop_strings_that_are_none_one_or_many():
    assert [read_stop(stop) for stop in (None, [], "ab", ["ab", "c"], ("ab",))] == [
        (),
        (),
        ("ab",),
        ("ab", "c"),
        ("ab",),
    ]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_stops_where_the_decoded_text_first_holds_a_stop_string(known, data):
    """The judge decodes all tokens so far after each token, and looks."""
    frequent = [known.get_vocab()[token] for token in SIGNS if token in known.get_vocab()]
    one = st.one_of(st.sampled_from(frequent), st.integers(0, len(known) + 5))
    ids = data.draw(st.lists(one, min_size=1, max_size=30))
    whole = known.decode(ids, skip_special_tokens=True)
    pieces = {whole[i : i + n] for i in range(len(whole)) for n in range(1, 5)}
    stops = [piece for piece in sorted(pieces) if piece and UNFINISHED not in piece] or ["x"]
    stop = data.draw(st.lists(st.sampled_from(stops), min_size=1, max_size=3))
    shown = [known.decode(ids[: n + 1], skip_special_tokens=True) for n in range(len(ids))]
    first = next((n for n, text in enumerate(shown) if any(one in text for one in stop)), None)
    said, taken, stopped = run(known, ids, stop)
    if first is None:
        assert ("".join(said), stopped) == (whole, False)
    else:
        cut = min(shown[first].find(one) for one in stop if one in shown[first])
        assert ("".join(said), taken, stopped) == (shown[first][:cut], first + 1, True)
