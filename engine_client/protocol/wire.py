"""The messages of the protocol: which there are, what each carries, and how it becomes a frame.

::

    client ── INIT · ATTACH · ADD · ABORT · UTILITY · SHUTDOWN ──────────────────────────▶ engine
    client ◀── HELLO · STATUS* · READY | FAILED · OUTPUTS · REPLY · DEAD · GOODBYE ── engine

A message is a frame: kind, flags, ``ref`` (the request key of an ADD, the call id of a UTILITY and its REPLY), a
pickled header and buffers.  ``ref`` stands outside of the pickle, so that a payload that cannot be decoded still
names the request or call that it belongs to, and fails only that one.  Output batches are in ``batch``.

Invariants: I9 (an encoder reads its arguments during the call only).

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter, is_not
from typing import Any, Final

from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreReadyResponse, EngineCoreRequest
from engine_client.params import SamplingParams
from engine_client.protocol.codec import LONGEST_PLAIN, Payload, are_plain, dumps, dumps_plain, dumps_row, loads
from engine_client.protocol.frames import RESTRICTED, Flag, Frame, Kind, new_tuple

__all__ = [
    "PING",
    "PROTOCOL_VERSION",
    "Init",
    "decode_abort",
    "decode_add",
    "decode_dead",
    "decode_init",
    "decode_log",
    "decode_ready",
    "decode_reply",
    "decode_status",
    "decode_text",
    "decode_utility",
    "encode_abort",
    "encode_add",
    "encode_dead",
    "encode_failed",
    "encode_hello",
    "encode_init",
    "encode_log",
    "encode_ready",
    "encode_reply",
    "encode_status",
    "encode_text",
    "encode_utility",
    "load_frame",
]

PROTOCOL_VERSION: Final = 3

# Looked up once, see ``frames.Kind``.
_NEEDS_MAIN: Final = int(Flag.NEEDS_MAIN)
_FAILED: Final = int(Flag.FAILED)
_ADD: Final = int(Kind.ADD)
_UTILITY: Final = int(Kind.UTILITY)
_REPLY: Final = int(Kind.REPLY)

PING: Final = "ping"
"""The utility that every busy loop answers by itself."""


@dataclass(frozen=True)
class Init:
    """Everything an engine process needs to become an engine.

    Args:
        token: random, per client instance; READY repeats it, so that another client's engine is not mistaken for ours.
        rank: data-parallel rank.
        target: ``"module:function"`` that builds the engine.
        sys_path, argv: of the client's interpreter, so that modules beside the user's script are found.
        main: description of the client's ``__main__`` (see ``ipc.user_main``).
        options: ``ClientOptions.for_engine()``.
        payload: pickled ``(vllm_config, executor_class, log_stats)``, decoded only after ``sys_path`` is in force.
    """

    token: str
    rank: int
    target: str
    sys_path: list[str]
    argv: list[str]
    main: dict[str, Any]
    options: dict[str, Any]
    payload: Payload = field(repr=False)


def _frame(kind: int, payload: Payload, ref: int = 0, flags: int = 0) -> Frame:
    if payload.needs_main:
        flags |= _NEEDS_MAIN
    return Frame(kind, flags, ref, payload.header, payload.buffers)


def load_frame(frame: Frame) -> Any:
    """Decode a frame's header and buffers.

    A frame that cannot be decoded has lost its buffers afterwards: they are the sender's again, however long somebody
    keeps the exception.  After a ``KeyboardInterrupt`` it can be decoded again.
    """
    if frame.error is not None:
        raise frame.error
    try:
        return loads(frame.header, frame.buffers, restricted=frame.flags >= RESTRICTED)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(frame.buffers, list):
            frame.buffers.clear()
        with suppress(OSError):  # of the import, which needs a descriptor
            from engine_client.protocol.tracebacks import empty_frames  # noqa: PLC0415  # needed for failures only

            empty_frames(error)
        raise


# -- handshake ---------------------------------------------------------------------------------------------------------


def encode_hello(pid: int, version: int = PROTOCOL_VERSION) -> Frame:
    """Encode the engine's first message."""
    return _frame(Kind.HELLO, dumps((version, pid)))


