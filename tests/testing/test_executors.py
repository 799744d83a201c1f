"""The small executors work, or fail in the way that their names say."""

from __future__ import annotations

import os

import pytest

from engine_client.config import EngineConfig
from engine_client.engine.batch import Batch, ScheduledRequest
from engine_client.engine.executor import progress_to
from engine_client.params import PoolingParams
from engine_client.testing.executors import (
    DyingStep,
    EchoExecutor,
    FailingInit,
    FailingStep,
    Grandchild,
    PoolingExecutor,
    SlowInit,
    SlowStep,
)
from helpers.procs import run_script


def config(**settings):
    return EngineConfig(additional_config=settings)


def batch(**fields):
    return Batch([ScheduledRequest("r", [5, 6], 2, 0, 2, is_last_chunk=True, block_ids=[0], **fields)], 2)


def test_echo():
    """Every step repeats the prompt's last token; text is its UTF-8 bytes."""
    executor = EchoExecutor(config())
    assert executor.execute_model(batch()).tokens == [[6]]
    assert executor.decode(executor.encode("é")) == "é"
    assert executor.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_pooling():
    """A prompt is pooled to its embeddings, or else to its tokens."""
    executor = PoolingExecutor(config())
    assert executor.execute_model(batch(pooling_params=PoolingParams())).pooling == [[5, 6]]
    embeddings = executor.execute_model(batch(pooling_params=PoolingParams(), prompt_embeds=[0.5]))
    assert embeddings.pooling == [[0.5]]


def test_failing_init():
    """The constructor raises, with a cause; both name the marker."""
    with pytest.raises(ValueError, match="outer MARK") as caught:
        FailingInit(config(marker="MARK"))
    assert caught.value.__cause__.args == ("inner MARK",)


def test_slow_init():
    """The constructor takes its time and reports progress."""
    steps = []
    with progress_to(lambda *step: steps.append(step)):
        SlowInit(config(init_seconds=0.01))
    assert steps == [("loading weights", done, 10) for done in range(11)]


def test_failing_step():
    """The chosen step raises, those before it work."""
    executor = FailingStep(config(fail_at_step=2))
    assert executor.execute_model(batch()).tokens == [[6]]
    with pytest.raises(ZeroDivisionError, match="step 2"):
        executor.execute_model(batch())


@pytest.mark.crash
def test_dying_step():
    """The chosen step ends the process, those before it work."""
    executor = DyingStep(config(die_at_step=2, how="system_exit"))
    assert executor.execute_model(batch()).tokens == [[6]]
    with pytest.raises(SystemExit):
        executor.execute_model(batch())


def test_slow_step():
    """A step takes its time and works."""
    assert SlowStep(config(step_seconds=0.001)).execute_model(batch()).tokens == [[6]]


@pytest.mark.parametrize("new_session", [False, True])
def test_grandchild(new_session):
    """The constructor starts a process and says which."""
    pid = Grandchild(config(new_session=new_session)).grandchild_pid()
    assert (os.getsid(pid) == pid) is new_session
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_any_configuration_serves():
    """A configuration without ``additional_config`` means the defaults."""
    run_script("""
        from engine_client.testing.executors import SlowStep
        SlowStep(None).before_step()
    """).check()
