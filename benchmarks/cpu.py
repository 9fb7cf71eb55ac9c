"""Decode speed on this machine's CPU, against transformers' own generate in the same run.

    python benchmarks/cpu.py [--model FOLDER] [--backend openvino inductor] [--cache 512 4096] [--tokens 100] [--rounds 3]

Prints a table of tokens per second and ratios: to transformers with its dynamic cache, and to the same
backend at the smallest cache size. The rounds alternate between all contestants and the best of each
counts, so that noise of the machine hits them alike. With --fill the cache is full of real tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from staticgen import Session
from staticgen.text import load_text_model


def transformers_seconds_per_token(model, ids, tokens):
    def run(count):
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        return time.perf_counter() - start

    return (run(tokens + 1) - run(1)) / tokens


def session_seconds_per_token(session, ids, tokens):
    session.generate(ids, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1)
    return session.stats.last.seconds_per_token


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--backend", nargs="+", default=["openvino"])
    parser.add_argument("--layout", default="ring")
    parser.add_argument("--cache", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fill", action="store_true", help="a prompt that fills the cache but for the new tokens")
    options = parser.parse_args()

    model, tokenizer = load_text_model(options.model)
    short = tokenizer("Once upon a time, in a village by the sea, there was", return_tensors="pt").input_ids
    sessions = {
        (backend, length): Session(model, max_length=length, backend=backend, layout=options.layout)
        for backend in options.backend
        for length in options.cache
    }
    best: dict[tuple[str, int], float] = {}
    reference = ("transformers", 0)

    def keep(name, seconds):
        best[name] = min(seconds, best.get(name, seconds))

    for _ in range(options.rounds):
        keep(reference, transformers_seconds_per_token(model, short, options.tokens))
        for name, session in sessions.items():
            ids = short
            if options.fill:
                ids = short.repeat(1, name[1] // short.shape[1] + 1)[:, : name[1] - options.tokens - 1]
            keep(name, session_seconds_per_token(session, ids, options.tokens))

    table = Table(title=f"{torch.get_num_threads()} threads")
    for column in ("", "ms/token", "tokens/s", "to transformers", "to smallest cache"):
        table.add_column(column)
    for name, seconds in best.items():
        backend, length = name
        label, smaller = "transformers, dynamic cache", ""
        if name in sessions:
            label = f"staticgen, {sessions[name].backend.description}, cache {length}"
            smaller = f"{best[backend, min(options.cache)] / seconds:.2f}x"
        table.add_row(
            label, f"{1000 * seconds:.1f}", f"{1 / seconds:.1f}", f"{best[reference] / seconds:.2f}x", smaller
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
