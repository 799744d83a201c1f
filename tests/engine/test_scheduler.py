"""Who runs when: budget, order, chunks, blocks, preemption, prefix cache, pause."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st

from engine_client.engine.batch import ModelOutput
from engine_client.engine.core import EngineCore
from engine_client.engine.executor import Executor
from engine_client.messages import EngineCoreEventType, FinishReason
from engine_client.params import PoolingParams
from helpers.engines import (
    EOS,
    Paged,
    Pooling,
    Recording,
    Result,
    Scripted,
    add,
    collect,
    make_config,
    make_core,
    run,
    step,
)

LENGTH, STOP, ABORT, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


def shape(core, index=-1):
    """Return (id, tokens) of a batch's requests."""
    return [(r.request_id, r.num_scheduled_tokens) for r in core.model_executor.batches[index]]


def test_starting_over_leaves_nothing():
    """Running, waiting and held requests are over without an output, and the executor is told; all blocks are free."""
    core = make_core(Recording, max_num_seqs=1)
    add(core, "runs", [1] * 40, max_tokens=9)
    step(core)
    add(core, "waits", [1], max_tokens=9)
    core.pause_scheduler("keep")
    add(core, "is held", [1], max_tokens=9)
    core.scheduler.abort(["waits"])
    core.start_over()
    core.start_over()
    assert sorted(core.model_executor.ended) == ["is held", "runs", "waits"]
    assert (core.counts(), core.take_outputs(), core.scheduler.cache.usage) == ((0, 0), {}, 0)
    core.resume_scheduler()
    add(core, "runs", [1] * 40, max_tokens=2)
    assert len(run(core)["runs"].tokens) == 2


class TestContinuousBatching:
    def test_one_request_to_its_end(self):
        """A request gets a token per step until ``max_tokens``, and is gone then."""
        core = make_core()
        add(core, "a", [5], max_tokens=3)
        outputs = [step(core)[0] for _ in range(3)]
        assert [output.new_token_ids for output in outputs] == [[6], [7], [8]]
        assert [output.finish_reason for output in outputs] == [None, None, LENGTH]
        assert core.counts() == (0, 0)
        assert not core.has_work()
        assert core.scheduler.cache.usage == 0

    def test_requests_join_and_leave_at_any_step(self):
        """A request that comes later runs beside the others at once, and its end leaves them alone."""
        core = make_core()
        add(core, "a", [10], max_tokens=4)
        step(core)
        add(core, "b", [20], max_tokens=2)
        step(core)
        assert shape(core) == [("a", 1), ("b", 1)]
        step(core)
        step(core)
        assert shape(core) == [("a", 1)]
        assert not core.has_work()

    def test_num_seqs_are_the_limit(self):
        """No more than ``max_num_seqs`` requests run at once; the next starts when one has ended."""
        core = make_core(max_num_seqs=2)
        for name in "abc":
            add(core, name, [1], max_tokens=2)
        step(core)
        assert core.counts() == (1, 2)
        step(core)
        step(core)
        assert shape(core) == [("c", 1)]

    def test_budget_is_the_limit(self):
        """A step computes at most ``max_num_batched_tokens`` tokens; running requests go first."""
        core = make_core(max_num_batched_tokens=8)
        add(core, "a", range(6), max_tokens=5)
        add(core, "b", range(9), max_tokens=5)
        step(core)
        assert shape(core) == [("a", 6), ("b", 2)]
        step(core)
        assert shape(core) == [("a", 1), ("b", 7)]
        assert core.model_executor.batches[-1].total_num_scheduled_tokens == 8

    def test_running_requests_beyond_the_budget_wait_their_turn(self):
        """When the budget is below the number of running requests, the first ones get on and the rest follow."""
        core = make_core(max_num_batched_tokens=2)
        for name in "abc":
            add(core, name, [1], max_tokens=3)
        results = run(core)
        assert [len(result.tokens) for result in results.values()] == [3, 3, 3]
        assert max(len(batch) for batch in core.model_executor.batches) == 2

    def test_several_tokens_per_step(self):
        """An executor may return more than one token; those behind the end are dropped."""

        class Fast(Recording):
            def execute_model(self, batch):
                return ModelOutput([[4, 5, 6] if r.is_last_chunk else [] for r in batch])

        core = make_core(Fast)
        add(core, "a", [1], max_tokens=5)
        results = run(core)
        assert results["a"].tokens == [4, 5, 6, 4, 5]

    def test_ids_are_free_after_the_end(self):
        """An id can be used again once its request has ended, and not before."""
        core = make_core()
        add(core, "a", max_tokens=1)
        with pytest.raises(ValueError, match="request 'a' is already running"):
            add(core, "a")
        run(core)
        add(core, "a", max_tokens=1)
        assert run(core)["a"].finish_reason is LENGTH


