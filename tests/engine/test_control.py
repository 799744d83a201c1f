"""What clients ask of an engine by name: pause, sleep, caches, adapters, profile, calls to workers."""

from __future__ import annotations

import inspect
import logging
import pstats

import pytest

from engine_client.engine.control import UTILITIES
from engine_client.engine.executor import Executor
from engine_client.messages import FinishReason
from helpers.engines import Recording, add, make_core, run, step


class Hooked(Recording):
    """Has every optional hook, and notes which were called."""

    def __init__(self, vllm_config=None):
        super().__init__(vllm_config)
        self.calls = []

    def sleep(self, level=1):
        super().sleep(level)
        self.calls.append(("sleep", level))

    def reset_mm_cache(self):
        self.calls.append(("reset_mm_cache",))

    def reset_encoder_cache(self):
        self.calls.append(("reset_encoder_cache",))

    def execute_dummy_batch(self):
        self.calls.append(("execute_dummy_batch",))

    def profile(self, is_start=True, profile_prefix=None):
        self.calls.append(("profile", is_start, profile_prefix))

    def save_sharded_state(self, path, pattern=None, max_size=None):
        self.calls.append(("save_sharded_state", path, pattern, max_size))

    def add_lora(self, lora_request):
        return lora_request == "good"

    def remove_lora(self, lora_id):
        return lora_id == 1

    def list_loras(self):
        return {1}

    def pin_lora(self, lora_id):
        return lora_id == 1


@pytest.fixture
def core():
    return make_core(Hooked)


@pytest.fixture
def busy(core):
    """Return an engine with a running request that has two tokens to go."""
    add(core, "a", [1], max_tokens=3)
    step(core)
    return core


class TestPause:
    def test_abort_ends_what_is_in_flight(self, busy):
        """An aborting pause is complete at once; clients are told, and new requests wait for the resume."""
        assert busy.pause_scheduler() is None
        [output] = busy.take_outputs()[0].outputs
        assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
        assert busy.model_executor.ended == ["a"]
        add(busy, "b", max_tokens=1)
        assert not busy.has_work()
        assert busy.is_scheduler_paused()
        busy.resume_scheduler()
        assert not busy.is_scheduler_paused()
        assert set(run(busy)) == {"b"}

    def test_abort_is_told_by_the_next_step_too(self, busy):
        """A driver that only steps gets the aborted requests' outputs from its next step."""
        busy.pause_scheduler("abort")
        [output] = step(busy)
        assert output.finish_reason is FinishReason.ABORT

    def test_wait_is_done_when_drained(self, busy):
        """A waiting pause returns a future that is done with the last request, and clears the caches then."""
        future = busy.pause_scheduler("wait")
        add(busy, "b", max_tokens=1)
        step(busy)
        assert not future.done()
        assert busy.model_executor.calls == []
        step(busy)
        assert future.result(0) is None
        assert busy.model_executor.calls == [("reset_mm_cache",), ("reset_encoder_cache",)]
        assert busy.counts() == (1, 0)

    def test_wait_with_nothing_in_flight_is_complete(self, core):
        """A waiting pause of an idle engine needs no future."""
        assert core.pause_scheduler("wait") is None
        assert core.is_scheduler_paused()

    def test_wait_is_done_when_the_last_one_is_aborted(self, busy):
        """An abort can be what drains the engine."""
        future = busy.pause_scheduler("wait")
        busy.abort_requests(["a"])
        assert future.result(0) is None

    def test_wait_fails_when_resumed_before(self, busy):
        """Whoever waits for an engine to drain is told when it goes on instead."""
        future = busy.pause_scheduler("wait")
        busy.resume_scheduler()
        with pytest.raises(RuntimeError, match="resumed before"):
            future.result(0)
        assert len(run(busy)["a"].tokens) == 2

    @pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
    def test_a_rank_in_lock_step_waits_for_its_group(self, busy, mode):
        """However it pauses, a rank's pause is complete, and its caches are cleared, when the group is idle."""
        idle: list[int] = []
        busy.group_is_idle = lambda: bool(idle)
        future = busy.pause_scheduler(mode)
        while busy.has_work():
            step(busy)
        busy.post_step(False)
        assert not future.done()
        assert busy.is_scheduler_paused()
        idle.append(1)
        busy.post_step(False)
        assert future.result(0) is None
        assert ("reset_mm_cache",) in busy.model_executor.calls

    def test_keep_freezes_and_clears(self, busy):
        """A keeping pause is complete at once; what it froze is computed anew if the cache was cleared."""
        assert busy.pause_scheduler("keep") is None
        assert busy.counts() == (1, 0)
        assert not busy.has_work()
        busy.resume_scheduler()
        assert run(busy)["a"].tokens == [3, 4]

    def test_keep_without_clearing_leaves_the_blocks(self, busy):
        """Without clearing the cache a frozen request goes on where it was."""
        busy.pause_scheduler("keep", clear_cache=False)
        assert busy.counts() == (0, 1)
        assert busy.model_executor.calls == []

    def test_keep_does_not_pass_for_drained(self, busy):
        """A keeping pause after a waiting one leaves its future open, since nothing has ended."""
        future = busy.pause_scheduler("wait")
        busy.pause_scheduler("keep")
        assert not future.done()
        busy.abort_all()
        assert future.result(0) is None

    def test_abort_reaches_what_was_held(self, core):
        """A second, aborting pause ends what the first one held back."""
        core.pause_scheduler("keep")
        add(core, "a")
        core.pause_scheduler("abort")
        assert core.take_outputs()[0].outputs[0].finish_reason is FinishReason.ABORT
        assert core.counts() == (0, 0)

    def test_unknown_mode_is_refused(self, busy):
        """Another mode is a ValueError that names those that exist, and changes nothing."""
        with pytest.raises(ValueError, match="must be 'abort', 'wait' or 'keep', not 'stop'"):
            busy.pause_scheduler("stop")
        assert not busy.is_scheduler_paused()


