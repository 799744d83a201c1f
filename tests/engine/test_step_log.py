"""What the log says of steps."""

from __future__ import annotations

import logging

import pytest

from engine_client.engine.batch import Batch, IntView, ScheduledRequest
from engine_client.engine.step_log import log_failure, log_iteration


def batch_of(*names, computed=0):
    tokens = IntView([1, 2, 3])
    requests = [ScheduledRequest(name, tokens, 3, computed, 3 - computed or 1, True, tokens) for name in names]
    return Batch(requests, sum(request.num_scheduled_tokens for request in requests), step=7)


def test_failure_names_the_batch(caplog):
    """A step that raises leaves a line with its number, size and requests; the exception passes on."""
    with pytest.raises(LookupError, match="unique"), log_failure(batch_of("a", "b"), "<the scheduler>"):
        raise LookupError("unique")
    assert caplog.messages == ["step 7 failed: 6 tokens of 2 requests ('a', 'b'); <the scheduler>"]


def test_failure_of_a_large_batch_stays_short(caplog):
    """Of a large batch the first requests are named."""
    with pytest.raises(LookupError), log_failure(batch_of(*map(str, range(300))), None):
        raise LookupError
    assert "'7', …)" in caplog.text
    assert "'8'" not in caplog.text


def test_success_is_silent(caplog):
    """A step that works leaves no line, nor does an interrupt."""
    with log_failure(batch_of("a"), None):
        pass
    with pytest.raises(KeyboardInterrupt), log_failure(batch_of("a"), None):
        raise KeyboardInterrupt
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (batch_of("a", "b"), "step 7: 2 prompts with 6 tokens, 0 generations with 0 tokens"),
        (batch_of("a", computed=3), "step 7: 0 prompts with 0 tokens, 1 generations with 1 tokens"),
        (None, "dummy step"),
    ],
)
def test_iteration_tells_size_and_time(caplog, batch, text):
    """A step's line has the prompts, the generations, their tokens and the milliseconds."""
    caplog.set_level(logging.INFO, "engine_client.engine")
    with log_iteration(batch):
        pass
    [line] = caplog.messages
    assert line.startswith(text)
    assert line.endswith(" ms")