class TestChunks:
    def test_long_prompt_takes_several_steps(self):
        """Only the last chunk brings a token, and what was computed is not computed again."""
        core = make_core(max_num_batched_tokens=4)
        add(core, "a", range(10), max_tokens=1)
        assert [len(step(core)) for _ in range(3)] == [0, 0, 1]
        chunks = [batch.requests[0] for batch in core.model_executor.batches]
        assert [(c.num_computed_tokens, c.num_scheduled_tokens, c.is_last_chunk) for c in chunks] == [
            (0, 4, False),
            (4, 4, False),
            (8, 2, True),
        ]

    def test_threshold_keeps_room_for_others(self):
        """``long_prefill_token_threshold`` bounds what one prompt takes of a step."""
        core = make_core(long_prefill_token_threshold=3)
        add(core, "a", range(8), max_tokens=1)
        add(core, "b", range(2), max_tokens=1)
        step(core)
        assert shape(core) == [("a", 3), ("b", 2)]

    def test_without_chunks_a_prompt_waits_for_room(self):
        """With chunked prefill off a prompt is computed in one step, even one longer than the configured budget."""
        core = make_core(enable_chunked_prefill=False, max_num_batched_tokens=4, max_model_len=20)
        add(core, "a", range(15), max_tokens=2)
        add(core, "b", range(15), max_tokens=1)
        run(core)
        assert [shape(core, n) for n in range(2)] == [[("a", 15)], [("a", 1), ("b", 15)]]


class TestOrder:
    def test_priority_policy(self):
        """Lower priority numbers start first, whatever came first."""
        core = make_core(policy="priority", max_num_seqs=1)
        for name, priority in [("a", 1), ("b", 0), ("c", -1)]:
            add(core, name, [1], max_tokens=1, priority=priority)
        assert list(run(core)) == ["c", "b", "a"]

    def test_fcfs_ignores_priority(self):
        """Under first come, first served the priority does not matter."""
        core = make_core(max_num_seqs=1)
        for name, priority in [("a", 1), ("b", 0)]:
            add(core, name, [1], max_tokens=1, priority=priority)
        assert list(run(core)) == ["a", "b"]


class TestPreemption:
    def test_last_one_gives_way(self):
        """When blocks run out the request that started last is computed anew later, with the same result."""
        core = make_core(num_gpu_blocks_override=5, block_size=2, log_stats=True, enable_prefix_caching=False)
        add(core, "a", [10, 11], max_tokens=6)
        add(core, "b", [20, 21], max_tokens=6)
        events, results = {}, {}
        while core.has_work():
            outputs = step(core)
            collect(results, outputs)
            for output in outputs:
                events.setdefault(output.request_id, []).extend(event.type.name for event in output.events or ())
        assert results["a"].tokens == list(range(12, 18))
        assert results["b"].tokens == list(range(22, 28))
        assert events["a"] == ["QUEUED", "SCHEDULED"]
        assert events["b"][:4] == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED"]
        preempted = [batch for batch in core.model_executor.batches if batch.preempted_request_ids]
        assert [list(batch.preempted_request_ids) for batch in preempted] == [["b"]]
        assert core.scheduler.cache.usage == 0

    def test_least_urgent_gives_way(self):
        """Under the priority policy the request with the highest number gives way, though it started first."""
        core = make_core(policy="priority", num_gpu_blocks_override=5, block_size=2, enable_prefix_caching=False)
        add(core, "late", [20, 21], max_tokens=6, priority=5)
        step(core)
        add(core, "urgent", [10, 11], max_tokens=6, priority=0)
        results = run(core)
        assert (len(results["urgent"].tokens), len(results["late"].tokens)) == (6, 5)  # one came in the first step
        preempted = [name for batch in core.model_executor.batches for name in batch.preempted_request_ids]
        assert preempted == ["late"]

    def test_returns_before_those_that_never_ran(self):
        """A preempted request starts again before new ones."""
        core = make_core(num_gpu_blocks_override=4, block_size=2, enable_prefix_caching=False)
        for name in "abc":
            add(core, name, [1, 2], max_tokens=5)
        assert list(run(core)) == ["a", "b", "c"]

    def test_what_can_never_fit_ends_alone(self):
        """A request that outgrows the whole cache ends with ERROR and says so; the others are unharmed."""
        core = make_core(num_gpu_blocks_override=3, block_size=2)
        add(core, "big", [1, 2], max_tokens=50)
        add(core, "small", [7], max_tokens=3)
        results = run(core)
        assert results["small"].tokens == [8, 9, 10]
        assert results["big"].finish_reason is ERROR
        assert "7 tokens, which need 4 KV blocks, and the engine has 3" in results["big"].stop_reason
        assert "num_gpu_blocks_override" in results["big"].stop_reason
        assert results["big"].tokens == [3, 4, 5, 6, 7]
        assert core.scheduler.cache.usage == 0

    def test_what_can_never_fit_ends_while_it_waits(self):
        """A request that was preempted with more tokens than the cache holds ends, rather than wait for ever."""
        core = make_core(num_gpu_blocks_override=3, block_size=2)
        add(core, "a", [1, 2, 3, 4, 5], max_tokens=9)
        step(core)
        step(core)
        core.reset_prefix_cache(reset_running_requests=True)
        assert core.counts() == (1, 0)
        [output] = step(core)
        assert (output.finish_reason, output.new_token_ids) == (ERROR, [])
        assert not core.has_work()


