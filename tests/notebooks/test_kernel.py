"""The library in Jupyter, as a person uses it: real kernels, cells, and buttons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_client.testing.leaks import eventually
from helpers.notebooks import Notebook
from helpers.procs import holders_of, is_gone, memory_of

pytestmark = [pytest.mark.slow, pytest.mark.crash]

more = partial(pytest.param, marks=pytest.mark.stress)
"""The rest of a matrix: a cell costs a second, and an engine another."""

DEFINE = """
import os, subprocess, sys, time
from dataclasses import dataclass
from engine_client import (
    AsyncMPClient, ClientOptions, EngineConfig, EngineCoreRequest, Executor, InprocClient, SamplingParams, SyncMPClient
)

@dataclass
class Word:
    text: str

class Counter(Executor):
    pause = 0.0

    def execute_model(self, batch):
        time.sleep(self.pause)
        return batch.sample(lambda request: request.token_ids[-1] + 1)

    def shout(self, word):
        return Word(word.text.upper())

    def set_pause(self, seconds):
        self.pause = seconds

    def say(self, text, seconds=0.0):
        print(text)
        time.sleep(seconds)

def request(request_id, max_tokens=3, prompt=(1, 2)):
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(request_id, list(prompt), None, params, None, 0.0, None, None, None)

def count(client, name="r", max_tokens=3):
    tokens = []
    with client.stream(request(name, max_tokens)) as stream:
        for output in stream:
            tokens += output.new_token_ids
            if len(tokens) == 1:
                print("began")
    return tokens

def pids(client):
    return [link.pid for link in client._session.links.values()]
"""
MAKE = "client = SyncMPClient(EngineConfig(), Counter, False)"
WORKS = "count(client)"


END = """
import gc
from engine_client import EngineCoreClient
for _ in gc.get_objects():
    if isinstance(_, EngineCoreClient): _.shutdown()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all: to start one takes seconds."""
    with Notebook(tmp_path_factory.mktemp("kernel")) as found:
        yield found


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    kernel.run("%reset -f\n" + DEFINE).check()
    yield kernel
    kernel.run(END).check()


def pid_of(notebook: Notebook, name: str = "client") -> int:
    return notebook.value(f"pids({name})")[0]


def test_classes_of_cells_reach_the_engine(notebook: Notebook) -> None:
    """An executor, a value and a function that cells define; after its cell ran again it is the new class that runs."""
    notebook.run(MAKE).check()
    assert notebook.run(WORKS).result == "[3, 4, 5]"
    assert notebook.run("client.collective_rpc('shout', args=(Word('a'),))").result == "[Word(text='A')]"
    cell = notebook.run(
        "def twice(worker, word): return Word(2 * word.text)\nclient.collective_rpc(twice, args=(Word('b'),))"
    )
    assert cell.result == "[Word(text='bb')]"
    again = DEFINE.replace("token_ids[-1] + 1", "token_ids[-1] + 10")
    notebook.run(again).check()
    notebook.run(MAKE).check()
    assert notebook.run(WORKS).result == "[12, 22, 32]"


def test_await_and_blocking_calls_in_the_running_loop(notebook: Notebook) -> None:
    """A cell awaits the asyncio client, and uses the blocking one though the kernel's loop runs."""
    notebook.run("client = AsyncMPClient(EngineConfig(), Counter, False)").check()
    assert notebook.run("await client.collective_rpc_async('shout', args=(Word('a'),))").result == "[Word(text='A')]"
    cell = notebook.run("[token async for output in client.stream(request('r')) for token in output.new_token_ids]")
    assert cell.result == "[3, 4, 5]"
    notebook.run("client.shutdown()").check()
    notebook.run("import asyncio; asyncio.get_running_loop()\n" + MAKE).check()
    assert notebook.run(WORKS).result == "[3, 4, 5]"


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("SyncMPClient", "count(client, 'long', 100_000)"),
        (
            "SyncMPClient",
            "client.add_request(request('long', 100_000)); print('began')\nwhile True: client.get_output()",
        ),
        more("SyncMPClient", "client.collective_rpc('say', args=('began', 5.0))"),
        ("AsyncMPClient", "async for _ in client.stream(request('long', 100_000)): print('began')"),
        more("InprocClient", "count(client, 'long', 100_000)"),
    ],
    ids=["stream", "get_output", "utility", "asyncio", "inproc"],
)
def test_the_stop_button(notebook: Notebook, kind: str, call: str) -> None:
    """It interrupts the call and aborts its requests; the engine lives, and the next call sees nothing of them."""
    notebook.run(f"client = {kind}(EngineConfig(), Counter, False)").check()
    before = [] if kind == "InprocClient" else notebook.value("pids(client)")
    cell = notebook.run(call, interrupt_at="began")
    assert cell.error.startswith(("KeyboardInterrupt", "CancelledError"))
    assert notebook.value("client.is_alive")
    if kind == "AsyncMPClient":
        assert notebook.run("[o.new_token_ids async for o in client.stream(request('r'))]").result == "[[3], [4], [5]]"
    else:
        assert notebook.run("client.abort_requests(['nothing']); count(client)").result == "[3, 4, 5]"
    if before:
        assert notebook.value("pids(client)") == before
        eventually(lambda: notebook.value("[(s.waiting, s.running) for s in client.engine_status()]") == [[0, 0]])


