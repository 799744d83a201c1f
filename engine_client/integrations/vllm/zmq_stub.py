"""A stand-in for pyzmq that carries vLLM through its imports, and through nothing else.

vLLM's modules say ``import zmq`` at their top and use some names for annotations and constants.  The stub has those
names.  Whoever makes a context, a socket or a poller gets one error that says which feature of vLLM wanted it.  It is
put into ``sys.modules`` only where pyzmq is not installed.

Threads: ``provide`` from any thread; the rest is plain data.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from engine_client.integrations.vllm.refusals import UnsupportedError

__all__ = ["ZMQUnavailableError", "is_stub", "provide", "unavailable"]

_CONSTANTS: Final = {
    "PAIR": 0,
    "PUB": 1,
    "SUB": 2,
    "REQ": 3,
    "REP": 4,
    "DEALER": 5,
    "ROUTER": 6,
    "PULL": 7,
    "PUSH": 8,
    "XPUB": 9,
    "XSUB": 10,
    "STREAM": 11,
    "NOBLOCK": 1,
    "DONTWAIT": 1,
    "SNDMORE": 2,
    "POLLIN": 1,
    "POLLOUT": 2,
    "IDENTITY": 5,
    "SUBSCRIBE": 6,
    "UNSUBSCRIBE": 7,
    "LINGER": 17,
    "SNDHWM": 23,
    "RCVHWM": 24,
    "RCVTIMEO": 27,
    "SNDTIMEO": 28,
    "SNDBUF": 11,
    "RCVBUF": 12,
    "LAST_ENDPOINT": 32,
    "XPUB_VERBOSE": 40,
    "IPV6": 42,
    "CONFLATE": 54,
    "ROUTER_HANDOVER": 56,
    "HEARTBEAT_IVL": 75,
    "HEARTBEAT_TTL": 76,
    "HEARTBEAT_TIMEOUT": 77,
    "EVENT_DISCONNECTED": 512,
}
"""libzmq's numbers."""

_FEATURES: Final = {
    "vllm.distributed.device_communicators": "the 'mp' executor (several workers, as for tensor parallelism)",
    "vllm.v1.executor": "the 'mp' executor (several workers, as for tensor parallelism)",
    "vllm.distributed.kv_events": "publishing KV cache events",
    "vllm.distributed.kv_transfer": "a KV connector",
    "vllm.distributed.ec_transfer": "an encoder cache connector",
    "vllm.distributed": "a distributed feature",
    "vllm.v1.kv_offload": "KV offloading between hosts",
    "vllm.v1.engine.coordinator": "vLLM's data-parallel coordinator",
    "vllm.v1.engine": "vLLM's own engine client (several API servers, several hosts, or no install() in this process)",
    "vllm.entrypoints.cli": "several API servers",
}
"""Which feature a module of vLLM is for; the most specific line counts."""


class ZMQUnavailableError(UnsupportedError):
    """Something needs a ZMQ socket, and pyzmq is not installed."""


def unavailable(feature: str, why: str) -> ZMQUnavailableError:
    """Return the error for a feature of vLLM; ``why`` says how it is known that it wants a socket."""
    return ZMQUnavailableError(
        f"{feature} needs ZMQ sockets ({why}), and pyzmq is not installed; engine_client "
        "replaces ZMQ between front-end and engine core only: install pyzmq, or do without this feature"
    )


def _refuse(what: str) -> ZMQUnavailableError:
    """Return the error for the first caller outside of vLLM's own helpers for sockets."""
    frame = sys._getframe(2)  # noqa: SLF001  # inspect offers the same, and takes 10 ms to load
    names: list[str] = []
    while frame is not None and len(names) < 16:  # type: ignore[redundant-expr]  # the last frame has none before it
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back  # type: ignore[assignment]  # as above
    module = next((name for name in names if name.startswith("vllm.") and not name.startswith("vllm.utils")), names[0])
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    feature = next((_FEATURES[prefix] for prefix in prefixes if prefix in _FEATURES), "this feature")
    return unavailable(feature, f"{module} asked for a zmq.{what}")


class _Unavailable:
    """Base of the classes that exist for annotations, and cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _refuse(type(self).__name__)

    @classmethod
    def instance(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise as the constructor does; ``zmq.Context.instance()`` is the other way to get one."""
        raise _refuse(cls.__name__)

    @classmethod
    def shadow(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise as the constructor does."""
        raise _refuse(cls.__name__)


def _recv_monitor_message(*args: Any, **kwargs: Any) -> Any:
    raise _refuse("utils.monitor.recv_monitor_message")


def _classes(*names: str) -> dict[str, Any]:
    return {name: type(name, (_Unavailable,), {"__module__": "zmq"}) for name in names}


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name, "Stand-in of engine_client for pyzmq, which is not installed.")
    module.__spec__ = ModuleSpec(name, loader=None, origin="engine_client", is_package=True)
    module.__path__ = []
    vars(module).update(values)
    return module


def _build() -> dict[str, ModuleType]:
    error = type("ZMQError", (Exception,), {"__module__": "zmq"})
    errors = {name: type(name, (error,), {"__module__": "zmq"}) for name in ("Again", "ContextTerminated")}
    asyncio = _module("zmq.asyncio", **_classes("Context", "Socket", "Poller"))
    monitor = _module("zmq.utils.monitor", recv_monitor_message=_recv_monitor_message)
    utils = _module("zmq.utils", monitor=monitor)
    classes = _classes("Context", "Socket", "Poller", "Frame", "Message", "MessageTracker")
    zmq = _module("zmq", **_CONSTANTS, **classes, **errors, ZMQError=error, asyncio=asyncio, utils=utils)
    return {module.__name__: module for module in (zmq, asyncio, utils, monitor)}


def provide() -> bool:
    """Put the stub into ``sys.modules`` if pyzmq is missing; return whether the stub is there."""
    if "zmq" not in sys.modules and find_spec("zmq") is None:
        sys.modules.update(_build())
    return is_stub()


def is_stub() -> bool:
    """Tell whether ``zmq`` is this stub."""
    spec = getattr(sys.modules.get("zmq"), "__spec__", None)
    return spec is not None and spec.origin == "engine_client"