class TestPrefixCache:
    def prefill_stats(self, core, name, prompt):
        add(core, name, prompt, max_tokens=1)
        [output] = step(core)
        return output.prefill_stats

    def test_second_prompt_computes_only_what_is_new(self):
        """A prompt that begins like an earlier one starts behind the common blocks, and says so."""
        core = make_core(block_size=4)
        first = self.prefill_stats(core, "a", range(10))
        assert (first.num_prompt_tokens, first.num_computed_tokens, first.num_cached_tokens) == (10, 10, 0)
        second = self.prefill_stats(core, "b", [*range(8), 50, 51])
        assert (second.num_prompt_tokens, second.num_computed_tokens, second.num_cached_tokens) == (10, 2, 8)
        assert second.num_local_cached_tokens == 8

    def test_salt_keeps_prompts_apart(self):
        """Prompts with another salt share nothing."""
        core = make_core(block_size=4)
        self.prefill_stats(core, "a", range(10))
        add(core, "b", range(10), max_tokens=1, cache_salt="mine")
        assert step(core)[0].prefill_stats.num_cached_tokens == 0

    def test_reset_forgets(self):
        """After a reset nothing is found."""
        core = make_core(block_size=4)
        self.prefill_stats(core, "a", range(10))
        assert core.reset_prefix_cache()
        assert self.prefill_stats(core, "b", range(10)).num_cached_tokens == 0

    def test_reset_waits_for_running_requests(self):
        """A reset is refused while requests run, unless they are to be preempted; they still end well."""
        core = make_core(block_size=4)
        add(core, "a", range(10), max_tokens=4)
        results: dict[str, Result] = {}
        collect(results, step(core))
        assert core.reset_prefix_cache() is False
        assert core.counts() == (0, 1)
        assert core.reset_prefix_cache(reset_running_requests=True) is True
        assert core.counts() == (1, 0)
        while core.has_work():
            collect(results, step(core))
        assert results["a"].tokens == [10, 11, 12, 13]

    def test_preempted_prompt_finds_its_own_blocks(self):
        """What a preempted request had computed is found again, if nobody needed the room."""
        core = make_core(Paged, num_gpu_blocks_override=8, block_size=2)
        add(core, "a", [1, 2], max_tokens=8)
        add(core, "b", [3, 4], max_tokens=8)
        assert [len(result.tokens) for result in run(core).values()] == [8, 8]

    def test_off_means_off(self):
        """Without prefix caching nothing is found."""
        core = make_core(block_size=4, enable_prefix_caching=False)
        self.prefill_stats(core, "a", range(10))
        assert self.prefill_stats(core, "b", range(10)).num_cached_tokens == 0