def encode_init(init: Init) -> Frame:
    """Encode the client's answer to HELLO."""
    inner = init.payload
    outer = (init.token, init.rank, init.target, init.sys_path, init.argv, init.main, init.options)
    return _frame(Kind.INIT, dumps((outer, inner.header, list(inner.buffers), inner.needs_main)))


def decode_init(frame: Frame) -> Init:
    """Decode INIT; its ``payload`` stays pickled."""
    outer, header, buffers, needs_main = load_frame(frame)
    token, rank, target, sys_path, argv, main, options = outer
    return Init(token, rank, target, sys_path, argv, main, options, Payload(header, buffers, needs_main))


def encode_status(phase: str, done: int, total: int) -> Frame:
    """Encode progress of the start."""
    return _frame(Kind.STATUS, dumps((str(phase), int(done), int(total))))


def decode_status(frame: Frame) -> tuple[str, int, int]:
    """Decode ``(phase, done, total)``."""
    phase, done, total = load_frame(frame)
    if (type(phase), type(done), type(total)) != (str, int, int):
        raise RemoteProtocolError("a STATUS says nothing")
    return phase, done, total


def encode_log(name: str, level: int, text: str) -> Frame:
    """Encode a log record: its logger, its level and its text."""
    return _frame(Kind.LOG, dumps((str(name), int(level), str(text))))


def decode_log(frame: Frame) -> tuple[str, int, str]:
    """Decode ``(name, level, text)``."""
    name, level, text = load_frame(frame)
    if (type(name), type(level), type(text)) != (str, int, str):  # nothing else is made a text: it may have no end
        raise RemoteProtocolError("a LOG says nothing")
    return name, level, text


def encode_ready(token: str, response: EngineCoreReadyResponse) -> Frame:
    """Encode the end of a start that succeeded."""
    return _frame(Kind.READY, dumps((token, vars(response))))


def decode_ready(frame: Frame) -> tuple[str, EngineCoreReadyResponse]:
    """Decode ``(token, response)``."""
    token, attributes = load_frame(frame)
    return token, EngineCoreReadyResponse(**attributes)


def encode_failed(error: BaseException, phase: str) -> Frame:
    """Encode the end of a start that failed in ``phase``."""
    return _frame(Kind.FAILED, dumps((error, phase)))


def encode_dead(error: BaseException, phase: str) -> Frame:
    """Encode ENGINE_CORE_DEAD: the engine's last words after an exception in ``phase``."""
    return _frame(Kind.DEAD, dumps((error, phase)))


def decode_dead(frame: Frame) -> tuple[BaseException, str]:
    """Decode DEAD or FAILED into ``(error, phase)``."""
    error, phase = load_frame(frame)
    if not isinstance(error, BaseException) or type(phase) is not str:
        raise RemoteProtocolError("last words are no error")
    return error, phase


def encode_text(kind: Kind, text: str) -> Frame:
    """Encode a message that carries one sentence (SHUTDOWN, GOODBYE), or a number (ATTACH: the sender's pid)."""
    return _frame(kind, dumps(text))


def decode_text(frame: Frame) -> Any:
    """Decode the value of a message that ``encode_text`` or ``encode_hello`` made."""
    return load_frame(frame)


# -- requests ----------------------------------------------------------------------------------------------------------

_HOT = ("request_id", "prompt_token_ids", "sampling_params", "arrival_time")
_REST = tuple(f.name for f in fields(EngineCoreRequest) if f.name not in _HOT)
_REST_DEFAULTS = tuple(
    None if f.default is MISSING else f.default for f in fields(EngineCoreRequest) if f.name not in _HOT
)
_REST_OF_REQUEST = dict(zip(_REST, _REST_DEFAULTS, strict=True))
_get_rest = attrgetter(*_REST)
_PARAMETERS = tuple(f.name for f in fields(SamplingParams))


def _rest_of(request: Any) -> dict[str, Any] | None:
    """Return the less common fields that are not at their defaults; missing attributes count as defaults."""
    try:
        values = _get_rest(request)
    except AttributeError:
        values = tuple(map(getattr, [request] * len(_REST), _REST, _REST_DEFAULTS))
    if not any(map(is_not, values, _REST_DEFAULTS)):
        return None
    return {
        name: value for name, value, default in zip(_REST, values, _REST_DEFAULTS, strict=True) if value is not default
    }


