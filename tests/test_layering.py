"""Every module imports from floors below its own, or from siblings that are named here; and no room grows too large.

Imports are read from the syntax trees: those at the top of a file, inside functions, and under TYPE_CHECKING alike.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys

import pytest

from helpers.tree import MODULES, Module, imports, parse

FLOORS = {
    "errors": 0,
    "interfaces": 0,
    "messages": 0,
    "params": 0,
    "config": 0,
    "deadline": 0,
    "progress": 1,
    "protocol": 1,
    "ipc": 2,
    "engine": 3,
    "clients": 3,
    "executors": 4,
    "launch": 4,
    "testing": 5,
    "bench": 5,
    "integrations": 5,
    "cli": 6,
    "__main__": 7,
}
"""The floor of each room; what is imported lies below."""

SIBLINGS: dict[str, dict[str, set[str]]] = {
    "": {
        "config": {"deadline"},
        "interfaces": {"messages"},
        "messages": {"params"},
    },
    "protocol": {
        "batch": {"codec", "exception_fields", "frames", "output_fields", "wire"},
        "codec": {"arrays", "exceptions", "frames", "restricted"},
        "exceptions": {"exception_fields", "tracebacks"},
        "framing": {"frames"},
        "lifecycle": {"frames"},
        "outputs": {"batch"},
        "registry": {"arrays", "exceptions"},
        "restricted": {"registry"},
        "tracebacks": {"exception_fields"},
        "wire": {"codec", "frames", "tracebacks"},
    },
    "ipc": {
        "aside": {"latch"},
        "arena": {"arena_memory", "arena_reader", "arena_room", "arena_table"},
        "arena_memory": {"descriptors"},
        "arena_reader": {"arena_table"},
        "arena_room": {"arena_blocks", "arena_memory", "arena_table"},
        "arena_table": {"arena_blocks"},
        "boot": {"engine_fds"},
        "channel": {"arena", "incoming", "outgoing"},
        "group_page": {"arena_memory", "descriptors", "engine_fds"},
        "group": {"descriptors", "engine_fds", "group_page"},
        "handle": {"exits"},
        "incoming": {"arena"},
        "launcher": {"engine_fds", "handle", "multiproc"},
        "multiproc": {"aside", "boot", "descriptors", "engine_fds", "handle"},
        "process_group": {"exits", "handle", "processes"},
        "loan": {"channel"},
        "moderation": {"polling"},
        "reader": {"channel", "loan", "moderation", "polling", "wakeup"},
        "stacks": {"arena_memory", "descriptors"},
        "observer": {"counters", "processes", "status_page"},
        "status_page": {"arena_memory", "counters"},
        "wakeup": {"descriptors"},
    },
    "engine": {
        "gate": {"front_end"},
        "busy_loop": {"gate", "front_end", "lock_step", "utility_calls"},
        "control": {"executor", "pause", "profile", "scheduler"},
        "core": {"batch", "control", "executor", "intake", "limits", "request", "scheduler", "step_log"},
        "executor": {"batch"},
        "intake": {"executor", "limits", "request", "stop"},
        "kv_cache": {"kv_blocks", "limits", "request"},
        "limits": {"executor"},
        "main": {"busy_loop", "core", "executor", "front_end", "lifeline", "lock_step", "log_ring", "log_sender"},
        "outbox": {"batch", "request", "stop"},
        "queues": {"request"},
        "request": {"batch", "kv_blocks", "stop"},
        "scheduler": {"batch", "kv_cache", "limits", "outbox", "queues", "request", "stop"},
        "step_log": {"batch"},
        "utility_calls": {"front_end"},
    },
    "clients": {
        "aborts": {"in_flight", "streams"},
        "aio": {
            "aio_streams",
            "endings",
            "events",
            "fan_out",
            "link",
            "mailbox",
            "mp",
            "router",
            "utilities",
        },
        "aio_streams": {"fan_out", "mailbox", "outputs", "streams"},
        "caller": {"endings", "fan_out", "link", "traffic"},
        "conditions": {"card", "link", "session"},
        "data_parallel": {"aio", "calls", "elastic"},
        "delivery": {"endings", "link", "relog", "traffic"},
        "elastic": {"caller", "endings", "link", "session", "starter"},
        "endings": {"link"},
        "fan_out": {"calls", "link"},
        "front_ends": {"endpoint", "link"},
        "guest": {"endpoint", "link", "session"},
        "inproc": {"base", "card", "interactive", "meter", "metrics", "utilities"},
        "link": {"calls", "meter"},
        "mailbox": {"calls"},
        "measuring": {"conditions", "frame_latency", "metrics", "session"},
        "meter": {"frame_latency"},
        "membership": {"endings", "events", "link", "taking"},
        "metrics": {"frame_latency", "metrics_server"},
        "mp": {
            *("base", "caller", "card", "conditions", "elastic", "endpoint", "events", "front_ends", "guest"),
            *("interactive", "measuring", "metrics", "restart", "session", "stacks", "starter"),
        },
        "outputs": {"in_flight"},
        "room": {"link"},
        "router": {"in_flight", "link"},
        "restart": {"elastic", "endings", "session"},
        "session": {"delivery", "endings", "link", "membership", "stalls"},
        "stacks": {"link", "session"},
        "stalls": {"link"},
        "relog": {"link"},
        "start": {"endings", "front_ends", "link", "relog"},
        "starter": {"front_ends", "link", "session", "start"},
        "streams": {"outputs"},
        "sync": {"mp", "streams", "utilities"},
        "taking": {"link", "traffic"},
        "traffic": {
            *("aborts", "calls", "endings", "in_flight", "link", "outputs", "room", "router", "streams"),
        },
    },
    "executors": {
        "ngram": {"corpus", "ngram_model", "sampling"},
        "ngram_model": {"corpus"},
        "torch_sampling": {"sampling"},
        "transformers": {
            *("paged_cache", "passes", "sampling", "torch_sampling", "transformers_gguf", "transformers_progress"),
        },
    },
    "testing": {
        "clients": {"scripted"},
        "executors": {"faults"},
        "leaks": {"inventory"},
        "pytest_plugin": {"clients", "leaks"},
        "scripted": {"faults"},
        "testing": {"clients", "executors", "faults", "leaks", "scripted"},
    },
    "bench": {
        "charts": {"results", "workloads"},
        "growth": {"loops", "stub"},
        "ours": {"floor", "growth", "stub"},
        "peer_zmq": {"zmq_engine"},
        "plot": {"charts", "machine", "results"},
        "rounds": {"machine", "results", "sides", "workloads"},
        "sides": {"workloads"},
        "table": {"machine", "results", "workloads"},
        "targets": {"results"},
    },
    "cli": {
        "chat": {"output"},
        "doctor": {"probe"},
        "generate": {"awaited", "output"},
        "main": {"bench", "chat", "doctor", "generate", "top"},
    },
    "integrations": {
        "vllm": {"vllm.install", "vllm.refusals"},
        "vllm.__main__": {"vllm.install"},
        "vllm.carried": {"vllm.subprocesses"},
        "vllm.clients": {"vllm.carried", "vllm.refusals", "vllm.zmq_stub"},
        "vllm.install": {
            *("vllm.after_import", "vllm.clients", "vllm.interrupts", "vllm.serving", "vllm.subprocesses"),
            "vllm.version",
        },
        "vllm.interrupts": {"vllm.after_import", "vllm.refusals"},
        "vllm.serving": {"vllm.after_import", "vllm.refusals"},
        "vllm.subprocesses": {"vllm.after_import", "vllm.zmq_stub"},
        "vllm.version": {"vllm.refusals"},
        "vllm.zmq_stub": {"vllm.refusals"},
    },
}
"""Of each room (``""``: floor 0), which module may import which of its neighbours."""

LATE_EXCEPTIONS = {
    # The factories name the clients, which are built on the interface that the factories belong to.
    ("clients.base", "clients.aio"),
    ("clients.base", "clients.data_parallel"),
    ("clients.base", "clients.sync"),
    ("clients.base", "clients.inproc"),
}
"""Imports inside functions that the two tables above would forbid."""

IN_PROCESS = {("clients.inproc", "engine.core"), ("clients.inproc", "engine.executor")}
"""The one place where the client's half knows an engine."""

