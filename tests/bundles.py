"""Bundles of tiny models, and what can be done to their folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import models
import texts
from staticgen.compile.bundles import compile_bundle

MANIFEST = "manifest.json"


def compile_tiny(folder, model=None, **arguments):
    """A bundle of a one-layer Llama that knows bytes, or of another model."""
    if model is None:
        model = models.llama(vocab_size=259, num_hidden_layers=1, eos_token_id=2)
        arguments = {"tokenizer": texts.byte_level(), **arguments}
    sizes = {"max_length": 32, "batch_size": 2, "prefill_buckets": [8], "cache_sizes": [16]}
    return compile_bundle(model, folder, **{**sizes, **arguments})


def copy(made, folder):
    """A copy that shares its files with ``made``: they are to be replaced, never written to."""
    shutil.copytree(made, folder, copy_function=os.link)
    return folder


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def names(folder):
    """All files, the manifest among them."""
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def render(manifest):
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors="surrogatepass")


def read(folder):
    return json.loads((folder / MANIFEST).read_bytes())


def write(folder, manifest):
    """Write a manifest with the checksum that it should have."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    replace(folder / MANIFEST, render({**rest, "checksum": hashlib.sha256(render(rest)).hexdigest()}))


def reseal(folder):
    """Make the manifest say what is in the files now."""
    manifest = read(folder)
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write(folder, manifest)