@pytest.mark.parametrize(
    "call",
    [
        "await client.collective_rpc_async('say', args=('began', 4.0))",
        "print('began'); await client.get_output_async()",
    ],
    ids=["utility", "get_output"],
)
def test_the_stop_button_while_nothing_happens(notebook: Notebook, call: str) -> None:
    """What is awaited is interrupted soon, though no engine says anything; the engine lives, and the next call works.

    ipykernel's handler of the signal does not wake an event loop that sleeps.
    """
    notebook.run("client = AsyncMPClient(EngineConfig(), Counter, False)").check()
    before = notebook.value("pids(client)")
    cell = notebook.run(call, interrupt_at="began")
    assert cell.error.startswith("CancelledError")
    assert cell.elapsed < 2.0
    assert notebook.value("client.is_alive")
    assert notebook.run("[o.new_token_ids async for o in client.stream(request('r'))]").result == "[[3], [4], [5]]"
    assert notebook.value("pids(client)") == before


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_the_end_of_a_kernel(tmp_path: Path, end: str) -> None:
    """When it is restarted or killed, its engine, with children and memory, is gone; the next kernel starts afresh."""
    with Notebook(tmp_path, DEFINE) as notebook:
        end_kernel(notebook, end)


def end_kernel(notebook: Notebook, end: str) -> None:
    notebook.run(MAKE).check()
    child = "lambda worker: subprocess.Popen(['sleep', '600']).pid"
    [child_pid] = notebook.value(f"client.collective_rpc({child})")
    engine = pid_of(notebook)
    notebook.run("block = client.allocate(1 << 26); block[:1] = b'x'\nimport threading").check()
    kernel = notebook.value("os.getpid()")
    memory = memory_of(kernel)
    assert holders_of(memory) == {kernel, engine}
    getattr(notebook, end)()
    notebook.wait_gone(engine, child_pid)
    eventually(lambda: not holders_of(memory))
    if end == "restart":
        notebook.run(DEFINE + MAKE).check()
        assert notebook.run(WORKS).result == "[3, 4, 5]"


@pytest.mark.parametrize(
    "between",
    [
        more("pass"),
        "client",
        more("client.collective_rpc('nonsense')"),
        "def ask(client): return client.collective_rpc('nonsense')\nask(client)",
        more("try:\n  count(None)\nexcept AttributeError as error:\n  client.call_utility('nonsense')"),
    ],
    ids=["unseen", "displayed", "failed", "failed-in-a-function", "failed-in-a-handler"],
)
def test_a_cell_that_runs_again(notebook: Notebook, between: str) -> None:
    """The engine of the client before ends, though IPython remembers that client in ``Out``, ``_`` or a traceback."""
    notebook.run(MAKE).check()
    old = pid_of(notebook)
    notebook.run(between)
    notebook.run("1").check()
    notebook.run(MAKE).check()
    notebook.wait_gone(old)
    assert notebook.run(WORKS).result == "[3, 4, 5]"
    assert not is_gone(pid_of(notebook))


def test_a_cell_that_runs_again_after_an_interrupt(notebook: Notebook) -> None:
    """The traceback of the interrupt does not keep the old engine, either."""
    notebook.run(MAKE).check()
    old = pid_of(notebook)
    assert notebook.run("count(client, 'long', 100_000)", interrupt_at="began").error
    notebook.run(MAKE).check()
    notebook.wait_gone(old)


def test_what_was_displayed_and_has_another_name_goes_on(notebook: Notebook) -> None:
    """Only what the session itself remembers is let go: a client of another name keeps its engine."""
    notebook.run(MAKE).check()
    old = pid_of(notebook)
    notebook.run("other = client\nclient").check()
    notebook.run(MAKE).check()
    assert pid_of(notebook, "other") == old
    assert notebook.run("count(other)").result == "[3, 4, 5]"
    assert pid_of(notebook) != old


