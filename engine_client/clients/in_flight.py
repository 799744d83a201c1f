"""The requests that a client has in flight: their ids, their integer keys, and what makes a request acceptable.

The user names a request by an id, the wire by a key that is never used twice.  An id is taken from ``add`` until its
last output was handed to the user, or until it was aborted; an output whose key is no longer here belongs to an aborted
request and is dropped, so an id can be used again at once.

Invariants: I2 in the form for requests (an id leaves the table once).

Threads: any; the lock is held for dictionary operations only.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping
from itertools import count
from numbers import Real
from typing import Any

from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns, outputs_from

__all__ = ["InFlight", "check_request"]


def check_request(request: Any, max_model_len: int | None) -> array[int] | None:
    """Check a request before anything is sent.

    Args:
        request: an ``EngineCoreRequest`` or an object with its attributes.
        max_model_len: longest prompt in tokens; None does not limit it.

    Returns:
        The prompt's token ids as unsigned 32-bit integers; None when there are none (prompt embeddings).

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that no engine can serve.
    """
    request_id = getattr(request, "request_id", None)
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a string, got {request_id!r:.100} in {type(request).__name__}")
    if not request_id:
        raise ValueError("request_id must not be empty")
    _check_parameters(request_id, request)
    token_ids = request.prompt_token_ids
    if token_ids is None:
        if getattr(request, "prompt_embeds", None) is None:
            raise ValueError(f"request {request_id!r:.100} has no prompt: give prompt_token_ids or prompt_embeds")
        return None
    try:
        prompt = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        kind = ValueError if isinstance(error, OverflowError) else TypeError
        raise kind(f"prompt_token_ids of request {request_id!r:.100} must be integers in [0, 2**32): {error}") from None
    if not prompt:
        raise ValueError(f"the prompt of request {request_id!r:.100} is empty")
    if max_model_len is not None and len(prompt) > max_model_len:
        raise ValueError(
            f"the prompt of request {request_id!r:.100} has {len(prompt)} tokens, more than max_model_len "
            f"({max_model_len}): shorten it, or raise model_config.max_model_len"
        )
    return prompt


def _check_parameters(request_id: str, request: Any) -> None:
    """Check the types of the fields that every engine reads."""
    sampling = request.sampling_params
    pooling = getattr(request, "pooling_params", None)
    if sampling is None and pooling is None:
        raise ValueError(f"request {request_id!r:.100} has neither sampling_params nor pooling_params")
    if sampling is not None and not hasattr(sampling, "max_tokens"):
        raise TypeError(f"sampling_params of request {request_id!r:.100} must be SamplingParams, got {sampling!r:.100}")
    if pooling is not None and not hasattr(pooling, "task"):
        raise TypeError(f"pooling_params of request {request_id!r:.100} must be PoolingParams, got {pooling!r:.100}")
    for name, kinds in _KINDS:
        value = getattr(request, name, None)
        if value is not None and not isinstance(value, kinds):
            raise TypeError(f"{name} of request {request_id!r:.100} must be {kinds[0].__name__}, got {value!r:.100}")


_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("arrival_time", (float, int, Real)),
    ("priority", (int,)),
    ("data_parallel_rank", (int,)),
    ("cache_salt", (str,)),
    ("trace_headers", (dict, Mapping)),
)


class InFlight:
    """The table of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._owners: dict[int, int] = {}
        self._next = count(1)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<InFlight {len(self._keys)} requests>"

    def add(self, request_id: str) -> int:
        """Take an id and return its key.

        Raises:
            ValueError: a request with this id is in flight.
        """
        with self._lock:
            if request_id in self._keys:
                raise ValueError(f"request {request_id!r:.100} is already running: choose another id or abort it first")
            key = next(self._next)
            self._keys[request_id] = key
            self._ids[key] = request_id
            self._owners[key] = threading.get_ident()
            return key

    def discard(self, key: int) -> None:
        """Forget a key; unknown ones are ignored."""
        with self._lock:
            request_id = self._ids.pop(key, None)
            self._owners.pop(key, None)
            if request_id is not None:
                self._keys.pop(request_id, None)

    def abort(self, request_ids: Iterable[Any]) -> list[int]:
        """Forget these requests and return their keys; whatever is not in flight is ignored."""
        with self._lock:
            keys = [key for request_id in request_ids if (key := self._pop(request_id)) is not None]
            for key in keys:
                self._ids.pop(key, None)
                self._owners.pop(key, None)
            return keys

    def _pop(self, request_id: Any) -> int | None:
        return self._keys.pop(request_id, None) if isinstance(request_id, str) else None

    def mine(self) -> list[int]:
        """Return the keys of the requests that the calling thread has added."""
        me = threading.get_ident()
        with self._lock:
            return [key for key, owner in self._owners.items() if owner == me]

    def outputs(self, columns: Columns) -> EngineCoreOutputs:
        """Turn a batch into outputs of the requests still in flight, and forget those that it finishes."""
        outputs, finished = outputs_from(columns, self._ids)
        for key in finished:
            self.discard(key)
        return outputs
