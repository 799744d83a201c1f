"""The blocking client with a scripted engine in a real process."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine_client import (
    ClosedError,
    EngineConfig,
    EngineDeadError,
    FinishReason,
    RemoteCallError,
    SamplingParams,
    SerializationError,
    SyncMPClient,
)
from engine_client.ipc.reader import ReaderThread
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.clients import collect, make_request, pid_of, scripted_client, session_of
from helpers.engines import Recording
from helpers.procs import wait_gone
from helpers.timing import DEADLOCK, took_at_most


def test_a_request_goes_there_and_back() -> None:
    """A request is answered token by token, to its end."""
    with scripted_client(Script(token=7)) as client:
        client.add_request(make_request("a", 3))
        outputs = collect(client, 1)["a"]
        assert [token for output in outputs for token in output.new_token_ids] == [7, 7, 7]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert "running" in repr(client)
        assert str(pid_of(client)) in repr(client)
        assert client.is_alive
        client.check_health(10)
    assert not client.is_alive
    assert "closed" in repr(client)


def test_many_requests_each_get_their_own() -> None:
    """Three hundred requests of different lengths all end with their own number of tokens."""
    with scripted_client() as client:
        for index in range(300):
            client.add_request(make_request(f"r{index}", 1 + index % 7))
        for name, outputs in collect(client, 300).items():
            assert sum(len(output.new_token_ids) for output in outputs) == 1 + int(name[1:]) % 7
        assert len(session_of(client).in_flight) == 0


def test_statistics_arrive_when_asked_for() -> None:
    """With ``log_stats`` outputs carry the scheduler's numbers."""
    with scripted_client(log_stats=True) as client:
        client.add_request(make_request("a", 2))
        stats = client.get_output(timeout=20).scheduler_stats
        assert stats is not None
        assert stats.step_counter == 1


def test_utilities_return_values_of_any_type() -> None:
    """Results keep their types: sets, tuples, arrays, big integers."""
    values: list[Any] = [{1, 2}, (1, "x"), 2**80, {"a": [None, 1.5]}, b"x" * 200_000, frozenset({3})]
    with scripted_client() as client:
        for value in values:
            assert client.call_utility("echo", value) == value
        array = np.arange(200_000, dtype=">i4").reshape(100, -1)
        back = client.call_utility("echo", array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        assert not back.flags.writeable
        assert client.list_loras() == set()
        assert client.get_supported_tasks() == ("generate",)


def test_an_exception_of_a_utility_arrives_as_itself() -> None:
    """Type, arguments and the engine's traceback arrive, and the engine serves on."""
    with scripted_client() as client:
        with pytest.raises(KeyError, match="marker") as caught:
            client.call_utility("fail", KeyError("marker"))
        assert "_fail" in caught.value.remote_traceback  # type: ignore[attr-defined]
        assert client.call_utility("echo", 1) == 1


def test_only_registered_utilities_can_be_called() -> None:
    """An unknown name and wrong arguments are errors that name them."""
    with scripted_client() as client:
        with pytest.raises(AttributeError, match="no_such"):
            client.call_utility("no_such")
        with pytest.raises(AttributeError, match="_running"):
            client.call_utility("_running")
        with pytest.raises(TypeError, match="argument"):
            client.call_utility("fail_step", 1, 2, 3)


def test_a_result_that_cannot_be_pickled_fails_that_call_only() -> None:
    """The caller is told why; the engine serves on."""
    with scripted_client() as client:
        with pytest.raises(SerializationError, match="lock"):
            client.call_utility("unpicklable")
        assert client.call_utility("echo", 2) == 2


def test_an_argument_that_cannot_be_pickled_is_refused_here() -> None:
    """The call raises, nothing is registered, nothing was sent."""
    with scripted_client() as client:
        with pytest.raises(TypeError, match="lock"):
            client.call_utility("echo", threading.Lock())
        assert client.utility_results == {}
        bad = make_request("bad", extra := 1)
        del extra
        bad.trace_headers = {"x": threading.Lock()}  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="lock"):
            client.add_request(bad)
        client.add_request(make_request("bad", 1))
        assert list(collect(client, 1)) == ["bad"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"request_id": 7}, TypeError),
        ({"request_id": ""}, ValueError),
        ({"prompt_token_ids": []}, ValueError),
        ({"prompt_token_ids": None}, ValueError),
        ({"prompt_token_ids": ["x"]}, TypeError),
        ({"prompt_token_ids": [-1]}, ValueError),
        ({"prompt_token_ids": 5}, TypeError),
        ({"prompt_token_ids": [1] * 5000}, ValueError),
        ({"sampling_params": None}, ValueError),
        ({"sampling_params": 3}, TypeError),
        ({"pooling_params": 3}, TypeError),
        ({"arrival_time": "now"}, TypeError),
        ({"priority": "high"}, TypeError),
        ({"data_parallel_rank": 5}, ValueError),
        ({"trace_headers": 1}, TypeError),
    ],
)
def test_a_bad_request_is_refused_in_the_call(change: dict[str, Any], error: type[Exception]) -> None:
    """Each wrong field raises at the caller, and the client serves on."""
    with scripted_client() as client:
        request = make_request("a", 1)
        for name, value in change.items():
            setattr(request, name, value)
        with pytest.raises(error):
            client.add_request(request)
        assert len(session_of(client).in_flight) == 0
        client.add_request(make_request("a", 1))
        assert list(collect(client, 1)) == ["a"]


