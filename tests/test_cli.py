"""The command line, against transformers' own generate."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import models
import pytest
import texts
from rich.console import Console

import staticgen
from staticgen import cli, flags
from staticgen.decoding import HONOURED
from staticgen.text import encode_prompt, load_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer on disk, in a folder with dots, spaces and accents in its name: C66."""
    path = tmp_path_factory.mktemp("hub") / "Tiny-2.5 0.5B é"
    models.llama(vocab_size=259, eos_token_id=2).save_pretrained(path)
    texts.byte_level().save_pretrained(path)
    return path


def scripted_folder(path, scripts):
    """A model that answers prompts by their length, and its tokenizer, on disk."""
    tokenizer = texts.byte_level()
    ids = {length: [*encode_prompt(tokenizer, text)[1:], 2] for length, text in scripts.items()}
    texts.scripted(ids, eos_token_id=2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(capfd, *arguments):
    """The command line in this process: exit code, standard output, standard error."""
    code = 0
    try:
        cli.app(list(map(str, arguments)), standalone_mode=True)
    except SystemExit as exit_:
        code = exit_.code or 0
    return code, *capfd.readouterr()


def expected(folder, prompt, new_tokens):
    """What transformers says to one prompt."""
    model, tokenizer = load_text_model(folder)
    new = models.reference(model, encode_prompt(tokenizer, prompt), new_tokens)
    return tokenizer.decode(new, skip_special_tokens=True)


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("backend", ["eager", "openvino"])
def test_the_command_prints_what_transformers_generates(folder, capfd, backend):
    code, out, err = run(
        capfd, "generate", "--prompt", "hello", "--model", folder, "--backend", backend, "--max-new-tokens", 20
    )
    assert (code, out) == (0, expected(folder, "hello", 20) + "\n")
    for word in ("load", "compile", "(3 programs)", "first token", "ms/token", "tokens/s", "6 + 20 tokens", backend):
        assert word in err


def test_chat_template_and_seed(folder, capfd):
    common = ["generate", "--model", folder, "--backend", "eager", "--prompt", "hi", "--max-tokens", 12]
    code, greedy, err = run(capfd, *common, "--chat")
    assert (code, greedy) == (0, expected(folder, user("hi"), 12) + "\n")
    assert "20 + 12 tokens, ended by length" in err
    sampled = [run(capfd, *common, "--do-sample", "--temperature", 3, "--seed", 5)[1] for _ in range(2)]
    assert sampled[0] == sampled[1] != greedy


def test_a_file_of_prompts_gives_lines_of_json(folder, capfd, tmp_path, monkeypatch):
    prompts = ["hello", "zwölf Boxkämpfer", "x"]
    file = tmp_path / "prompts.txt"
    file.write_text("hello\r\nzwölf Boxkämpfer\n\n  \nx", encoding="utf-8")
    common = ["generate", "--model", folder, "--backend", "eager", "--max-new-tokens", 7, "--batch-size", 2]
    code, out, err = run(capfd, *common, "--file", file)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["prompt"] for line in lines] == prompts
    assert [line["text"] for line in lines] == [expected(folder, prompt, 7) for prompt in prompts]
    assert {(line["new_tokens"], line["finish_reason"]) for line in lines} == {(7, "length")}
    assert "3 prompts, 21 new tokens in" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nx\n"))
    code, out, _ = run(capfd, *common, "--file", "-", "--chat")
    assert [json.loads(line)["text"] for line in out.splitlines()] == [
        expected(folder, user(p), 7) for p in ("hello", "x")
    ]


def test_samples_are_lines_of_json(folder, capfd, tmp_path):
    common = ["generate", "--model", folder, "--backend", "eager", "--max-new-tokens", 5, "--seed", 3]
    code, out, _ = run(capfd, *common, "--prompt", "hello", "--samples", 3, "--do-sample", "--temperature", 2)
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, [line["sample"] for line in lines]) == (0, [0, 1, 2])
    assert len({line["text"] for line in lines}) == 3
    model, tokenizer = load_text_model(folder)
    complete = staticgen.completion(model, tokenizer, backend="eager", do_sample=True, temperature=2.0, seed=3)
    assert [line["text"] for line in lines] == complete("hello", samples=3, max_tokens=5)


