"""Parity and decode speed on one NVIDIA GPU, against transformers and the copy bandwidth of the same run.

    python benchmarks/gpu.py [--seconds 450] [--json FILE] [--compile none inductor] [--tiny]

First every model family, tiny and in float32, token for token against transformers. Then decode of Llama-like
models with random weights in bfloat16 (1B and 8B; 1, 8 and 32 rows; caches of 2048 and 16384 slots, over which every
step attends): staticgen, transformers with its static cache and torch.compile, and transformers with its dynamic
cache and a prompt that fills it as far. All are timed by the clock around a long call less a short one. The most telling
comes first: two cases with all that is asked for, then the others without inductor, then inductor for those. What does not
fit in the seconds is listed as not run; the JSON file is written anew after every figure.
``--tiny`` runs the same code on the CPU through the null graph, with tiny models; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from staticgen import Session

TESTS = Path(__file__).parent.parent / "tests"
BUCKETS = [16]
LLAMAS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False}  # fmt: skip
# (model, rows, cache length), the most telling first.
CASES = [
    ("8B", 1, 2048), ("1B", 1, 2048), ("8B", 1, 16384), ("8B", 8, 2048), ("8B", 32, 2048), ("1B", 8, 2048),
    ("1B", 32, 2048), ("1B", 1, 16384), ("8B", 8, 16384), ("1B", 8, 16384), ("8B", 32, 16384), ("1B", 32, 16384),
]  # fmt: skip


@dataclass
class Figure:
    """One measurement; ``problem`` says why there is none."""

    model: str
    rows: int
    cache: int
    runtime: str
    tokens_per_second: float = 0.0
    milliseconds_per_step: float = 0.0
    bandwidth_share: float = 0.0
    compiles: int = 0
    compile_seconds: float = 0.0
    problem: str = ""


def random_model(sizes):
    """A Llama of these sizes with random weights, cheaply: a few million normal numbers over and over."""
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=32768, pad_token_id=0, eos_token_id=None, bos_token_id=1
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
                continue
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), block.numel()):
                flat[begin : begin + block.numel()].copy_(block[: flat.numel() - begin])
    # Buffers that to_empty left unset.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def bytes_per_step(model, rows, cache):
    """What a decode step must read: every weight but the embedding's other rows, and the cache."""
    config = model.config
    weights = {id(p): p.nbytes for p in model.parameters()}
    if not config.tie_word_embeddings:
        weights.pop(id(model.get_input_embeddings().weight))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2
    return sum(weights.values()) + keys * rows * cache


