"""Classes and functions that live where no other process can import them; changed global settings (BC-12, BC-47)."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_client import RemoteCallError, SerializationError
from engine_client.clients import start
from engine_client.testing.executors import EchoExecutor
from helpers.clients import collect, make_request
from helpers.hosts import run_as
from helpers.procs import ScriptResult, run_script
from helpers.scenes import client_of, methods
from helpers.timing import SCALE, took_at_most

pytestmark = pytest.mark.crash

# -- BC-12 -------------------------------------------------------------------------------------------------------------

# A kernel: its own main file, but cells run in another module that is called __main__ and has no file.
KERNEL = """
import json, sys, types
method, extra, cells = json.loads(sys.argv[-1])
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
if not extra:
    sys.modules["cloudpickle"] = None
main.method = method
for number, cell in enumerate(cells, 1):
    try:
        exec(compile(cell, f"<cell {number}>", "exec"), main.__dict__)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
"""

IMPORTS = """
from dataclasses import dataclass
from engine_client import ClientOptions, EngineConfig, SyncMPClient
from engine_client.engine.executor import Executor
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import TARGET, Script
from helpers.clients import collect, make_request

def make(executor, target=ClientOptions.engine_target, **settings):
    options = ClientOptions(start_method=method, engine_target=target)
    return SyncMPClient(EngineConfig(additional_config=settings), executor, False, options=options)

def tokens(client):
    client.add_request(make_request("a", 3))
    return [token for output in collect(client, 1)["a"] for token in output.new_token_ids]
"""

CLASSES = """
@dataclass
class Point:
    x: int

class Broken(Exception):
    pass

class Seven(Executor):
    def execute_model(self, batch):
        return batch.sample(lambda request: 7)

    def double(self, point):
        if point.x < 0:
            raise Broken(point.x)
        return Point(2 * point.x)

def double(worker, point):
    return Point(2 * point.x)
"""

MAKE = "client = make({executor}); print(*tokens(client))"
END = "client.shutdown(); print('end')"


def run_cells(directory: Path, method: str, *cells: str, extra: bool = True) -> ScriptResult:
    """Run cells in a kernel; without ``extra`` there is no cloudpickle."""
    import json

    kernel = directory / "kernel.py"
    kernel.write_text(f"def main():\n{textwrap.indent(KERNEL, '    ')}\nif __name__ == '__main__':\n    main()\n")
    return run_script(kernel, json.dumps([method, extra, [IMPORTS, CLASSES, *cells]])).check()


@methods("spawn")
def test_bc12_without_the_extra_an_executor_of_a_cell_is_refused(method: str, tmp_path: Path) -> None:
    """The constructor names the class and the two ways out; the cell returns, nothing runs, and the next one works."""
    result = run_cells(tmp_path, method, "make(Seven)", MAKE.format(executor="EchoExecutor"), END, extra=False)
    refusal, *rest = result.stdout.splitlines()
    assert refusal.startswith("SerializationError: ")
    assert "__main__.Seven cannot be sent" in refusal
    assert "importable module" in refusal
    assert "engine_client[notebook]" in refusal
    assert rest == ["3 3 3", "end"]
    assert result.elapsed < 5.0 * SCALE


@methods("forkserver")
def test_bc12_without_the_extra_an_argument_of_a_cell_fails_its_call(method: str, tmp_path: Path) -> None:
    """A function or an object of a cell fails that one call or request, by name; client and engine go on."""
    result = run_cells(
        tmp_path,
        method,
        "client = make(EchoExecutor)",
        "client.collective_rpc(double, args=(1,))",
        "client.collective_rpc('encode', args=(Point(1),))",
        "client.add_request(make_request('b', 1, prompt_embeds=Point(1)))",
        "assert not client.utility_results; print(*tokens(client))",
        END,
        extra=False,
    )
    names = ["double", "Point", "Point"]
    expected = [f"SerializationError: __main__.{name} cannot be sent" for name in names]
    lines = result.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == [*expected, "3 3 3", "end"]


@methods("forkserver")
def test_bc12_with_the_extra_all_of_it_works(method: str, tmp_path: Path) -> None:
    """Executors, functions, arguments, results and exceptions of cells travel, and come back as the same types."""
    result = run_cells(
        tmp_path,
        method,
        MAKE.format(executor="Seven"),
        "result, = client.collective_rpc('double', args=(Point(4),)); print(result, type(result) is Point)",
        "result, = client.collective_rpc(double, args=(Point(5),)); print(result, type(result) is Point)",
        "result, = client.collective_rpc(lambda worker: Point(1)); print(result, type(result) is Point)",
        "client.collective_rpc('double', args=(Point(-1),))",
        "try: client.collective_rpc('double', args=(Point(-1),))\nexcept Broken as error: print('caught', error)",
        "print(*tokens(client))",
        END,
    )
    points = ["Point(x=8) True", "Point(x=10) True", "Point(x=1) True"]
    assert result.stdout.splitlines() == ["7 7 7", *points, "Broken: -1", "caught -1", "7 7 7", "end"]


@methods()
def test_bc12_a_class_that_is_redefined(method: str, tmp_path: Path) -> None:
    """After its cell ran again, new objects are of the new class here and there, and old ones still of the old."""
    again = CLASSES.replace("class Point:", "class Point:\n    y = 'new'")
    result = run_cells(
        tmp_path,
        method,
        MAKE.format(executor="Seven"),
        "old = Point(1)",
        again,
        "result, = client.collective_rpc(lambda worker, point: (point, point.y), args=(Point(4),)); print(*result)",
        "result, = client.collective_rpc(lambda worker, point: hasattr(point, 'y'), args=(old,)); print(result)",
        "result, = client.collective_rpc(lambda worker, point: point, args=(old,)); print(type(result) is type(old))",
        "result, = client.collective_rpc(double, args=(Point(4),)); print(result, result.y, type(result) is Point)",
        END,
    )
    assert result.stdout.splitlines() == [
        "7 7 7",
        "Point(x=4) new",
        "False",
        "True",
        "Point(x=8) new True",
        "end",
    ]


@methods()
def test_bc12_a_failure_of_a_cells_executor(method: str, tmp_path: Path) -> None:
    """An executor of a cell that fails to start is told with its own exception, once; nothing is started again."""
    fails = "class Fails(Seven):\n    def __init__(self, vllm_config):\n        raise Broken('unique text')\n"
    report = (
        "try:\n    make(Fails)\nexcept RuntimeError as error:\n"
        "    print(type(error.__cause__) is Broken, 'unique text' in str(error))"
    )
    result = run_cells(tmp_path, method, fails, report, MAKE.format(executor="Seven"), END)
    assert result.stdout.splitlines() == ["True True", "7 7 7", "end"]


def _result_of_the_engine(worker: Any, where: str) -> Any:
    """Return an object of a class that the client has nowhere."""
    import types

    del worker
    kind = type("OnlyThere", (), {"__module__": where})
    module = sys.modules.setdefault(where, types.ModuleType(where))
    module.OnlyThere = kind  # type: ignore[attr-defined]
    return kind()


@methods()
@pytest.mark.parametrize("where", ["__main__", "__mp_main__", "module_of_the_engine"])
def test_bc12_a_result_whose_class_only_the_engine_has(where: str, method: str) -> None:
    """That call fails with the class or its module named, or gets a copy of the class; client and engine go on."""
    with client_of(method) as client:  # type: ignore[attr-defined]
        try:
            (result,) = client.collective_rpc(_result_of_the_engine, args=(where,))
        except (SerializationError, RemoteCallError) as error:
            text = str(error)
        else:
            text = type(result).__name__
        assert "OnlyThere" in text or where in text
        client.add_request(make_request("a", 2))
        assert collect(client, 1)
        assert not client.utility_results


# -- BC-47 -------------------------------------------------------------------------------------------------------------

FACTORY = """
import os, sys, threading
from functools import partial
from engine_client.testing.executors import EchoExecutor

