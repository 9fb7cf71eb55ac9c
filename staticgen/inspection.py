"""What is in a bundle, and in what two of them, or a bundle and this machine, differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from staticgen.backends import open_backend
from staticgen.bundle import Bundle
from staticgen.compiled import CompiledModel
from staticgen.errors import BackendUnavailableError

# What two bundles of one model have different anyway.
_OWN = ("created", "files", "checksum", "made")


def differences(one: Bundle, other: Bundle) -> list[tuple[str, Any, Any]]:
    """Entries of two manifests that differ: dotted name, value in one, value in the other; None where it is missing."""
    mine, its = dict(_entries(one.manifest)), dict(_entries(other.manifest))
    names = sorted({*mine, *its})
    return [(name, mine.get(name), its.get(name)) for name in names if mine.get(name) != its.get(name)]


def _entries(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if not before and key in _OWN:
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{before}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _entries({str(item.get("name", at)): item for at, item in enumerate(value)}, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def on_this_machine(model: CompiledModel, versions: Mapping[str, str]) -> list[tuple[str, Any, Any]]:
    """In what this machine differs from the one that made a bundle, and whether it can run it.

    Args:
        model: the bundle.
        versions: of the libraries here.

    Returns:
        name, what the bundle says, what is here.
    """
    made = model.bundle.manifest["versions"]
    found: list[tuple[str, Any, Any]] = [
        (f"versions.{name}", made.get(name), versions.get(name))
        for name in sorted({*made, *versions})
        if made.get(name) != versions.get(name)
    ]
    try:
        backend = open_backend(model.backend, model.device, model.compile_options)
    except BackendUnavailableError as error:
        return [*found, ("device", model.device, f"cannot run here: {error}")]
    here = backend.made_for
    for files in model.programs.values():
        for _, made_for in files.compiled:
            found += [
                (f"programs.{files.name}.made_for.{key}", made_for.get(key), here.get(key))
                for key in sorted({*made_for, *here})
                if made_for.get(key) != here.get(key)
            ]
    return found