THIRD_PARTY = {
    "prometheus_client": {"clients.metrics"},
    "psutil": {"ipc.processes"},
    "tblib": {"protocol.tracebacks"},
    "cloudpickle": {"protocol.codec"},
    "matplotlib": {"bench.plot"},
    "msgspec": {"bench.peer_zmq", "bench.zmq_engine"},
    "numpy": {"bench.ours", "protocol.arrays"},
    "pytest": {"testing.pytest_plugin"},
    "torch": {
        *("bench.ours", "bench.peer_vllm", "executors.paged_cache", "executors.torch_sampling"),
        *("executors.transformers", "protocol.arrays"),
    },
    "tqdm": {"bench.progress", "progress"},
    "transformers": {"executors.paged_cache", "executors.transformers", "executors.transformers_progress"},
    "typing_extensions": None,
    "vllm": {"bench.peer_vllm", "integrations.vllm.engine", "integrations.vllm.install"},
    "zmq": {"bench.peer_vllm", "bench.peer_zmq", "bench.zmq_engine"},
}
"""Packages that are not of the standard library, and the only modules that may import them, inside functions (None: any
module, for type checkers alone)."""

LOADED_BY_IT = {("testing.pytest_plugin", "pytest")}
"""A plugin of a package that nobody but that package loads."""