class Locked:
    '''Has a lock, and knows how to travel without.'''
    def __init__(self):
        self.lock = threading.Lock()
    def __getstate__(self):
        return {}

class Tell(EchoExecutor):
    def __init__(self, vllm_config, extra=None):
        super().__init__(vllm_config)
        self.extra = extra
    def tell(self):
        import late
        return self.extra, os.environ.get("LATE"), late.value

def function(vllm_config):
    return Tell(vllm_config, "function")

class Maker:
    def __init__(self, extra):
        self.extra = extra
    def build(self, vllm_config):
        return Tell(vllm_config, self.extra)

FACTORIES = {
    "class": Tell,
    "function": function,
    "partial": partial(Tell, extra="partial"),
    "method": Maker("method").build,
}
"""

CHANGED = """
import os, sys, multiprocessing
default, late_default, method = sys.argv[-3:]
if __name__ == "__main__":
    if default != "none":
        multiprocessing.set_start_method(default)
    if method == "preloaded":
        multiprocessing.set_forkserver_preload(["json", "colorsys", "not_there"])
        method = "forkserver"
    import multiprocessing.context
    from engine_client import ClientOptions, EngineConfig, SyncMPClient
    from factory import FACTORIES, Locked
    if late_default != "none":
        multiprocessing.set_start_method(late_default, force=True)
    before = multiprocessing.get_start_method(allow_none=True)
    def refuse(*args, **kwargs):
        raise AssertionError("set_start_method was called")
    multiprocessing.context.DefaultContext.set_start_method = refuse
    multiprocessing.set_start_method = refuse
    if method == "forkserver":  # so that it runs before the changes
        process = multiprocessing.get_context("forkserver").Process(target=print, args=("forkserver", ), daemon=True)
        process.start(); process.join(); process.close()
    for number, (name, factory) in enumerate(FACTORIES.items()):
        os.environ["LATE"] = name
        directory = os.path.abspath(f"late{number}")
        os.mkdir(directory)
        with open(os.path.join(directory, "late.py"), "w") as file:
            file.write(f"value = {number}")
        sys.path.insert(0, directory)
        config = EngineConfig(additional_config={"locked": Locked()})
        with SyncMPClient(config, factory, False, options=ClientOptions(start_method=method)) as client:
            print(*client.collective_rpc("tell"), flush=True)
    assert multiprocessing.get_start_method(allow_none=True) == before