def test_an_id_in_use_is_refused_and_free_afterwards() -> None:
    """A live id raises ValueError; after its end or its abort it can be used again."""
    with scripted_client(Script(step_seconds=0.01)) as client:
        client.add_request(make_request("a", 1000))
        with pytest.raises(ValueError, match="already running"):
            client.add_request(make_request("a", 1))
        client.abort_requests(["a", "a", "never", 5, ["x"]])  # type: ignore[list-item]
        client.add_request(make_request("a", 2))
        assert len(collect(client, 1)["a"]) == 2
        client.add_request(make_request("a", 1))
        assert len(collect(client, 1)["a"]) == 1


def test_nothing_arrives_of_an_aborted_request() -> None:
    """After the abort no output of it is returned, whatever was queued."""
    with scripted_client() as client:
        for name in ("a", "b"):
            client.add_request(make_request(name, 50))
        client.get_output(timeout=20)
        client.abort_requests(["a"])
        assert list(collect(client, 1)) == ["b"]
        assert client.call_utility("info")["requests"] == []


def test_abort_everything_strange_is_ignored() -> None:
    """Unknown, finished, empty: nothing happens."""
    with scripted_client() as client:
        client.abort_requests([])
        client.abort_requests(["unknown"] * 1000)
        client.add_request(make_request("a", 1))
        collect(client, 1)
        client.abort_requests(["a"])
        assert client.call_utility("echo", 1) == 1
    client.abort_requests(["a"])


def test_get_output_and_utilities_take_timeouts() -> None:
    """A timeout raises TimeoutError and loses nothing; a late reply is dropped."""
    with scripted_client() as client:
        with pytest.raises(TimeoutError, match=r"0\.05"):
            client.get_output(timeout=0.05)
        with pytest.raises(TimeoutError, match="wait"):
            client.call_utility("wait", 0.4, timeout=0.05)
        assert client.utility_results == {}
        assert client.call_utility("echo", "mine") == "mine"
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError, match="seconds"):
                client.get_output(timeout=wrong)
        with pytest.raises(TimeoutError, match="remote"):
            client.call_utility("fail", TimeoutError("remote"), timeout=10)


def test_deferred_utilities_are_answered_when_they_are_done() -> None:
    """Other calls overtake a deferred one; its result and its error arrive."""
    with scripted_client() as client:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(client.call_utility("deferred", "late", 0.3)))
        thread.start()
        assert client.call_utility("echo", 1) == 1
        thread.join(20)
        assert results == ["late"]
        with pytest.raises(OSError, match="late"):
            client.call_utility("deferred", OSError("late"), 0.05)


def test_pausing_with_abort_tells_the_client() -> None:
    """Requests that a pause aborts end with reason ABORT, before the pause returns."""
    with scripted_client(Script(step_seconds=0.001)) as client:
        client.add_request(make_request("a", 100_000))
        client.get_output(timeout=20)
        client.pause_scheduler("abort")
        assert client.is_scheduler_paused()
        assert collect(client, 1)["a"][-1].finish_reason is FinishReason.ABORT
        client.resume_scheduler()


