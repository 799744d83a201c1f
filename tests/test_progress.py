"""The bar: where it shows, what it shows, and that it leaves tqdm and the screen as they were."""

from __future__ import annotations

import builtins
import io
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tqdm as real_tqdm

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ProgressBar, report_progress
from helpers.engines import Recording


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Loading(Recording):
    def __init__(self, vllm_config: Any = None) -> None:
        super().__init__(vllm_config)
        for done in range(3):
            report_progress("loading weights", done, 2)


class Bar:
    """Stands for tqdm, and keeps what it is told."""

    events: list[Any]

    def __init__(self, desc: str, total: int | None, **options: Any) -> None:
        self.total, self.n = total, 0
        self.options = options
        self.events.append((desc, total))

    def update(self, number: int) -> None:
        self.n += number
        self.events.append((self.n, self.total))

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.events.append(text)

    def clear(self) -> None:
        self.events.append("clear")

    def refresh(self) -> None:
        self.events.append("refresh")

    def close(self) -> None:
        self.events.append("end")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give what a stand-in for tqdm is told."""
    Bar.events = []
    for name in ("tqdm", "tqdm.auto"):
        module = ModuleType(name)
        module.tqdm = Bar  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return Bar.events


def test_it_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a bar for each phase; it is wiped away at the end."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar() as progress:
        assert progress.is_visible
        progress("loading", 1, 10)
        assert repr(progress) == "<ProgressBar loading>"
        progress.end()
        progress("running", 1, 2)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "loading" in text
    assert "running" in text
    assert text.rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_it_follows_the_phases(events: list[Any]) -> None:
    """A bar learns its total when that is known, moves to what is done, and ends with its phase and with the start."""
    with ProgressBar(Terminal()) as progress:
        for report in (("a", 0, 0), ("a", 3, 10), ("b", 1, 2), ("ready", 1, 2), ("ready", 2, 2)):
            progress(*report)
        assert repr(progress) == "<ProgressBar idle>"
    first = [("a", None), (0, None), (3, 10), "end"]
    assert events == [*first, ("b", 2), (1, 2), "end", ("ready", 2), (1, 2), "end"]


def test_a_note_stands_behind_the_bar(events: list[Any]) -> None:
    """A note is shown at most ten times a second; other text may come in between."""
    progress = ProgressBar(Terminal())
    progress.clear()
    for done in range(5):
        progress("a", done, 5, f"{done} so far")
    progress.clear()
    progress.end()
    assert [event for event in events if isinstance(event, str)].count("refresh") == 1
    assert events[-3:] == [(4, 5), "clear", "end"]


def test_it_is_for_notebooks_too(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook's kernel the bar is the notebook's, though nothing there is a terminal."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    progress = ProgressBar(io.StringIO())
    progress("a", 1, 2)
    progress.clear()
    progress.end()
    assert events == [("a", 2), (1, 2), "end"]
    shell.kernel = None
    assert not ProgressBar(io.StringIO()).is_visible


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the bars that are made as in the kernel of a notebook that has ipywidgets."""
    pytest.importorskip("ipywidgets")
    import IPython
    import tqdm.notebook

    class Kept(tqdm.notebook.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            bars.append(self)

    bars: list[Any] = []
    module = ModuleType("tqdm.auto")  # the real one looks for a kernel when it is imported
    module.tqdm = Kept  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    return bars


def test_a_widget_learns_its_total(widgets: list[Any]) -> None:
    """A bar that is a widget is full when all is done, though its total came later or changed; its clock goes on."""
    with ProgressBar() as progress:
        progress("a", 0, 0)
        began = widgets[0].start_t
        for done, total in ((1, 10), (6, 20)):
            progress("a", done, total)
            shown = widgets[0].container.children[1]
            assert (shown.value, shown.max) == (done, total)
        assert (len(widgets), widgets[0].start_t) == (1, began)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_widget_is_removed(widgets: list[Any], done: int) -> None:
    """The end of a phase hides the widget, full or not."""
    with ProgressBar() as progress:
        progress("a", done, 2)
    assert widgets[0].container.layout.visibility == "hidden"
    assert widgets[0].container.children[1].bar_style == ""


@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_start_is_shown(multiprocess: bool) -> None:
    """Given as ``on_progress`` it shows what the executor tells while it is built, in whichever process that is."""
    terminal = Terminal()
    options = ClientOptions(on_progress=ProgressBar(terminal))
    EngineCoreClient.make_client(multiprocess, False, EngineConfig(), Loading, False, options=options).shutdown()
    assert "loading weights: " in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_nothing_of_the_program_s_tqdm_changes() -> None:
    """Its lock and its watching thread stay what they were."""
    before = (getattr(real_tqdm.tqdm, "_lock", None), real_tqdm.tqdm.monitor_interval, threading.active_count())
    ProgressBar(Terminal())("a", 1, 2)
    after = (getattr(real_tqdm.tqdm, "_lock", None), real_tqdm.tqdm.monitor_interval, threading.active_count())
    assert after == before


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_terminal_or_tqdm_there_is_nothing(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Where nobody looks nothing is written; where tqdm is missing the error says what to install, if there is one."""
    shown = io.StringIO()
    with ProgressBar(shown) as progress:
        progress("loading", 1, 2)
        progress.clear()
    assert (shown.getvalue(), repr(progress)) == ("", "<ProgressBar hidden>")

    importer = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tqdm":
            raise ImportError(name)
        return importer(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("engine_client.progress.find_spec", lambda name: None)
    place = Terminal() if terminal else io.StringIO()
    with ProgressBar(place, optional=True) as progress:
        progress("loading", 1, 2)
    assert place.getvalue() == ""
    with pytest.raises(ImportError, match=r"pip install engine_client\[progress\]"):
        ProgressBar(place)
