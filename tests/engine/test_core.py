"""The engine core as a whole: construction, requests from messages to outputs, failures, capacities, end."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

import engine_client
from engine_client.engine.batch import ModelOutput
from engine_client.engine.core import EngineCore
from engine_client.engine.executor import Executor
from engine_client.messages import FinishReason, LogprobsLists
from helpers.engines import Recording, add, make_config, make_core, make_request, run, step


class TestConstruction:
    def test_executor_gets_the_configuration(self):
        """The executor is built from the configuration object itself, by a class or by any other callable."""
        config = make_config()
        assert EngineCore(config, Recording, False).model_executor.vllm_config is config
        assert EngineCore(config, partial(Recording), False).step() == ({}, False)

    @pytest.mark.parametrize("build", [object, lambda config: None])
    def test_executor_must_be_one(self, build):
        """A callable that builds something else is refused with what it built."""
        with pytest.raises(TypeError):
            EngineCore(make_config(), build, False)

    def test_sparse_configuration_is_enough(self):
        """A configuration with none of the attributes that are read serves."""
        core = EngineCore(SimpleNamespace(scheduler_config=SimpleNamespace()), Recording, False)
        add(core, "a", max_tokens=2)
        assert len(run(core)["a"].tokens) == 2

    def test_executor_is_released_when_the_rest_fails(self):
        """If the engine cannot be built around an executor, the executor is shut down."""
        built = []

        def build(config):
            built.append(Recording(config))
            return built[0]

        with pytest.raises(ValueError, match="max_num_seqs"):
            EngineCore(make_config(max_num_seqs=0), build, False)
        assert built[0].is_shut_down

    def test_what_the_executor_raises_passes_on(self):
        """The executor's own exception is the one that the caller sees."""

        def fail(config):
            raise MemoryError("unique")

        with pytest.raises(MemoryError, match="unique"):
            EngineCore(make_config(), fail, False)

    def test_failure_callback_reaches_the_executor(self):
        """An executor can report that its workers have failed."""
        core = EngineCore(make_config(), Recording, False, executor_fail_callback=print)
        assert core.model_executor.failure_callback is print

    def test_configuration_is_not_changed(self):
        """The engine reports its capacities and leaves the caller's configuration alone."""
        config = make_config()
        core = EngineCore(config, Recording, False)
        add(core, "a", max_tokens=1)
        run(core)
        assert config == make_config()


class TestRequests:
    def test_wave_comes_back(self):
        """Preprocessing returns the request and the wave that it was sent in."""
        request, wave = make_core().preprocess_add_request(make_request("a", current_wave=7))
        assert (request.request_id, wave) == ("a", 7)

    def test_messages_must_be_preprocessed(self):
        """A client's message is refused where a preprocessed request belongs."""
        with pytest.raises(TypeError, match="what preprocess_add_request returns"):
            make_core().add_request(make_request())

    def test_refused_request_leaves_nothing(self):
        """A request that is refused leaves no trace, and its id is free."""
        core = make_core()
        for prompt in ([], None, ["x"]):
            with pytest.raises((ValueError, TypeError)):
                add(core, "a", prompt)
        assert core.counts() == (0, 0)
        add(core, "a", max_tokens=1)
        assert run(core)["a"].finish_reason is FinishReason.LENGTH

    def test_abort_immediately(self):
        """A request that asks to be aborted at once is over at once, without output."""
        core = make_core()
        add(core, "a", abort_immediately=True)
        assert not core.has_work()
        assert core.take_outputs() == {}
        assert core.model_executor.ended == ["a"]

    def test_outputs_go_to_the_client_that_asked(self):
        """Each client gets its own requests' outputs."""
        core = make_core()
        add(core, "a", client_index=0, max_tokens=1)
        add(core, "b", client_index=4, max_tokens=1)
        outputs, executed = core.step_fn()
        assert executed
        assert {index: [o.request_id for o in outputs[index].outputs] for index in outputs} == {0: ["a"], 4: ["b"]}

    def test_logprobs_come_with_their_tokens(self):
        """Log-probabilities of the executor reach the request's output."""

        class WithLogprobs(Recording):
            def execute_model(self, batch):
                rows = [LogprobsLists([[r.token_ids[-1] + 1]], [[-0.5]], [1]) for r in batch]
                return ModelOutput(super().execute_model(batch).tokens, logprobs=rows)

        core = make_core(WithLogprobs)
        add(core, "a", [1], max_tokens=1)
        [output] = step(core)
        assert output.new_logprobs.logprob_token_ids == [[2]]

    def test_executor_hears_of_every_end(self):
        """The executor is told of requests that finished, that were aborted, and that could never fit."""
        core = make_core(num_gpu_blocks_override=2, block_size=2)
        add(core, "done", [1], max_tokens=1)
        add(core, "aborted", [1])
        add(core, "big", [1, 2], max_tokens=9)
        core.abort_requests(["aborted"])
        run(core)
        assert core.model_executor.ended == ["aborted", "done", "big"]


