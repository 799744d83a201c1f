"""The executor's hooks and their defaults, calls to workers, and progress."""

from __future__ import annotations

import threading

import pytest

from engine_client.engine.executor import Executor, has_hook, progress_to, report_progress
from helpers.timing import DEADLOCK, took_at_most


class Minimal(Executor):
    label = "a value, no method"

    def execute_model(self, batch):
        return batch.sample(lambda request: 1)

    def greet(self, name="you", *, mark="!"):
        return f"hello {name}{mark}"


class Many(Minimal):
    def workers(self):
        return [Minimal(1), Minimal(2)]


@pytest.fixture
def executor():
    return Minimal("config")


class TestDefaults:
    def test_one_method_is_enough(self, executor):
        """An executor with nothing but ``execute_model`` can be built; one without it cannot."""
        assert executor.vllm_config == "config"
        assert executor.supported_tasks == ("generate",)
        with pytest.raises(TypeError, match="execute_model"):
            Executor(None)

    @pytest.mark.parametrize(
        ("hook", "args"),
        [
            ("add_lora", (None,)),
            ("remove_lora", (1,)),
            ("list_loras", ()),
            ("pin_lora", (1,)),
            ("save_sharded_state", ("/tmp",)),
            ("encode", ("x",)),
            ("decode", ([1],)),
            ("profile", ()),
        ],
    )
    def test_what_a_model_has_not_is_refused(self, executor, hook, args):
        """Hooks without a sensible default say "not supported" and whose fault it is."""
        with pytest.raises(ValueError, match="not supported: Minimal does not"):
            getattr(executor, hook)(*args)

    def test_what_can_be_ignored_is_ignored(self, executor):
        """Hooks that may do nothing do nothing."""
        executor.check_request(None)
        executor.finish_requests(["a"])
        executor.execute_dummy_batch()
        executor.reset_mm_cache()
        executor.reset_encoder_cache()
        executor.shutdown()

    def test_has_hook_tells_own_methods(self, executor):
        """A hook counts as the executor's own if a subclass wrote it."""
        assert has_hook(Many(None), "workers")
        assert not has_hook(executor, "workers")

    def test_failure_callback_is_kept(self, executor):
        """The engine's callback is there for an executor that watches its own workers."""
        executor.register_failure_callback(print)
        assert executor.failure_callback is print


class TestSleep:
    def test_sleeps_until_every_tag_is_awake(self, executor):
        """Tags are woken one by one; the executor sleeps until the last one is awake."""
        executor.sleep()
        assert executor.is_sleeping
        assert repr(executor) == "<Minimal asleep>"
        executor.wake_up(["weights"])
        assert executor.is_sleeping
        executor.wake_up(["kv_cache"])
        assert not executor.is_sleeping
        assert repr(executor) == "<Minimal awake>"

    def test_wakes_up_all_without_tags(self, executor):
        """Without tags everything is woken."""
        executor.sleep(2)
        executor.wake_up()
        assert not executor.is_sleeping

    def test_refuses_unknown_tags(self, executor):
        """A tag that does not exist is named with those that do."""
        executor.sleep()
        with pytest.raises(ValueError, match=r"unknown tags \['coffee'\].*kv_cache.*weights"):
            executor.wake_up(["coffee"])
        assert executor.is_sleeping


class TestCollectiveRpc:
    def test_calls_a_method_by_name(self, executor):
        """A name is looked up on the worker and called with the arguments."""
        assert executor.collective_rpc("greet", args=("Ada",), kwargs={"mark": "?"}) == ["hello Ada?"]

    def test_gives_a_function_the_worker(self, executor):
        """A callable gets the worker as its first argument."""
        assert executor.collective_rpc(lambda worker, n: (worker, n), args=(3,)) == [(executor, 3)]

    def test_has_a_result_per_worker(self):
        """Results come in the order of the workers."""
        assert Many(None).collective_rpc(lambda worker: worker.vllm_config) == [1, 2]

    def test_refuses_what_is_not_there(self, executor):
        """An unknown name is an AttributeError, an attribute that is no method a TypeError, as is a number."""
        with pytest.raises(AttributeError, match="sing"):
            executor.collective_rpc("sing")
        with pytest.raises(TypeError, match=r"Minimal.label is not a method but str"):
            executor.collective_rpc("label")
        with pytest.raises(TypeError, match="needs a method's name or a callable, not 5"):
            executor.collective_rpc(5)

    def test_raises_what_the_method_raised(self, executor):
        """The method's exception is the caller's, with a timeout and without."""

        def fail(worker):
            raise LookupError("unique")

        for timeout in (None, DEADLOCK):
            with pytest.raises(LookupError, match="unique"):
                executor.collective_rpc(fail, timeout)

    def test_returns_within_the_timeout(self, executor):
        """With a timeout the result of a method in time is returned."""
        assert executor.collective_rpc("greet", DEADLOCK) == ["hello you!"]

    def test_leaves_a_late_call_behind(self):
        """A call that is late raises TimeoutError at once; the timeout is for all workers together."""
        release, ended = threading.Event(), threading.Event()

        def wait(worker):
            release.wait(DEADLOCK)
            ended.set()

        with took_at_most(5), pytest.raises(TimeoutError, match=r"took longer than 0.02 s"):
            Many(None).collective_rpc(wait, 0.02)
        release.set()
        assert ended.wait(DEADLOCK)

    def test_refuses_a_negative_timeout(self, executor):
        """A timeout that cannot be is refused before anything is called."""
        with pytest.raises(ValueError, match="timeout"):
            executor.collective_rpc("greet", -1)


class TestProgress:
    def test_reaches_whoever_listens(self):
        """What is reported inside of the block arrives; outside of it nobody minds."""
        heard = []
        report_progress("early", 1, 2)
        with progress_to(lambda *report: heard.append(report)):
            report_progress("loading", 1, 2)
            with progress_to(None):
                report_progress("unheard", 1)
            report_progress("warming up", 3)
        report_progress("late", 1)
        assert heard == [("loading", 1, 2), ("warming up", 3, 0)]