def test_stop_strings_and_characters_of_several_tokens(capfd, tmp_path):
    """C42, C43."""
    folder = scripted_folder(tmp_path, {2: "ab 世界 é 🙂 END more"})
    common = ["generate", "--model", folder, "--backend", "eager", "--prompt", "x"]
    assert run(capfd, *common)[1] == "ab 世界 é 🙂 END more\n"
    code, out, err = run(capfd, *common, "--stop", "nowhere", "--stop", "END")
    assert (code, out) == (0, "ab 世界 é 🙂 \n")
    assert "ended by stop" in err
    assert run(capfd, *common, "--max-new-tokens", 5)[1] == "ab 世界"[:3] + "\ufffd\n"


def test_the_bar_stays_out_of_the_results(folder, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("staticgen.terminal.console", Console(stderr=True, highlight=False, force_terminal=True))
    (tmp_path / "p").write_text("a\nb\n")
    common = ["generate", "--model", folder, "--backend", "eager", "--max-new-tokens", 2]
    _, out, err = run(capfd, *common, "--file", tmp_path / "p")
    assert len([json.loads(line) for line in out.splitlines()]) == 2
    assert "completing" in err


def test_every_flag_reaches_the_session_or_the_call(folder, capfd, monkeypatch):
    """Each is accepted as its argument would be; what is not supported is refused by that name."""
    seen = {}

    class Stop(Exception):
        pass

    def completion(model, tokenizer, **arguments):
        seen.update(arguments)
        raise Stop

    monkeypatch.setattr("staticgen.completions.Completion", completion)
    monkeypatch.setattr("staticgen.completions.check_calls", lambda *_: None)
    values = {int: 3, float: 0.5, str: "eager", bool: None, None: '{"a": 1}', list[int]: 3, list[str]: "x"}
    for name, flag in {**flags.SESSION, **flags.LAYOUT, **flags.LENGTH, **flags.CHOICE}.items():
        seen.clear()
        names = flag.names or (f"--{name.replace('_', '-')}",)
        value = {"layout": "shift", "overflow": "stop", "device": "cpu"}.get(name, values[flag.kind])
        used = [names[0].split("/")[0], *([] if value is None else [value])]
        backend = [] if name == "backend" else ["--backend", "eager"]
        monkeypatch.setattr("staticgen.backends.open_backend", lambda *a: None)
        with pytest.raises(Stop):
            cli.app(["chat", "--model", str(folder), *backend, *map(str, used)], standalone_mode=False)
        wanted = {None: {"a": 1}, bool: True, list[int]: [3], list[str]: ["x"]}.get(flag.kind, value)
        found = seen["layout_options"] if name in flags.LAYOUT else seen
        assert found[name] == wanted


@pytest.mark.parametrize(
    ("used", "settings"),
    [
        (["--repetition-penalty", 0.2], {"repetition_penalty": 0.2}),
        (["--bad-words-ids", "[[100], [7, 8]]", "--suppress-tokens", 9], {"bad_words_ids": [[100], [7, 8]], "suppress_tokens": [9]}),
        (["--num-beams", 3, "--length-penalty", 2, "--early-stopping", "true"], {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}),
        (["--eos-token-id", 50, "--eos-token-id", 60, "--min-new-tokens", 9], {"eos_token_id": [50, 60], "min_new_tokens": 9}),
        (["--no-repeat-ngram-size", 1], {"no_repeat_ngram_size": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_do_what_they_do_in_transformers(folder, capfd, used, settings):
    model, tokenizer = load_text_model(folder)
    wanted = tokenizer.decode(
        models.reference(model, encode_prompt(tokenizer, "hello"), 12, **settings), skip_special_tokens=True
    )
    common = ["generate", "--model", folder, "--backend", "eager", "--prompt", "hello", "--max-new-tokens", 12]
    code, out, err = run(capfd, *common, *used)
    assert (code, out) == (0, wanted + "\n"), err


def test_constraints(folder, capfd, tmp_path):
    common = ["generate", "--model", folder, "--backend", "eager", "--prompt", "hello", "--max-new-tokens", 30]
    assert run(capfd, *common, "--regex", "[xy]{3}[0-9]")[1][:3].strip("xy") == ""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for used in (json.dumps(schema), tmp_path / "schema.json"):
        answer = run(capfd, *common, "--json-schema", used)[1].split()
        assert "".join(answer)[:5] == '{"n":'
    (tmp_path / "grammar").write_text('start: "ab" | "cd"')
    assert run(capfd, *common, "--grammar", tmp_path / "grammar")[1] in ("ab\n", "cd\n")
    code, _, err = run(capfd, *common, "--regex", "a", "--grammar", "b")
    assert (code, err) == (1, "error: regex and grammar are given, expected one constraint\n")
    assert run(capfd, *common, "--json-schema", "{")[0] == 1


def test_every_decoding_setting_has_a_flag():
    """But those that give a call another shape, which text has no place for."""
    other = {"stop_strings", "num_return_sequences"}  # --stop, --samples
    other |= {"return_dict_in_generate", "output_scores", "output_logits"}
    assert set(HONOURED) - other <= set(flags.ALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere"], "'./nowhere' is neither a folder nor a .gguf file"),
        (["--backend", "tpu"], "unknown backend 'tpu': expected one of"),
        (["--dtype", "int4"], "dtype is 'int4', expected one of float32"),
        (["--max-length", "3"], "max_length is 3"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--layout", "rign"], "unknown layout 'rign'"),
        (["--overflow", "sink", "--layout", "ring"], "overflow='sink' is not for layout 'ring'"),
        (["--stop", ""], "stop is [''], expected a string that is not empty"),
        (["--samples", "2"], "samples is 2, but greedy decoding makes one text: pass do_sample=True"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--top-p", "7", "--do-sample"], "top_p is 7.0"),
        (["--file", "nowhere.txt"], "give either --prompt or --file"),
        (["--prompt", None], "give either --prompt or --file"),
        (["--prompt", None, "--file", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--prompt", None, "--file", os.devnull], "has no prompts"),
        (["--prompt", ""], None),
    ],
    ids=str,
)
def test_errors_are_one_line_and_a_non_zero_exit(folder, capfd, arguments, words):
    defaults = {"--prompt": "hello", "--model": str(folder), "--backend": "eager"}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True)) if len(arguments) % 2 == 0 else {}
    rest = [] if given else arguments
    defaults.update(given)
    used = [part for name, value in defaults.items() if value is not None for part in (name, value)]
    code, out, err = run(capfd, "generate", *used, *rest)
    if words is None:  # BOS alone is a prompt
        assert code == 0
        return
    assert code == 1
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_what_does_not_fit_is_refused_before_anything_is_compiled(folder, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(staticgen.session.Session, "__init__", None)
    (tmp_path / "p").write_text("a\n" + "b" * 50 + "\n")
    code, out, err = run(
        capfd, "generate", "--model", folder, "--backend", "eager", "--file", tmp_path / "p", "--max-length", 40
    )
    assert (code, out) == (1, "")
    assert err.startswith("error: prompt[1]: ids has 51 tokens")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("no room"), RuntimeError("a\nb"), OverflowError("x")])
def test_errors_while_it_runs(folder, capfd, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(staticgen.session.Session, "stream", fail)
    code, _, err = run(capfd, "generate", "--model", folder, "--backend", "eager", "--prompt", "x")
    assert (code, err.strip()) == (1, f"error: {' '.join(str(error).split()) or 'MemoryError'}")


def test_a_missing_npu_is_said_before_anything_is_loaded(capfd):
    import openvino

    if "NPU" in openvino.Core().available_devices:
        pytest.skip("this machine has an NPU")
    code, _, err = run(capfd, "generate", "--prompt", "hello", "--model", "./nowhere", "--backend", "npu")
    assert code == 1
    assert "wants OpenVINO device NPU" in err


def test_version_and_help(capfd):
    assert run(capfd, "--version")[:2] == (0, f"staticgen {staticgen.__version__}\n")
    out = run(capfd, "generate", "--help")[1]
    assert "--max-new-tokens" in out
    assert "default: 512" in out
    assert "default: 2048" in run(capfd, "chat", "--help")[1]


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom staticgen.cli import app\n"
        "try: app(['generate', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# Chat


def talk(capfd, monkeypatch, folder, typed, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return run(capfd, "chat", "--model", folder, "--backend", "eager", *arguments)


def conversation(folder, system, lines, new_tokens):
    """The answers of transformers, each after all that was said before."""
    messages, answers = list(system), []
    for line in lines:
        messages += user(line)
        answers.append(expected(folder, messages, new_tokens))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_chat_remembers_what_was_said(folder, capfd, monkeypatch):
    answers = conversation(folder, [], ["hi", "why", "so"], 6)
    code, out, err = talk(capfd, monkeypatch, folder, "hi\n\nwhy\nso\n", "--max-new-tokens", 6)
    assert (code, out) == (0, "".join(answer + "\n" for answer in answers))
    assert err.count("> ") == 5
    assert err.count("ended by length") == 3
    first = len(encode_prompt(texts.byte_level(), user("hi")))
    known = [int(number) for number in re.findall(r"\((\d+) known\)", err)]
    assert len(known) == 2  # all of the turn before is, at least its prompt
    assert first <= known[0] < known[1]
    for layout in ("none", "sink"):
        used = ["--layout", layout, "--max-length", 120, "--max-new-tokens", 6]
        assert talk(capfd, monkeypatch, folder, "hi\nwhy\nso\n", *used)[1] == out
    code, out, _ = talk(capfd, monkeypatch, folder, "hi\n/reset\nhi\n/exit\nwhy\n", "--max-new-tokens", 6)
    assert (code, out) == (0, 2 * (answers[0] + "\n"))


def test_a_chat_begins_with_its_system_message(folder, capfd, monkeypatch):
    (answer,) = conversation(folder, [{"role": "system", "content": "be"}], ["hi"], 6)
    out = talk(capfd, monkeypatch, folder, "hi\n/reset\nhi", "--max-new-tokens", 6, "--system", "be")[1]
    assert out == 2 * (answer + "\n")


def test_a_message_that_does_not_fit_is_refused_and_the_chat_goes_on(folder, capfd, monkeypatch):
    answers = conversation(folder, [], ["hi", "why"], 4)
    typed = f"hi\n{'x' * 200}\nwhy\n"
    code, out, err = talk(capfd, monkeypatch, folder, typed, "--max-new-tokens", 4, "--max-length", 64)
    assert (code, out) == (1, "".join(answer + "\n" for answer in answers))
    assert err.count("error: ids has ") == 1


def test_a_chat_needs_a_template(folder, capfd, monkeypatch, tmp_path):
    tokenizer = texts.byte_level()
    tokenizer.chat_template = None
    load_text_model(folder)[0].save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, err = talk(capfd, monkeypatch, tmp_path, "hi\n")
    assert (code, out) == (1, "")
    assert "error: messages need a chat template" in err


class Interrupting(io.StringIO):
    """Standard output that Ctrl-C is pressed at, once; a signal itself is sent to a process of its own, below."""

    def __init__(self, at):
        super().__init__()
        self._left = at

    def write(self, text):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.fixture
def interruptible():
    """A shell's background job ignores Ctrl-C, and so would the tests that are run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_answer_and_keeps_the_chat(capfd, monkeypatch, tmp_path):
    tokenizer = texts.byte_level()
    first = len(encode_prompt(tokenizer, user("hi")))
    cut = [*user("hi"), {"role": "assistant", "content": "ab"}, *user("go on")]
    second = len(encode_prompt(tokenizer, cut))
    folder = scripted_folder(tmp_path, {first: "abcdefgh", second: "more"})
    out = Interrupting(3)  # print writes each piece, and then its empty end
    monkeypatch.setattr(sys, "stdout", out)
    code, _, err = talk(capfd, monkeypatch, folder, "hi\ngo on\n")
    assert (code, out.getvalue()) == (0, "a\nmore\n")
    assert "cancelled" in err


def test_ctrl_c_elsewhere_ends_the_command(folder, capfd, monkeypatch):
    out = Interrupting(2)
    monkeypatch.setattr(sys, "stdout", out)
    code, _, err = run(capfd, "generate", "--model", folder, "--backend", "eager", "--prompt", "hi")
    assert (code, "cancelled" in err) == (130, True)


@pytest.mark.usefixtures("interruptible")
def test_a_chat_in_a_process_of_its_own_with_real_signals(folder):
    """Ctrl-C while it answers, then another message, then the end of the input."""
    command = [sys.executable, "-c", "from staticgen.cli import app; app()", "chat", "--model", str(folder)]
    process = subprocess.Popen(
        [*command, "--backend", "eager", "--max-length", "4000", "--eos-token-id", "258"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    try:
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/exit\n")
        process.stdin.close()
        assert process.wait(60) == 0
        assert b"cancelled" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
