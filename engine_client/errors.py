"""Every error that this library raises, in one tree.

::

    EngineClientError
    ├── EngineDeadError            the engine is gone (the reference's name)
    │   └── ClosedError            ... because you closed the client
    ├── EngineGenerateError        one generation failed; the engine lives (the reference's name)
    ├── EngineStalledError         (also TimeoutError) the engine is alive and does not respond
    ├── StartupError               (also RuntimeError) the engine did not come up
    │   └── HandshakeTimeout       (also TimeoutError) ... within its deadline
    ├── ForeignProcessError        (also RuntimeError) the client was used in a forked copy of its process
    ├── ProtocolError
    │   ├── LocalProtocolError     this side did something the protocol forbids
    │   └── RemoteProtocolError    the other side did
    ├── SerializationError         (also TypeError) a value cannot cross the process border
    └── RemoteCallError            stands in for a remote exception that cannot be rebuilt here

Every waiter gets an instance of its own, since raising an exception changes it.  All of them can be pickled.

Threads: immutable after construction; built anywhere.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "EngineClientError",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineStalledError",
    "ForeignProcessError",
    "HandshakeTimeout",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteCallError",
    "RemoteProtocolError",
    "SerializationError",
    "StartupError",
]

_DEAD_MESSAGE = "the engine core is dead"


class EngineClientError(Exception):
    """Base of all errors of this library."""


class EngineDeadError(EngineClientError):
    """The engine core is dead; nothing more will come from it.

    ``__cause__`` is the engine's own exception where there was one.

    Args:
        args: the message; a fixed sentence when there is none, as with the reference's class.
        suppress_context: hide the exception that was being handled when this one was raised.
        rank: data-parallel rank of the engine.
        pid: process id of the engine.
        exit_name: how the process ended: ``"exit code 3"``, ``"SIGKILL(-9)"``, ``"unknown"``.
        remote_traceback: the engine's traceback as text; for a native crash or a stall its threads' Python stacks.
    """

    def __init__(
        self,
        *args: object,
        suppress_context: bool = False,
        rank: int | None = None,
        pid: int | None = None,
        exit_name: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(*(args or (_DEAD_MESSAGE,)))
        self.rank = rank
        self.pid = pid
        self.exit_name = exit_name
        self.remote_traceback = remote_traceback
        self.__suppress_context__ = suppress_context


class ClosedError(EngineDeadError):
    """The client was closed by its user; the engine was ended with it."""


class EngineGenerateError(EngineClientError):
    """One generation failed; the engine lives on."""


class EngineStalledError(EngineClientError, TimeoutError):
    """The engine process lives but did not respond within the limit."""


class StartupError(EngineClientError, RuntimeError):
    """An engine did not come up; the message names ranks, exits and the cause (also ``__cause__``)."""


class HandshakeTimeout(StartupError, TimeoutError):
    """An engine did not say READY before the deadline."""


class ForeignProcessError(EngineClientError, RuntimeError):
    """A client was used in a process that only inherited it by fork."""


class ProtocolError(EngineClientError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the protocol forbids; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol forbids; its channel is closed."""


class SerializationError(EngineClientError, TypeError):
    """A value cannot cross the process border; the message names it and says what to do."""


class RemoteCallError(EngineClientError):
    """Stands in for an exception of the engine that cannot be rebuilt in this process.

    Args:
        message: type name and text of the original.
        type_name: ``module.qualname`` of the original exception's class.
        remote_traceback: the engine's traceback as text.
    """

    def __init__(self, message: str = "", type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback
