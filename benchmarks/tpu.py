"""What the TPU's compiler says of one decode step, for several ways to write it; no TPU is needed.

    python benchmarks/tpu.py --profile tpu-v5e

The model has the sizes of SmolLM2-135M and random weights: the compiler does not look at numbers. Each way is a choice of
how attention is written, how the cache lies, and how the new keys and values get into it. Of each: bytes that a step
reads and writes in main memory against those of weights and cache, temporary memory against the weights, and whether the
cache is updated where it is.
"""

from __future__ import annotations

import argparse
import sys
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from staticgen.compile import account_all
from transformers import LlamaConfig, LlamaForCausalLM

from staticgen.backends.xla import XlaBackend
from staticgen.cache import KVBuffers
from staticgen.device_functions import Drafts
from staticgen.shapes import StepForm, StepShape
from staticgen.step import Step

SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def stacks(buffers, new):
    """Of each stack its window, itself, what is new for it, and the dimension of its slots."""
    count = len(buffers.keys)
    for size, (keys, values) in buffers._stacks.items():
        for stack, offset, dim in ((keys, 0, keys.dim() + buffers._key_dim), (values, count, 3)):
            fresh = torch.stack([new[offset + index] for index in buffers._members[size]])
            yield size.window, stack, fresh.transpose(-1, -2) if dim == 4 else fresh, dim


def put_one_hot(self, new, slots):
    """Compare every slot with the one that is written."""
    for window, stack, fresh, dim in stacks(self, new):
        shape = [1] * 5
        shape[dim] = stack.shape[dim]
        here = (torch.arange(stack.shape[dim], device=stack.device) == slots[window].long()).reshape(shape)
        stack.copy_(torch.where(here, fresh, stack))


def put_shift(self, new, slots):
    """Move everything to the left by one."""
    for _, stack, fresh, dim in stacks(self, new):
        stack.copy_(torch.cat([stack.narrow(dim, 1, stack.shape[dim] - 1), fresh], dim=dim))


def put_layers(self, new, slots):
    """Write each layer by itself."""
    count = len(self.keys)
    for index, layer in enumerate(self.spec.layers):
        slot = slots[layer.window].long()
        fresh = new[index].transpose(-1, -2) if self.transposed_keys else new[index]
        self.keys[index].index_copy_(3 if self.transposed_keys else 2, slot, fresh)
        self.values[index].index_copy_(2, slot, new[count + index])


SPLIT = StepForm()
WAYS = {
    "ring, attention split": (SPLIT, None),
    "ring, attention concat": (StepForm(attention="concat"), None),
    "ring, attention sdpa": (StepForm(attention="sdpa"), None),
    "ring, keys transposed": (StepForm(transposed_keys=True), None),
    "ring, layer by layer": (SPLIT, put_layers),
    "ring, one-hot": (SPLIT, put_one_hot),
    "shift": (SPLIT, put_shift),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tpu-v5e")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cache", type=int, nargs="+", default=[512, 4096], help="slots")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=options.layers)).to(torch.bfloat16).eval()
    programs = {}
    for way, (form, put) in WAYS.items():
        step, backend = Step(model, form), XlaBackend("cpu")
        run_step, _ = backend.take(step)
        for length in options.cache:
            draft = Drafts(step, StepShape(options.batch, 1, length), run_step).loop(sampled=False)
            with mock.patch.object(KVBuffers, "put_token_", put or KVBuffers.put_token_):
                programs[f"{way}; {length}"] = backend.lower(draft)[0]
    accounts = account_all(programs, options.profile)
    table = Table(
        title=f"One greedy step of {options.batch} rows, {options.layers} layers, bfloat16, {options.profile}"
    )
    for title in (
        "",
        "cache",
        "bytes accessed / (weights + cache)",
        "temporary / weights",
        "cache in place",
        "MB in all",
    ):
        table.add_column(title, justify="left" if title == "" else "right")
    for name, found in accounts.items():
        way, _, length = name.partition("; ")
        ratio = (
            "refused" if found.bytes_accessed is None else f"{found.bytes_accessed / (found.weights + found.cache):.2f}"
        )
        in_place = "yes" if found.aliased >= found.cache else "no"
        table.add_row(
            way, length, ratio, f"{found.temporary / found.weights:.1%}", in_place, f"{found.memory / 1e6:.0f}"
        )
    Console(width=120).print(table)
    print(f"compiler: {next(iter(accounts.values())).compiler}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