HEAVY = {
    "asyncio": {
        "bench.loops",
        "bench.peer_zmq",
        "cli.awaited",
        "clients.aio",
        "clients.aio_streams",
        "clients.mailbox",
    },
    "cProfile": set(),
    "ctypes": set(),
    "faulthandler": {"testing.leaks"},
    "inspect": set(),
    "multiprocessing": set(),
    "subprocess": {"bench.floor", "bench.peer_zmq", "bench.sides"},
    "tempfile": {"bench.peer_zmq", "bench.sides", "testing.leaks"},
    "traceback": {"bench.driver"},
}
"""Modules of the standard library that take time or memory, and who may load them when it is itself loaded."""

IO = {
    *("asyncio", "concurrent", "multiprocessing", "threading", "_thread", "subprocess", "signal", "time"),
    *("os", "posix", "fcntl", "mmap", "resource", "select", "selectors", "socket", "ssl"),
    *("logging", "pathlib", "shutil", "tempfile"),
}
"""Modules that do I/O, tell time or start threads; not for ``protocol/``."""

FLOOR_0_BAN = IO - {"os", "time"}
FLOOR_0_EXCEPTIONS = {("config", "os"), ("deadline", "time"), ("messages", "time")}

NAMED = [module for module in MODULES if module.name != "engine_client"]


def short(name: str) -> str:
    """Return a module's name within the package."""
    return name.removeprefix("engine_client").removeprefix(".")


def room_of(name: str) -> str:
    return short(name).partition(".")[0]


def inner_imports(module: Module):
    """Return the imports of this package's own modules."""
    return [found for found in imports(module) if found.target.partition(".")[0] == "engine_client"]


@pytest.mark.parametrize("module", NAMED, ids=str)
def test_imports_go_down(module):
    """A module imports from below, or from the siblings named in the table."""
    own = short(module.name)
    wrong = []
    for found in inner_imports(module):
        target = short(found.target)
        edge = (own, target)
        if not target or edge in IN_PROCESS or (found.late and edge in LATE_EXCEPTIONS):
            continue
        if not may_import(own, target):
            wrong.append(f"line {found.line}: {target}")
    assert not wrong, f"{own} may not import {wrong}"


def may_import(own: str, target: str) -> bool:
    own_floor, target_floor = FLOORS[room_of(own)], FLOORS[room_of(target)]
    if target_floor < own_floor:
        return True
    room = "" if own_floor == 0 else room_of(own)
    if target_floor > own_floor or (room and room_of(target) != room):
        return False
    name = target.partition(".")[2] or target
    return name == room or name in SIBLINGS.get(room, {}).get(own.partition(".")[2] or own, set())


@pytest.mark.parametrize("module", [m for m in NAMED if room_of(m.name) in ("bench", "cli", "integrations")], ids=str)
def test_outer_rooms_use_the_public_names(module):
    """The command line and the integrations import names from the package itself, as a user would."""
    public = {
        "engine_client",
        *(m.name for m in MODULES if room_of(m.name) in ("bench", "executors", "interfaces", "testing")),
    }
    own_room = f"engine_client.{room_of(module.name)}"
    inner = [f for f in inner_imports(module) if not f.target.startswith(own_room)]
    assert [f"line {f.line}: {f.target}" for f in inner if f.target not in public] == []


def test_tables_name_nothing_that_is_gone():
    """Every edge in the tables exists, so that they stay a description of the tree."""
    edges = {(short(module.name), short(found.target)) for module in NAMED for found in inner_imports(module)}
    listed = {
        (room if own == room else f"{room}.{own}".strip("."), f"{room}.{target}".strip("."))
        for room, table in SIBLINGS.items()
        for own, targets in table.items()
        for target in targets
    }
    assert (listed | LATE_EXCEPTIONS | IN_PROCESS) - edges == set()
    assert {room_of(module.name) for module in NAMED} == set(FLOORS)


