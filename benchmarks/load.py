"""From a started process to the first token: a bundle, a model that was converted before, a new one, transformers.

    python benchmarks/load.py [--model FOLDER] [--rounds 3]

On Linux. Every run is a process of its own; what counts begins after its imports. The best of the rounds counts; peak memory
is the whole process's, with files that are mapped into it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

IMPORTS = "import json, time, torch, transformers, openvino, staticgen; staticgen.Session; staticgen.completion"
MODEL = "from staticgen.text import load_text_model; from transformers.models.llama import modeling_llama"
END = (
    "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0]\n"
    "print(json.dumps([time.perf_counter() - begun, int(peak) * 1024]))"
)
IDS = "[504, 3575, 282, 4649, 314]"
RUNS = {
    "transformers, from a checkpoint": (
        MODEL,
        f"model, _ = load_text_model(source); model.generate(torch.tensor([{IDS}]), max_new_tokens=1, do_sample=False)",
    ),
    "staticgen, from a checkpoint, nothing kept": (
        MODEL,
        f"model, _ = load_text_model(source); next(staticgen.Session(model, backend='openvino').stream({IDS}))",
    ),
    "staticgen, from a checkpoint, converted before": (
        MODEL,
        f"model, _ = load_text_model(source); next(staticgen.Session(model, backend='openvino').stream({IDS}))",
    ),
    "staticgen, from a bundle": ("pass", f"next(staticgen.load(bundle).stream({IDS}))"),
}


def seconds_and_bytes(imports, work, source, bundle, cache):
    places = f"source, bundle = {source!r}, {bundle!r}"
    code = "\n".join([IMPORTS, imports, places, "begun = time.perf_counter()", work, END])
    environment = {**os.environ, "STATICGEN_CACHE": cache}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    best: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        from staticgen.compile import compile_bundle  # noqa: PLC0415

        from staticgen.text import load_text_model  # noqa: PLC0415

        os.environ["STATICGEN_CACHE"] = "off"
        model, tokenizer = load_text_model(options.model)
        source, bundle, cache = f"{place}/source", f"{place}/bundle", f"{place}/cache"
        model.hf_quantizer = None  # what came from a GGUF file is not quantised any more
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        compile_bundle(model, bundle, tokenizer=tokenizer)
        for number in range(options.rounds + 1):
            for name, (imports, work) in RUNS.items():
                kept = cache if "before" in name else "off"
                found = seconds_and_bytes(imports, work, source, bundle, kept)
                if number:  # the first round fills the cache and the system's own
                    best[name] = min(best.get(name, found), found)
    base = best["transformers, from a checkpoint"][0]
    table = Table("", "seconds to the first token", "to transformers", "peak memory, GB")
    for name, (seconds, peak) in best.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / base:.2f}x", f"{peak / 1e9:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