class TestStops:
    def test_stop_string_spans_tokens(self):
        """A stop string ends the text with the token that completes it, which is part of the output."""
        core = make_core(Scripted)
        add(core, "a", list(b"hello"), max_tokens=20, stop=["lo"])
        result = run(core)["a"]
        assert (bytes(result.tokens), result.finish_reason, result.stop_reason) == (b"hello", STOP, "lo")

    def test_stop_token_and_eos(self):
        """A stop token is named as the reason, the end of the sequence is not."""
        core = make_core(Scripted)
        add(core, "token", [5, 6, 7], max_tokens=20, stop_token_ids=[6])
        add(core, "eos", [5, EOS, 7], max_tokens=20)
        add(core, "ignored", [5, EOS, 7], max_tokens=4, ignore_eos=True)
        add(core, "late", [EOS, 5], max_tokens=20, min_tokens=2)
        results = run(core)
        assert (results["token"].tokens, results["token"].stop_reason) == ([5, 6], 6)
        assert (results["eos"].tokens, results["eos"].stop_reason) == ([5, EOS], None)
        assert results["ignored"].finish_reason is LENGTH
        assert results["late"].tokens == [EOS, 5, EOS]

    def test_model_length(self):
        """Without ``max_tokens`` the text ends when prompt and output have the model's length."""
        core = make_core(max_model_len=8)
        add(core, "a", range(5), max_tokens=None)
        add(core, "full", range(8), max_tokens=9)
        results = run(core)
        assert (len(results["a"].tokens), results["a"].finish_reason) == (3, LENGTH)
        assert (len(results["full"].tokens), results["full"].finish_reason) == (1, LENGTH)


class TestPooling:
    def test_ends_with_its_value(self):
        """A pooling request ends with its value and without tokens, also in chunks."""
        core = make_core(Pooling, max_num_batched_tokens=4)
        add(core, "a", range(10), pooling_params=PoolingParams(task="embed"))
        outputs = [output for _ in range(3) for output in step(core)]
        [output] = outputs
        assert (output.pooling_output, output.new_token_ids, output.finish_reason) == (45, [], STOP)
        assert output.prefill_stats.num_prompt_tokens == 10


class TestAborts:
    def test_wherever_a_request_is(self):
        """Waiting, running and held requests end without output; the others get all of theirs."""
        core = make_core(max_num_seqs=2)
        for name in "abcd":
            add(core, name, [1], max_tokens=3)
        step(core)
        core.abort_requests(["a", "c"])
        results = run(core)
        assert set(results) == {"b", "d"}
        assert [len(result.tokens) for result in results.values()] == [2, 3]
        assert core.scheduler.cache.usage == 0

    @pytest.mark.parametrize("names", [[], ["unknown"], ["done"], ["done", "done"], [None, 5, ["a"]], "unknown"])
    def test_nobody_minds_the_rest(self, names):
        """Aborts of nothing, of unknown and finished ids, and of what is no id, do nothing."""
        core = make_core()
        add(core, "done", max_tokens=1)
        run(core)
        add(core, "a", max_tokens=2)
        core.abort_requests(names)
        assert len(run(core)["a"].tokens) == 2

    def test_twice_in_one_message(self):
        """An id that is aborted twice ends once, and can be used again."""
        core = make_core()
        add(core, "a")
        core.abort_requests(["a", "a"])
        add(core, "a", max_tokens=1)
        assert run(core)["a"].finish_reason is LENGTH

    def test_during_a_step(self):
        """A request that is aborted while its step runs gets nothing of that step."""

        class Aborting(Recording):
            core = None

            def execute_model(self, batch):
                self.core.abort_requests(["a"])
                return super().execute_model(batch)

        core = make_core(Aborting)
        core.model_executor.core = core
        add(core, "a")
        add(core, "b", max_tokens=1)
        assert [output.request_id for output in step(core)] == ["b"]
        assert core.scheduler.cache.usage == 0

    def test_abort_all_tells_everybody(self):
        """After ``abort_all`` every request's client has an output with reason ABORT."""
        core = make_core(max_num_seqs=1)
        add(core, "a")
        add(core, "b", client_index=2)
        step(core)
        core.abort_all()
        outputs = core.take_outputs()
        assert {index: [(o.request_id, o.finish_reason) for o in outputs[index].outputs] for index in outputs} == {
            0: [("a", ABORT)],
            2: [("b", ABORT)],
        }
        assert core.take_outputs() == {}
        assert core.counts() == (0, 0)