@pytest.mark.parametrize("room", SIBLINGS, ids=lambda room: room or "floor 0")
def test_no_circles(room):
    """The modules of a room can be put in an order in which each imports only from those before it."""
    left = {own: set(targets) for own, targets in SIBLINGS[room].items()}
    while left:
        ready = {own for own, targets in left.items() if not targets & left.keys()}
        assert ready, f"a circle among {sorted(left)}"
        left = {own: targets for own, targets in left.items() if own not in ready}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_foreign_packages(module):
    """Packages from outside are imported in one place each, inside functions, so that they load when needed."""
    own = short(module.name)
    for found in imports(module):
        top = found.target.partition(".")[0]
        if top in sys.stdlib_module_names or top == "engine_client":
            continue
        assert top in THIRD_PARTY, f"line {found.line}: {top} is not among the packages that this library knows"
        places = THIRD_PARTY[top]
        assert found.type_checking or found.late or (own, top) in LOADED_BY_IT, (
            f"line {found.line}: {top} is loaded with the module"
        )
        assert found.type_checking if places is None else own in places, (
            f"line {found.line}: {top} does not belong here"
        )


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_heavy_modules_load_late(module):
    """What takes time or memory to load is imported inside functions, but for the modules named in the table."""
    own = short(module.name)
    for found in imports(module):
        top = found.target.partition(".")[0]
        if not found.late and not found.type_checking:
            assert own in HEAVY.get(top, {own}), f"line {found.line}: {top}"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m.name) == "protocol"], ids=str)
def test_protocol_is_pure(module):
    """``protocol/`` does no I/O: nothing that could is imported, anywhere in a file."""
    assert [f for f in imports(module) if f.target.partition(".")[0] in IO and not f.type_checking] == []
    called = {ast.unparse(node.func) for node in ast.walk(parse(module)) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input"}


@pytest.mark.parametrize("module", [m for m in NAMED if FLOORS[room_of(m.name)] == 0], ids=str)
def test_floor_0_is_plain_data(module):
    """Floor 0 starts no thread or process; the deadline alone reads the clock (and messages take a time stamp)."""
    own = short(module.name)
    found = {(own, f.target.partition(".")[0]) for f in imports(module)}
    assert {edge for edge in found if edge[1] in IO} <= FLOOR_0_EXCEPTIONS


def sizes(module: Module) -> tuple[int, dict[str, int]]:
    """Return the lines of a module, docstrings apart, and of each function, all in."""
    tree = parse(module)
    lines = module.path.read_text(encoding="utf-8").count("\n")
    functions: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions[f"{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    return lines, functions


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_rooms_stay_small(module):
    """A module has at most 300 lines, docstrings apart; a function at most 50."""
    lines, functions = sizes(module)
    assert lines <= 300
    assert {name: length for name, length in functions.items() if length > 50} == {}


def test_rooms_are_small_on_the_whole():
    """The median module has at most 180 lines, and 95 % of the functions have at most 35."""
    counted = [sizes(module) for module in MODULES]
    assert statistics.median(lines for lines, _ in counted) <= 180
    lengths = sorted(length for _, functions in counted for length in functions.values())
    assert lengths[int(0.95 * len(lengths))] <= 35


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_says_what_it_is_for(module):
    """Every module has a docstring; one with code also says who may use it from which thread."""
    text = ast.get_docstring(parse(module))
    assert text
    if module.path.name not in ("__init__.py", "__main__.py"):
        assert "Threads:" in text
    if room_of(module.name) == "protocol" and module.path.name != "__init__.py":
        assert "Pure" in text


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_is_unfinished(module):
    """There is no mark of unfinished work, and every exemption from a check gives its reason."""
    before = ""
    for number, line in enumerate(module.path.read_text(encoding="utf-8").splitlines(), 1):
        assert not any(word in line for word in ("TODO", "FIXME", "XXX")), f"line {number}: {line}"
        exemption = re.search(r"# (?:noqa: [A-Z0-9, ]+\b|type: ignore\[[a-z-, ]+\]|pragma: no \w+)(.*)", line)
        if exemption:
            reason = exemption[1].strip(" #()") or before.strip().startswith("#")
            assert reason, f"line {number} gives no reason: {line.strip()}"
        else:
            assert not re.search(r"# (noqa|type: ignore|pragma)", line), f"line {number} exempts from everything"
        before = line
