"""Starts the engines of one client: at the beginning, again after a death, and when the client grows.

Invariants: I11 (an engine is the session's as soon as it exists).

Threads: ``start`` from one thread at a time; the session's locks do the rest.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from engine_client.clients.front_ends import FrontEnds
from engine_client.clients.link import EngineLink
from engine_client.clients.session import Session
from engine_client.clients.start import Handshake, launch_engine
from engine_client.config import ClientOptions
from engine_client.deadline import Deadline
from engine_client.errors import SerializationError
from engine_client.ipc.aside import run_aside, signals_blocked
from engine_client.ipc.user_main import describe_main, importable
from engine_client.messages import EngineCoreReadyResponse
from engine_client.protocol.codec import Payload, dumps
from engine_client.protocol.exception_fields import text_of
from engine_client.protocol.wire import Init

__all__ = ["Starter"]

T = TypeVar("T")


class Starter:
    """What an engine is built from, and how it is started.

    Args:
        options: of the client.
        vllm_config, executor_class, log_stats: of the client; encoded here and now.

    Raises:
        SerializationError: the configuration or the executor class cannot be sent.
    """

    def __init__(self, options: ClientOptions, vllm_config: Any, executor_class: Any, *, log_stats: bool) -> None:
        self.options = options
        self._main = describe_main()
        self.main_importable = importable(self._main)
        self._payload = _encode_build(vllm_config, executor_class, log_stats, main_importable=self.main_importable)
        self._token = secrets.token_hex(16)

    def launch(self, session: Session, ranks: Iterable[int], front_ends: FrontEnds | None = None) -> list[EngineLink]:
        """Start processes; each belongs to the session from the moment that it runs.

        Raises:
            OSError, StartupError: a process could not be started; those before it are the session's.
        """

        def launch_all() -> list[EngineLink]:
            assert session.writer is not None  # from the start to the end of a session
            group = None if session.lock_step is None else session.lock_step.fds
            links = []
            for rank in ranks:
                links.append(launch_engine(rank, self.options, session.writer, group, front_ends))
                session.adopt(links[-1])
            return links

        return self.undisturbed(launch_all)

    def undisturbed(self, action: Callable[[], T]) -> T:
        """Return ``action()``, during which no interrupt comes: what it acquires may not have an owner yet."""
        if self.options.start_method == "fork":
            with signals_blocked():  # instead of another thread, with which a fork would not be safe
                return action()
        return run_aside(action)

    def make_ready(
        self, links: list[EngineLink], deadline: Deadline, check: Callable[[], None] | None = None
    ) -> dict[int, EngineCoreReadyResponse]:
        """Lead processes to READY; return what each reported, by rank.

        Args:
            links: to them.
            deadline: for all.
            check: called now and then; what it raises ends the start.

        Raises:
            StartupError, HandshakeTimeout: as ``Handshake.run``.
        """
        return Handshake(links, self._make_init, self._token, self.options, deadline, check).run()

    def _make_init(self, rank: int) -> Init:
        target, options = self.options.engine_target, self.options.for_engine()
        return Init(self._token, rank, target, list(sys.path), list(sys.argv), self._main, options, self._payload)


def _encode_build(vllm_config: Any, executor_class: Any, log_stats: bool, *, main_importable: bool) -> Payload:
    """Encode what an engine is built from, or say which part of it cannot be sent, and why."""
    try:
        return dumps((vllm_config, executor_class, log_stats), main_importable=main_importable)
    except SerializationError:
        raise  # names the object itself
    except Exception as error:
        what, value = "the configuration", vllm_config
        with suppress(Exception):  # the one above, again
            dumps(vllm_config, main_importable=main_importable)
            what, value = "the executor class", getattr(executor_class, "func", executor_class)  # of a partial
        name = getattr(value, "__qualname__", type(value).__qualname__)
        text = f"{what} {name} cannot be sent to an engine: {type(error).__name__}: {text_of(error)}"
        raise SerializationError(text) from error
