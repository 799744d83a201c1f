"""The client that runs the engine core in this process."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from engine_client import ClientOptions, ClosedError, EngineConfig, FinishReason, InprocClient
from engine_client.testing.executors import EchoExecutor, FailingInit, SlowInit
from helpers.clients import make_request


def inproc(**options: Any) -> InprocClient:
    return InprocClient(EngineConfig(), EchoExecutor, False, options=ClientOptions(**options))


def test_each_call_does_one_step() -> None:
    """``get_output`` steps the engine and returns the outputs of client 0, empty when there are none."""
    with inproc() as client:
        assert client.get_output().outputs == []
        client.add_request(make_request("a", 2))
        first, second = client.get_output(), client.get_output()
        assert [o.new_token_ids for o in first.outputs + second.outputs] == [[3], [3]]
        assert second.outputs[0].finish_reason is FinishReason.LENGTH
        assert client.get_output().outputs == []
        assert "running" in repr(client)
        assert not client.dp_engines_running()
        client.check_health()


def test_no_thread_and_no_process_is_started() -> None:
    """Everything happens on the calling thread."""
    before = threading.active_count()
    with inproc() as client:
        client.add_request(make_request("a", 1))
        client.get_output()
        assert threading.active_count() == before


def test_a_bad_request_raises_in_the_call() -> None:
    """An empty prompt, a wrong id, and an id in use are refused where they are given."""
    with inproc() as client:
        with pytest.raises(ValueError, match="prompt"):
            client.add_request(make_request("a", 1, ()))
        with pytest.raises(TypeError, match="request_id"):
            client.add_request(make_request(5, 1))  # type: ignore[arg-type]
        client.add_request(make_request("a", 3))
        with pytest.raises(ValueError, match="a"):
            client.add_request(make_request("a", 3))
        client.abort_requests(["a", "unknown"])
        client.abort_requests([])
        assert client.get_output().outputs == []


def test_waiting_to_sleep_is_refused() -> None:
    """Nothing could drain requests while the caller waits."""
    with inproc() as client:
        for call in (lambda: client.sleep(mode="wait"), lambda: client.pause_scheduler("wait")):
            with pytest.raises(ValueError, match="in-process"):
                call()
        client.sleep(1)
        assert client.is_sleeping()
        client.wake_up()
        assert not client.is_sleeping()
        client.pause_scheduler("keep")
        assert client.is_scheduler_paused()
        client.resume_scheduler()


def test_only_registered_utilities_can_be_called() -> None:
    """Utilities go by name, as over the wire."""
    with inproc() as client:
        assert client.call_utility("get_supported_tasks") == ("generate",)
        with pytest.raises(AttributeError, match="step"):
            client.call_utility("step")


def test_after_shutdown_every_call_says_closed() -> None:
    """The second shutdown does nothing, other calls raise."""
    client = inproc()
    client.shutdown()
    client.shutdown(1.0)
    assert not client.is_alive
    assert "closed" in repr(client)
    client.abort_requests(["a"])
    request = make_request("a")
    for call in (client.get_output, client.check_health, client.list_loras, lambda: client.add_request(request)):
        with pytest.raises(ClosedError):
            call()


def test_progress_and_errors_of_the_start_reach_the_caller() -> None:
    """``on_progress`` is called while the executor is built; its exception passes through."""
    seen: list[Any] = []
    config = EngineConfig(additional_config={"init_seconds": 0.05})
    options = ClientOptions(on_progress=lambda *event: seen.append(event))
    InprocClient(config, SlowInit, False, options=options).shutdown()
    assert len(seen) > 1
    assert seen[-1] == ("ready", 1, 1)
    with pytest.raises(ValueError, match="marker"):
        InprocClient(EngineConfig(additional_config={"marker": "marker"}), FailingInit, False)


def test_an_interrupt_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt reaches the caller, and what was in flight does not reach the next call; nor after a second."""
    with inproc() as client:
        core = client.engine_core

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        calls = {
            "step_fn": client.get_output,
            "preprocess_add_request": lambda: client.add_request(make_request("late")),
            "abort_requests": lambda: client.abort_requests(["a"]),
            "start_over": client.get_output,
        }
        for name, call in calls.items():
            client.add_request(make_request("a", 100))
            client.get_output()
            with monkeypatch.context() as patch:
                patch.setattr(core, "step_fn", interrupt)
                patch.setattr(core, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    call()
            client.add_request(make_request("a", 1))
            assert [output.request_id for output in client.get_output().outputs] == ["a"]
            assert client.get_output().outputs == []
        client._utilities = {"stop": interrupt}  # noqa: SLF001  # no utility of an engine can be interrupted at will
        client.add_request(make_request("a", 100))
        with pytest.raises(KeyboardInterrupt):
            client.call_utility("stop")
        assert client.get_output().outputs == []


def test_a_stream_has_the_outputs_of_its_request_alone() -> None:
    """A stream ends with its finish reason; what comes for others meanwhile waits for ``get_output``."""
    with inproc() as client:
        client.add_request(make_request("other", 4))
        stream = client.stream(make_request("own", 3))
        outputs = list(stream)
        assert [output.request_id for output in outputs] == ["own"] * 3
        assert outputs[-1].finish_reason is stream.finish_reason is FinishReason.LENGTH
        others = [output for _ in range(4) for output in client.get_output().outputs]
        assert [output.request_id for output in others] == ["other"] * 4


def test_a_stream_that_is_closed_or_dropped_aborts_its_request() -> None:
    """Nothing of an ended stream reaches anybody, whether it was begun or not, and its id is free."""
    with inproc() as client:
        for end in (lambda stream: stream.close(), lambda stream: None):
            for begin in (next, lambda stream: None):
                stream = client.stream(make_request("a", 50))
                begin(stream)
                end(stream)
                del stream
                assert client.get_output().outputs == []
                assert not client.engine_core.has_work()


def test_the_card_of_a_client() -> None:
    """A notebook shows this process, its load, what went wrong last, and whether the client is closed."""
    client = InprocClient(EngineConfig(), EchoExecutor, False)
    client.add_request(make_request("a", 5))
    client.get_output()
    html = client._repr_html_()
    assert f">{os.getpid()}<" in html
    assert ">ready<" in html
    client.engine_core.step_fn = lambda: 1 // 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        client.get_output()
    assert "ZeroDivisionError: " in client._repr_html_()
    client.shutdown()
    assert ">closed<" in client._repr_html_()