def test_tensors_travel_both_ways_unchanged() -> None:
    """Embeddings of any size arrive equal, and come back equal; what the sender does afterwards does not matter."""
    with scripted_client() as client:
        client.call_utility("set_echo_tensor", True)
        for size in (0, 1, 1000, 1_000_000):
            embeds = np.random.default_rng(size).random((1, size))
            expected = embeds.copy()
            client.add_request(make_request(f"r{size}", 1, None, prompt_embeds=embeds))
            embeds[:] = 0
            (output,) = collect(client, 1)[f"r{size}"]
            assert np.array_equal(output.pooling_output, expected)


def test_allocated_memory_is_filled_in_place() -> None:
    """``allocate`` gives shared memory that is sent without a copy."""
    with scripted_client() as client:
        client.call_utility("set_echo_tensor", True)
        memory = client.allocate(800_000)
        array = np.frombuffer(memory, dtype=np.float64)
        array[:] = 1.25
        client.add_request(make_request("a", 1, None, prompt_embeds=array))
        (output,) = collect(client, 1)["a"]
        assert np.array_equal(output.pooling_output, np.full(100_000, 1.25))


def test_results_outlive_the_client() -> None:
    """An array that was received stays intact after shutdown, and is read-only."""
    client = scripted_client()
    array = client.call_utility("echo", np.arange(100_000))
    client.shutdown()
    del client
    gc.collect()
    assert array.sum() == 99_999 * 50_000
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_sixteen_threads_share_one_client() -> None:
    """Calls and requests of many threads do not mix."""
    with scripted_client() as client:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for index in range(30):
                    assert client.call_utility("echo", (number, index)) == (number, index)
                    client.add_request(make_request(f"{number}-{index}", 1))
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        found = collect(client, 16 * 30)
        for thread in threads:
            thread.join(20)
        assert errors == []
        assert len(found) == 480


def test_racing_adds_of_one_id_have_one_winner() -> None:
    """Of many threads that add the same id, exactly one succeeds."""
    with scripted_client(Script(step_seconds=0.005)) as client:
        barrier = threading.Barrier(8)
        wins: list[int] = []

        def add(number: int) -> None:
            barrier.wait()
            try:
                client.add_request(make_request("same", 20))
                wins.append(number)
            except ValueError:
                pass

        threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert len(collect(client, 1)["same"]) == 20


def test_after_shutdown_every_call_says_closed() -> None:
    """Calls after ``shutdown`` raise ClosedError at once; a second shutdown does nothing."""
    client = scripted_client()
    pid = pid_of(client)
    with took_at_most(1.0):
        client.shutdown()
    wait_gone(pid, 1.0)
    client.shutdown()
    for call in (
        client.get_output,
        lambda: client.add_request(make_request("a")),
        lambda: client.call_utility("echo", 1),
        client.check_health,
        lambda: client.allocate(100),
        client.ensure_alive,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert client.resources.engine_dead


def test_shutdown_ends_those_who_wait() -> None:
    """Threads in ``get_output`` and in a utility get ClosedError when another one shuts the client down."""
    client = scripted_client()
    errors: list[Exception] = []

    def wait(call: Any) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    calls: list[Any] = [client.get_output]
    calls += [lambda: client.call_utility("deferred"), lambda: client.call_utility("wait", 0.2)]
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    while len(client.utility_results) < 2:
        time.sleep(0.001)
    with took_at_most(6.0):
        client.shutdown()
        for thread in threads:
            thread.join(5)
    assert len(errors) >= 2
    assert isinstance(errors[0] if isinstance(errors[0], ClosedError) else errors[-1], ClosedError)


def test_dropping_the_last_reference_ends_the_engine() -> None:
    """A client that is collected leaves nothing, with and without work in flight."""
    for work in (False, True):
        client = scripted_client(Script(step_seconds=0.001))
        pid = pid_of(client)
        if work:
            client.add_request(make_request("a", 100_000))
        reference = weakref.ref(client)
        del client
        gc.collect()
        assert reference() is None
        wait_gone(pid, 6.0)


def test_a_client_cannot_be_pickled() -> None:
    """Pickling says what to do instead."""
    with scripted_client() as client, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(client)


def test_any_object_with_the_attributes_serves_as_request() -> None:
    """A request of another class is read by attribute."""
    with scripted_client() as client:
        client.add_request(
            SimpleNamespace(  # type: ignore[arg-type]
                request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=2), arrival_time=0.0
            )
        )
        assert len(collect(client, 1)["a"]) == 2