class Bench:
    def __init__(self, options):
        self.tiny, self.options = options.tiny, options
        self.deadline = time.perf_counter() + options.seconds
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.target = {"backend": "cuda", "device": "null" if self.tiny else "cuda"}
        self.tokens = 9 if self.tiny else 65
        self.figures: list[Figure] = []
        self.said: dict = {}  # what goes to the file besides

    @property
    def left(self):
        return self.deadline - time.perf_counter()

    def synchronise(self):
        if not self.tiny:
            torch.cuda.synchronize()

    def free(self):
        torch._dynamo.reset()
        gc.collect()
        if not self.tiny:
            torch.cuda.empty_cache()

    def copy_bandwidth(self):
        """Bytes/s read and written by a copy larger than any cache; the best of ten."""
        source = torch.zeros(1 << (20 if self.tiny else 32), dtype=torch.uint8, device=self.device)
        target, best = torch.empty_like(source), float("inf")
        for _ in range(10):
            self.synchronise()
            start = time.perf_counter()
            target.copy_(source)
            self.synchronise()
            best = min(best, time.perf_counter() - start)
        return 2 * source.nbytes / best

    def parity(self):
        """Families whose tokens differ from transformers' or that fail, with what was said; those not run; how many agree."""
        sys.path.insert(0, str(TESTS))
        from families import FAMILIES  # noqa: PLC0415 - of the tests, which are beside this file
        from models import new_tokens, random_prompt, reference  # noqa: PLC0415

        wrong, late, good = {}, [], 0
        families = [family for family in FAMILIES if family.model_class is not None]
        for family in families[:2] if self.tiny else families:
            variant = next(iter(family.variants))
            if self.left < 0.8 * self.options.seconds:
                late.append(family.name)
                continue
            try:
                model = family.build(variant)
                prompts = [random_prompt(length) for length in (3, 12)]
                session = Session(
                    model,
                    max_length=32,
                    batch_size=2,
                    prefill_buckets=BUCKETS,
                    backend_options={"compile": "none"},
                    **self.target,
                )
                found = new_tokens(session.generate(prompts, max_new_tokens=12), 12)
                if session.stats.last.loop != "device":
                    wrong[family.name] = session.stats.last.loop_reason
                elif found != [reference(model, prompt, 12) for prompt in prompts]:
                    wrong[family.name] = "other tokens"
                else:
                    good += 1
            except Exception as error:
                wrong[family.name] = f"{type(error).__name__}: {error}"[:300]
        return wrong, late, good

    def staticgen(self, model, rows, cache, compiler, figure):
        session = Session(
            model, max_length=cache, batch_size=rows, cache_sizes=[], prefill_buckets=BUCKETS,
            backend_options={"compile": compiler, "attention": self.options.attention}, **self.target,
        )  # fmt: skip
        figure.compiles, figure.compile_seconds = session.stats.compiles, session.stats.compile_seconds
        ids = torch.randint(3, 128, (rows, 16), generator=torch.Generator().manual_seed(1))

        def run(count):
            begin = time.perf_counter()
            session.generate(ids, torch.ones_like(ids), max_new_tokens=count, do_sample=False)
            assert count == 1 or session.stats.last.loop == "device"
            return time.perf_counter() - begin

        seconds = self.per_step(run)
        assert session.stats.compiles == figure.compiles
        return seconds

    def per_step(self, run):
        """Seconds of a decode step: a long call less a short one, so that prefill is in both."""
        short = min(run(1) for _ in range(2))
        return (min(run(self.tokens) for _ in range(2)) - short) / (self.tokens - 1)

    def transformers(self, given_model, rows, cache, static, figure):
        """Seconds of a decode step."""
        model = self.copy(given_model)
        prompt = 16 if static else cache - self.tokens
        ids = torch.randint(3, 128, (rows, prompt), generator=torch.Generator().manual_seed(1)).to(self.device)
        settings = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
        given, counters = {}, torch._dynamo.utils.counters["stats"]
        graphs, start = counters["unique_graphs"], time.perf_counter()
        if static:
            config = model.config
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            shared = transformers.StaticCache(config=config, max_cache_len=cache)
            shared.early_initialization(rows, config.num_key_value_heads, head, model.dtype, self.device)
            given = {"past_key_values": shared}  # with which generate compiles its decode step by itself, on a GPU
            if self.tiny:
                compiler = transformers.CompileConfig(backend="eager", mode=None)
                compiler._compile_all_devices = True
                given["compile_config"] = compiler

        def run(count):
            if static:
                shared.reset()
            self.synchronise()
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **given, **settings)
            self.synchronise()
            return time.perf_counter() - begin

        with torch.no_grad():
            run(4)
            run(4)
            figure.compile_seconds = time.perf_counter() - start
            figure.compiles = counters["unique_graphs"] - graphs
            if static and not figure.compiles:
                raise RuntimeError("transformers compiled nothing")
            return self.per_step(run)

    def measure(self, case, runtime, work, bandwidth, needed):
        figure = Figure(*case, runtime)
        self.figures.append(figure)
        if self.left < (0 if self.tiny else 25):
            figure.problem = "not run: no time"
            return
        try:
            seconds = work(figure)
            figure.milliseconds_per_step = 1000 * seconds
            figure.tokens_per_second = case[1] / seconds
            figure.bandwidth_share = needed / seconds / bandwidth
        except Exception as error:
            figure.problem = f"{type(error).__name__}: {error}"[:300]
        finally:
            print(figure, flush=True)
            self.free()
            self.save()

    def save(self):
        """What there is so far: a run that is stopped has said that much."""
        if self.options.json:
            result = {**self.said, "figures": [asdict(figure) for figure in self.figures]}
            self.options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

    def speed(self, bandwidth):
        cases = [(name, rows, 32) for name, rows, _ in CASES[:1]] if self.tiny else CASES
        names = list(dict.fromkeys(name for name, _, _ in cases))
        models = {name: random_model(TINY if self.tiny else LLAMAS[name]) for name in names}
        # Each contestant's weights are on the GPU while it runs, and no longer.
        plain = [compiler for compiler in self.options.compile if compiler == "none"]
        slow = [compiler for compiler in self.options.compile if compiler != "none"]
        for case in cases[:2]:
            self.ours(case, models[case[0]], bandwidth, self.options.compile)
            self.theirs(case, models[case[0]], bandwidth)
        for case in cases[2:]:
            self.ours(case, models[case[0]], bandwidth, plain)
            self.theirs(case, models[case[0]], bandwidth)
        for case in cases[2:]:
            self.ours(case, models[case[0]], bandwidth, slow)

    def ours(self, case, model, bandwidth, compilers):
        """staticgen at one size."""
        _, rows, cache = case
        needed = bytes_per_step(model, rows, cache)
        for compiler in compilers:
            runtime = "staticgen cuda" + (f", compile={compiler}" if compiler != "none" else "")
            work = partial(self.staticgen, model, rows, cache, compiler)
            self.measure(case, runtime, work, bandwidth, needed)

    def theirs(self, case, model, bandwidth):
        """transformers at one size."""
        _, rows, cache = case
        needed = bytes_per_step(model, rows, cache)
        static = partial(self.transformers, model, rows, cache, True)
        self.measure(case, "transformers, static cache, torch.compile", static, bandwidth, needed)
        runtime = "transformers, dynamic cache"
        if rows * cache > 300_000:
            self.figures.append(Figure(*case, runtime, problem="not run: so long a prompt takes too long"))
        else:
            self.measure(case, runtime, partial(self.transformers, model, rows, cache, False), bandwidth, needed)

    def copy(self, model):
        """The model on the GPU; the one given stays where it is, unchanged."""
        with torch.device("meta"):
            other = type(model)(model.config)
        state = {name: tensor.to(self.device, copy=True) for name, tensor in model.state_dict().items()}
        other.load_state_dict(state, assign=True)
        other.tie_weights()
        other.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.device)
        return other.eval()