class TestStatistics:
    def test_state_after_each_step(self):
        """With statistics every step reports the queues, the cache's use and the lookups since the last report."""
        core = make_core(log_stats=True, max_num_seqs=1, num_gpu_blocks_override=10, block_size=2)
        add(core, "a", [1, 2, 3], max_tokens=2)
        add(core, "b", [1, 2, 3], max_tokens=2)
        stats = core.step_fn()[0][0].scheduler_stats
        assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (1, 1, 0.2)
        assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries) == (1, 3)
        core.step_fn()
        stats = core.step_fn()[0][0].scheduler_stats
        assert stats.prefix_cache_stats.hits == 2
        assert stats.step_counter == 3

    def test_nothing_without(self):
        """Without statistics there are no events and no reports."""
        core = make_core()
        add(core, "a", max_tokens=1)
        outputs = core.step_fn()[0][0]
        assert outputs.scheduler_stats is None
        assert outputs.outputs[0].events is None

    def test_events_have_times_in_order(self):
        """Events are in the order in which they happened."""
        core = make_core(log_stats=True)
        add(core, "a", max_tokens=1)
        events = step(core)[0].events
        assert [event.type for event in events] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
        assert events[0].timestamp <= events[1].timestamp <= time.monotonic()

    def test_finished_requests_are_named(self):
        """If asked to, outputs name the requests that ended, aborted ones included."""
        core = EngineCore(make_config(), Recording, False, include_finished_set=True)
        add(core, "a", max_tokens=1)
        add(core, "b")
        core.abort_requests(["b"])
        assert core.step_fn()[0][0].finished_requests == {"a", "b"}

    def test_repr_tells_the_state(self):
        """The repr shows the queues, the blocks and a pause."""
        core = make_core(num_gpu_blocks_override=10)
        add(core, "a", max_tokens=2)
        step(core)
        core.pause_scheduler("keep", clear_cache=False)
        add(core, "b")
        assert repr(core.scheduler) == "<Scheduler waiting=1 running=1 paused=keep <BlockPool held=1/10 stored=0>>"


class TestFailure:
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_step_that_raised_can_be_repeated(self, policy):
        """An exception of the executor changes nothing: the next step gives what this one would have given."""

        class Flaky(Paged):
            calls = 0

            def execute_model(self, batch):
                self.calls += 1
                output = super().execute_model(batch)
                if self.calls % 2:
                    raise ConnectionError("unique")
                return output

        config = {"block_size": 2, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 5, "policy": policy}
        core, steady = make_core(Flaky, **config), make_core(Paged, **config)
        for each in (core, steady):
            for name in "abc":
                add(each, name, [ord(name), 2, 3, 4], max_tokens=6, ignore_eos=True)
        results: dict[str, Result] = {}
        while core.has_work():
            with pytest.raises(ConnectionError, match="unique"):
                step(core)
            collect(results, step(core))
        assert results == run(steady)


