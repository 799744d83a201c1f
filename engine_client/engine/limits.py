"""What an engine can hold and do in a step, read from its configuration and its executor.

Configuration is read by attribute path, and an attribute (or a whole section) that is missing or None counts as the
default of ``engine_client.config``.

Threads: plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_client.config import CacheConfig, ModelConfig, SchedulerConfig
from engine_client.engine.executor import Executor

__all__ = ["Limits", "read_limits"]

_DEFAULTS = {
    "model_config": ModelConfig(),
    "cache_config": CacheConfig(),
    "scheduler_config": SchedulerConfig(),
}


@dataclass(frozen=True)
class Limits:
    """The engine's real capacities.

    Args:
        max_num_batched_tokens: the token budget of a step.
        chunked_prefill: a prompt may be computed in several steps.
        long_prefill_token_threshold: the most tokens of one prompt in a step; 0: the budget is the limit.
        num_blocks: KV blocks of ``block_size`` tokens.
    """

    max_model_len: int = 4096
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    block_size: int = 16
    num_blocks: int = 32768
    prefix_caching: bool = True

    def chunk(self, number: int, budget: int) -> int:
        """Return how many of ``number`` tokens of one request may be computed in a step that has ``budget`` left."""
        if self.long_prefill_token_threshold and self.chunked_prefill:
            number = min(number, self.long_prefill_token_threshold)
        return min(number, budget)


def _read(vllm_config: Any, section: str, name: str) -> Any:
    value = getattr(getattr(vllm_config, section, None), name, None)
    return getattr(_DEFAULTS[section], name) if value is None else value


def _read_number(vllm_config: Any, section: str, name: str, minimum: int = 1) -> int:
    value = _read(vllm_config, section, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{section}.{name} must be an integer, not {value!r}")
    if value < minimum:
        raise ValueError(f"{section}.{name} must be at least {minimum}, not {value}")
    return value


def read_limits(vllm_config: Any, executor: Executor) -> Limits:
    """Return what an engine of this configuration and executor can do.

    KV blocks: ``cache_config.num_gpu_blocks_override``, else the executor's ``num_kv_blocks``, else enough for
    ``max_num_seqs`` sequences of full length.  (``cache_config.num_gpu_blocks`` is where a client notes the sum over
    its engines, and so says nothing about one of them.)  Without chunked prefill a step's budget is at least
    ``max_model_len``, since no prompt could be longer than the budget.

    Raises:
        TypeError, ValueError: a value cannot work; the message names it.
    """
    max_model_len = _read_number(vllm_config, "model_config", "max_model_len")
    if executor.max_model_len is not None:
        max_model_len = min(max_model_len, executor.max_model_len)
    max_num_seqs = _read_number(vllm_config, "scheduler_config", "max_num_seqs")
    budget = _read_number(vllm_config, "scheduler_config", "max_num_batched_tokens")
    chunked = bool(_read(vllm_config, "scheduler_config", "enable_chunked_prefill"))
    policy = _read(vllm_config, "scheduler_config", "policy")
    if policy not in ("fcfs", "priority"):
        raise ValueError(f"scheduler_config.policy must be 'fcfs' or 'priority', not {policy!r}")
    block_size = _read_number(vllm_config, "cache_config", "block_size")
    num_blocks = _read(vllm_config, "cache_config", "num_gpu_blocks_override") or executor.num_kv_blocks
    if num_blocks is None:
        num_blocks = max_num_seqs * -(-max_model_len // block_size)
    if num_blocks < 1:
        raise ValueError(f"an engine needs at least one KV block; {executor!r} has num_kv_blocks={num_blocks}")
    return Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        chunked_prefill=chunked,
        long_prefill_token_threshold=_read_number(
            vllm_config, "scheduler_config", "long_prefill_token_threshold", minimum=0
        ),
        policy=policy,
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=bool(_read(vllm_config, "cache_config", "enable_prefix_caching")),
    )