"""
DEFAULTS = ("none", "fork", "spawn", "forkserver")
TOLD = "(None, 'class', 0)\n('function', 'function', 1)\n('partial', 'partial', 2)\n('method', 'method', 3)\n"

# Every default before and after our import with the default start, and each with another one.
REST = [
    *((default, late, "exec") for default, late in zip(DEFAULTS, (*DEFAULTS[2:], *DEFAULTS[:2]), strict=True)),
    ("forkserver", "none", "spawn"),
    ("none", "fork", "forkserver"),
    ("spawn", "fork", "fork"),
]


@pytest.mark.parametrize(
    ("default", "late", "method"),
    [
        ("forkserver", "fork", "exec"),
        ("fork", "spawn", "spawn"),
        ("spawn", "forkserver", "preloaded"),
        ("none", "none", "fork"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in REST),
    ],
)
def test_bc47_the_global_default_does_not_matter(default: str, late: str, method: str, tmp_path: Path) -> None:
    """Every default gives the same: all kinds of factories work, and see environment and path as at the call."""
    (tmp_path / "factory.py").write_text(FACTORY)
    result = run_as("script", CHANGED, tmp_path, default, late, method, cwd=tmp_path)
    assert result.check().stdout == ("forkserver\n" if method in ("forkserver", "preloaded") else "") + TOLD


class HasLock:
    """Cannot be pickled."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()

    def build(self, vllm_config: Any) -> EchoExecutor:
        return EchoExecutor(vllm_config)


UNPICKLABLE = {
    "method": (lambda: HasLock().build, "HasLock.build"),
    "partial": (lambda: partial(EchoExecutor, HasLock()), "EchoExecutor"),
    "instance": (HasLock, "HasLock"),
}


@pytest.mark.parametrize("what", UNPICKLABLE)
@methods()
def test_bc47_an_unpicklable_factory_fails_up_front(what: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory that cannot be pickled is named in a TypeError, with the reason, before any process is started."""
    monkeypatch.setattr(start, "launch", None)
    make, name = UNPICKLABLE[what]
    with took_at_most(1.0), pytest.raises(SerializationError, match="the executor class") as caught:
        client_of(method, make())
    assert name in str(caught.value)
    assert "lock" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value.__cause__, TypeError)


@methods()
def test_bc47_an_unpicklable_configuration_fails_up_front(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration with a lock inside is refused, as the configuration and with the reason."""
    monkeypatch.setattr(start, "launch", None)
    with took_at_most(1.0), pytest.raises(SerializationError, match=r"the configuration.*EngineConfig.*lock"):
        client_of(method, EchoExecutor, {"deep": [HasLock()]})


def test_bc47_a_lambda_with_and_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local factory travels with cloudpickle; without, it is refused by name."""
    seen = []

    def factory(vllm_config: Any) -> EchoExecutor:
        return EchoExecutor(vllm_config)

    with client_of("exec", factory) as client:  # type: ignore[attr-defined]
        client.add_request(make_request("a", 2))
        seen += collect(client, 1)
    assert seen == ["a"]
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(SerializationError, match=r"<locals>\.factory cannot be sent"):
        client_of("exec", factory)


# What a packager's hook makes of an application: its own name is its interpreter, which serves multiprocessing's ends.
FROZEN = """#!{python}
import sys
sys.path[:0] = {path}
sys.frozen = True
sys.executable = __file__
if len(sys.argv) > 2 and sys.argv[-2] == "-c" and sys.argv[-1].startswith("from multiprocessing."):
    exec(sys.argv[-1])
    raise SystemExit
from multiprocessing import spawn
spawn.freeze_support()

from engine_client import ClientOptions, EngineConfig, StartupError, SyncMPClient
from engine_client.testing.executors import EchoExecutor
from helpers.clients import collect, make_request

if __name__ == "__main__":
    try:
        SyncMPClient(EngineConfig(), EchoExecutor, False)
    except StartupError as error:
        print("spawn" in str(error), "freeze_support" in str(error), flush=True)
    with SyncMPClient(EngineConfig(), EchoExecutor, False, options=ClientOptions(start_method="spawn")) as client:
        client.add_request(make_request("a", 2))
        print(*collect(client, 1), flush=True)
"""


def test_bc47_a_frozen_application(tmp_path: Path) -> None:
    """A frozen application is told what to use instead of the default, and that works."""
    application = tmp_path / "application"
    application.write_text(FROZEN.format(python=sys.executable, path=[str(Path(__file__).parent.parent)]))
    application.chmod(0o755)
    assert run_script(application).check().stdout == "True True\na\n"


def test_bc47_nothing_of_multiprocessings_state_changes() -> None:
    """A client leaves no default start method fixed that the host had not fixed."""
    source = """
import multiprocessing
from engine_client import EngineConfig, SyncMPClient
from engine_client.testing.executors import EchoExecutor
with SyncMPClient(EngineConfig(), EchoExecutor, False):
    assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")
print("well")
"""
    assert run_script(source).check().stdout == "well\n"