def test_what_an_engine_prints_appears_under_the_cell(notebook: Notebook) -> None:
    """At once and not at its end: Python's prints, what C code or a child writes, both streams, each under its cell."""
    notebook.run(MAKE).check()
    cell = notebook.run("client.collective_rpc('say', args=('while it runs', 20.0))", interrupt_at="while it runs")
    assert cell.error.startswith("KeyboardInterrupt")
    notebook.run("client = None\n" + MAKE).check()
    everything = """
def speak(worker):
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"written\\n")
    subprocess.run(["echo", "by a child"])
client.collective_rpc(speak)
time.sleep(0.5)
"""
    cell = notebook.run(everything).check()
    assert sorted(cell.text.split("\n")) == ["", "by a child", "complained", "printed", "written"]
    assert {output["name"] for output in cell.outputs} == {"stdout", "stderr"}
    assert notebook.run("client.collective_rpc('say', args=('later',)); time.sleep(0.2)").text == "later\n"


def test_the_card(notebook: Notebook) -> None:
    """A client that is shown is a table: while it lives, when its engine was killed, and when it is closed."""
    notebook.run(MAKE).check()
    notebook.run("count(client, max_tokens=50)").check()
    pid = pid_of(notebook)
    html = notebook.run("client").html
    assert all(text in html for text in ("<table>", "tokens/s", "last error", f">{pid}<", ">ready<", "MiB", " s<"))
    notebook.run(f"import signal; os.kill({pid}, signal.SIGKILL)\nwhile client.is_alive: time.sleep(0.01)").check()
    dead = notebook.run("client").html
    assert all(text in dead for text in (">dead<", "SIGKILL(-9)", f">{pid}<"))
    notebook.run("client.shutdown(); " + MAKE + "; client.shutdown()").check()
    assert ">closed<" in notebook.run("client").html
    assert "in this process" in notebook.run("InprocClient(EngineConfig(), Counter, False)").html


LOADING = """
from engine_client import ProgressBar, report_progress

class Loading(Counter):
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        for done in range(11):
            report_progress("loading weights", done, 10)
            time.sleep(0.15)

options = ClientOptions(on_progress=ProgressBar())
client = SyncMPClient(EngineConfig(), Loading, False, options=options)
"""


@pytest.fixture
def kept_modules(notebook: Notebook) -> Iterator[None]:
    """What the test imports of tqdm, or hides from it, is unknown to the next."""
    cell = "import sys\nfor _ in list(sys.modules):\n    if _.startswith(('tqdm', 'ipywidgets')): del sys.modules[_]"
    notebook.run(cell).check()
    yield
    notebook.run(cell).check()


@pytest.mark.usefixtures("kept_modules")
def test_a_bar_under_the_cell(notebook: Notebook) -> None:
    """Without ipywidgets a start is shown as it goes, by phases, and the bar is gone when the engine is ready."""
    cell = notebook.run("sys.modules['ipywidgets'] = None\n" + LOADING).check()
    shown = [line.strip() for line in cell.text.split("\r")]
    percents = [int(found[1]) for line in shown if (found := re.match(r"loading weights: +(\d+)%", line))]
    assert len(set(percents)) > 3
    assert percents == sorted(percents)
    assert shown[-1] == ""
    assert notebook.run(WORKS).result == "[3, 4, 5]"


@pytest.mark.usefixtures("kept_modules")
@pytest.mark.skipif(not find_spec("ipywidgets"), reason="the bar is one of characters without ipywidgets")
def test_a_widget_under_the_cell(notebook: Notebook) -> None:
    """With ipywidgets the bar is a widget, whose total is the one that was reported."""
    watch = """
class Watched(ProgressBar):
    def __call__(self, phase, *args):
        super().__call__(phase, *args)
        if phase == "loading weights":
            bar = self._bar.container.children[1]
            seen.append((bar.value, bar.max))
seen = []
"""
    loading = LOADING.replace("done, 10", "done, 10 if done else 0").replace("=ProgressBar()", "=Watched()")
    cell = notebook.run(loading.replace("options =", watch + "options =")).check()
    assert [name for output in cell.outputs for name in output.get("data", ()) if "widget-view" in name]
    seen = notebook.value("seen")
    assert (seen[1], seen[-1][1]) == ([1, 10], 10)
    assert notebook.run(WORKS).result == "[3, 4, 5]"


def test_reusing_the_engine(notebook: Notebook) -> None:
    """A cell that asks first keeps the engine it has, however often it runs."""
    cell = "if not globals().get('client') or not client.is_alive:\n    " + MAKE
    notebook.run(cell).check()
    old = pid_of(notebook)
    notebook.run(cell).check()
    assert pid_of(notebook) == old
    notebook.run("client.shutdown()\n" + cell).check()
    assert pid_of(notebook) != old