class TestSleep:
    def test_level_0_only_pauses(self, busy):
        """Level 0 leaves the executor awake and the caches as they are."""
        assert busy.sleep(0, "keep") is None
        assert busy.is_sleeping()
        assert busy.model_executor.calls == []
        busy.wake_up(["scheduling"])
        assert not busy.is_sleeping()
        assert run(busy)["a"].tokens == [3, 4]

    @pytest.mark.parametrize("level", [1, 2])
    def test_levels_reach_the_executor(self, busy, level):
        """Levels 1 and 2 clear the caches and put the executor to sleep; frozen requests survive."""
        assert busy.sleep(level, "keep") is None
        assert busy.model_executor.calls[-1] == ("sleep", level)
        assert busy.scheduler.cache.usage == 0
        assert busy.is_sleeping()
        assert repr(busy).startswith("<EngineCore sleeping <Hooked asleep>")
        busy.wake_up()
        assert run(busy)["a"].tokens == [3, 4]

    def test_goes_on_when_all_tags_are_awake(self, core):
        """Part by part the executor wakes up; requests run once the last part is awake."""
        core.sleep()
        add(core, "a", max_tokens=1)
        core.wake_up(["scheduling"])
        core.wake_up(["weights"])
        assert core.is_sleeping()
        assert not core.has_work()
        core.wake_up(["kv_cache", "scheduling"])
        assert not core.is_sleeping()
        assert core.has_work()

    def test_waits_for_what_is_in_flight(self, busy):
        """A waiting sleep begins when the last request has ended, and its future is done then."""
        future = busy.sleep(1, "wait")
        step(busy)
        assert not busy.model_executor.is_sleeping
        step(busy)
        assert future.result(0) is None
        assert busy.model_executor.is_sleeping

    def test_does_not_begin_after_a_wake_up(self, busy):
        """A waiting sleep that is woken up before it began fails, and does not begin later."""
        future = busy.sleep(1, "wait")
        busy.wake_up()
        assert isinstance(future.exception(0), RuntimeError)
        run(busy)
        assert not busy.is_sleeping()

    def test_failure_to_sleep_is_the_callers(self, busy, monkeypatch):
        """An executor that cannot sleep fails the call, at once or when drained; the engine can go on."""

        def fail(level):
            raise OSError("no room")

        monkeypatch.setattr(busy.model_executor, "sleep", fail)
        future = busy.sleep(1, "wait")
        run(busy)
        with pytest.raises(OSError, match="no room"):
            future.result(0)
        with pytest.raises(OSError, match="no room"):
            busy.sleep()
        busy.wake_up()
        assert not busy.is_sleeping()

    def test_no_step_while_asleep(self, busy):
        """Neither a resume nor a waiting pause makes a sleeping executor run."""
        busy.sleep(1, "keep")
        for call in (busy.resume_scheduler, lambda: busy.pause_scheduler("wait")):
            with pytest.raises(RuntimeError, match=r"the engine sleeps.*call wake_up first"):
                call()
        assert not busy.has_work()

    @pytest.mark.parametrize("level", [3, -1, "1", None])
    def test_unknown_level_is_refused(self, core, level):
        """Another level is a ValueError, and changes nothing."""
        with pytest.raises(ValueError, match="must be 0, 1 or 2"):
            core.sleep(level)
        assert not core.is_sleeping()

    def test_no_dummy_batch_reaches_a_sleeping_executor(self, core):
        """A rank in lock-step that sleeps keeps pace without its executor."""
        core.sleep()
        before = list(core.model_executor.calls)
        core.execute_dummy_batch()
        assert core.model_executor.calls == before

    def test_unknown_tag_is_refused(self, core):
        """Another tag is a ValueError that names those that exist."""
        core.sleep()
        with pytest.raises(ValueError, match="coffee"):
            core.wake_up(["coffee"])


