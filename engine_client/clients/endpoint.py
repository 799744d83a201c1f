"""What a front-end process needs to use engines that another process has launched.

::

    launcher: FrontEnds ─▶ Endpoint ──(multiprocessing arguments, or pass_fds)──▶ front-end: take ─▶ EngineLink …

It consists of open descriptors and a description of them, so it travels only while the front-end's process is being
started.  An endpoint is for one front-end, once; the first that takes it seals its memory, which all copies share.

Invariants: I5 (a descriptor is the endpoint's until it is disowned), I11.

Threads: used by one thread at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.messages import EngineCoreReadyResponse

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Endpoint", "RankEnd"]


@dataclass(frozen=True)
class RankEnd:
    """The front-end's ends of what connects it with one engine.

    Args:
        rank, pid: of the engine.
        channel: socket of the pipe to it.
        arena_in: memory that it writes big buffers for this front-end to.
        page: memory of its status page.
        response: what it said when it was ready.
    """

    rank: int
    pid: int
    channel: int
    arena_in: int
    page: int
    response: dict[str, Any]

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return the engine's real capacities."""
        return EngineCoreReadyResponse(**self.response)


class Endpoint:
    """One front-end's access to launched engines; give it as ``client_addresses``.

    Hand it to the front-end's process as an argument of ``multiprocessing.Process``, or start that process with
    ``pass_fds=endpoint.pass_fds`` and let it call ``Endpoint.from_text(text)`` with ``str(endpoint)``.

    Once that process is started the launcher may ``close`` its own copy, as ``with endpoint: process.start()`` does.
    The memory of a front-end is then free as soon as that ends, and else when the engines end.

    Args:
        index: of the front-end.
        count: how many front-ends these engines have.
        arena_out: memory that the front-end writes big buffers to.
        ranks: of the engines.
        group: memory of the page of ranks in lock-step; None for independent ones.
        main: how the launcher's main file can be run, as ``describe_main`` returns it.
        launcher_pid: of the process that has launched the engines.
    """

    def __init__(  # noqa: PLR0913  # all that travels
        self,
        index: int,
        count: int,
        arena_out: int,
        ranks: Iterable[RankEnd],
        *,
        group: int | None,
        main: dict[str, str],
        launcher_pid: int,
    ) -> None:
        self.index = index
        self.count = count
        self.arena_out = arena_out
        self.ranks = tuple(ranks)
        self.group = group
        self.main = main
        self.launcher_pid = launcher_pid
        self.maker_pid = os.getpid()  # of this object; a forked copy has another
        self._is_taken = False
        self._open = list(self._fds())  # those that are this object's to close
        self._inodes = [os.fstat(fd).st_ino for fd in self._open]
        _mine.add(self)

    def __repr__(self) -> str:
        state = "taken" if self._is_taken else "open" if self._open else "closed"
        return f"<Endpoint {self.index} of {self.count} {state} ranks={[end.rank for end in self.ranks]}>"

    def __del__(self) -> None:
        close_all(getattr(self, "_open", []))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fds(self) -> tuple[int, ...]:
        group = () if self.group is None else (self.group,)
        return (self.arena_out, *group, *(fd for end in self.ranks for fd in (end.channel, end.arena_in, end.page)))

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Return the descriptors, for ``subprocess.Popen(pass_fds=…)``.

        Raises:
            ValueError: they were taken or closed.
        """
        self._check_open()
        return self._fds()

    def __str__(self) -> str:
        ranks = [asdict(end) for end in self.ranks]
        own = [self.index, self.count, self.arena_out, self.group, self.main, self.launcher_pid]
        return json.dumps([*own, ranks, self._inodes])

    @classmethod
    def from_text(cls, text: str, fds: Sequence[int] | None = None) -> Endpoint:
        """Return the endpoint that ``str`` was called on, in a process that has inherited its descriptors.

        Args:
            text: what ``str`` returned.
            fds: the numbers that the descriptors have here, in the order of ``pass_fds``; None: the same.

        Raises:
            ValueError: the text is no endpoint's, was used before, or the descriptors were not inherited.
        """
        if fds is None and (os.getpid(), text) in _texts:
            raise ValueError("an endpoint was made from this text already: use that one")
        try:
            index, count, arena_out, group, main, launcher_pid, ranks, inodes = json.loads(text)
            ends = [RankEnd(**end) for end in ranks]
            shape = [arena_out, *([] if group is None else [group])]
            shape += [fd for end in ends for fd in (end.channel, end.arena_in, end.page)]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"this is no endpoint's text: {error}") from None
        take = iter(_checked(shape if fds is None else fds, inodes))
        arena_out, group = next(take), None if group is None else next(take)
        ends = [replace(end, channel=next(take), arena_in=next(take), page=next(take)) for end in ends]
        endpoint = cls(index, count, arena_out, ends, group=group, main=main, launcher_pid=launcher_pid)
        if fds is None:
            _texts.add((os.getpid(), text))
        return endpoint

    def __reduce__(self) -> Any:
        from multiprocessing.context import get_spawning_popen  # noqa: PLC0415  # needed for this alone
        from multiprocessing.reduction import DupFd  # noqa: PLC0415  # as above

        if get_spawning_popen() is None:
            raise TypeError(
                "an endpoint can be pickled only while a process is being started: give it to multiprocessing.Process "
                "as an argument, or start the process with pass_fds=endpoint.pass_fds"
            )
        return _rebuild, (str(self), [DupFd(fd) for fd in self.pass_fds])

    def _check_open(self) -> None:
        if self._is_taken or not self._open:
            raise ValueError(_USED.format(self.index))

    def take(self) -> None:
        """Make the caller the one who uses the descriptors: each is its own once disowned, ``close`` closes the rest.

        A process that was forked has the endpoints of other front-ends, too; these are closed.

        Raises:
            ValueError: it was used or closed before, here or in another process.
        """
        self._check_open()
        try:
            fcntl.fcntl(self.arena_out, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except PermissionError:  # there is such a seal already
            raise ValueError(_USED.format(self.index)) from None
        except (AttributeError, OSError):
            pass  # safe because it is only the sentence above that is missing where there are no seals
        self._is_taken = True
        if self.launcher_pid != os.getpid():
            for other in list(_mine):
                if other is not self and other.maker_pid != os.getpid():
                    other.close()

    def disown(self, fd: int) -> int:
        """Return a descriptor that has another owner from now on."""
        self._open.remove(fd)
        return fd

    def close(self) -> None:
        """Close the descriptors; idempotent.  Those of processes that have them stay open."""
        close_all(self._open)


_USED: Final = "endpoint {} was used or closed already; each front-end needs one of its own"

_mine: weakref.WeakSet[Endpoint] = weakref.WeakSet()
"""The endpoints in this process: those it made, was given, or inherited by fork."""

_texts: set[tuple[int, str]] = set()
"""Those that endpoints were made from, with the process that did so: a second one would close what the first has."""


def _checked(fds: Sequence[int], inodes: Sequence[int]) -> Sequence[int]:
    """Return descriptors, closed at exec, if they are those that are meant."""
    try:
        is_right = [os.fstat(fd).st_ino for fd in fds] == list(inodes)
    except OSError:
        is_right = False
    if not is_right:
        raise ValueError(
            "the descriptors of this endpoint were not inherited: start the process with pass_fds=endpoint.pass_fds"
        )
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def _rebuild(text: str, passed: list[Any]) -> Endpoint:
    """Make an endpoint in the process that was started."""
    return Endpoint.from_text(text, [above_stdio(each.detach()) for each in passed])
