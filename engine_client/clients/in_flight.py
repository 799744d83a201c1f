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
from collections.abc import Hashable, Iterable, Mapping
from itertools import count
from numbers import Real
from typing import Any, Final

from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns
from engine_client.protocol.outputs import outputs_from

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
    token_ids = getattr(request, "prompt_token_ids", None)
    if token_ids is None:
        if getattr(request, "prompt_embeds", None) is None:
            raise ValueError(f"request {request_id!r:.100} has no prompt: give prompt_token_ids or prompt_embeds")
        return None
    if isinstance(token_ids, _NO_LISTS):
        raise TypeError(f"prompt_token_ids of request {request_id!r:.100} must be a list, got {token_ids!r:.100}")
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
    sampling = getattr(request, "sampling_params", None)
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


_NO_LISTS: Final = (str, bytes, bytearray, set, frozenset, dict)
"""Can be iterated over, and an array even takes the bytes for machine words, but nobody means token ids by them."""


class InFlight:
    """The table of one client.

    A request is in flight while ``_ids`` has its key; each change is ordered so that an interrupt between any two of
    its lines leaves nothing that ``discard`` or the next change does not remove.
    """

    def __init__(self) -> None:
        self._next = count(1)
        self._lock = threading.RLock()  # a signal handler may abort on the thread that is inside
        # -- guarded by _lock, but for reading --
        self._keys: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._owners: dict[int, Hashable] = {}  # the thread, or the event loop's mailbox, that has added it
        self._ranks: dict[int, int] = {}
        self._of_rank: dict[int, set[int]] = {}
        self._finished: set[int] = set()  # their last outputs are out, or on their way out; removed by the next call
        # -- not guarded: the reader counts, whoever takes an end begins anew, and a count too few is harmless --
        self._unnoticed: dict[int, int] = {}  # requests by rank that ended since anybody last took an end

    def __len__(self) -> int:
        if self._finished:
            self._settle()
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<InFlight {len(self)} requests>"

    def new_key(self) -> int:
        """Return a key that was never used.  Whoever has it before the request is added can always discard that."""
        return next(self._next)

    def add(self, request_id: str, key: int | None = None, rank: int = 0, owner: Hashable = None) -> int:
        """Take an id for a request to this rank and return its key.

        Args:
            owner: who has it, for ``mine``; None: the calling thread.

        Raises:
            ValueError: a request with this id is in flight.
        """
        if key is None:
            key = self.new_key()
        owner = threading.get_ident() if owner is None else owner  # not below, where an interrupt would leave it out
        with self._lock:
            if self._finished:
                self._settle_locked()
            if self._keys.get(request_id) in self._ids:
                raise ValueError(f"request {request_id!r:.100} is already running: choose another id or abort it first")
            self._ids[key] = request_id
            self._owners[key] = owner
            self._ranks[key] = rank
            self._of_rank.setdefault(rank, set()).add(key)
            self._keys[request_id] = key
            return key

    def discard(self, key: int) -> None:
        """Forget a key; unknown ones are ignored."""
        with self._lock:
            self._discard_locked(key)

    def _discard_locked(self, key: int) -> None:
        request_id = self._ids.get(key)
        if request_id is not None and self._keys.get(request_id) == key:
            del self._keys[request_id]
        self._owners.pop(key, None)
        of_rank = self._of_rank.get(self._ranks.get(key, -1))
        if of_rank is not None:
            of_rank.discard(key)
        self._ranks.pop(key, None)
        self._ids.pop(key, None)

    def keys_of(self, request_ids: Iterable[Any]) -> dict[int, int]:
        """Return the ranks of these requests by their keys; whatever is not in flight is ignored."""
        with self._lock:
            self._settle()
            return self._ranks_locked(map(self._keys.get, filter(_is_text, request_ids)))

    def _ranks_locked(self, keys: Iterable[int | None]) -> dict[int, int]:
        # An interrupt may have left a key half forgotten.
        return {key: rank for key in keys if key is not None and (rank := self._ranks.get(key)) is not None}

    def mine(self, owner: Hashable = None) -> dict[int, int]:
        """Return the ranks, by key, of the requests that an owner, by default the calling thread, has added."""
        with self._lock:
            self._settle()
            return self._owned_locked(threading.get_ident() if owner is None else owner)

    def _owned_locked(self, owner: Hashable) -> dict[int, int]:
        return self._ranks_locked([key for key, its_owner in self._owners.items() if its_owner == owner])

    def arrived(self, keys: Iterable[int]) -> None:
        """Note that the last outputs of these requests are here, so that their ranks have nothing to do for them."""
        unnoticed = self._unnoticed
        for key in keys:
            rank = self._ranks.get(key)
            if rank is not None:
                self._of_rank.get(rank, set()).discard(key)
                unnoticed[rank] = unnoticed.get(rank, 0) + 1

    def of_rank(self, rank: int) -> list[int]:
        """Return the keys of the requests that a rank has not finished."""
        with self._lock:
            self._settle()
            return list(self._of_rank.get(rank, ()))

    def ranks_of(self, keys: Iterable[int]) -> dict[int, int]:
        """Return the ranks of these requests by their keys; whatever is not in flight is left out."""
        with self._lock:
            return self._ranks_locked(keys)

    def count(self, rank: int) -> int:
        """Return how many requests a rank has not finished."""
        self._settle()
        return len(self._of_rank.get(rank, ()))

    def load(self, rank: int) -> int:
        """Return how many requests a rank had when a last output was last taken, or was sent since.

        Requests that are sent in one go count until somebody could have noticed that they ended.  A rank that ends the
        first of them while the last are still being sent is thus not given more of them than others.
        """
        return self.count(rank) + self._unnoticed.get(rank, 0)

    def notice_ends(self) -> None:
        """Note that all ends that are here could have been noticed by now."""
        self._unnoticed = {}

    def outputs(self, columns: Columns) -> EngineCoreOutputs:
        """Turn a batch into outputs of the requests still in flight, and forget those that it finishes.

        It forgets them with its last act, so that a batch can be turned again if an interrupt comes in between.
        """
        if self._finished:
            self._settle()
        outputs, finished = outputs_from(columns, self._ids)
        if finished:
            self.notice_ends()
            self._finished.update(finished)
        return outputs

    def undo_outputs(self, columns: Columns) -> None:
        """Remember again what a batch finishes, because nobody has got its outputs."""
        self._finished.difference_update(columns.keys)

    def _settle(self) -> None:
        """Remove what is finished."""
        while self._finished:
            with self._lock:
                self._settle_locked()

    def _settle_locked(self) -> None:
        for key in list(self._finished):
            self._discard_locked(key)
            self._finished.discard(key)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
