"""What was compiled before, kept in the user's cache folder: converted models, their programs, unpacked checkpoints.

An entry is a folder with a manifest like a bundle's (:mod:`staticgen.bundle`), which holds the key too: everything that
its content depends on. It is found by the key's digest, checked when it is read, and dropped when it is damaged. The
entries that were used longest ago go first when all of them together are too large.

``STATICGEN_CACHE`` names the folder, or says ``off``; ``STATICGEN_CACHE_BYTES`` is the most that it may take.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from staticgen.bundle import MANIFEST, Bundle, new_folder, read_bundle, write_manifest
from staticgen.errors import BundleError

logger = logging.getLogger("staticgen")

FOLDER, LIMIT = "STATICGEN_CACHE", "STATICGEN_CACHE_BYTES"
DEFAULT_LIMIT = 20 * 10**9
NONE_YET = "there is none yet"
KINDS = ("checkpoint", "model", "program")
# Folders in which libraries keep what they have compiled themselves, each an entry whose kind is its name.
LIBRARIES = ("jax", "torch_xla")


@dataclass(frozen=True)
class Entry:
    """One entry, as ``staticgen cache list`` shows it.

    Attributes:
        folder: where it is.
        kind: of :data:`KINDS` or :data:`LIBRARIES`; or ``"unfinished"``, left by a process that was killed, or ``"damaged"``.
        key: what its content depends on.
        nbytes: bytes of its files.
        used: seconds since the epoch when it was used last.
    """

    folder: Path
    kind: str
    key: Mapping[str, Any]
    nbytes: int
    used: float


class CompileCache:
    """The entries in one folder; any number of processes may use it at once.

    Args:
        root: the folder; it is made when something is stored.
        limit: bytes that all entries may take.
    """

    def __init__(self, root: Path, limit: int = DEFAULT_LIMIT):
        self.root, self.limit = root, limit

    def find(self, kind: str, key: Mapping[str, Any]) -> Bundle | None:
        """The entry with this key, if it is there and whole."""
        folder = self._folder(kind, key)
        try:
            found = read_bundle(folder)
        except FileNotFoundError:
            return None
        except BundleError as error:
            logger.warning("the compile cache's entry is damaged and is dropped: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # somebody else's folder, or just dropped; what was read is good
            os.utime(folder)
        return found

    def store(self, kind: str, key: Mapping[str, Any], write: Callable[[Path], None]) -> Bundle:
        """Keep what ``write`` puts into a folder; if another process was faster, what that one kept.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder = self._folder(kind, key)
        try:
            with new_folder(folder) as unfinished:
                write(unfinished)
                write_manifest(unfinished, {"kind": kind, "key": key})
        except FileExistsError:
            if (found := self.find(kind, key)) is not None:
                return found
            raise
        self._shrink(keep=folder)
        return read_bundle(folder)

    def try_to_store(self, kind: str, key: Mapping[str, Any], write: Callable[[Path], None]) -> Bundle | None:
        """:meth:`store`, or a warning that says why nothing is kept."""
        try:
            return self.store(kind, key, write)
        except OSError as error:
            warnings.warn(
                f"the compile cache {str(self.root)!r} cannot be used ({error}), so that nothing is kept; let {FOLDER} name "
                "another folder, or say off",
                UserWarning,
                stacklevel=3,
            )
            return None

    def library(self, name: str) -> Path:
        """The folder of a library, one of :data:`LIBRARIES`, for it to make; what is in it is the library's own."""
        if name not in LIBRARIES:
            raise ValueError(f"library is {name!r}, expected one of {', '.join(LIBRARIES)}")
        folder = self.root / name
        with contextlib.suppress(OSError):  # there is none yet
            os.utime(folder)
        return folder

    def difference(self, kind: str, key: Mapping[str, Any]) -> str:
        """Why there is no entry with this key: the fields in which the most similar one differs."""
        others = [entry.key for entry in self.entries() if entry.kind == kind]
        if not others:
            return NONE_YET
        differing = [{name for name in {*key, *other} if key.get(name) != other.get(name)} for other in others]
        nearest = min(range(len(others)), key=lambda index: len(differing[index]))
        words = [
            f"{name} is {key.get(name)!r}, not {others[nearest].get(name)!r}" for name in sorted(differing[nearest])
        ]
        return "; ".join(words) or "it has just been dropped"

    def entries(self) -> list[Entry]:
        """All entries, the one used last first."""
        return sorted(self._read_entries(), key=lambda entry: -entry.used)

    def _read_entries(self) -> Iterator[Entry]:
        folders = self.root.iterdir() if self.root.is_dir() else iter(())
        for folder in folders:
            try:
                used = folder.stat().st_mtime
                sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
            except OSError:  # dropped meanwhile
                continue
            kind, key = "damaged", {}
            if folder.name in LIBRARIES:
                kind = folder.name
            elif folder.name.endswith(".tmp"):
                kind = "unfinished"
            else:
                try:
                    manifest = json.loads((folder / MANIFEST).read_bytes())
                    kind, key = str(manifest["kind"]), dict(manifest["key"])
                except (OSError, ValueError, KeyError, TypeError):
                    pass
            yield Entry(folder, kind, key, sum(sizes), used)

    def clean(self, older_than: float = 0.0) -> list[Entry]:
        """Drop the entries that were not used for ``older_than`` seconds, all by default; returns them.

        Those that other processes are writing right now are dropped too, which costs them the entry and nothing else.
        """
        now = time.time()
        gone = [entry for entry in self.entries() if now - entry.used >= older_than]
        for entry in gone:
            shutil.rmtree(entry.folder, ignore_errors=True)
        return gone

    def _folder(self, kind: str, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.root / f"{kind}-{digest[:32]}"

    def _shrink(self, keep: Path) -> None:
        """Drop what was used longest ago until the rest is small enough; never what was just stored."""
        entries = self.entries()
        total = sum(entry.nbytes for entry in entries)
        for entry in reversed(entries):
            if total <= self.limit:
                return
            if entry.folder != keep:
                shutil.rmtree(entry.folder, ignore_errors=True)
                total -= entry.nbytes


def user_cache() -> CompileCache | None:
    """The cache of this user; None where it is turned off.

    Raises:
        ValueError: ``STATICGEN_CACHE_BYTES`` is no number of bytes.
    """
    place = os.environ.get(FOLDER, "")
    if place.strip().lower() in ("off", "0", "none"):
        return None
    limit = os.environ.get(LIMIT, str(DEFAULT_LIMIT))
    if not limit.isdigit():
        raise ValueError(f"{LIMIT} is {limit!r} in the environment, expected a number of bytes")
    return CompileCache(Path(place) if place else platformdirs.user_cache_path("staticgen"), int(limit))


@functools.cache
def code_digest() -> str:
    """Of this package's own code: a program made by other code may be another one."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
