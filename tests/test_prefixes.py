"""Prefixes: what was computed once is not computed again, and the tokens are those of the whole prompt."""

import pickle
import subprocess
import sys
from pathlib import Path

import models
import pytest
import safetensors.torch
import torch
from models import left_padded, new_tokens, random_prompt, reference
from transformers import DynamicCache

import staticgen
from staticgen import Session, SessionBusyError, StaleSessionError, load_prefix

COMMON = random_prompt(12)
PROMPTS = [COMMON + random_prompt(length, seed=3) for length in (2, 5, 9)]
MODELS = {"llama": models.llama, "gpt2": models.gpt2, "gemma3": models.gemma3}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


def layouts(model):
    """Those that the model can have, with their options."""
    sinks = {"num_sink_tokens": 0 if model.config.model_type.startswith("gemma3") else 2}
    return [("ring", {}), ("shift", {}), *([] if model.config.model_type == "gpt2" else [("sink", sinks)])]


def reused(model, prompts, count):
    """How many tokens need not run of prompts that begin with ``count`` known ones.

    Those in the columns before the one where the longest prompt goes on; where layers have windows, the keys of
    fewer tokens than ``count`` are of no use, and all of them are taken.
    """
    if model.config.model_type.startswith("gemma3"):
        return count * len(prompts)
    width = max(map(len, prompts))
    return sum(max(0, count - (width - len(prompt))) for prompt in prompts)


def test_a_prefix_gives_the_tokens_of_the_whole_prompt(model, backend):
    """C58: batched with different lengths, alone, in every layout, streamed, and the prefix itself as the prompt."""
    expected = [reference(model, prompt, 16) for prompt in PROMPTS]
    session = Session(model, max_length=40, batch_size=3, prefill_buckets=[8], cache_sizes=[24], **backend)
    prefix = session.prefix(COMMON)
    assert len(prefix) == 12
    assert prefix.token_ids.tolist() == COMMON
    compiles = session.stats.compiles
    for layout, options in layouts(model):
        session.set_cache_implementation(layout, **options)
        for _ in range(2):
            assert new_tokens(session.generate(PROMPTS, max_new_tokens=16, prefix=prefix), 21) == expected
            assert session.stats.last.reused_tokens == reused(model, PROMPTS, 12)
    ids, mask = left_padded(PROMPTS[:2])
    streamed = torch.stack(list(session.stream(ids, mask, max_new_tokens=16, prefix=prefix)), dim=1)
    assert streamed.tolist() == expected[:2]
    replays = session.stats.replays
    output = session.generate(COMMON, max_new_tokens=16, prefix=prefix)
    assert new_tokens(output, 12) == [reference(model, COMMON, 16)]
    assert session.stats.last.reused_tokens == 11
    assert session.stats.replays - replays == 16  # the last token of the prompt, and the 15 that follow
    both = [COMMON, PROMPTS[2]]
    output = session.generate(both, max_new_tokens=16, prefix=prefix)
    assert new_tokens(output, 21) == [reference(model, prompt, 16) for prompt in both]
    assert session.stats.compiles == compiles


def test_without_a_prefix_nothing_is_reused(tiny_llama):
    session = Session(tiny_llama, max_length=40, prefill_buckets=[4], backend="eager")
    prefix = session.prefix(COMMON)
    replays = session.stats.replays
    output = session.generate(PROMPTS[1], max_new_tokens=8)
    assert (session.stats.last.reused_tokens, session.stats.replays - replays) == (0, 5 + 7)
    assert torch.equal(session.generate(PROMPTS[1], max_new_tokens=8, prefix=prefix), output)
    assert (session.stats.last.reused_tokens, session.stats.replays - replays) == (12, 12 + 2 + 7)


def test_one_differing_token_is_refused(tiny_llama):
    session = Session(tiny_llama, max_length=40, batch_size=3, backend="eager")
    prefix = session.prefix(torch.tensor([COMMON]))
    replays = session.stats.replays
    for at in range(12):
        other = [*PROMPTS[1]]
        other[at] = 3 if other[at] != 3 else 4
        with pytest.raises(ValueError, match=rf"ids row 1 differs from the prefix at token {at}: {other[at]} there, "):
            session.generate([PROMPTS[0], other, PROMPTS[2]], max_new_tokens=8, prefix=prefix)
    with pytest.raises(ValueError, match=r"ids row 2 has 11 tokens and the prefix 12; .*leave prefix out"):
        session.generate([*PROMPTS[:2], COMMON[:11]], max_new_tokens=8, prefix=prefix)
    assert session.stats.replays == replays
    output = session.generate(PROMPTS, max_new_tokens=8, prefix=prefix)
    assert new_tokens(output, 21) == [reference(tiny_llama, prompt, 8) for prompt in PROMPTS]


