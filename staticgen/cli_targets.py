"""The commands about targets: ``staticgen profiles`` and ``staticgen plan``. Their results go to standard output."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from staticgen.terminal import console, errors

if TYPE_CHECKING:
    from staticgen.buckets import BucketUse
    from staticgen.planning import Plan
    from staticgen.profiles import Figure, Profile

_JSON = typer.Option("--json", help="Print JSON.")


def profiles(
    name: Annotated[str | None, typer.Argument(help="Show this one, or the one in a .toml file of yours.")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the targets that staticgen knows, or show one with the source of each figure."""
    with errors():
        from staticgen.profiles import load_profile, profile_names  # noqa: PLC0415

        found = [load_profile(each) for each in (profile_names() if name is None else [name])]
        if as_json:
            tables = [{"name": profile.name, **profile.to_dict()} for profile in found]
            print(json.dumps(tables if name is None else tables[0], indent=2, ensure_ascii=False))
        elif name is None:
            _print(_profiles_table(found))
            _print(
                "~ is an estimate; what is left out differs between machines. `staticgen profiles NAME` shows sources."
            )
        else:
            _print(_profile_table(found[0]))


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, local folder or GGUF file. (default: SmolLM2-135M-Instruct)")
    ] = None,
    profile: Annotated[str, typer.Option(help="The target; see staticgen profiles. Or a .toml file.")] = "generic-cpu",
    max_length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together. (default: 512)")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts that run at once.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. (default: the profile's)")] = None,
    weights: Annotated[str, typer.Option(help="How matrices are compressed: none, int8 or int4.")] = "none",
    prompt_lengths: Annotated[
        str | None,
        typer.Option(help="Propose prefill buckets for these: a file with a length a line, or LENGTH COUNT."),
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(help="With --prompt-lengths: buckets at most. (default: as many as the profile's)")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="Bytes that the target has, instead of the profile's.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes/s at which it reads them, instead of the profile's.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's memory and speed. For CPU profiles.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Work out what a model needs on a target, whether it fits, and how fast it can be at best.

    Only the model's config is read, and nothing is compiled.
    """
    with errors():
        os.environ.setdefault("TQDM_DISABLE", "1")
        with console.status("importing"):
            from transformers.utils import logging  # noqa: PLC0415

            from staticgen import planning  # noqa: PLC0415
            from staticgen.buckets import read_prompt_lengths  # noqa: PLC0415
            from staticgen.profiles import load_profile  # noqa: PLC0415
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        lengths = None if prompt_lengths is None else read_prompt_lengths(prompt_lengths)
        target = load_profile(profile)
        if measure:
            with console.status("measuring"):
                target = planning.measured(target, dtype)
        target = planning.with_figures(target, memory=memory, bandwidth=bandwidth)
        with console.status("planning"):
            found = planning.plan(
                model,
                target,
                max_length=max_length,
                batch_size=batch_size,
                dtype=dtype,
                weights=weights,
                prompt_lengths=lengths,
                buckets=buckets,
            )
        if as_json:
            print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        else:
            _print_plan(found)


def _print(renderable: Any) -> None:
    Console(highlight=False, markup=False, emoji=False).print(renderable)


def _profiles_table(found: list[Profile]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "backend", "memory", "bandwidth", "peak", "dtype"):
        table.add_column(
            heading, no_wrap=True, justify="right" if heading in ("memory", "bandwidth", "peak") else "left"
        )
    for profile in found:
        dtype = profile.dtypes[0]
        table.add_row(
            profile.name,
            profile.backend,
            _figure(profile.memory, "B"),
            _figure(profile.bandwidth, "B/s"),
            _figure(profile.peak.get(dtype), "FLOP/s"),
            dtype,
        )
    return table


def _profile_table(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    limits = {"batch_size": profile.limits.batch_size, "max_length": profile.limits.max_length}
    rows = {
        "name": profile.name,
        "description": profile.description,
        "backend": profile.backend,
        "device": profile.device,
        "dtypes": ", ".join(profile.dtypes),
        "layout": profile.layout,
        "attention": profile.form.attention + (", transposed keys" if profile.form.transposed_keys else ""),
        "prefill_buckets": ", ".join(map(str, profile.prefill_buckets)),
        "cache_sizes": ", ".join(map(str, profile.cache_sizes)) or "max_length only",
        "compile_options": ", ".join(f"{key}={value}" for key, value in profile.compile_options.items()) or "none",
        "limits": ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None) or "none known",
    }
    if profile.tpu is not None:
        shared = f", {profile.chips} chips share a program" if profile.chips > 1 else ""
        rows["tpu"] = f"topology {profile.tpu.topology}{shared}"
    for key, value in rows.items():
        table.add_row(key, value)
    for key in ("memory", "bandwidth"):
        if key not in profile.figures():
            table.add_row(key, "differs between machines")
    for key, figure in profile.figures().items():
        unit = {"memory": "B", "bandwidth": "B/s"}.get(key, "OP/s" if "int" in key else "FLOP/s")
        table.add_row(key, f"{_figure(figure, unit)} ({figure.source})")
    return table


def _print_plan(found: Plan) -> None:
    target = f"{found.profile}, {found.dtype}" + ("" if found.weights == "none" else f", weights {found.weights}")
    _print(f"{found.model or 'the default model'} ({found.model_type}) on {target}")
    _print(f"max_length {found.max_length}, batch_size {found.batch_size}\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    active = found.active_parameters
    table.add_row("parameters", _amount(found.parameters, ""))
    if active != found.parameters:
        table.add_row("  met by a token", _amount(active, ""))
    table.add_row("weights, one copy", _amount(found.weights_bytes, "B"))
    table.add_row("cache", _amount(found.cache_bytes, "B"))
    table.add_row(f"programs ({len(found.programs)})", _amount(sum(each.nbytes for each in found.programs), "B"))
    if found.loaded_model_bytes:
        table.add_row("loaded model", _amount(found.loaded_model_bytes, "B"))
    table.add_row("in all", _amount(found.total_bytes, "B"))
    if found.memory is not None:
        table.add_row("of", _amount(found.memory, "B"))
    _print(table)
    if found.fits is not None:
        _print(
            f"{'fits' if found.fits else 'does not fit'}; the largest max_length that does is "
            f"{found.largest_max_length or 'none'}, the largest batch_size {found.largest_batch_size or 'none'}"
        )
    _print("")
    steps = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("step", "cache", "reads", "computes", "at best", "tokens/s", "waits for"):
        steps.add_column(heading, justify="left" if heading in ("step", "waits for") else "right", no_wrap=True)
    for each in found.programs:
        time = ("unknown", "unknown", "") if each.seconds is None else (
            f"{1000 * each.seconds:.2f} ms",
            f"{found.batch_size * each.tokens / each.seconds:.0f}",
            each.bound or "",
        )  # fmt: skip
        name = each.kind if each.kind == "decode" else f"{each.kind} {each.tokens}"
        steps.add_row(name, str(each.cache_length), _amount(each.read_bytes, "B"), _amount(each.flops, "FLOP"), *time)
    _print(steps)
    _print("")
    prompts = "prompts of every length" if found.proposed_buckets is None else f"{found.own_buckets.prompts} prompts"
    _print(f"prefill buckets, {prompts}:")
    _print(_use("the profile's", found.own_buckets))
    if found.proposed_buckets is not None:
        _print(_use("proposed", found.proposed_buckets))
    _print("")
    for note in found.notes:
        _print(f"- {note}")


def _use(name: str, use: BucketUse) -> str:
    sizes = ", ".join(map(str, use.buckets))
    return f"  {name} {sizes}: {100 * use.waste:.1f} % of what is computed is padding, {use.steps} steps"


def _figure(figure: Figure | None, unit: str) -> str:
    return "" if figure is None else ("~" if figure.estimate else "") + _amount(figure.value, unit)


def _amount(number: float, unit: str) -> str:
    """A number with a decimal prefix, in three or four digits: ``819 GB/s``."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {prefix}{unit}".rstrip()
    return f"{number:g} {unit}".rstrip()
