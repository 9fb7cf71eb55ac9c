"""Hardware profiles: what staticgen knows about a target, one TOML file each in ``hw_profiles/``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from staticgen.errors import UnknownNameError
from staticgen.shapes import StepForm

_SWITCHES = ("transposed_keys", "late_heads", "fed")  # of the step's form


@dataclass(frozen=True)
class Profile:
    """One target.

    Attributes:
        name: the file's name without ``.toml``.
        description: the target in words.
        form: how the step's attention is written for it.
        prefill_buckets: sizes of prefill steps, ascending.
        cache_sizes: cache lengths at which decode is compiled besides the session's own, ascending.
        compile_options: given to the target's compiler, by its own names.
    """

    name: str
    description: str
    form: StepForm
    prefill_buckets: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    compile_options: dict[str, str]


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    files = resources.files("staticgen.hw_profiles").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        UnknownNameError: there is none of this name.
        ValueError: the file has a wrong, missing or unknown entry; the message names it.
    """
    if name not in profile_names():
        raise UnknownNameError(f"unknown profile {name!r}: expected one of {', '.join(profile_names())}")
    text = resources.files("staticgen.hw_profiles").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_profile(name, tomllib.loads(text))


def parse_profile(name: str, table: dict[str, Any]) -> Profile:
    """Check a profile's entries; see :func:`load_profile` for the errors."""
    known = {"description", "attention", *_SWITCHES, "prefill_buckets", "cache_sizes", "compile_options"}
    for key in table.keys() ^ known:
        problem = "unknown" if key in table else "missing"
        raise ValueError(f"profile {name!r}: {problem} entry {key!r}; a profile has {', '.join(sorted(known))}")
    if table["attention"] not in ("split", "concat"):
        raise ValueError(f"profile {name!r}: attention is {table['attention']!r}, expected 'split' or 'concat'")
    for key in _SWITCHES:
        if not isinstance(table[key], bool):
            raise ValueError(f"profile {name!r}: {key} is {table[key]!r}, expected true or false")
    if not isinstance(table["compile_options"], dict):
        raise ValueError(f"profile {name!r}: compile_options is {table['compile_options']!r}, expected a table")
    for key in ("prefill_buckets", "cache_sizes"):
        sizes = table[key]
        whole = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
        if not whole or sizes != sorted(set(sizes)) or (key == "prefill_buckets" and not sizes):
            raise ValueError(f"profile {name!r}: {key} is {sizes!r}, expected ascending whole numbers")
    return Profile(
        name=name,
        description=table["description"],
        form=StepForm(table["attention"], **{key: table[key] for key in _SWITCHES}),
        prefill_buckets=tuple(table["prefill_buckets"]),
        cache_sizes=tuple(table["cache_sizes"]),
        compile_options={key: str(value) for key, value in table["compile_options"].items()},
    )