def test_other_decoding_settings(tiny_llama):
    session = Session(tiny_llama, max_length=40, batch_size=3, backend="eager")
    prefix = session.prefix(COMMON)
    for settings in [
        {"do_sample": True, "seed": 5, "top_k": 20},
        {"repetition_penalty": 1.5},
        {"do_sample": True, "seed": 5, "temperature": 0.5, "repetition_penalty": 1.3},
        {"eos_token_id": reference(tiny_llama, PROMPTS[0], 3)[2], "min_new_tokens": 2},
    ]:
        expected = session.generate(PROMPTS, max_new_tokens=16, **settings)
        output = session.generate(PROMPTS, max_new_tokens=16, prefix=prefix, **settings)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_prefixes_of_any_length(model, length):
    """Shorter and longer than a window; with prompts of one more token and of many."""
    session = Session(model, max_length=64, batch_size=3, prefill_buckets=[4, 16], backend="eager")
    common = random_prompt(length, seed=8)
    prefix = session.prefix(common)
    prompts = [common + random_prompt(more, seed=9) for more in (1, 20, 2)]
    output = session.generate(prompts, max_new_tokens=12, prefix=prefix)
    assert new_tokens(output, length + 20) == [reference(model, prompt, 12) for prompt in prompts]
    assert session.stats.last.reused_tokens > 0


def test_a_prefix_serves_other_sessions(model, tmp_path):
    """Of other sizes, layouts and backends, and from a file; it shares no memory with the session that made it."""
    first = Session(model, max_length=20, backend="eager")
    prefix = first.prefix(COMMON)
    prefix.save(tmp_path / "common.safetensors")
    first.generate(random_prompt(15), max_new_tokens=5)
    first._context._caches.zero_()
    expected = [reference(model, prompt, 24) for prompt in PROMPTS]
    for arguments in [
        {"backend": "eager", "layout": "shift", "prefill_buckets": [3]},
        {"backend": "openvino", "cache_sizes": [22], "prefill_buckets": [16]},
    ]:
        session = Session(model, max_length=48, batch_size=4, **arguments)
        for one in (prefix, load_prefix(tmp_path / "common.safetensors")):
            assert new_tokens(session.generate(PROMPTS, max_new_tokens=24, prefix=one), 21) == expected
    output = staticgen.generate(model, PROMPTS, max_new_tokens=24, prefix=prefix, backend="eager")
    assert new_tokens(output, 21) == expected
    steps = staticgen.stream(model, PROMPTS, max_new_tokens=24, prefix=prefix, backend="eager", layout="shift")
    assert torch.stack(list(steps), dim=1).tolist() == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {"overflow": "slide"},
        {"overflow": "slide", "layout": "shift"},
        {"overflow": "sink", "layout_options": {"window_length": 24, "num_sink_tokens": 0}},
    ],
)
def test_text_longer_than_the_cache(kind, options):
    """Prompts that fit, and one that does not; a prefix longer than the cache is of no use, and does no harm."""
    model = MODELS[kind]()
    session = Session(model, max_length=24, batch_size=3, backend="eager", prefill_buckets=[4, 8], **options)
    prefix = session.prefix(COMMON)
    long = Session(model, max_length=64, backend="eager").prefix(COMMON + random_prompt(18, seed=3))
    for prompts, used in [
        (PROMPTS, prefix),
        ([COMMON + random_prompt(30, seed=3), PROMPTS[0]], prefix),
        ([COMMON + random_prompt(18, seed=3) + [9]], long),
    ]:
        output = session.generate(prompts, max_new_tokens=40, prefix=used)
        assert torch.equal(output, session.generate(prompts, max_new_tokens=40))


def test_inside_inference_mode(tiny_llama):
    with torch.inference_mode():
        session = Session(tiny_llama, max_length=40, batch_size=3, backend="eager", prefix_cache=10**6)
        prefix = session.prefix(torch.tensor(COMMON))
        inside = [session.generate(PROMPTS, max_new_tokens=8, prefix=one) for one in (prefix, None, None)]
    outside = [session.generate(PROMPTS, max_new_tokens=8, prefix=one) for one in (prefix, None)]
    assert all(
        new_tokens(one, 21) == [reference(tiny_llama, prompt, 8) for prompt in PROMPTS] for one in inside + outside
    )


