"""The command ``staticgen devices``: what can run here, what is missing, and what to type next."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from staticgen.devices import Target, find_devices
from staticgen.terminal import errors


def devices(
    backend: Annotated[
        str | None,
        typer.Argument(
            help="One of npu, gpu, openvino, cuda, xla, jax, intel_npu, inductor and eager; all without it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say for every backend what this machine has and lacks, and what to type next.

    With a backend's name, only that; then the exit code is 1 when it cannot be used here.
    """  # fmt: skip
    with errors():
        targets = find_devices(backend)
        if as_json:
            print(json.dumps([asdict(target) for target in targets], indent=2, ensure_ascii=False))
        else:
            print("\n\n".join(_lines(target) for target in targets))
        if backend is not None and not targets[0].usable:
            raise typer.Exit(1)


def _lines(target: Target) -> str:
    """A target in lines of plain text."""
    lines = [f"{target.name}: {'can be used' if target.usable else 'cannot be used here'}"]
    width = max(len(finding.what) for finding in target.findings)
    for finding in target.findings:
        lines.append(f"  {finding.status:7}  {finding.what:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"  {'':7}  {'':{width}}  -> {finding.fix}")
    if target.next:
        lines.append(f"  next: {target.next}")
    return "\n".join(lines)
