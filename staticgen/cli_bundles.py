"""The commands that make bundles and look into them: ``compile``, ``verify``, ``inspect`` and ``cache``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from staticgen.terminal import console, errors, quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Callable

    from staticgen.certificate import Comparison

cache_app = typer.Typer(no_args_is_help=True, help="What was compiled before, and is kept for the next time.")
# What a compile goes through, and what part of the whole each stage takes, roughly: measured with SmolLM2 for a CPU.
STAGES = {
    "import": 3, "load": 2, "step": 1, "convert": 5, "compress": 2, "programs": 5, "compile": 100, "target": 40, "blobs": 100, "reference": 3, "check": 5, "files": 1,
}  # fmt: skip
_NOT_ALWAYS = ("compress", "compile", "target", "blobs")
JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def compile_model(
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's folder; it must not exist.")],
    model: Annotated[
        str | None, typer.Argument(help="Hub id, local folder or GGUF file. (default: SmolLM2-135M-Instruct)")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="The target: a name of `staticgen profiles`, or a file of one's own.")
    ] = "generic-cpu",
    max_length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together. (default: 512)")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts that run at once.")] = 1,
    layout: Annotated[
        str | None, typer.Option(help="The cache layout to use by default. (default: the target's)")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: the target's first)")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="How weights are stored: float16, int8, int4 or int4-g64. (default: as in the model)"),
    ] = None,
    blobs: Annotated[
        bool, typer.Option(help="Keep what the compiler of a GPU or an NPU makes, where it is at hand.")
    ] = True,
    prefill_buckets: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prefill step; repeat for several sizes.")
    ] = None,
    cache_sizes: Annotated[
        list[int] | None, typer.Option(help="Cache lengths of decode below --max-length; repeat for several.")
    ] = None,
) -> None:
    """Compile a model for a target, which need not be here, into a bundle that loads elsewhere.

    Use it with `staticgen generate --model DIR`, or from Python with staticgen.load(DIR).
    """
    with errors():
        begun = time.perf_counter()
        with _stages() as report:
            report("import", "", 0.0)
            quiet_transformers()
            from staticgen.compile import compile_bundle  # noqa: PLC0415
            from staticgen.profiles import load_profile  # noqa: PLC0415
            from staticgen.text import DTYPES, load_text_model  # noqa: PLC0415

            target = load_profile(profile)
            chosen = dtype or target.dtypes[0]
            if chosen not in target.dtypes:
                raise ValueError(
                    f"dtype is {chosen!r}, but profile {target.name!r} has {', '.join(target.dtypes)}; choose one of them"
                )
            if output.exists():
                raise FileExistsError(f"folder {str(output)!r} exists already; choose another or remove it")
            report("load", str(model or "the default model"), 0.0)
            network, tokenizer = load_text_model(model, DTYPES[chosen])
            compiled = compile_bundle(
                network, output, tokenizer=tokenizer, profile=profile, max_length=max_length, batch_size=batch_size,
                layout=layout, prefill_buckets=prefill_buckets or None, cache_sizes=cache_sizes or None,
                weights=weights, blobs=blobs, source=_source(model), report=report,
            )  # fmt: skip
        manifest = compiled.bundle.manifest
        worst = max(one["largest_difference"] for one in manifest["certificate"]["results"])
        console.print(
            f"{output}: {len(compiled.programs)} programs, {compiled.bundle.nbytes / 1e6:.0f} MB | "
            f"{time.perf_counter() - begun:.0f} s, peak memory {_peak_memory() / 1e9:.1f} GB | "
            f"logits within {worst:.2g} of the reference, checked on {manifest['certificate']['checked_on']}",
            style="dim",
            soft_wrap=True,
        )


def _source(model: str | None) -> str:
    """Where a model is from: a hub id, or the name of a folder or file without what is above it."""
    if model is None:
        from staticgen.text import DEFAULT_MODEL  # noqa: PLC0415

        return DEFAULT_MODEL
    return Path(model).expanduser().absolute().name if Path(model).expanduser().exists() else model


def verify(
    folder: Annotated[Path, typer.Argument(help="A bundle.")],
    backend: Annotated[str, typer.Option(help="'jax' for a bundle for TPUs; else the bundle's own.")] = "auto",
    device: Annotated[str | None, typer.Option(help="The backend's name for a device.")] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Run it on this machine's CPU in place of its own device.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Check every file of a bundle, and replay the reference's answers that it holds.

    Prints for each prompt the first token that differs, the largest difference of a logit, and the largest KL
    divergence. Exit code 1 if a token differs that did not differ when the bundle was made.
    """
    with errors():
        from staticgen.certificate import compare, load_golden, stand_in_arguments  # noqa: PLC0415
        from staticgen.compiled import open_compiled  # noqa: PLC0415
        from staticgen.session import Session  # noqa: PLC0415

        model = open_compiled(folder)
        arguments: dict[str, Any] = stand_in_arguments(model) if stand_in else {}
        if device is not None:
            arguments["device"] = device
        session = Session(model, backend=backend, **arguments)
        results = compare(session, load_golden(model.bundle), model.step.vocab_size)
        certificate = model.bundle.manifest["certificate"]
        known = [one["diverges_at"] for one in certificate["results"]]
        worse = [one for one, before in zip(results, known, strict=True) if _is_worse(one, before)]
        if as_json:
            print(
                json.dumps({"on": session.backend.description, "results": [one.to_dict() for one in results]}, indent=1)
            )
        else:
            table = Table("prompt", "tokens compared", "first other token", "largest difference", "KL (nats)")
            for one in results:
                table.add_row(
                    f"{one.prompt_tokens} tokens", str(one.steps), _divergence(one), f"{one.largest_difference:.3g}",
                    f"{one.kl:.3g}",
                )  # fmt: skip
            Console(soft_wrap=True).print(table)
            print(f"{len(model.bundle.manifest['files'])} files are what the manifest says")
            print(f"reference: {certificate['reference']}; here: {session.backend.description}")
        if worse:
            raise typer.Exit(1)