def learned_reference(model, keys_values, ids, count):
    """Greedy tokens of the model over a cache that holds ``keys_values`` as its first tokens."""
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(keys_values):
        cache.update(keys[None], values[None], index)
    at, fed, found = keys_values[0][0].shape[1], list(ids), []
    with torch.no_grad():
        while len(found) < count:
            positions = torch.arange(at, at + len(fed))[None]
            mask = torch.ones(1, at + len(fed), dtype=torch.int64)
            logits = model(
                torch.tensor([fed]), past_key_values=cache, position_ids=positions, attention_mask=mask
            ).logits
            at, fed = at + len(fed), [logits[0, -1].argmax().item()]
            found += fed
    return found


def learned(model, count, seed=0):
    """Keys and values that no tokens have."""
    generator = torch.Generator().manual_seed(seed)
    spec = Session(model, max_length=2, backend="eager")._step.cache_spec
    return [
        tuple(torch.randn(layer.heads, count, size, generator=generator) for size in (layer.key_dim, layer.value_dim))
        for layer in spec.layers
    ]


@pytest.mark.parametrize("backend", ["eager", "openvino"])
def test_learned_keys_and_values(model, backend, tmp_path):
    rests = [random_prompt(length) for length in (9, 2, 14, 2)]
    session = Session(model, max_length=39, batch_size=4, prefill_buckets=[8], backend=backend)
    for count in (1, 5, 13):
        keys_values = learned(model, count)
        new = 39 - count - 14
        expected = [learned_reference(model, keys_values, rest, new) for rest in rests]
        assert expected != [reference(model, rest, new) for rest in rests]
        prefix = session.prefix(keys_values=keys_values)
        assert (len(prefix), prefix.token_ids) == (count, None)
        for keys, values in keys_values:
            keys.zero_(), values.zero_()
        prefix.save(tmp_path / "learned")
        session.set_cache_implementation("ring")
        with pytest.raises(
            ValueError, match=f"the prefix and ids have {count + 14} tokens and max_new_tokens is {new + 1}"
        ):
            session.generate(rests, max_new_tokens=new + 1, prefix=prefix)
        for layout, options in layouts(model):
            session.set_cache_implementation(layout, **options)
            output = session.generate(rests, prefix=load_prefix(tmp_path / "learned"))  # max_length counts the prefix
            assert new_tokens(output, 14) == expected
            assert session.stats.last.reused_tokens == 4 * count
        output = session.generate(rests[1], max_new_tokens=12, prefix=prefix, min_new_tokens=3)
        assert new_tokens(output, 2) == [expected[1][:12]]
    output = staticgen.generate(model, rests, max_new_tokens=12, prefix=prefix, backend="eager")
    assert new_tokens(output, 14) == expected


def test_learned_keys_slide_out_like_any_others(tiny_llama):
    """Ragged rows over a ring that wraps: each row has its prefix as long as if it were alone."""
    keys_values = learned(tiny_llama, 6)
    rests = [random_prompt(length) for length in (9, 2, 4)]
    for options in ({"overflow": "slide"}, {"overflow": "sink"}):
        session = Session(tiny_llama, max_length=20, batch_size=3, prefill_buckets=[4, 8], backend="eager", **options)
        prefix = session.prefix(keys_values=[(keys[None], values[None]) for keys, values in keys_values])
        output = session.generate(rests, max_new_tokens=40, prefix=prefix)
        alone = [session.generate(rest, max_new_tokens=40, prefix=prefix)[0, len(rest) :].tolist() for rest in rests]
        assert new_tokens(output, 9) == alone