class TestExecutorsHooks:
    def test_are_called_with_what_the_client_gave(self, core):
        """Caches, dummy batches, profiles and saves reach an executor that has hooks for them."""
        core.reset_mm_cache()
        core.reset_encoder_cache()
        core.execute_dummy_batch()
        core.profile(True, "prefix")
        core.profile(False)
        core.save_sharded_state("/path", "*.bin", 5)
        assert core.model_executor.calls == [
            ("reset_mm_cache",),
            ("reset_encoder_cache",),
            ("execute_dummy_batch",),
            ("profile", True, "prefix"),
            ("profile", False, None),
            ("save_sharded_state", "/path", "*.bin", 5),
        ]

    def test_adapters(self, core):
        """Adapter calls return what the executor says."""
        assert core.add_lora("good") is True
        assert core.remove_lora(2) is False
        assert core.list_loras() == {1}
        assert core.pin_lora(1) is True

    @pytest.mark.parametrize(
        ("method", "args"),
        [
            ("add_lora", [None]),
            ("remove_lora", [1]),
            ("list_loras", []),
            ("pin_lora", [1]),
            ("save_sharded_state", ["x"]),
        ],
    )
    def test_are_not_supported_without(self, method, args):
        """An executor without the hook gives a ValueError that says so."""
        with pytest.raises(ValueError, match="not supported"):
            getattr(make_core(), method)(*args)

    def test_collective_rpc(self, core):
        """Workers are called by method name or with a function, with arguments and a timeout."""
        executor = core.model_executor
        assert core.collective_rpc("pin_lora", args=(1,)) == [True]
        assert core.collective_rpc(lambda worker, *, x: (worker, x), 20.0, (), {"x": 3}) == [(executor, 3)]

    def test_tasks_and_blocks(self, core):
        """The engine names its tasks, and the one group of KV blocks that it has."""
        assert core.get_supported_tasks() == ("generate",)
        [group] = core.get_kv_cache_group_metadata()
        assert group == {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}


class TestProfile:
    def test_cprofile_without_a_hook(self, tmp_path, caplog):
        """Without a profiler of the executor's, the engine's steps are profiled into a file that the log names."""
        caplog.set_level(logging.INFO, "engine_client.engine")
        core = make_core()
        core.profile(True, str(tmp_path / "run"))
        add(core, "a", max_tokens=3)
        run(core)
        core.profile(False)
        [path] = tmp_path.glob("run-*.prof")
        assert any(name == "schedule" for _, _, name in pstats.Stats(str(path)).stats)
        assert all(str(path) in message for message in caplog.messages)
        assert len(caplog.messages) == 2

    def test_stop_without_start_is_refused(self):
        """A stop without a start is the caller's error."""
        with pytest.raises(ValueError, match="no profile"):
            make_core().profile(False)

    def test_shutdown_writes_it(self, tmp_path):
        """A profile that is being taken when the engine is shut down is written."""
        core = make_core()
        core.profile(True, str(tmp_path / "run"))
        core.shutdown()
        assert len(list(tmp_path.glob("run-*.prof"))) == 1


class TestUtilities:
    def test_ends_are_kept_from_an_executor_without_the_hook(self):
        """An executor that does not ask for ends is not told."""

        class Silent(Executor):
            def execute_model(self, batch):
                return batch.sample(lambda request: 1)

        core = make_core(Silent)
        add(core, "a", max_tokens=1)
        assert run(core)["a"].finish_reason is FinishReason.LENGTH

    def test_are_exactly_these(self, core):
        """Clients may call these methods by name and no others; each is documented."""
        utilities = core.utilities()
        assert sorted(utilities) == sorted(UTILITIES) == list(UTILITIES)
        assert utilities["is_sleeping"]() is False
        assert all(inspect.getdoc(method) for method in utilities.values())
        for name in ("step", "add_request", "shutdown", "utilities", "model_executor", "_pause"):
            assert name not in utilities