def _is_worse(found: Comparison, known: int | None) -> bool:
    return found.diverges_at is not None and (known is None or found.diverges_at < known)


def _divergence(one: Comparison) -> str:
    return "none" if one.diverges_at is None else f"{one.diverges_at}: {one.found}, not {one.expected}"


def inspect(
    folder: Annotated[Path, typer.Argument(help="A bundle.")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare it with.")] = None,
    as_json: JSON = False,
) -> None:
    """Show what is in a bundle, and in what it differs from this machine, or from another bundle."""
    with errors():
        from staticgen.bundle import library_versions, read_bundle  # noqa: PLC0415
        from staticgen.compiled import CompiledModel  # noqa: PLC0415
        from staticgen.inspection import differences, on_this_machine  # noqa: PLC0415

        model = CompiledModel(read_bundle(folder))
        manifest = dict(model.bundle.manifest)
        against = (
            on_this_machine(model, library_versions())
            if other is None
            else differences(model.bundle, read_bundle(other))
        )
        if as_json:
            listed = [{"name": name, "bundle": mine, "other": its} for name, mine, its in against]
            print(json.dumps({"manifest": manifest, "differences": listed}, indent=1))
            return
        out = Console(soft_wrap=True, highlight=False)
        table = Table(show_header=False)
        target, shapes = manifest["target"], manifest["shapes"]
        rows = {
            "model": f"{manifest['model']['source']} ({manifest['model']['model_type']}), "
            f"{manifest['model']['parameters'] / 1e6:.0f}M parameters",
            "revision": manifest["model"]["revision"] or "unknown",
            "target": f"{target['profile']}: backend {target['backend']}, device {target['device']}",
            "sizes": f"max_length {shapes['max_length']}, batch_size {shapes['batch_size']}, "
            f"prefill_buckets {shapes['prefill_buckets']}, cache_sizes {shapes['cache_sizes']}",
            "layout": manifest["layout"],
            "dtype": f"{manifest['dtype']}, weights {manifest['weights']}",
            "certificate": f"{manifest['certificate']['reference']}; checked on {manifest['certificate']['checked_on']}",
            "created": manifest["created"],
        }
        for name, value in rows.items():
            table.add_row(name, str(value))
        out.print(table)
        files = Table("program", "tokens", "cache", "compiled for")
        for one in model.programs.values():
            compiled = "; ".join(map(_made_for, (made_for for _, made_for in one.compiled)))
            files.add_row(
                one.name, str(one.shape.tokens), str(one.shape.cache_length), compiled or "compiled where it runs"
            )
        out.print(files)
        if accounts := target.get("compiled"):
            out.print(_accounts(accounts))
        out.print(f"{len(manifest['files'])} files, {model.bundle.nbytes / 1e6:.1f} MB, all what the manifest says")
        what = "this machine" if other is None else str(other)
        if not against:
            out.print(f"no difference to {what}")
            return
        differing = Table("", "this bundle", what)
        for name, mine, its in against:
            differing.add_row(name, str(mine), str(its))
        out.print(differing)


def _accounts(accounts: Mapping[str, Mapping[str, Any]]) -> Any:
    """What the TPU's compiler said of each function."""
    table = Table("function", "memory", "temporary", "bytes accessed", "FLOPs", "fits")
    for name, one in accounts.items():
        accessed = "unknown" if one["bytes_accessed"] is None else f"{one['bytes_accessed'] / 1e6:.1f} MB"
        fits = {True: "yes", False: "no", None: "unknown"}[one["fits"]]
        table.add_row(
            name, f"{one['memory'] / 1e6:.1f} MB", f"{one['temporary'] / 1e6:.1f} MB", accessed, f"{one['flops'] / 1e6:.1f}M", fits
        )  # fmt: skip
    return table


def _made_for(made_for: Mapping[str, Any]) -> str:
    if "npu_platform" in made_for:
        return f"NPU {made_for['npu_platform']}"
    if "torch" in made_for:
        return f"{made_for.get('machine')} with {made_for.get('cpu')}, torch {made_for['torch']}"
    return str(made_for.get("full_device_name", "another device"))


@cache_app.command("list")
def cache_list(as_json: JSON = False) -> None:
    """List the compile cache, the entry used last first."""
    with errors():
        cache = _cache()
        entries = cache.entries()
        if as_json:
            listed = [
                {"folder": str(one.folder), "kind": one.kind, "bytes": one.nbytes, "used": one.used, "key": one.key}
                for one in entries
            ]
            print(json.dumps({"folder": str(cache.root), "limit": cache.limit, "entries": listed}, indent=1))
            return
        table = Table("kind", "model", "dtype", "size", "MB", "last used", "name")
        for one in entries:
            key = one.key
            size = f"[{key['batch']}, {key['tokens']}, {key['cache_length']}]" if "tokens" in key else ""
            used = datetime.fromtimestamp(one.used).strftime("%Y-%m-%d %H:%M")
            model = str(key.get("model_type") or key.get("name") or "")
            table.add_row(
                one.kind, model, str(key.get("dtype", "")), size, f"{one.nbytes / 1e6:.1f}", used, one.folder.name
            )
        Console(soft_wrap=True, highlight=False).print(table)
        total = sum(one.nbytes for one in entries)
        print(f"{cache.root}: {len(entries)} entries, {total / 1e6:.0f} MB of {cache.limit / 1e6:.0f} MB at most")


@cache_app.command("clean")
def cache_clean(
    days: Annotated[float, typer.Option(min=0, help="Only what was not used for this many days.")] = 0,
) -> None:
    """Remove what the compile cache holds."""
    with errors():
        gone = _cache().clean(days * 24 * 3600)
        print(f"removed {len(gone)} entries, {sum(one.nbytes for one in gone) / 1e6:.0f} MB")


def _cache() -> Any:
    from staticgen.compile_cache import FOLDER, user_cache  # noqa: PLC0415

    cache = user_cache()
    if cache is None:
        raise ValueError(f"the compile cache is turned off: {FOLDER} says so in the environment")
    return cache


@contextmanager
def _stages() -> Iterator[Callable[[str, str, float], None]]:
    """A bar over the stages of a compile; lines where nobody looks."""
    begun = time.perf_counter()
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left, about"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        stages = {name: size for name, size in STAGES.items() if name not in _NOT_ALWAYS}

        def report(stage: str, detail: str, part: float) -> None:
            nonlocal stages
            if stage not in stages:
                stages = {name: size for name, size in STAGES.items() if name in (*stages, stage)}
            names = list(stages)
            done = sum(stages[name] for name in names[: names.index(stage)]) + part * stages[stage]
            words = f"{stage} {detail}".strip()
            progress.update(task, total=sum(stages.values()), completed=done, description=words)
            if not console.is_terminal:
                console.print(f"{time.perf_counter() - begun:7.1f} s  {words}", soft_wrap=True)

        yield report


def _peak_memory() -> int:
    """The most bytes of memory that this process had at once."""
    status = Path("/proc/self/status")  # of Linux, whose getrusage counts what the process was forked from
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import psutil  # noqa: PLC0415

    memory = psutil.Process().memory_info()
    if hasattr(memory, "peak_wset"):  # Windows
        return int(memory.peak_wset)
    import resource  # noqa: PLC0415

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
