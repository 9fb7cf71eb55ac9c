"""Whether Intel's NPU compiler takes every program of a model: decode at each cache size, and each prefill bucket.

    python benchmarks/npu_check.py --short              tiny models of five families, for every generation of NPU
    python benchmarks/npu_check.py [--model FOLDER]     a real model (SmolLM2-135M), in float16 and int8

No NPU is needed. The compiler is an executable that --compiler or STATICGEN_NPU_COMPILER names, or the one of
OpenVINO's NPU plugin. Prints a table of seconds and blob sizes and exits with 1 if a program was refused; where no
compiler is at hand it says what is missing, prints SKIPPED, and exits with 0. Blobs are compiled and not run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from staticgen.compile import PLATFORMS, compile_blob, compress_weights

from staticgen import BackendUnavailableError, CompileError
from staticgen.backends.ir import convert_step, write_ir
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape
from staticgen.step import step_for
from staticgen.text import load_text_model

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2048,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {"head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 2048}
TINY = {
    "Gemma 3": ("Gemma3ForCausalLM", {**SIZES, **GEMMA}),
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "Llama": ("LlamaForCausalLM", SIZES),
    "Phi-3": ("Phi3ForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 64}),
}


def tiny_model(name):
    """A model of this family with random weights and heads of 64 numbers, as real ones have."""
    cls, settings = TINY[name]
    model_class = getattr(transformers, cls)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**settings)).eval()


def check(rows, name, model, weights, options):
    """Compile all programs of a model for all platforms; a row of the table for each."""
    profile = load_profile("intel-npu")
    step = step_for(model, profile.form)
    shapes = {f"decode, cache {length}": StepShape(1, 1, length) for length in options.cache}
    longest = max(options.cache)
    shapes |= {f"prefill {tokens}": StepShape(1, tokens, longest) for tokens in profile.prefill_buckets}
    with tempfile.TemporaryDirectory() as folder:
        converted = None if weights == "f16" else compress_weights(convert_step(step), weights)
        for program in write_ir(step, shapes, Path(folder), converted, compress_to_fp16=True):
            for platform in options.platform:
                blob = Path(folder, "program.blob")
                blob.unlink(missing_ok=True)
                row = [name, weights, program.name, platform]
                paths = program.paths
                try:
                    made = compile_blob(
                        paths["model"], blob, platform, weights=paths["weights"], compiler=options.compiler
                    )
                except CompileError as error:
                    row += ["", "refused", str(error)]
                else:
                    row += [f"{made.seconds:.1f}", f"{made.nbytes / 1e6:.1f}", ""]
                rows.append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="tiny models with random weights")
    parser.add_argument("--family", nargs="+", default=list(TINY), choices=list(TINY), help="of the tiny models")
    parser.add_argument("--model", help="folder or GGUF file; SmolLM2-135M if left out")
    parser.add_argument("--weights", nargs="+", default=None, help="f16, int8, int4, int4-g64")
    parser.add_argument("--cache", type=int, nargs="+", default=None, help="slots of the decode programs")
    parser.add_argument("--platform", nargs="+", default=list(PLATFORMS), choices=list(PLATFORMS))
    parser.add_argument("--compiler", help="an executable that takes MODEL.xml OUT.blob PLATFORM")
    options = parser.parse_args()
    options.cache = options.cache or [256 if options.short else 512]
    options.weights = options.weights or ["f16", "int8"]

    rows: list[list[str]] = []
    try:
        if options.short:
            for name in options.family:
                # int8 rewrites the matmuls of all models alike, so that one stands for the others.
                for weights in options.weights if name == "Llama" else options.weights[:1]:
                    check(rows, name, tiny_model(name), weights, options)
        else:
            model, _ = load_text_model(options.model)
            for weights in options.weights:
                check(rows, options.model or "SmolLM2-135M", model, weights, options)
    except BackendUnavailableError as error:
        print(f"SKIPPED: {error}")
        return 0

    table = Table(title="Intel's NPU compiler")
    for column in ("model", "weights", "program", "NPU", "seconds", "MB", "reason"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    refused = sum(row[5] == "refused" for row in rows)
    print(f"{len(rows) - refused} of {len(rows)} programs compiled")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
