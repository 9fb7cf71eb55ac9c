"""Hardware profiles: what staticgen knows about a target, one TOML file each in ``hw_profiles/``, or a user's own."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_args

from staticgen.errors import UnknownNameError
from staticgen.layouts import LAYOUTS
from staticgen.shapes import Attention, StepForm

DTYPES = ("float32", "bfloat16", "float16")  # in which a model's weights and cache can be
PEAK_DTYPES = (*DTYPES, "float8", "int8", "int4")

_REQUIRED = (
    "description", "backend", "device", "dtypes", "layout", "attention", "transposed_keys", "prefill_buckets",
    "cache_sizes", "compile_options",
)  # fmt: skip
_OPTIONAL = ("late_heads", "fed", "limits", "memory", "bandwidth", "peak", "tpu")
_TOPOLOGY = re.compile(r"v\d+[a-z]*:[1-9]\d*(x[1-9]\d*){1,2}")


@dataclass(frozen=True)
class Figure:
    """A number of a target, and where it is from.

    Attributes:
        value: in bytes, bytes/s or FLOP/s.
        source: the document that says it, and what it says; of an estimate, what it is worked out from.
        estimate: nobody has published it for this target.
    """

    value: float
    source: str
    estimate: bool = False


@dataclass(frozen=True)
class Limits:
    """What a target's compiler refuses to go beyond; None where no such limit is known.

    Attributes:
        batch_size: rows of a step.
        max_length: slots of a cache.
    """

    batch_size: int | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class Topology:
    """Chips of a TPU, as its compiler has them without any being here.

    Attributes:
        topology: generation, and how the chips are arranged: ``"v5e:2x2"``. The compiler has whole hosts only.
        mesh: how many of the chips share a program; 1 where it runs on one of them.
        chip_config: how the compiler takes the cores of a chip, by its own name; None for its default.
    """

    topology: str
    mesh: int = 1
    chip_config: str | None = None

    @property
    def chips(self) -> int:
        """How many chips there are."""
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))


@dataclass(frozen=True)
class Profile:
    """One target.

    Where several chips share a program, its figures are those of one.

    Attributes:
        name: the file's name without ``.toml``.
        description: the target in words.
        backend: the name of the backend that runs it, of staticgen or of one to come.
        device: the backend's name for the device.
        dtypes: of a model, its cache and what is computed from them, as far as the target has them; the first is
            the one to take if nothing else is asked for.
        layout: the cache layout to take if nothing else is asked for.
        form: how the step's attention is written for it.
        prefill_buckets: sizes of prefill steps, ascending.
        cache_sizes: cache lengths at which decode is compiled besides the session's own, ascending.
        compile_options: given to the target's compiler, by its own names.
        limits: what cannot be compiled for it.
        memory: bytes that a program and its cache can have; None where machines with this target differ.
        bandwidth: bytes/s at which that memory is read, at best; None where machines with this target differ.
        peak: FLOP/s at best, dense, by dtype: those of :data:`PEAK_DTYPES` that are known.
        tpu: what its compiler is told to compile for; None where the target is no TPU.
    """

    name: str
    description: str
    backend: str
    device: str
    dtypes: tuple[str, ...]
    layout: str
    form: StepForm
    prefill_buckets: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    compile_options: dict[str, str]
    limits: Limits = field(default_factory=Limits)
    memory: Figure | None = None
    bandwidth: Figure | None = None
    peak: dict[str, Figure] = field(default_factory=dict)
    tpu: Topology | None = None

    @property
    def chips(self) -> int:
        """How many chips share a program."""
        return 1 if self.tpu is None else self.tpu.mesh

    def to_dict(self) -> dict[str, Any]:
        """The entries of its file, as dicts, lists, texts and numbers; :func:`parse_profile` makes the profile of them."""
        table = asdict(self)
        del table["name"]
        table |= table.pop("form")
        table |= {key: list(value) for key, value in table.items() if isinstance(value, tuple)}
        for name in ("limits", "tpu"):
            table[name] = table[name] and {key: value for key, value in table[name].items() if value is not None}
        return {key: value for key, value in table.items() if value is not None}

    def figures(self) -> dict[str, Figure]:
        """Its figures by the names that they have in the file: ``memory``, ``bandwidth``, ``peak.bfloat16`` ..."""
        known = {"memory": self.memory, "bandwidth": self.bandwidth}
        known |= {f"peak.{dtype}": figure for dtype, figure in self.peak.items()}
        return {name: figure for name, figure in known.items() if figure is not None}


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    files = resources.files("staticgen.hw_profiles").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_profile(name: str | Path) -> Profile:
    """The profile called ``name``, or the one in a file of the user's own.

    Args:
        name: one of :func:`profile_names`, or the path of a file, which ends in ``.toml``.

    Raises:
        UnknownNameError: there is none of this name; the message lists those there are.
        FileNotFoundError: there is no such file.
        ValueError: the file is no TOML, or has a wrong, missing or unknown entry; the message names file and entry.
    """
    if isinstance(name, Path) or (isinstance(name, str) and name.endswith(".toml")):
        path = Path(name).expanduser()
        if path.suffix != ".toml":
            raise ValueError(f"profile {str(name)!r}: the file's name must end in .toml")
        if not path.is_file():
            raise FileNotFoundError(f"profile {str(name)!r}: there is no such file")
        return _read(path.stem, str(path), path.read_bytes())
    if name not in profile_names():
        raise UnknownNameError(
            f"unknown profile {name!r}: expected one of {', '.join(profile_names())}, or the path of a .toml file"
        )
    file = resources.files("staticgen.hw_profiles").joinpath(f"{name}.toml")
    return _read(name, f"{name}.toml", file.read_bytes())


def parse_profile(name: str, table: Mapping[str, Any]) -> Profile:
    """The profile called ``name`` with these entries, as its file or :meth:`Profile.to_dict` has them.

    Raises:
        ValueError: a wrong, missing or unknown entry; the message names it, its value and what was expected.
    """
    return _parse(name, name, table)


def _read(name: str, file: str, content: bytes) -> Profile:
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except ValueError as error:  # of the encoding or of the syntax
        raise ValueError(f"profile {file!r} is no TOML in UTF-8: {error}") from error
    return _parse(name, file, table)


def _parse(name: str, file: str, table: Mapping[str, Any]) -> Profile:
    check = _Check(file)
    check.keys("", table, _REQUIRED, _OPTIONAL)
    dtypes = check.names("dtypes", table["dtypes"], DTYPES)
    limits = check.table("limits", table.get("limits", {}))
    check.keys("limits.", limits, (), ("batch_size", "max_length"))
    peak = check.table("peak", table.get("peak", {}))
    check.keys("peak.", peak, (), PEAK_DTYPES)
    return Profile(
        name=name,
        description=check.text("description", table["description"]),
        backend=check.text("backend", table["backend"]),
        device=check.text("device", table["device"]),
        dtypes=dtypes,
        layout=check.one_of("layout", table["layout"], LAYOUTS.names()),
        form=StepForm(
            check.one_of("attention", table["attention"], get_args(Attention)),  # type: ignore[arg-type]
            check.truth("transposed_keys", table["transposed_keys"]),
            check.truth("late_heads", table.get("late_heads", False)),
            check.truth("fed", table.get("fed", False)),
        ),
        prefill_buckets=check.sizes("prefill_buckets", table["prefill_buckets"], least=1),
        cache_sizes=check.sizes("cache_sizes", table["cache_sizes"], least=0),
        compile_options=check.options("compile_options", table["compile_options"]),
        limits=Limits(**{key: check.count(f"limits.{key}", value) for key, value in limits.items()}),
        memory=check.figure("memory", table["memory"]) if "memory" in table else None,
        bandwidth=check.figure("bandwidth", table["bandwidth"]) if "bandwidth" in table else None,
        peak={dtype: check.figure(f"peak.{dtype}", entry) for dtype, entry in peak.items()},
        tpu=check.topology("tpu", table["tpu"]) if "tpu" in table else None,
    )


class _Check:
    """Checks of one entry each, by its key; what passes comes back in the profile's own type."""

    def __init__(self, file: str):
        self._file = file

    def _refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        raise ValueError(f"profile {self._file!r}: {key} is {value!r}, expected {expected}")

    def keys(self, prefix: str, table: Mapping[str, Any], required: Iterable[str], optional: Iterable[str]) -> None:
        known = (*required, *optional)
        for key in (*(key for key in table if key not in known), *(key for key in required if key not in table)):
            problem = "unknown" if key in table else "missing"
            raise ValueError(
                f"profile {self._file!r}: {problem} entry {prefix + str(key)!r}; expected {', '.join(known)}"
            )

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            self._refuse(key, value, "a text")
        return value

    def truth(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def one_of(self, key: str, value: Any, names: Iterable[str]) -> str:
        if not isinstance(value, str) or value not in names:
            self._refuse(key, value, f"one of {', '.join(names)}")
        return value

    def names(self, key: str, value: Any, known: Iterable[str]) -> tuple[str, ...]:
        good = isinstance(value, list) and value and all(isinstance(name, str) and name in known for name in value)
        if not good or len(set(value)) < len(value):
            self._refuse(key, value, f"a list of some of {', '.join(known)}, each once, the default first")
        return tuple(value)

    def count(self, key: str, value: Any) -> int:
        if not _is_count(value):
            self._refuse(key, value, "a whole number from 1 on")
        return int(value)

    def sizes(self, key: str, value: Any, least: int) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(map(_is_count, value)) or value != sorted(set(value)):
            self._refuse(key, value, "ascending whole numbers from 1 on")
        if len(value) < least:
            self._refuse(key, value, "at least one size")
        return tuple(value)

    def table(self, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse(key, value, "a table")
        return value

    def options(self, key: str, value: Any) -> dict[str, str]:
        for name, option in self.table(key, value).items():
            if isinstance(option, bool) or not isinstance(option, str | int | float):
                self._refuse(f"{key}.{name}", option, "a text or a number")
        return {name: str(option) for name, option in value.items()}

    def topology(self, key: str, value: Any) -> Topology:
        entry = self.table(key, value)
        self.keys(f"{key}.", entry, ("topology",), ("mesh", "chip_config"))
        name, config = entry["topology"], entry.get("chip_config")
        if not isinstance(name, str) or not _TOPOLOGY.fullmatch(name):
            self._refuse(
                f"{key}.topology", name, "a generation and how its chips are arranged, as 'v5e:2x2' or 'v4:2x2x1'"
            )
        found = Topology(
            name,
            self.count(f"{key}.mesh", entry.get("mesh", 1)),
            None if config is None else self.text(f"{key}.chip_config", config),
        )
        if found.mesh > found.chips:
            self._refuse(f"{key}.mesh", found.mesh, f"{found.chips} at most, the chips of topology {name!r}")
        return found

    def figure(self, key: str, value: Any) -> Figure:
        entry = self.table(key, value)
        self.keys(f"{key}.", entry, ("value", "source"), ("estimate",))
        number = entry["value"]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            self._refuse(f"{key}.value", number, "a number above 0")
        source = self.text(f"{key}.source", entry["source"])
        return Figure(number, source, self.truth(f"{key}.estimate", entry.get("estimate", False)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