def test_the_config_is_handed_over_when_ready() -> None:
    """The client takes the engine's capacities over as the reference does."""
    ready = {"max_model_len": 100, "num_gpu_blocks": 7, "block_size": 32, "kv_cache_size_tokens": 224}
    with scripted_client(Script(ready=ready)) as client:
        config = client.vllm_config
        assert config.model_config.max_model_len == 100
        assert config.cache_config.num_gpu_blocks == 7
        assert config.cache_config.block_size == 32
        assert config.cache_config.kv_cache_size_tokens == 224
        with pytest.raises(ValueError, match="max_model_len"):
            client.add_request(make_request("a", 1, range(101)))


def test_progress_of_the_start_arrives() -> None:
    """``on_progress`` is called with phase, done and total as they come, on the thread that starts the client."""
    seen: list[Any] = []
    script = Script(progress=(("loading weights", 1, 2), ("loading weights", 2, 2)))
    with scripted_client(script, on_progress=lambda *event: seen.append((*event, threading.get_ident()))):
        pass
    me = threading.get_ident()
    phases = [("importing and building the engine", 0, 0), ("loading weights", 1, 2), ("loading weights", 2, 2)]
    assert seen == [(*phase, me) for phase in (*phases, ("ready", 1, 1))]


def test_an_exception_in_a_step_is_the_cause_of_the_death() -> None:
    """Everybody gets EngineDeadError with the original as its cause; the next call too."""
    client = scripted_client()
    client.call_utility("fail_step", RuntimeError("unique marker"))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="unique marker") as caught:
            client.get_output(timeout=10)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "step" in caught.value.remote_traceback
        with pytest.raises(EngineDeadError, match="unique marker"):
            client.call_utility("echo", 1)
    assert not client.is_alive
    client.shutdown()


def test_a_stand_in_for_what_cannot_be_rebuilt() -> None:
    """An exception whose class is unknown here arrives as RemoteCallError with its text."""
    with scripted_client() as client, pytest.raises(RemoteCallError, match="only there"):
        client.collective_rpc(_raise_foreign)


def _raise_foreign(worker: object) -> None:
    del worker
    raise type("Foreign", (Exception,), {"__module__": "nowhere"})("only there")


@pytest.mark.timing  # coverage itself loads multiprocessing in the engine
def test_the_engine_has_the_client_s_environment() -> None:
    """Working directory, ``sys.path`` and ``argv`` are the client's; process group and session are its own."""
    import sys

    with scripted_client() as client:
        info = client.call_utility("info")
        assert info["cwd"] == os.getcwd()
        assert info["path"] == sys.path
        assert info["argv"] == sys.argv
        assert info["pid"] == info["group"] == info["session"] == pid_of(client)
        assert "asyncio" not in info["modules"]
        assert "multiprocessing" not in info["modules"]


def test_after_a_shutdown_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """When ``shutdown`` returns the reader has ended, also where a death had it release everything by itself."""
    real = ReaderThread._release  # noqa: SLF001  # its last act

    def slow(self: ReaderThread) -> None:
        real(self)
        time.sleep(0.3)

    monkeypatch.setattr(ReaderThread, "_release", slow)
    before = set(threading.enumerate())
    client = scripted_client()
    with pytest.raises(EngineDeadError):
        client.call_utility("die", "exit3")
    client.shutdown()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["add", "get", "call"])
