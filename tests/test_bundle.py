"""Bundles that are not what was written: each is refused in words, and nothing outside of it is read."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import bundles
import models
import pytest
from bundles import MANIFEST

import staticgen
from staticgen import BackendUnavailableError, BundleError, UnknownNameError
from staticgen.bundle import is_bundle, new_folder, read_bundle

REFUSALS = (FileNotFoundError, BundleError, BackendUnavailableError, UnknownNameError)
REMEDIES = ("staticgen compile", "register_layout")
HARMS = int(os.environ.get("STATICGEN_HARMS", "40"))  # of each kind

_opened = []  # what Python opened, as far as it is in a folder that is named so that nobody may look into it


def _listen(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes | os.PathLike):
        place = os.path.realpath(arguments[0])  # of a link, where it leads
        if "elsewhere" in os.fsdecode(place):
            _opened.append(place)


sys.addaudithook(_listen)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return bundles.compile_tiny(tmp_path_factory.mktemp("made") / "bundle").bundle.folder


@pytest.fixture
def elsewhere(made, tmp_path):
    """A folder with the same files, which nobody may look into."""
    return bundles.copy(made, tmp_path / "elsewhere")


def refused(folder):
    """The one error of a bundle that is none, in all ways to read it."""
    _opened.clear()
    said = set()
    for read in (staticgen.load, lambda it: staticgen.generate(it, [[5, 6]])):
        with pytest.raises(REFUSALS) as caught:
            read(folder)
        said.add((caught.type, str(caught.value)))
    assert not _opened
    ((kind, words),) = said
    assert kind in REFUSALS, kind
    assert folder.name in words and any(remedy in words for remedy in REMEDIES), words
    return words


def flip(folder, name, chance):
    content = bytearray((folder / name).read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    bundles.replace(folder / name, bytes(content))


def truncate(folder, name, chance):
    content = (folder / name).read_bytes()
    bundles.replace(folder / name, content[: chance.randrange(len(content))])


def append(folder, name, chance):
    bundles.replace(folder / name, (folder / name).read_bytes() + chance.randbytes(chance.randint(1, 9)))


def overwrite(folder, name, chance):
    bundles.replace(folder / name, chance.randbytes((folder / name).stat().st_size))


def empty(folder, name, chance):
    bundles.replace(folder / name, b"")


def delete(folder, name, chance):
    (folder / name).unlink()


def swap(folder, name, chance):
    other = chance.choice([one for one in bundles.names(folder) if one != name])
    mine, its = (folder / name).read_bytes(), (folder / other).read_bytes()
    bundles.replace(folder / name, its)
    bundles.replace(folder / other, mine)


def link(folder, name, chance):
    (folder / name).unlink()
    (folder / name).symlink_to(folder.parent / "elsewhere" / name)


def link_to_nothing(folder, name, chance):
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "nothing")


def make_folder(folder, name, chance):
    (folder / name).unlink()
    (folder / name).mkdir()


def make_pipe(folder, name, chance):
    (folder / name).unlink()
    os.mkfifo(folder / name)


def rename(folder, name, chance):
    (folder / name).rename(folder / f"{name}.bak")


def add(folder, name, chance):
    """A file that the manifest does not have; a tokenizer would read some of these."""
    names = ("added_tokens.json", "special_tokens_map.json", "programs/x.xml", "vocab.txt", "tokenizer.model", "a b")
    (folder / chance.choice(names)).write_bytes(b"{}")


HARMFUL = [
    flip,
    truncate,
    append,
    overwrite,
    empty,
    delete,
    swap,
    link,
    link_to_nothing,
    make_folder,
    make_pipe,
    rename,
    add,
]


@pytest.mark.parametrize("harm", HARMFUL, ids=lambda harm: harm.__name__)
def test_a_damaged_bundle_is_refused(made, elsewhere, tmp_path, harm):
    chance = random.Random(harm.__name__)
    for index in range(HARMS):
        folder = bundles.copy(made, tmp_path / f"bundle {index}")
        name = chance.choice(bundles.names(made))
        harm(folder, name, chance)
        refused(folder)


def test_a_folder_that_is_a_link_within_is_refused(made, elsewhere, tmp_path):
    folder = bundles.copy(made, tmp_path / "bundle")
    shutil.rmtree(folder / "programs")
    (folder / "programs").symlink_to(elsewhere / "programs")
    assert "link" in refused(folder)


def test_a_whole_bundle_is_read_wherever_it_is(made, tmp_path):
    """Moved, behind a link, with notes and what downloads leave behind; the copies before were damaged by one thing only."""
    folder = bundles.copy(made, tmp_path / "Bündel 1")
    (folder / "README.md").write_text("notes")
    (folder / ".cache" / "download").mkdir(parents=True)
    (folder / ".cache" / "download" / "lock").write_text("")
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, str(folder), tmp_path / "link"):
        assert is_bundle(place) and read_bundle(place).manifest == bundles.read(made)
        assert staticgen.load(place).generate([[5, 6, 7]], max_new_tokens=3).shape == (1, 6)


def test_there_is_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("empty", "file", "nothing"):
        with pytest.raises(FileNotFoundError, match=f"{name}.*staticgen compile"):
            staticgen.load(tmp_path / name)
    with pytest.raises(TypeError, match="folder is a int, expected the path"):
        staticgen.load(3)


OUTSIDE = [
    "../elsewhere/step.json", "programs/../../elsewhere/step.json", "/etc/passwd", "C:/step.json", "C:step.json", "..\\step.json",
    "programs\\decode_16.xml", "\\\\server\\share", "./step.json", "programs//decode_16.xml", "programs/", "", ".", "..",
    "step.json\0", "step\n.json", "\ud800", "\udc80", "a" * 5000, "a/" * 3000 + "a", "programs", "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: ascii(name[:30]))
def test_names_that_are_none_of_a_bundle(made, elsewhere, tmp_path, name):
    for place in ("files", "model", "weights"):
        folder = bundles.copy(made, tmp_path / f"bundle-{place}")
        manifest = bundles.read(folder)
        entry = manifest["files"]["step.json"]
        if place == "files":
            manifest["files"] = {name: entry, **manifest["files"]}
        else:
            manifest["programs"][0]["files"][place] = name
        bundles.write(folder, manifest)
        refused(folder)


def _cases():
    """What is forged in a manifest whose checksum is right: the way to an entry, and what is put there."""
    huge, nothing = 10**30, [None, True, -1, 0, 1.5, "", "x", [], {}, 10**9, 10**30, 1e300]
    ways = [
        ("format",), ("version",), ("model",), ("model", "model_type"), ("model", "config_sha256"), ("model", "weights_digest"),
        ("model", "vocab_size"), ("target",), ("target", "backend"), ("target", "device"), ("target", "compile_options"),
        ("shapes",), ("shapes", "max_length"), ("shapes", "batch_size"), ("shapes", "prefill_buckets"),
        ("shapes", "cache_sizes"), ("dtype",), ("layout",), ("cache",), ("cache", "layers"), ("cache", "bytes"),
        ("programs",), ("programs", 0), ("programs", 0, "batch"), ("programs", 0, "tokens"),
        ("programs", 1, "cache_length"), ("programs", 0, "files"), ("files",), ("files", "step.json"),
        ("files", "step.json", "bytes"), ("files", "weights.bin", "sha256"), ("created",), ("versions",), ("versions", "torch"),
        ("certificate",), ("certificate", "checked_on"), ("certificate", "results"), ("certificate", "results", 0),
        ("model", "source"), ("model", "parameters"), ("weights",),
    ]  # fmt: skip
    harmless = {("target", "compile_options"): [{}], ("programs", 0, "files"): [{}], ("versions",): [{}]}
    harmless |= {
        key: ["", "x"] for key in [("created",), ("certificate", "checked_on"), ("model", "source"), ("weights",)]
    }
    harmless["versions", "torch"] = ["", "x"]
    harmless["model", "source"] = [None, "", "x"]
    harmless["model", "parameters"] = [10**9, huge]
    for way in ways:
        for value in nothing:
            if value not in harmless.get(way, ()):
                yield way, value
        if way not in (("versions", "torch"), ("certificate", "results", 0)):  # there may be fewer
            yield way, _GONE
    yield ("programs", 0, "name"), 3
    yield ("programs", 0, "name"), _GONE
    yield ("programs", 0, "compiled"), [{"file": "../elsewhere/step.json", "made_for": {}}]
    yield ("programs", 0, "compiled"), [{"file": "step.json", "made_for": []}]
    yield ("programs", 0, "compiled"), 3
    yield ("target", "compile_options"), {"PERFORMANCE_HINT": 3}
    yield ("target", "compile_options"), {"NO_SUCH_OPTION": "x"}
    yield ("target", "device"), "NPU"
    yield ("target", "device"), "TPU"
    yield ("target", "backend"), "npu"
    yield ("target", "backend"), "torch_xla"
    yield ("shapes", "prefill_buckets"), [8, huge]
    yield ("shapes", "prefill_buckets"), [8, 8]
    yield ("shapes", "cache_sizes"), [32, 16]
    yield ("shapes", "cache_sizes"), [16.0, 32.0]
    yield ("version",), 2
    yield ("version",), "1"
    yield ("version",), 1.0
    yield ("layout",), "paged"


_GONE = object()


def test_forged_manifests(made, elsewhere, tmp_path):
    words = {}
    for index, (way, value) in enumerate(_cases()):
        folder = bundles.copy(made, tmp_path / f"bundle {index}")
        manifest = bundles.read(folder)
        table = manifest
        for key in way[:-1]:
            table = table[key]
        if value is _GONE:
            del table[way[-1]]
        else:
            table[way[-1]] = value
        bundles.write(folder, manifest)
        try:
            words[way, str(value)] = refused(folder)
        except BaseException as error:
            error.add_note(f"{way} is {value!r}")
            raise
        shutil.rmtree(folder)
    assert "reads version 1: a newer one" in words[("version",), "2"]
    assert "finds CPU" in words[("target", "device"), "NPU"]
    assert "register_layout" in words[("layout",), "paged"]


def _texts(manifest):
    """Manifests that are no JSON, or not written as they are."""
    good = bundles.render(manifest).decode()
    doubled = good.replace('"version": 1,', '"version": 1,\n "version": 1,', 1)
    yield from (doubled, doubled.replace('"version": 1', '"version": 2', 1), good.replace(" 1,", " NaN,", 1))
    yield from (
        good.replace(" 1,", " Infinity,", 1),
        good.replace(" 1,", " 1e999,", 1),
        good.replace(" 1,", f" {'9' * 5000},", 1),
    )
    yield from (
        "[" * 100_000,
        '{"a":' * 50_000,
        "[" * 900 + "]" * 900,
        "null",
        "[]",
        "3",
        '"x"',
        "{}",
        "",
        " ",
        good[:-3],
    )
    yield from (good + " ", good.replace("\n", "\r\n"), "\ufeff" + good, json.dumps(manifest), "\0" * 100)
    nested: object = "x"
    for _ in range(900):
        nested = [nested]
    yield json.dumps({"format": "staticgen-bundle", "version": 1, "x": nested})
    yield json.dumps({"format": "staticgen-bundle", "version": 1, "files": [], "checksum": "x"})


def test_manifests_that_are_no_json_or_not_ours(made, tmp_path):
    for index, text in enumerate(_texts(bundles.read(made))):
        for encoding in ("utf-8", "utf-16"):
            folder = bundles.copy(made, tmp_path / f"bundle {index} {encoding}")
            bundles.replace(folder / MANIFEST, text.encode(encoding))
            refused(folder)
    for number in (float("nan"), float("inf")):
        folder = bundles.copy(made, tmp_path / f"bundle {number}")
        bundles.write(folder, {**bundles.read(folder), "created": number})
        refused(folder)


def test_files_of_another_model(made, tmp_path):
    other = bundles.compile_tiny(tmp_path / "other", models.gpt2(vocab_size=259), batch_size=1).bundle.folder
    twin = bundles.compile_tiny(
        tmp_path / "twin", models.llama(seed=1, vocab_size=259, num_hidden_layers=1)
    ).bundle.folder
    for name, source in (("step.json", other), ("config.json", other), ("step.json", twin)):
        folder = bundles.copy(made, tmp_path / f"{source.name} {name}")
        bundles.replace(folder / name, (source / name).read_bytes())
        bundles.reseal(folder)
        refused(folder)


# Whatever is in the files of a bundle whose hashes are right: words, or tokens, but no crash.
_FORGER = """
import random, sys
from pathlib import Path
import bundles, staticgen
from staticgen.certificate import load_golden
from staticgen.bundle import read_bundle

