"""``engine-client generate``: the same text from both modes, batches, prompts from everywhere, errors that help."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from engine_client import progress
from engine_client.cli.main import main
from engine_client.executors.corpus import default_corpus
from helpers.procs import run_script

MAIN = "import sys; from engine_client.cli.main import main; sys.exit(main())"
MODES = ("mp", "inproc")
TEXT = "the cat sat on the mat. the cat ate the rat. the dog ate the cat. ünder the mat.\n" * 3

OWN_EXECUTOR = '''
from engine_client import Executor


class Shift(Executor):
    """Answers with the letter after the last one; knows no digits, and no more than eight letters."""

    max_model_len = 8

    def execute_model(self, batch):
        return batch.sample(lambda request: request.token_ids[-1] + 1)

    def check_request(self, request):
        if any(48 <= token < 58 for token in request.prompt_token_ids):
            raise ValueError("digits are not for me")

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class Mute(Executor):
    def execute_model(self, batch):
        return batch.sample(lambda request: 0)


class Broken(Shift):
    def __init__(self, vllm_config):
        raise KeyError("the weights")


no_class = 1
'''


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a directory with a small corpus and a module of the user's."""
    (tmp_path / "corpus.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "own_executor.py").write_text(OWN_EXECUTOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_executor", raising=False)
    return tmp_path