def test_learned_keys_that_do_not_fit_are_refused(tiny_llama):
    session = Session(tiny_llama, max_length=32, backend="eager")
    pairs = learned(tiny_llama, 4)
    broken = [(keys.clone(), values) for keys, values in pairs]
    broken[1][0][0, 2, 3] = torch.inf
    for given, error, message in [
        (pairs[:1], ValueError, "keys_values has 1 layers, the model caches 2"),
        ([(k[:1], v) for k, v in pairs], ValueError, r"keys of layer 0 are \[1, 4, 16\], expected \[2, 4, 16\]"),
        ([(k, v[:, :3]) for k, v in pairs], ValueError, r"values of layer 0 are \[2, 3, 16\], expected \[2, 4, 16\]"),
        ([(k.half(), v) for k, v in pairs], ValueError, "keys of layer 0 are torch.float16, expected torch.float32"),
        ([(k[:, :0], v[:, :0]) for k, v in pairs], ValueError, "holds no token"),
        (
            [(k.expand(3, -1, -1, -1), v) for k, v in pairs],
            TypeError,
            "layer 0 must be a pair of tensors .* of one row",
        ),
        ([5, 6], TypeError, "layer 0 must be a pair"),
        (7, TypeError, "keys_values is a int"),
        (DynamicCache(), ValueError, "has 0 layers"),
        (broken, ValueError, "not finite"),
    ]:
        with pytest.raises(error, match=message):
            session.prefix(keys_values=given)
    prefix = session.prefix(keys_values=learned(tiny_llama, 33))
    with pytest.raises(ValueError, match="the prefix and ids have 36 tokens"):
        session.generate([5, 6, 7], prefix=prefix)
    with pytest.raises(ValueError, match="prefix has 33 tokens, more than the 32 that this session keeps of a row"):
        session.generate([5, 6, 7], max_new_tokens=4, overflow="slide", prefix=prefix)
    assert session.stats.replays == 0


def test_what_a_prefix_cannot_be_made_of_or_used_with(tiny_llama):
    session = Session(tiny_llama, max_length=16, batch_size=2, backend="eager")
    prefix = session.prefix(COMMON)
    replays = session.stats.replays
    for ids, error, message in [
        (None, ValueError, "prefix takes either ids or keys_values"),
        ([], ValueError, "ids is empty"),
        ([[1, 2], [3, 4]], ValueError, "ids has 2 rows, expected one"),
        ([1, 128], ValueError, r"ids\[0, 1\] is 128, outside the model's vocabulary"),
        (random_prompt(17), ValueError, "ids has 17 tokens, more than the 16 that this session keeps"),
        ("text", TypeError, "ids must be token ids"),
    ]:
        with pytest.raises(error, match=message):
            session.prefix(ids)
    with pytest.raises(TypeError, match=r"prefix is a list, expected what session.prefix\(ids\) returns"):
        session.generate(PROMPTS[0], prefix=COMMON)
    pairs = [(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))] * 2
    with pytest.raises(ValueError, match="both prefix and past_key_values are given"):
        session.generate(PROMPTS[0], prefix=prefix, past_key_values=pairs)
    session.set_cache_implementation("none")
    for call in (lambda: session.prefix(COMMON), lambda: session.generate(PROMPTS[0], prefix=prefix)):
        with pytest.raises(ValueError, match=r"layout 'none' keeps no keys and values, so that .*prefix is of no use"):
            call()
    session.set_cache_implementation("sink", window_length=4)
    with pytest.raises(ValueError, match="ids has 12 tokens, more than the 8 that this session keeps"):
        session.prefix(COMMON)
    assert session.stats.replays == replays
    session.set_cache_implementation("ring")
    stream = session.stream(PROMPTS[0], max_new_tokens=2, prefix=prefix)
    next(stream)
    with pytest.raises(SessionBusyError):
        session.prefix(COMMON)
    stream.close()
    changed = models.llama()
    session = Session(changed, max_length=16, backend="eager")
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    with pytest.raises(StaleSessionError):
        session.prefix(COMMON)


def test_another_model_is_refused_by_what_differs(tiny_llama, tmp_path):
    Session(tiny_llama, max_length=16, backend="eager").prefix(COMMON).save(tmp_path / "prefix")
    prefix = load_prefix(tmp_path / "prefix")
    nearly = models.llama()
    with torch.no_grad():
        nearly.model.layers[1].mlp.down_proj.weight[17, 5] += 0.001
    for model, message in [
        (models.gpt2(), "config.model_type llama, not gpt2"),
        (models.llama(seed=1), "weights with digest [0-9a-f]{32}, not [0-9a-f]{32}"),
        (nearly, "weights with digest"),
        (models.llama(num_hidden_layers=3), "a number of layers of 2, not 3"),
        (models.llama(num_key_value_heads=4), r"layer 0 LayerSpec\(heads=2, .*, not LayerSpec\(heads=4"),
        (models.llama(rms_norm_eps=1e-5), "config.rms_norm_eps 1e-06, not 1e-05"),
        (models.llama().bfloat16(), "dtype torch.float32, not torch.bfloat16"),
    ]:
        session = Session(model, max_length=32, backend="eager")
        with pytest.raises(ValueError, match=f"prefix was made for another model than the session's: it has {message}"):
            session.generate(PROMPTS[0], max_new_tokens=4, prefix=prefix)
        assert session.stats.replays == 0


