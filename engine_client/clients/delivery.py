"""What a frame of an engine means for whoever waits for it.

Threads: the reader's.
"""

from __future__ import annotations

import logging
from typing import Final

from engine_client.clients.endings import EXIT_TIMEOUT
from engine_client.clients.link import EngineLink
from engine_client.clients.relog import relog
from engine_client.clients.traffic import Traffic
from engine_client.deadline import Deadline
from engine_client.errors import RemoteCallError
from engine_client.protocol.frames import Flag, Frame, Kind
from engine_client.protocol.lifecycle import Action
from engine_client.protocol.wire import decode_dead, decode_text

__all__ = ["deliver"]

_log = logging.getLogger("engine_client.session")

# Looked up once, see ``frames.Kind``.
_IGNORE: Final = Action.IGNORE
_OUTPUTS, _REPLY = int(Kind.OUTPUTS), int(Kind.REPLY)


def deliver(traffic: Traffic, link: EngineLink, frame: Frame, *, is_quiet: bool, grace: float) -> Deadline | None:
    """Take a frame; return until when its engine has to end, if it has said its last.

    Args:
        traffic: of the client.
        link: to the engine.
        frame: what it has sent.
        is_quiet: nobody is to be woken.
        grace: seconds that an engine gets to end which leaves in order.

    Raises:
        Exception: the frame cannot be used.
    """
    kind = frame.kind
    if link.life.received(kind) is _IGNORE or (is_quiet and kind in {_OUTPUTS, _REPLY}):
        return None
    if kind == _OUTPUTS:
        traffic.take_outputs(link, frame)
    elif kind == _REPLY:
        if not traffic.calls.settle(frame.ref, result=frame) and frame.flags & Flag.FAILED:
            _log.warning("a utility call that its caller gave up has failed in %s", link.title)
    elif kind == Kind.LOG:
        relog(link, frame)
    elif kind == Kind.DEAD:
        link.last_words = _last_words(frame)
        return Deadline(EXIT_TIMEOUT)
    elif kind == Kind.GOODBYE:
        text = decode_text(frame)
        link.farewell = text if type(text) is str else ""  # nothing else is made a text: it may have no end
        return Deadline(0.0 if link.is_foreign else grace)  # how a process ends that is not ours is nothing to wait for
    return None


def _last_words(frame: Frame) -> tuple[BaseException, str]:
    try:
        return decode_dead(frame)
    except Exception as error:  # noqa: BLE001  # a cause that cannot be decoded is still a death
        return RemoteCallError(f"its last words cannot be decoded: {error}"), "serving"