@pytest.fixture(params=MODES)
def run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command from this process, in either mode; it returns status, stdout, stderr."""

    def command(*arguments: str, corpus: str = "corpus.txt") -> tuple[int, str, str]:
        status = main(["generate", "--mode", request.param, "--corpus", corpus, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def command_line(*arguments: str, mode: str = "mp", stdin: str | None = None):
    return run_script(MAIN, "generate", "--mode", mode, *arguments, env={"PYTHONIOENCODING": "utf-8"}, stdin=stdin)


def stats_of(stderr: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", stderr)}


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.7", "--seed", "7")], ids=["greedy", "seeded"])
def test_text_of_the_corpus_the_same_in_both_modes(sampling: tuple[str, ...]):
    """At least 80 % of the words occur in the corpus, and both modes print the same bytes, greedy and with a seed."""
    arguments = ("--max-tokens", "40", *sampling, "The with statement is used to")
    printed = [command_line(*arguments, mode=mode).check().stdout for mode in MODES]
    assert printed[0] == printed[1]
    assert printed[0].startswith("The with statement is used to ")
    words = set(re.findall(rb"\w+", default_corpus()))
    found = re.findall(r"\w+", printed[0])
    assert len(found) > 8
    assert sum(word.encode() in words for word in found) >= 0.8 * len(found)


@pytest.mark.parametrize("options", [("--async",), ("--data-parallel", "2"), ("--async", "--data-parallel", "4")])
def test_more_engines_and_asyncio_print_the_same_texts(options: tuple[str, ...]):
    """The asyncio client and several engines continue prompts as one engine does, in the order given."""
    prompts = ("a new block", "the with statement", "it returns", "this module", "an iterator")
    alone = command_line("--max-tokens", "20", *prompts).check().stdout
    assert command_line("--max-tokens", "20", *options, *prompts).check().stdout == alone


@pytest.mark.parametrize("options", [("--async",), ("--data-parallel", "2"), ("--data-parallel", "0")])
def test_what_one_process_cannot_do_is_refused(options: tuple[str, ...]):
    """Asyncio and several engines need processes of their own, and at least one; the error says so."""
    found = command_line(*options, "text", mode="inproc")
    assert found.returncode != 0
    assert "engine-client: error: --" in found.stderr


@pytest.mark.parametrize("options", [(), ("--stop", " the", "--stop", ".\n")])
def test_a_file_of_prompts_runs_as_one_batch(run, folder: Path, options: tuple[str, ...]):
    """For 64 prompts the number of steps is at most a quarter of the sum of lengths, stop strings or not."""
    prompts = [f"{letter} the {word}" for letter in "abcdefgh" for word in TEXT.split()[:8]]
    (folder / "prompts.txt").write_text("\n".join(prompts))
    status, out, err = run("--file", "prompts.txt", "--max-tokens", "20", "--json", "--stats", *options)
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    stats = stats_of(err)
    assert stats["prompts"] == 64
    assert stats["prompt_tokens"] == sum(map(len, prompts))
    assert stats["tokens"] == sum(len(line["token_ids"]) for line in lines)
    assert 0 < stats["steps"] <= stats["tokens"] / 4
    assert err.count("\n") == 1
    if options:
        assert {line["stop_reason"] for line in lines} == {" the"}
        assert not any(" the" in line["text"] for line in lines)


def test_continuations_stand_in_the_order_given(run):
    """Each prompt is printed with its continuation behind it, in order, whichever ends first."""
    status, out, _ = run("--stop", ".", "-n", "50", "the dog", "the rat", "under", "the cat ate the ra")
    assert status == 0
    lines = out.splitlines()
    assert [line[: len(prompt)] for line, prompt in zip(lines, ("the dog", "the rat", "under"), strict=False)] == [
        "the dog",
        "the rat",
        "under",
    ]
    assert lines[0] == "the dog ate the cat"
    assert lines[3] == "the cat ate the rat"


def test_lines_of_a_file_are_prompts(run, folder: Path):
    """Blank lines are skipped, line ends of any system are no part of a prompt, and arguments come first."""
    (folder / "prompts.txt").write_bytes(b"the dog\r\n\n  \nthe c\xff\n\xc3\xbcnd")
    status, out, _ = run("-f", "prompts.txt", "-n", "1", "--json", "the")
    assert status == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["the", "the dog", "the c\udcff", "ünd"]


@pytest.mark.parametrize("arguments", [(), ("--file", "-")])
def test_stdin_gives_prompts(run, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Without prompts, or with --file -, the lines of stdin are the prompts."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the d\nthe r\n")))
    assert run("-n", "2", *arguments)[:2] == (0, "the dog\nthe rat\n")


def test_prompts_typed_at_a_terminal_are_asked_for(run, monkeypatch: pytest.MonkeyPatch):
    """On a terminal a line on stderr says what to do."""
    stdin = io.TextIOWrapper(io.BytesIO(b"the d\n"))
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, err = run("-n", "2")
    assert (status, out) == (0, "the dog\n")
    assert err == "Type prompts, one a line, then Ctrl-D.\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("",), "prompt 1 is empty: give at least one character to continue"),
        (("the", ""), "prompt 2 is empty"),
        (("--file", "/dev/null"), "there is no prompt: give one as an argument, by --file or on stdin"),
        (("--file", "no-such-file"), "no-such-file: No such file or directory"),
        (("--file", "."), ".: Is a directory"),
        (("--temperature", "-1", "x"), "temperature must be zero or more"),
        (("--max-tokens", "0", "x"), "max_tokens must be at least 1"),
        (("--top-p", "2", "x"), "top_p must be in (0, 1]"),
        (("--stop", "", "x"), "stop must not hold an empty string"),
        (("--executor", "own_executor", "x"), "--executor must be MODULE:CLASS, not 'own_executor'"),
        (("--executor", "no_such_module:A", "x"), "--executor no_such_module:A: No module named 'no_such_module'"),
        (("--executor", "own_executor:A", "x"), "module 'own_executor' has no 'A'"),
        (("--executor", "own_executor:no_class", "x"), "no_class is not a class"),
        (("--executor", "own_executor:Mute", "x"), "not supported: Mute does not encode text"),
        (("--executor", "own_executor:Broken", "x"), "the weights"),
    ],
)
def test_mistakes_are_one_line(run, arguments: tuple[str, ...], text: str):
    """What the user got wrong, or what the executor raised, is one line on stderr and status 1."""
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("engine-client: error: ")
    assert text in err
    assert err.count("\n") == 1


def test_missing_corpus_is_named(run, folder: Path):
    """A corpus that cannot be read, or is empty, is named."""
    status, _, err = run("the", corpus="missing.txt")
    assert (status, err) == (1, f"engine-client: error: {folder}/missing.txt: No such file or directory\n")
    (folder / "empty.txt").touch()
    status, _, err = run("the", corpus="empty.txt")
    assert status == 1
    assert "empty.txt' has no text in it" in err


def test_own_executor_from_the_working_directory(run):
    """--executor runs a class of a module that lies in the working directory."""
    assert run("--executor", "own_executor:Shift", "-n", "3", "abc", "x")[:2] == (0, "abcdef\nxyz{\n")


def test_refused_prompts_do_not_stop_the_others(run):
    """A prompt that the executor refuses is an error of its own; the others are continued, and the status is 1."""
    status, out, err = run("--executor", "own_executor:Shift", "-n", "2", "a1", "abc", "abcdefghij", "mno")
    assert status == 1
    assert out == "abcde\nmnopq\n"
    first, second = err.splitlines()
    assert re.fullmatch("engine-client: error: prompt 1: (ValueError: )?digits are not for me", first)
    assert second.startswith("engine-client: error: prompt 3: ")
    assert "10" in second
    status, out, _ = run("--executor", "own_executor:Shift", "-n", "2", "--json", "a1", "abc")
    assert status == 1
    refused, continued = map(json.loads, out.splitlines())
    assert "digits are not for me" in refused["error"]
    assert "error" not in continued


def test_long_prompts_have_room(run):
    """A prompt longer than the usual limit of 4096 tokens, and its continuation, fit."""
    prompt = "x" * 5000 + " the d"
    status, out, _ = run("-n", "2", prompt)
    assert (status, out) == (0, prompt + "og\n")


def test_logprobs_as_text_and_as_json(run):
    """--logprobs shows a line for each token, or fields of the JSON line."""
    status, out, _ = run("--logprobs", "2", "-n", "2", "the do")
    assert status == 0
    text, *lines = out.splitlines()
    assert text == "the dog "
    assert len(lines) == 2
    assert re.fullmatch(r"  'g' +-0\.\d{3}  rank 1     'g' -0\.\d{3}  '.' -\d\.\d{3}", lines[0])
    status, out, _ = run("--logprobs", "2", "-n", "2", "--json", "the do")
    first, _ = json.loads(out)["logprobs"]
    assert (first["token_id"], first["rank"]) == (ord("g"), 1)
    assert first["best"][0] == [ord("g"), first["logprob"]]


def test_sampling_options_arrive(run):
    """top_k, top_p and min_p of the smallest are greedy, --ignore-eos goes on after the end of a document."""
    greedy = run("-n", "20", "the ")
    for option in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        assert run("-n", "20", "--temperature", "3", *option, "the ") == greedy
    prompt = "ünder the mat.\nthe cat sat on the mat. the cat ate the rat. the dog ate the cat. ünder the mat."
    bias = ("--temperature", "5", "--seed", "3", "-n", "2000", "--json", prompt)
    ended = json.loads(run(*bias)[1])
    going_on = json.loads(run("--ignore-eos", *bias)[1])
    assert ended["finish_reason"] == "stop"
    assert going_on["finish_reason"] == "length"
    assert going_on["text"].startswith(ended["text"])


@pytest.mark.parametrize("options", [(), ("--stop", "the mat")])
def test_one_prompt_streams_to_a_terminal(run, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """On a terminal a single continuation is shown as it grows; all in all it is the same text."""
    expected = run("-n", "30", *options, "the cat ")[1]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        status, _, _ = run("-n", "30", *options, "the cat ")
        shown = sys.stdout.getvalue()
    assert (status, shown) == (0, expected)


def test_refused_prompt_on_a_terminal(run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A prompt that is refused is an error there too, and nothing is made up for it."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    status, _, err = run("--executor", "own_executor:Shift", "a1")
    assert status == 1
    assert err.count("\n") == 1
    assert sys.stdout.getvalue() in ("", "a1\n")


def test_several_prompts_on_a_terminal_are_not_mixed(run, monkeypatch: pytest.MonkeyPatch):
    """Several prompts, JSON and log-probabilities are printed when they are complete, on a terminal too."""
    for options in (("the d", "the r"), ("--json", "the d"), ("--logprobs", "1", "the d")):
        expected = run("-n", "2", *options)[1]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Terminal())
            run("-n", "2", *options)
            assert sys.stdout.getvalue() == expected


def test_many_prompts_show_how_far_they_are(run, monkeypatch: pytest.MonkeyPatch):
    """A bar counts the prompts that are done, tells tokens a second and the time left; texts stay whole beside it."""
    expected = run("-n", "300", "the d", "the r", "the c")[1]
    with monkeypatch.context() as patch:
        patch.setattr(progress, "_INTERVAL", 0.0)  # however quick the machine is
        patch.setattr(sys, "stdout", Terminal())
        patch.setattr(sys, "stderr", Terminal())
        run("-n", "300", "the d", "the r", "the c")
        text, bar = sys.stdout.getvalue(), sys.stderr.getvalue()
    assert text == expected
    assert re.search(r"generating: +0%.*0/3", bar)
    assert re.search(r"\d+ tokens/s, at most \d+:\d\d left", bar)
    assert "building model" in bar
    assert bar.rpartition("\r")[0].rpartition("\r")[2].strip() == "", "something is left on the screen"


def test_letters_that_stdout_does_not_have(folder: Path):
    """Where stdout cannot encode a letter it is written as an escape, and nothing fails."""
    arguments = ("generate", "--corpus", "corpus.txt", "-n", "4", "ü")
    result = run_script(MAIN, *arguments, cwd=folder, env={"PYTHONIOENCODING": "ascii"}).check()
    assert result.stdout == "\\xfcnder\n"


@pytest.mark.parametrize(
    ("executor", "text"),
    [("DyingStep", r"SIGKILL\(-9\)"), ("FailingStep", "ZeroDivisionError: step 1 fails on purpose")],
)
def test_dead_engine_is_one_line(executor: str, text: str):
    """An engine that dies is one line that says how; -v shows the traceback and the log."""
    arguments = ("--executor", f"engine_client.testing.executors:{executor}", "x")
    result = command_line(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(rf"engine-client: error: engine core 0 \(pid \d+\) died: {text}.*\n", result.stderr)
    verbose = command_line("-v", *arguments).stderr
    assert "Traceback" in verbose
    assert verbose.endswith(result.stderr.partition("(pid")[0] + verbose.rpartition("error: engine core 0 ")[2])


def test_own_warnings_are_shown(folder: Path):
    """What an executor logs as a warning is shown, while the library's own log waits for -v."""
    (folder / "warner.py").write_text(
        "import logging\nfrom own_executor import Shift\n\n\nclass Warner(Shift):\n"
        "    def __init__(self, vllm_config):\n        super().__init__(vllm_config)\n"
        "        logging.getLogger('warner').warning('low on letters')\n"
    )
    for mode in MODES:
        arguments = ("generate", "--mode", mode, "--executor", "warner:Warner", "-n", "1", "a", "1")
        result = run_script(MAIN, *arguments, cwd=folder)
        first, second = result.stderr.splitlines()
        assert first == "low on letters"
        assert second.startswith("engine-client: error: prompt 2: ")


@pytest.mark.parametrize("mode", MODES)
def test_no_asyncio(mode: str, folder: Path):
    """The command never loads asyncio, nor numpy."""
    code = "import sys; from engine_client.cli.main import main; main(); print({'asyncio', 'numpy'} & {*sys.modules})"
    result = run_script(code, "generate", "--mode", mode, "--corpus", "corpus.txt", "-n", "2", "the d", cwd=folder)
    assert result.check().stdout == "the dog\nset()\n"
