"""What is read from a configuration, however sparse it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_client.engine.limits import Limits, read_limits
from helpers.engines import Recording, make_config


def limits_of(executor=None, **settings):
    return read_limits(make_config(**settings), executor or Recording())


def with_attributes(**attributes):
    executor = Recording()
    vars(executor).update(attributes)
    return executor


def test_defaults():
    """An empty configuration gives the documented defaults, with room for every sequence at full length."""
    assert limits_of() == Limits(num_blocks=128 * 4096 // 16)


@pytest.mark.parametrize(
    "config", [None, SimpleNamespace(), SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=None))]
)
def test_what_is_missing_is_the_default(config):
    """Missing sections, missing attributes and None count as the default."""
    assert read_limits(config, Recording()) == limits_of()


def test_sparse_configuration_of_another_kind():
    """Any object with some of the attributes serves."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64), cache_config=SimpleNamespace(block_size=8, num_gpu_blocks=3)
    )
    limits = read_limits(config, Recording())
    assert (limits.max_model_len, limits.block_size, limits.num_blocks) == (64, 8, 128 * 8)


def test_number_of_blocks():
    """The override goes before the executor's number, and that before the default."""
    executor = with_attributes(num_kv_blocks=7)
    assert limits_of(executor, num_gpu_blocks_override=5).num_blocks == 5
    assert limits_of(executor).num_blocks == 7


def test_executor_may_lower_the_length():
    """The model's own limit counts if it is below the configured one."""
    assert limits_of(with_attributes(max_model_len=100)).max_model_len == 100
    assert limits_of(with_attributes(max_model_len=10**6)).max_model_len == 4096


def test_budget_without_chunks_holds_the_longest_prompt():
    """Without chunked prefill the budget is never below ``max_model_len``."""
    assert limits_of(enable_chunked_prefill=False).max_num_batched_tokens == 4096
    assert limits_of(enable_chunked_prefill=False, max_num_batched_tokens=9000).max_num_batched_tokens == 9000


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("max_model_len", 0, ValueError, "model_config.max_model_len must be at least 1, not 0"),
        ("max_num_seqs", 0, ValueError, "scheduler_config.max_num_seqs must be at least 1"),
        ("max_num_batched_tokens", -5, ValueError, "scheduler_config.max_num_batched_tokens must be at least 1"),
        ("block_size", "16", TypeError, "cache_config.block_size must be an integer, not '16'"),
        ("max_num_seqs", True, TypeError, "must be an integer, not True"),
        ("policy", "random", ValueError, "must be 'fcfs' or 'priority', not 'random'"),
        ("long_prefill_token_threshold", -1, ValueError, "must be at least 0"),
    ],
)
def test_values_that_cannot_work_are_named(name, value, error, text):
    """A value that cannot work is refused with its path."""
    with pytest.raises(error, match=text):
        limits_of(**{name: value})


def test_an_executor_without_blocks_is_refused():
    """An executor that says it has no KV block is named."""
    with pytest.raises(ValueError, match="at least one KV block"):
        limits_of(with_attributes(num_kv_blocks=0))


def test_chunk_is_the_smallest_of_three():
    """A chunk is what is left of the prompt, of the budget, or the threshold, which does not apply without chunks."""
    assert Limits().chunk(5, 9) == 5
    assert Limits().chunk(9, 5) == 5
    assert Limits(long_prefill_token_threshold=3).chunk(9, 5) == 3
    assert Limits(long_prefill_token_threshold=3, chunked_prefill=False).chunk(9, 20) == 9