@st.composite
def workloads(draw):
    requests = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=18),
                    "max_tokens": st.integers(1, 16),
                    "priority": st.integers(0, 2),
                    "ignore_eos": st.booleans(),
                    "arrives": st.integers(0, 12),
                    "aborted_after": st.one_of(st.none(), st.none(), st.integers(0, 12)),
                    "cache_salt": st.sampled_from([None, None, "salt"]),
                }
            ),
            min_size=1,
            max_size=9,
        )
    )
    config = {
        "block_size": draw(st.integers(1, 5)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "enable_chunked_prefill": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_model_len": 40,
    }
    needed = max(-(-(len(r["prompt"]) + r["max_tokens"]) // config["block_size"]) for r in requests)
    config["num_gpu_blocks_override"] = needed + draw(st.integers(0, 3))
    return requests, config, draw(st.lists(st.integers(0, 15), max_size=3))


def play(requests, config, resets, *, aborts=True):
    """Run a workload step by step; return the results and the core."""
    core = make_core(Paged, **config)
    results: dict[str, Result] = {}
    aborted = set()
    for tick in range(2000):
        for number, wish in enumerate(requests):
            name = f"r{number}"
            if wish["arrives"] == tick:
                wanted = {key: wish[key] for key in ("max_tokens", "priority", "ignore_eos", "cache_salt")}
                add(core, name, wish["prompt"], **wanted)
            if aborts and wish["aborted_after"] is not None and tick == wish["arrives"] + wish["aborted_after"]:
                core.abort_requests([name])
                aborted.add(name)
        if tick in resets:
            core.reset_prefix_cache(reset_running_requests=True)
        if core.has_work():
            collect(results, step(core))
        elif tick > 30:
            break
    return results, core, aborted


@given(workloads())
@settings(max_examples=150)
def test_a_tiny_cache_changes_nothing_but_time(workload):
    """Any mix of requests on a tiny pool ends, gives every block back, and gets what an unlimited pool gives.

    The executor reads its context out of the blocks, so it would notice a block that is shared wrongly or lost.
    """
    requests, config, resets = workload
    results, core, aborted = play(requests, config, resets)
    assert core.counts() == (0, 0)
    assert core.scheduler.cache.usage == 0
    assert core.scheduler.cache.reset()
    assert core.model_executor.live_ids == set()
    assert core.model_executor.most_tokens <= core.limits.max_num_batched_tokens
    assert core.model_executor.most_requests <= config["max_num_seqs"]

    roomy = {**config, "num_gpu_blocks_override": 10_000, "max_num_batched_tokens": 10_000, "max_num_seqs": 100}
    roomy.update(enable_chunked_prefill=True, long_prefill_token_threshold=0, enable_prefix_caching=False)
    expected, _, _ = play(requests, roomy, [], aborts=False)
    for name, result in expected.items():
        got = results.get(name)
        if got is not None and got.finish_reason is not None:
            assert got == result
        else:
            assert name in aborted
            assert got is None or got.tokens == result.tokens[: len(got.tokens)]


class TestPause:
    def test_new_requests_are_held_and_the_others_drain(self):
        """Under a waiting pause what came before it ends, waiting requests included, and what comes after it waits."""
        core = make_core(max_num_seqs=1)
        add(core, "a", max_tokens=2)
        add(core, "b", max_tokens=2)
        core.scheduler.pause("wait")
        add(core, "c", max_tokens=2)
        assert list(run(core)) == ["a", "b"]
        assert core.counts() == (1, 0)
        core.scheduler.resume()
        assert list(run(core)) == ["c"]

    def test_preempted_requests_drain_too(self):
        """A request that is preempted while the engine drains still ends before the pause is complete."""
        core = make_core(num_gpu_blocks_override=5, block_size=2, enable_prefix_caching=False)
        add(core, "a", [10, 11], max_tokens=6)
        add(core, "b", [20, 21], max_tokens=6)
        core.scheduler.pause("wait")
        assert [len(result.tokens) for result in run(core).values()] == [6, 6]

    def test_keep_freezes(self):
        """A keeping pause leaves everything where it is until the engine goes on."""
        core = make_core()
        add(core, "a", [1], max_tokens=3)
        results: dict[str, Result] = {}
        collect(results, step(core))
        core.scheduler.pause("keep")
        assert not core.has_work()
        assert step(core) == []
        core.scheduler.resume()
        while core.has_work():
            collect(results, step(core))
        assert results["a"].tokens == [2, 3, 4]

    def test_abort_ends_what_runs(self):
        """An aborting pause ends everything with reason ABORT."""
        core = make_core()
        add(core, "a")
        core.scheduler.pause("abort")
        assert core.take_outputs()[0].outputs[0].finish_reason is ABORT
        assert not core.scheduler.has_in_flight()

    def test_held_requests_can_be_aborted(self):
        """A request that is held back by a pause can be aborted like any other."""
        core = make_core()
        core.scheduler.pause("wait")
        add(core, "a")
        core.abort_requests(["a"])
        core.scheduler.resume()
        assert core.counts() == (0, 0)


class Constant(Executor):
    """The cheapest executor there is."""

    def execute_model(self, batch):
        return ModelOutput([[1] if request.is_last_chunk else [] for request in batch.requests])


def seconds_per_step(core, steps=40):
    """Return the CPU time of the cheapest step, which other processes on the machine do not change much."""
    samples = []
    for _ in range(steps):
        begin = time.thread_time()
        step(core)
        samples.append(time.thread_time() - begin)
    return min(samples)


@pytest.mark.timing
def test_cost_of_a_decode_step():
    """A step of 256 running requests takes well below 2 ms of the scheduler (about 0.3 ms on an idle machine)."""
    core = make_core(Constant, max_num_seqs=256, max_num_batched_tokens=256 * 16)
    for number in range(256):
        add(core, str(number), range(16), max_tokens=1000)
    step(core)
    assert seconds_per_step(core) < 0.005  # generous: 0.3 ms on a quiet machine


@pytest.mark.timing
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_cost_does_not_grow_with_waiting_requests(policy):
    """A step takes as long with 20,000 waiting requests as with none."""
    cores = [make_core(Constant, max_num_seqs=32, policy=policy) for _ in range(2)]
    for core, number in zip(cores, (32, 20_032), strict=True):
        for index in range(number):
            add(core, str(index), [1], max_tokens=1000)
        step(core)
    alone, crowded = map(seconds_per_step, cores)
    assert crowded < 5 * alone + 0.002