def _parameters_of(params: Any) -> tuple[Any, ...] | None:
    """Return the values of our own sampling parameters if all are plain: cheaper than an object, and than its names."""
    if type(params) is not SamplingParams or tuple(params.__dict__) != _PARAMETERS:
        return None
    values = tuple(params.__dict__.values())
    return values if are_plain(values) else None


def encode_add(key: int, request: Any, prompt: array[int] | None, *, main_importable: bool = True) -> Frame:
    """Encode a request under its integer key; ``prompt`` is its token ids, checked already.

    What most requests are made of is plain, or arrays, and does not need the general codec.
    """
    name, params, arrival_time = request.request_id, request.sampling_params, request.arrival_time
    token_ids = None if prompt is None else prompt.tobytes()
    rest = _rest_of(request)
    parameters = _parameters_of(params)
    row = (name, token_ids, parameters or params, arrival_time, rest)
    if parameters is not None and are_plain((name, arrival_time)):
        if rest is None or are_plain(rest.values()):
            header = dumps_plain(row)
            if header is not None:
                return new_tuple(Frame, (_ADD, 0, key, header, (), None))
        elif len(token_ids or b"") < LONGEST_PLAIN and (payload := dumps_row(row[:-1], rest)) is not None:
            return _frame(_ADD, payload, ref=key)
    return _frame(_ADD, dumps(row, main_importable=main_importable), ref=key)


def decode_add(frame: Frame) -> EngineCoreRequest:
    """Decode a request; its key is ``frame.ref``."""
    request_id, prompt, params, arrival_time, rest = load_frame(frame)
    token_ids: list[int] | None = None
    if prompt is not None:
        column = array("I")
        column.frombytes(prompt)
        token_ids = column.tolist()
    if type(params) is tuple:
        values, params = params, SamplingParams.__new__(SamplingParams)
        params.__dict__.update(zip(_PARAMETERS, values, strict=True))
    request = EngineCoreRequest.__new__(EngineCoreRequest)
    fields_ = request.__dict__
    fields_.update(_REST_OF_REQUEST)
    fields_.update(request_id=request_id, prompt_token_ids=token_ids, sampling_params=params, arrival_time=arrival_time)
    if rest:
        fields_.update(rest)
    return request


def encode_abort(keys: Sequence[int]) -> Frame:
    """Encode the wish to end requests, by key."""
    return _frame(Kind.ABORT, dumps(array("Q", keys).tobytes()))


def decode_abort(frame: Frame) -> list[int]:
    """Decode the keys of an ABORT."""
    column = array("Q")
    column.frombytes(load_frame(frame))
    return column.tolist()


# -- utilities ---------------------------------------------------------------------------------------------------------


def encode_utility(call_id: int, method: str, args: Sequence[Any], *, main_importable: bool = True) -> Frame:
    """Encode a utility call."""
    args = tuple(args)
    header = dumps_plain((method, args)) if are_plain((method, *args)) else None
    if header is not None:
        return new_tuple(Frame, (_UTILITY, 0, call_id, header, (), None))
    return _frame(_UTILITY, dumps((method, args), main_importable=main_importable), ref=call_id)


def decode_utility(frame: Frame) -> tuple[str, tuple[Any, ...]]:
    """Decode ``(method, args)``; the call id is ``frame.ref``."""
    method, args = load_frame(frame)
    return method, args


def encode_reply(
    call_id: int, result: Any = None, error: BaseException | None = None, *, main_importable: bool = True
) -> Frame:
    """Encode the answer to a utility call: its result, or the exception that ended it."""
    if error is not None:
        return _frame(_REPLY, dumps(error), call_id, _FAILED)
    return _frame(_REPLY, dumps(result, main_importable=main_importable), call_id)


def decode_reply(frame: Frame) -> tuple[bool, Any]:
    """Decode ``(failed, result or exception)``; the call id is ``frame.ref``."""
    return bool(frame.flags & _FAILED), load_frame(frame)