class TestSteps:
    def test_nothing_to_do(self):
        """A step without work does not run the model."""
        core = make_core()
        assert core.step_fn() == ({}, False)
        assert core.model_executor.batches == []

    def test_step_with_batch_queue_is_a_step(self):
        """The reference's name for overlapping steps does one step here."""
        core = make_core()
        add(core, "a", [1], max_tokens=1)
        outputs, executed = core.step_with_batch_queue()
        assert outputs[0].outputs[0].new_token_ids == [2]
        assert executed

    def test_step_without_a_batch_does_not_run_the_model(self):
        """A step that only finds that a request can never fit tells so without running the model."""
        core = make_core(num_gpu_blocks_override=1, block_size=2)
        add(core, "a", [1, 2], max_tokens=9)
        step(core)
        outputs, executed = core.step_fn()
        assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
        assert not executed

    def test_exception_passes_on_and_is_logged(self, caplog):
        """What the executor raises is what the step raises; the log says what was in the batch."""

        class Failing(Recording):
            def execute_model(self, batch):
                raise LookupError("unique")

        core = make_core(Failing)
        add(core, "mine")
        with pytest.raises(LookupError, match="unique"):
            core.step_fn()
        assert "step 0 failed: 3 tokens of 1 requests ('mine')" in caplog.text

    def test_nonsense_of_an_executor_is_an_error(self):
        """An answer that does not fit the batch is refused before it changes anything."""

        class Wrong(Recording):
            def execute_model(self, batch):
                return ModelOutput([[1], [2]])

        core = make_core(Wrong)
        add(core, "a")
        with pytest.raises(ValueError, match="has 2 entries for a batch of 1 requests"):
            core.step_fn()
        assert core.counts() == (0, 1)

    def test_details_are_logged_on_request(self, caplog):
        """Steps and dummy steps are logged if the configuration asks for it."""
        caplog.set_level(logging.INFO, "engine_client.engine")
        config = make_config()
        config.observability_config = SimpleNamespace(enable_logging_iteration_details=True)
        core = EngineCore(config, Recording, False)
        add(core, "a", max_tokens=1)
        run(core)
        core.execute_dummy_batch()
        assert [message.split(":")[0] for message in caplog.messages] == ["step 0", "dummy step"]
        with core.log_error_detail(core.model_executor.batches[0]):
            pass


class TestCapacities:
    def test_are_the_real_ones(self):
        """READY reports what the engine really has, which may differ from the configuration."""

        class Small(Recording):
            num_kv_blocks = 10
            max_model_len = 100

        ready = make_core(Small, block_size=8).ready_response()
        assert (ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (100, 10, 8)
        assert (ready.kv_cache_size_tokens, ready.kv_cache_max_concurrency) == (80, 0.8)
        assert (ready.dtype, ready.world_size, ready.data_parallel_size) == ("auto", 1, 1)

    def test_need_no_sections(self):
        """A configuration without sections has defaults to report."""
        ready = EngineCore(None, Recording, False).ready_response()
        assert (ready.dtype, ready.world_size, ready.data_parallel_size, ready.dp_stats_address) == ("auto", 1, 1, None)

    def test_name_the_version(self):
        """READY carries this library's version."""
        assert make_core().ready_response().vllm_version == engine_client.__version__


class TestShutdown:
    def test_releases_everything_once(self):
        """After shutdown nothing is in flight, whoever waited knows, and the executor is shut down."""
        core = make_core()
        add(core, "a")
        step(core)
        future = core.pause_scheduler("wait")
        core.shutdown()
        core.shutdown()
        assert core.model_executor.is_shut_down
        assert core.model_executor.ended == ["a"]
        with pytest.raises(RuntimeError, match="shut down"):
            future.result(0)
        assert core.step_fn() == ({}, False)
        assert not core.has_work()
        assert repr(core).startswith("<EngineCore shut down")

    def test_executor_is_released_though_the_rest_fails(self, tmp_path):
        """A profile that cannot be written does not keep the executor from being shut down."""
        core = make_core()
        folder = tmp_path / "gone"
        folder.mkdir()
        core.profile(True, str(folder / "run"))
        folder.rmdir()
        with pytest.raises(FileNotFoundError):
            core.shutdown()
        assert core.model_executor.is_shut_down

    def test_no_reference_is_left(self):
        """An engine that was shut down is freed with its last reference, without the garbage collector."""
        core = make_core()
        add(core, "a", max_tokens=1)
        run(core)
        core.shutdown()
        gone = weakref.ref(core)
        gc.disable()
        try:
            del core
            assert gone() is None
        finally:
            gc.enable()

    def test_repr_of_a_serving_engine(self):
        """The repr shows the state, the executor and the queues."""
        assert repr(make_core(num_gpu_blocks_override=3)) == (
            "<EngineCore serving <Recording awake> <Scheduler waiting=0 running=0 <BlockPool held=0/3 stored=0>>>"
        )


class Twenty(Executor):
    """The README's executor: repeats the prompt, byte by byte, and stops at a full stop."""

    eos_token_id = 256

    def execute_model(self, batch):
        return batch.sample(self.next_token)

    def next_token(self, request):
        position = len(request.token_ids) - request.num_prompt_tokens
        return request.token_ids[position] if position < request.num_prompt_tokens else self.eos_token_id

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")


def test_executor_of_twenty_lines_is_complete():
    """A small executor serves chunked prompts, many requests, stop strings and preemption without a line about them."""
    core = make_core(Twenty, block_size=4, num_gpu_blocks_override=9, max_num_batched_tokens=10)
    texts = ["one fine day.", "two. three", "four"]
    for text in texts:
        add(core, text, list(text.encode()), max_tokens=50, stop=["."])
    results = run(core)
    decoded = {name: core.collective_rpc("decode", args=(result.tokens,))[0] for name, result in results.items()}
    assert decoded == {"one fine day.": "one fine day.", "two. three": "two.", "four": "four"}
    assert {result.finish_reason for result in results.values()} == {FinishReason.STOP}