made, folders, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
chance = random.Random(seed)
for index in range(count):
    folder = bundles.copy(made, folders / f"forged {seed} {index}")
    name = chance.choice([one for one in bundles.names(folder) if one != "manifest.json"])
    content = bytearray((folder / name).read_bytes())
    for _ in range(chance.choice([1, 1, 4, 64])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    content = content[: chance.choice([len(content)] * 3 + [len(content) // 2])]
    bundles.replace(folder / name, bytes(content))
    bundles.reseal(folder)
    try:
        load_golden(read_bundle(folder))
        session = staticgen.load(folder)
        session.generate([[5, 6, 7]], max_new_tokens=2, do_sample=False)
        staticgen.completion(folder)("x", max_tokens=2, do_sample=False)
    except (FileNotFoundError, staticgen.BundleError, staticgen.CompileError, staticgen.UnknownNameError) as error:
        words = str(error)
        assert folder.name in words or "expected" in words, words
        print("refused", name)
    except ArithmeticError:  # weights that are no numbers
        assert name.startswith(("weights", "programs")), name
        print("refused", name)
    else:
        print("ran", name)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_forged_files_crash_nothing(made, tmp_path, seed):
    count = 20
    command = [sys.executable, "-c", _FORGER, str(made), str(tmp_path), str(seed), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused") + done.stdout.count("ran") == count


def test_a_bundle_that_changes_is_read_again(made, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(made, folder)
    first = staticgen.load(folder)
    state = (folder / "step.json").stat()
    with (folder / "step.json").open("r+b") as file:  # the same file, of the same size and time
        file.seek(-10, os.SEEK_END)
        file.write(b"x")
    os.utime(folder / "step.json", ns=(state.st_atime_ns, state.st_mtime_ns))
    refused(folder)
    assert first.generate([[5, 6]], max_new_tokens=2).shape == (1, 4)  # what was read stays good


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path):
    with new_folder(tmp_path / "a [1]") as unfinished:
        (unfinished / "x").write_text("x")
        assert not (tmp_path / "a [1]").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a [1]"]
    with pytest.raises(FileExistsError, match="exists already"), new_folder(tmp_path / "a [1]"):
        pass
    with pytest.raises(FileExistsError, match="exists already"), new_folder(tmp_path / "b") as unfinished:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "theirs").write_text("x")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "c"):
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a [1]", "b"]
    stale, fresh = tmp_path / ".a [2].1.tmp", tmp_path / ".a [2].2.tmp"
    for place in (stale, fresh):
        place.mkdir()
    os.utime(stale, (0, 0))
    with new_folder(tmp_path / "a [2]"):
        pass
    assert not stale.exists() and fresh.exists()