def test_a_file_serves_another_process_and_bfloat16(tmp_path):
    model = models.gemma3().bfloat16()
    session = Session(model, max_length=40, backend="eager")
    session.prefix(COMMON).save(tmp_path / "prefix")
    output = session.generate(PROMPTS[1], max_new_tokens=8, prefix=load_prefix(tmp_path / "prefix"))
    code = (
        "import sys, models, staticgen; session = staticgen.Session(models.gemma3().bfloat16(), max_length=40, backend='eager');"
        f"prefix = staticgen.load_prefix({str(tmp_path / 'prefix')!r});"
        f"print(session.generate({PROMPTS[1]}, max_new_tokens=8, prefix=prefix).tolist(), session.stats.last.reused_tokens)"
    )
    tests = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tests}:{tests.parent}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == f"{output.tolist()} 12"


def rewritten(path, metadata=(), drop=(), **tensors):
    """The file with some metadata and tensors replaced."""
    with safetensors.safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name not in drop}  # noqa: SIM118
        return safetensors.torch.save({**kept, **tensors}, {**file.metadata(), **dict(metadata)})


def test_files_that_are_no_prefix(tiny_llama, tmp_path):
    good = tmp_path / "good"
    Session(tiny_llama, max_length=16, backend="eager").prefix(COMMON).save(good)
    octets = good.read_bytes()
    keys = safetensors.torch.load(octets)["keys.1"]
    layers = (
        '[{"heads": 2, "key_dim": 16, "value_dim": 16, "window": null}, {"heads": 0, "key_dim": 16, "value_dim": 16}]'
    )
    contents = [
        (b"", ""),
        (b"\xff" * 64, ""),
        (pickle.dumps({"keys": [1, 2]}), ""),
        (safetensors.torch.save({"a": torch.ones(2)}), "its format is None, expected 'staticgen-prefix'"),
        (rewritten(good, {"version": "2"}), "it is of version '2', and this staticgen reads version '1'"),
        (rewritten(good, {"length": "11"}), "token_ids must be int64 of 11 tokens"),
        (rewritten(good, {"length": "many"}), "invalid literal"),
        (rewritten(good, {"length": "0"}, drop=["token_ids"]), "at least one"),
        (rewritten(good, {"dtype": "int8"}), "dtype is 'int8'"),
        (rewritten(good, {"config": "[]"}), "'config' an object"),
        (rewritten(good, {"config": "[" * 100_000}), ""),
        (rewritten(good, {"layers": "[]"}), "a list of at least one"),
        (rewritten(good, {"layers": '[{"heads": 2}]'}), "key_dim"),
        (rewritten(good, {"layers": layers}), "must be whole numbers above 0"),
        (rewritten(good, drop=["keys.1"]), "tensor 'keys.1' is missing"),
        (rewritten(good, extra=torch.ones(1)), "tensor 'extra' is none of a prefix"),
        (
            rewritten(good, **{"keys.1": keys[:, :7].clone()}),
            r"keys of layer 1 are \[2, 7, 16\], expected \[2, 12, 16\]",
        ),
        (rewritten(good, **{"keys.1": keys[0].clone()}), r"keys of layer 1 are \[12, 16\]"),
        (rewritten(good, **{"keys.1": keys.half()}), "keys of layer 1 are torch.float16, expected torch.float32"),
        (rewritten(good, **{"keys.1": keys / 0}), "not finite"),
        (rewritten(good, token_ids=torch.ones(12)), "token_ids must be int64"),
        *((octets[:length], "") for length in range(0, len(octets), 97)),
    ]
    bad = tmp_path / "bad"
    for content, message in contents:
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=f"bad' is no prefix that can be read: .*{message}"):
            load_prefix(bad)
    with pytest.raises(FileNotFoundError):
        load_prefix(tmp_path / "missing")
    assert load_prefix(good).token_ids.tolist() == COMMON


def test_a_file_is_written_whole_or_not_at_all(tiny_llama, tmp_path, monkeypatch):
    prefix = Session(tiny_llama, max_length=16, backend="eager").prefix(COMMON)
    target = tmp_path / "prefix"
    target.write_bytes(b"what was there")

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail)
        with pytest.raises(OSError, match="no space"):
            prefix.save(target)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"what was there"]
    prefix.save(str(target))
    assert load_prefix(str(target)).token_ids.tolist() == COMMON
    assert list(tmp_path.iterdir()) == [target]
