"""From a client's message to the engine's own form of a request: everything that can be wrong with it is found here.

A message may be any object with the attributes of ``EngineCoreRequest``, and so may its parameters; what is missing
counts as the default.  A message that gets through can no longer harm other requests: its tokens are integers that the
model knows, its numbers are numbers, it fits into the engine.

Threads: the engine's thread only.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable
from itertools import count
from typing import Any, Final

from engine_client.engine.executor import Executor, has_hook
from engine_client.engine.limits import Limits
from engine_client.engine.request import Request
from engine_client.engine.stop import StopRule, StopStrings

__all__ = ["Intake"]

_GENERATION_TASKS: Final = ("generate", "transcription", "realtime")
_OTHER_TASKS: Final = ("render",)


class Intake:
    """Checks messages against what one engine can do.

    Args:
        executor: whose tokens, tasks and hooks count.
        limits: of the engine.
    """

    def __init__(self, executor: Executor, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._arrivals = count()

    def read(self, message: Any) -> Request:
        """Return the request that a message asks for.

        Raises:
            TypeError: something in it has the wrong type.
            ValueError: it cannot be served; the text says what to do.
        """
        request_id = message.request_id
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if not request_id:
            raise ValueError("request_id must not be empty")
        tokens = _read_prompt(message)
        self._check_prompt(tokens)
        pooling = getattr(message, "pooling_params", None)
        sampling = getattr(message, "sampling_params", None)
        if pooling is None and sampling is None:
            raise ValueError(f"request {request_id!r:.100} has neither sampling_params nor pooling_params; give it one")
        self._check_task(None if pooling is None else (getattr(pooling, "task", None),))
        self._check_features(message)
        self._executor.check_request(message)
        params = sampling if pooling is None else pooling
        return Request(
            message,
            tokens,
            self._stop_rule(sampling, len(tokens)) if pooling is None else None,
            rank=self._rank(message),
            space=self._cache_space(message),
            reads_cache=pooling is None
            and not getattr(params, "skip_reading_prefix_cache", None)
            and getattr(params, "prompt_logprobs", None) is None,
        )

    def _check_prompt(self, tokens: list[int]) -> None:
        number, limits = len(tokens), self._limits
        if not number:
            raise ValueError("the prompt is empty; give at least one token")
        if number > limits.max_model_len:
            raise ValueError(
                f"the prompt has {number} tokens and max_model_len is {limits.max_model_len}: "
                f"shorten the prompt or raise max_model_len"
            )
        blocks = -(-number // limits.block_size)
        if blocks > limits.num_blocks:
            raise ValueError(
                f"the prompt of {number} tokens needs {blocks} KV blocks and the engine has {limits.num_blocks}: "
                f"shorten the prompt or give the engine more (cache_config.num_gpu_blocks_override)"
            )
        if min(tokens) < 0:
            raise ValueError(f"prompt_token_ids must be zero or more, found {min(tokens)}")
        vocab_size = self._executor.vocab_size
        if vocab_size is not None and max(tokens) >= vocab_size:
            raise ValueError(
                f"prompt_token_ids must be below {vocab_size}, the model's vocabulary; found {max(tokens)}"
            )

    def _check_task(self, pooling_task: tuple[Any] | None) -> None:
        """Refuse what the executor does not do; ``pooling_task`` is None for generation."""
        supported = self._executor.supported_tasks
        name = type(self._executor).__name__
        if pooling_task is None:
            if not set(supported).intersection(_GENERATION_TASKS):
                raise ValueError(f"{name} does not generate text; its tasks are {list(supported)}: give pooling_params")
            return
        pooling = [task for task in supported if task not in _GENERATION_TASKS + _OTHER_TASKS]
        if pooling_task[0] not in pooling:
            raise ValueError(f"unsupported pooling task {pooling_task[0]!r}; {name} supports {pooling}")

    def _check_features(self, message: Any) -> None:
        name = type(self._executor).__name__
        if getattr(message, "resumable", False):
            raise ValueError("resumable requests are not supported; send the whole prompt at once")
        if getattr(message, "lora_request", None) is not None and not has_hook(self._executor, "add_lora"):
            raise ValueError(f"LoRA adapters are not supported by {name}; leave lora_request out")
        if not isinstance(getattr(message, "cache_salt", None), (str, type(None))):
            raise TypeError(f"cache_salt must be a string, not {message.cache_salt!r}")
        _integer(getattr(message, "client_index", 0), "client_index", minimum=0)

    def _rank(self, message: Any) -> tuple[int, float, int]:
        arrival = getattr(message, "arrival_time", None)
        try:
            arrived = time.time() if arrival is None else float(arrival)
        except (TypeError, ValueError):
            raise TypeError(f"arrival_time must be a number of seconds, not {arrival!r}") from None
        return _integer(getattr(message, "priority", 0), "priority"), arrived, next(self._arrivals)

    def _cache_space(self, message: Any) -> Hashable:
        """Return what separates this prompt from others in the prefix cache; None keeps it out of the cache."""
        if not self._limits.prefix_caching:
            return None
        if getattr(message, "prompt_embeds", None) is not None or getattr(message, "mm_features", None):
            return None  # the tokens alone do not say what was computed
        lora = getattr(message, "lora_request", None)
        adapter = None if lora is None else (getattr(lora, "lora_name", None), getattr(lora, "lora_int_id", None))
        return adapter, getattr(message, "cache_salt", None)

    def _stop_rule(self, params: Any, first: int) -> StopRule:
        max_tokens = getattr(params, "max_tokens", None)
        max_len = self._limits.max_model_len
        if max_tokens is not None:
            max_len = min(max_len, first + _integer(max_tokens, "max_tokens", minimum=1))
        eos = getattr(params, "eos_token_id", None)  # the reference's front-ends may know it from the tokenizer
        if eos is None:
            eos = self._executor.eos_token_id
        return StopRule(
            eos=None if getattr(params, "ignore_eos", False) else eos,
            tokens=_stop_tokens(params),
            strings=self._stop_strings(params),
            first=first,
            min_tokens=_integer(getattr(params, "min_tokens", None) or 0, "min_tokens", minimum=0),
            max_len=max_len,
        )

    def _stop_strings(self, params: Any) -> StopStrings | None:
        strings = getattr(params, "stop", None)
        if not strings:
            return None
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(isinstance(string, str) and string for string in strings):
            raise TypeError(f"stop must be strings that are not empty, not {strings!r}")
        if not has_hook(self._executor, "decode"):
            raise ValueError(
                f"stop strings need an executor with decode(), which {type(self._executor).__name__} has not: "
                f"use stop_token_ids"
            )
        return StopStrings(strings, self._executor.decode)


def _read_prompt(message: Any) -> list[int]:
    ids, embeds = getattr(message, "prompt_token_ids", None), getattr(message, "prompt_embeds", None)
    if ids is None:
        if embeds is None:
            raise ValueError("the request has no prompt; give prompt_token_ids or prompt_embeds")
        return [0] * _num_rows(embeds)
    tokens = _integers(ids, "prompt_token_ids")
    if embeds is not None and _num_rows(embeds) != len(tokens):
        raise ValueError(f"prompt_embeds has {_num_rows(embeds)} rows for {len(tokens)} prompt_token_ids")
    return tokens


def _num_rows(embeds: Any) -> int:
    shape = getattr(embeds, "shape", None)
    try:
        return int(shape[0]) if shape is not None else len(embeds)
    except (TypeError, IndexError):
        raise TypeError(f"prompt_embeds must be an array with a row per token, not {type(embeds).__name__}") from None


def _stop_tokens(params: Any) -> frozenset[int]:
    tokens = getattr(params, "stop_token_ids", None)
    return frozenset() if tokens is None else frozenset(_integers(tokens, "stop_token_ids"))


def _integers(values: Any, name: str) -> list[int]:
    """Return a list of Python integers; numpy's and the like are converted."""
    if isinstance(values, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be a list of integers, not {type(values).__name__}; encode the text first")
    try:
        return array("q", values).tolist()
    except OverflowError as error:
        raise ValueError(f"{name} has a number that is no token: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name} must be a list of integers: {error}") from None


def _integer(value: Any, name: str, minimum: int | None = None) -> int:
    index = getattr(value, "__index__", None)
    if index is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    number = int(index())
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {number}")
    return number