def show(bench):
    console, said = Console(width=140), bench.said
    console.print(
        f"{said['device']}: copy bandwidth {said['bandwidth'] / 1e12:.3f} TB/s; torch {said['torch']}, "
        f"transformers {said['transformers']}"
    )
    console.print(f"parity in float32: {said['families']} families agree with transformers token for token")
    for name, reason in said["wrong"].items():
        console.print(f"  {name}: {reason}", markup=False)
    if said["late"]:
        console.print(f"  not run for want of time: {', '.join(said['late'])}")
    table = Table(title="decode, bfloat16, greedy")
    for column in ("model", "rows", "cache", "", "tokens/s", "ms/step", "% of bandwidth", "graphs", "compile s"):
        table.add_column(column)
    for one in bench.figures:
        cells = [one.model, str(one.rows), str(one.cache), one.runtime]
        if one.problem:
            cells += [one.problem]
        else:
            cells += [
                f"{one.tokens_per_second:.1f}",
                f"{one.milliseconds_per_step:.2f}",
                f"{100 * one.bandwidth_share:.0f}",
            ]
            cells += [str(one.compiles), f"{one.compile_seconds:.0f}"]
        table.add_row(*cells)
    console.print(table)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=450, help="of all work together; what comes later is not begun"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--compile", nargs="+", default=["none", "inductor"], choices=["none", "inductor"])
    parser.add_argument("--attention", default="spread", choices=["spread", "split", "concat", "sdpa"])
    parser.add_argument("--tiny", action="store_true", help="on the CPU through the null graph, with tiny models")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.compile = ["none"]  # the null graph cannot see what compiled code does
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU; --tiny runs the same code without one")
    bench = Bench(options)
    device = "the CPU, through the null graph" if options.tiny else torch.cuda.get_device_name()
    bandwidth = bench.copy_bandwidth()
    wrong, late, good = bench.parity()
    bench.said = {
        "date": time.strftime("%Y-%m-%d"), "device": device, "bandwidth": bandwidth, "families": good, "wrong": wrong,
        "late": late, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    bench.speed(bandwidth)
    show(bench)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
