"""The folder that ``staticgen compile`` writes: a manifest, and files of which it knows size and SHA-256.

Nothing in it is code for Python: JSON, safetensors, and the programs of a backend. It is written under another name and
renamed when it is whole; what is read has been checked against the manifest before.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from staticgen.errors import BundleError

MANIFEST = "manifest.json"
FORMAT, VERSION = "staticgen-bundle", 1
_MOST_MANIFEST_BYTES = 1 << 26
_PIECE = 1 << 22
_STALE_SECONDS = 24 * 3600
_LIBRARIES = (
    "staticgen", "torch", "transformers", "openvino", "nncf", "safetensors", "tokenizers", "torch_xla", "jax", "libtpu",
)  # fmt: skip
_REBUILD = "make it anew with `staticgen compile`"
# Besides hidden files, what may be in the folder without being in the manifest: nothing reads them.
_FOR_PEOPLE = ("LICENSE", "README.md")


@dataclass(frozen=True)
class Bundle:
    """A folder whose files are what its manifest says.

    Attributes:
        folder: where it is.
        manifest: its manifest.
        stamp: size and times of every file when it was checked.
    """

    folder: Path
    manifest: Mapping[str, Any]
    stamp: tuple[tuple[int, ...], ...]

    def is_unchanged(self) -> bool:
        """Whether all files are still those that were checked, as far as their sizes and times tell."""
        try:
            return _stamp(self.folder, self.manifest) == self.stamp
        except OSError:
            return False

    def path(self, name: str) -> Path:
        """Where a file of the manifest is.

        Raises:
            BundleError: the manifest has no such file.
        """
        if name not in self.manifest["files"]:
            raise BundleError(
                f"bundle {str(self.folder)!r}: {MANIFEST} names {name!r}, which is not among its files; {_REBUILD}"
            )
        return self.folder / name

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())


def is_bundle(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a manifest in this folder, good or not."""
    return Path(folder, MANIFEST).is_file()


def read_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Read a bundle's manifest, and check every file against it.

    Raises:
        FileNotFoundError: there is no such folder, or no manifest in it.
        BundleError: the manifest or a file is not what was written, or of a version that this one does not read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"bundle {str(folder)!r} is no folder; `staticgen compile MODEL -o {folder}` makes one")
    found = root / MANIFEST
    if not found.is_file():
        raise FileNotFoundError(
            f"folder {str(folder)!r} has no {MANIFEST}, so it is no bundle, or one that was not finished; {_REBUILD}"
        )

    def refusal(reason: object) -> BundleError:
        return BundleError(f"bundle {str(folder)!r}: {reason}; {_REBUILD}")

    try:
        state = found.lstat()
        if not stat.S_ISREG(state.st_mode):
            raise refusal(f"{MANIFEST} is a link, expected a file")
        if state.st_size > _MOST_MANIFEST_BYTES:
            raise refusal(f"{MANIFEST} has {state.st_size} bytes, expected {_MOST_MANIFEST_BYTES} at most")
        manifest = _parse(found.read_bytes(), refusal)
        _check_names(root, manifest, refusal)
        stamp = _stamp(root, manifest)
        _check_contents(root, manifest, refusal)
        _check_rest(root, manifest, refusal)
    except OSError as error:
        raise refusal(f"{error.strerror or error} ({error.filename})") from error
    return Bundle(root, manifest, stamp)


def _stamp(root: Path, manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    states = [(root / name).lstat() for name in (MANIFEST, *manifest["files"])]
    return tuple((state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino) for state in states)


def _parse(octets: bytes, refusal: Any) -> dict[str, Any]:
    try:
        manifest = json.loads(octets, parse_constant=_refuse_constant)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise refusal(f"{MANIFEST} has no format {FORMAT!r}")
        version = manifest.get("version")
        if type(version) is not int or version != VERSION:
            raise refusal(
                f"it has format version {version!r}, and this staticgen reads version {VERSION}: a newer one may read it"
            )
        if _render(manifest) != octets or manifest.get("checksum") != _checksum(manifest):
            raise refusal(f"{MANIFEST} was changed after it was written")
    except (ValueError, RecursionError) as error:
        raise refusal(f"{MANIFEST} is no JSON ({error})") from error
    return manifest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_names(root: Path, manifest: Mapping[str, Any], refusal: Any) -> None:
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise refusal(f"{MANIFEST} lists no files")
    for name, entry in files.items():
        if problem := _unsafe(name):
            raise refusal(f"the file name {name!r} {problem}")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise refusal(f"{MANIFEST} says {entry!r} of file {name!r}, expected its bytes and SHA-256")
        place = root
        for part in PurePosixPath(name).parts:
            place = place / part
            if place.is_symlink():
                raise refusal(f"file {name!r} is or goes through a link, expected a file of its own")
        if not place.is_file():
            raise refusal(f"file {name!r} is missing")
        if (size := place.stat().st_size) != entry["bytes"]:
            raise refusal(f"file {name!r} has {size} bytes, expected {entry['bytes']}")


def _check_contents(root: Path, manifest: Mapping[str, Any], refusal: Any) -> None:
    files = manifest["files"]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: sha256_of(root / name), files)
        for (name, entry), digest in zip(files.items(), digests, strict=True):
            if digest != entry.get("sha256"):
                raise refusal(f"file {name!r} was changed after it was written: its SHA-256 is not the manifest's")


def _check_rest(root: Path, manifest: Mapping[str, Any], refusal: Any) -> None:
    """Refuse what is in the folder unlisted: transformers would read a tokenizer's file that nobody has checked."""
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for entry in (*names, *(name for name in folders if Path(place, name).is_symlink())):
            name = Path(place, entry).relative_to(root).as_posix()
            known = entry.startswith(".") or name in (MANIFEST, *_FOR_PEOPLE) or name in manifest["files"]
            if not known:
                raise refusal(f"there is {name!r}, which is not among the files of {MANIFEST}: remove it")


def _unsafe(name: str) -> str | None:
    """What is wrong with the name of a file inside a bundle; None if nothing is."""
    parts = name.split("/")
    if not name.isprintable() or not name or "\\" in name or ":" in name:  # half a surrogate pair is not printable
        return "is empty or has a character that is none of a relative path's"
    if name.startswith("/"):
        return "is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "has a part that leaves the folder or says nothing"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def write_manifest(folder: Path, fields: Mapping[str, Any], files: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of what is in ``folder``: ``fields``, and every file with its size and SHA-256.

    ``files`` are those of the manifest before, where they are what they were.
    """
    if files is None:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        files = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
            for name in names
            if name != MANIFEST
        }
    manifest = {"format": FORMAT, "version": VERSION, **fields, "files": files}
    manifest["checksum"] = _checksum(manifest)
    (folder / MANIFEST).write_bytes(_render(manifest))


def _checksum(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(_render(rest)).hexdigest()


def _render(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors="surrogatepass")


def library_versions() -> dict[str, str]:
    """Versions of what programs depend on, and the kind of machine."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write to, which gets its name when the block ends, and is gone when it fails.

    What an earlier writer of the same name left behind when it was killed is removed after a day.

    Raises:
        FileExistsError: there is one of this name, at the beginning or at the end.
    """
    target = Path(folder).absolute()
    taken = FileExistsError(f"folder {str(folder)!r} exists already; choose another or remove it")
    if target.exists() or target.is_symlink():
        raise taken
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):  # another compile may have removed it
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        try:
            unfinished.rename(target)
        except OSError as error:
            if target.exists():
                raise taken from error
            raise
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