def test_an_interrupt_undoes_what_its_thread_has_in_flight(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """KeyboardInterrupt reaches the caller, and the next calls see nothing of the requests that were running."""
    with scripted_client(Script(step_seconds=0.001)) as client:
        client.add_request(make_request("running", 100_000))
        client.get_output(timeout=20)
        calls = {
            "add": lambda: client.add_request(make_request("late")),
            "get": client.get_output,
            "call": lambda: client.call_utility("echo", 1),
        }

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(*{"call": (client._caller, "send")}.get(name, (session_of(client), name)), interrupt)  # noqa: SLF001  # to interrupt it
            with pytest.raises(KeyboardInterrupt):
                calls[name]()
        assert len(session_of(client).in_flight) == 0
        client.add_request(make_request("running", 2))
        assert [len(outputs) for outputs in collect(client, 1).values()] == [2]
        assert client.call_utility("info")["requests"] == []


def test_what_an_interrupt_left_is_undone_by_the_next_call() -> None:
    """A call that ended without a word of it, because an interrupt came in what handles another, is undone later."""
    with scripted_client(Script(step_seconds=0.001)) as client:
        client.add_request(make_request("running", 100_000))
        client.get_output(timeout=20)
        session_of(client).callers.add(threading.get_ident())
        assert client.call_utility("info")["requests"] == []
        client.add_request(make_request("running", 2))
        assert [len(outputs) for outputs in collect(client, 1).values()] == [2]
        assert not session_of(client).callers


def test_a_signal_handler_may_call_inside_of_a_call() -> None:
    """Calls that a handler makes while its thread waits work, and what the thread has in flight goes on."""
    with scripted_client(Script(step_seconds=0.002)) as client:
        told: list[Any] = []
        numbers = itertools.count()  # a handler may come inside of a handler

        def handler(*_: Any) -> None:
            number = next(numbers)
            told.append(client.call_utility("echo", number))
            client.add_request(make_request(f"from the handler {number}", 2))

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            client.add_request(make_request("long", 200))
            over = threading.Event()

            def disturb() -> None:
                while not over.wait(0.02):
                    os.kill(os.getpid(), signal.SIGUSR1)

            thread = threading.Thread(target=disturb)
            thread.start()
            found = collect(client, 1)
            while "long" not in found or not found["long"][-1].finished:
                for name, outputs in collect(client, 1).items():
                    found.setdefault(name, []).extend(outputs)
            over.set()
            thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert sum(len(output.new_token_ids) for output in found["long"]) == 200
        assert sorted(told) == list(range(len(told)))
        assert len(told) > 3
        assert all(len(outputs) <= 2 for name, outputs in found.items() if name != "long")


def test_the_blocking_client_serves_several_ranks() -> None:
    """Requests go to the ranks that they ask for, calls to all, or to those named; outputs come together."""
    config = EngineConfig()
    config.parallel_config.data_parallel_size = 2
    with scripted_client(config=config) as client:
        assert client.is_dp
        assert client.core_engines == [b"\0\0", b"\1\0"]
        for name, rank in (("a", 0), ("b", 1), ("c", None)):
            client.add_request(make_request(name, 4, data_parallel_rank=rank))
        assert {name: len(outputs) for name, outputs in collect(client, 3).items()} == {"a": 4, "b": 4, "c": 4}
        assert len(list(client.stream(make_request("s", 3, data_parallel_rank=1)))) == 3
        assert client.call_utility("echo", 1) == 1
        first, second = client.call_utility("info", ranks=[0, 1])
        assert first["pid"] != second["pid"]
        assert second["steps"] > 0
        with pytest.raises(ValueError, match=r"data_parallel_rank 2 is not one of the ranks \[0, 1\]"):
            client.add_request(make_request("wrong", data_parallel_rank=2))


def test_an_interrupt_as_the_reader_is_to_be_told_of_what_waits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever did not fit into the pipe leaves all the same, and later calls are served."""
    with scripted_client(arena_limit=0) as client:
        reader = session_of(client)._reader  # noqa: SLF001
        wakeup = reader.wakeup
        calls: list[int] = []

        def interrupted() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            wakeup()

        monkeypatch.setattr(reader, "wakeup", interrupted)
        with frozen(pid_of(client)), pytest.raises(KeyboardInterrupt):
            client.call_utility("echo", bytes(3_000_000))
        for number in range(3):
            assert client.call_utility("echo", number, timeout=DEADLOCK) == number
        assert len(calls) >= 2


class Tracing(Recording):
    def choose(self, request: Any) -> int:
        return int(request.trace_headers["token"])


def test_trace_headers_reach_the_executor_and_come_back() -> None:
    """They cross to the engine's process with the request, are there in each step, and are on each output."""
    with SyncMPClient(EngineConfig(), Tracing, False) as client:
        request = make_request("a", 2)
        request.trace_headers = {"token": "41", "traceparent": "00-1-2-01"}
        client.add_request(request)
        outputs = collect(client, 1)["a"]
    assert [output.new_token_ids for output in outputs] == [[41], [41]]
    assert all(output.trace_headers == request.trace_headers for output in outputs)
