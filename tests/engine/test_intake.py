"""What a request may look like, and what is refused before it can do harm."""

from __future__ import annotations

import array
from types import SimpleNamespace

import numpy as np
import pytest

from engine_client.engine.intake import Intake
from engine_client.engine.limits import Limits
from engine_client.messages import FinishReason
from engine_client.params import LoRARequest, PoolingParams
from helpers.engines import Pooling, Recording, Scripted, make_request

LIMITS = Limits(max_model_len=64, block_size=4, num_blocks=10)


def read(prompt=(1, 2, 3), executor=None, limits=LIMITS, **settings):
    return Intake(executor or Recording(), limits).read(make_request("a", prompt, **settings))


def with_attributes(executor=Recording, **attributes):
    made = executor()
    vars(made).update(attributes)
    return made


class WithLora(Recording):
    def add_lora(self, lora_request):
        return True


class TestPrompt:
    @pytest.mark.parametrize(
        "prompt",
        [[1, 2], range(1, 3), np.array([1, 2], dtype=np.uint16), array.array("i", [1, 2]), memoryview(b"\1\2")],
    )
    def test_may_be_any_sequence_of_integers(self, prompt):
        """Prompts in lists, ranges, arrays and views become lists of Python integers, and are not shared."""
        tokens = read(prompt).tokens
        assert tokens == [1, 2]
        assert {type(token) for token in tokens} == {int}
        assert tokens is not prompt

    @pytest.mark.parametrize("prompt", ["text", b"text", [1, "2"], [1.5], [None], 7, [[1]]])
    def test_must_be_integers(self, prompt):
        """Anything else in a prompt is a TypeError that says what is expected."""
        with pytest.raises(TypeError, match="prompt_token_ids must be a list of integers"):
            read(prompt)

    def test_must_be_tokens(self):
        """Numbers that are no tokens of the model are refused, with the vocabulary's size if it is known."""
        with pytest.raises(ValueError, match="must be zero or more, found -4"):
            read([1, -4])
        with pytest.raises(ValueError, match="a number that is no token"):
            read([1 << 70])
        executor = with_attributes(vocab_size=100)
        assert read([99], executor).tokens == [99]
        with pytest.raises(ValueError, match="must be below 100, the model's vocabulary; found 100"):
            read([1, 100], executor)

    def test_must_not_be_empty(self):
        """An empty prompt, and none at all, are refused with what to give."""
        with pytest.raises(ValueError, match="the prompt is empty; give at least one token"):
            read([])
        with pytest.raises(ValueError, match="has no prompt; give prompt_token_ids or prompt_embeds"):
            read(None)

    def test_must_not_be_longer_than_the_model_allows(self):
        """A prompt may be as long as ``max_model_len`` and no longer."""
        limits = Limits(max_model_len=5)
        assert len(read(range(5), limits=limits).tokens) == 5
        with pytest.raises(ValueError, match="has 6 tokens and max_model_len is 5: shorten"):
            read(range(6), limits=limits)

    def test_must_fit_into_the_kv_cache(self):
        """A prompt that needs more blocks than there are is refused, with both numbers and what to change."""
        assert read(range(40)).tokens
        with pytest.raises(ValueError, match=r"needs 11 KV blocks and the engine has 10: .*num_gpu_blocks_override"):
            read(range(41))


class TestEmbeddings:
    @pytest.mark.parametrize("embeds", [np.zeros((3, 8)), [[0.5]] * 3, memoryview(b"abc")])
    def test_length_is_the_number_of_rows(self, embeds):
        """A prompt of embeddings has a token per row, which shows as 0, and stays out of the prefix cache."""
        request = read(None, prompt_embeds=embeds)
        assert request.tokens == [0, 0, 0]
        assert request.space is None
        assert request.scheduled(3).prompt_embeds is embeds

    def test_may_come_with_tokens_of_the_same_number(self):
        """Tokens beside embeddings must be as many as there are rows."""
        assert read([1, 2], prompt_embeds=np.zeros((2, 4))).tokens == [1, 2]
        with pytest.raises(ValueError, match="prompt_embeds has 3 rows for 2 prompt_token_ids"):
            read([1, 2], prompt_embeds=np.zeros((3, 4)))

    @pytest.mark.parametrize("embeds", [5, np.array(1.0), object()])
    def test_must_have_rows(self, embeds):
        """Something without rows is a TypeError."""
        with pytest.raises(TypeError, match="prompt_embeds must be an array with a row per token"):
            read(None, prompt_embeds=embeds)


class TestFields:
    @pytest.mark.parametrize("name", [None, 5, b"a"])
    def test_id_must_be_a_string(self, name):
        """Another type of id is a TypeError."""
        with pytest.raises(TypeError, match="request_id must be a string, not"):
            Intake(Recording(), LIMITS).read(make_request(name))

    def test_id_must_not_be_empty(self):
        """An empty id is a ValueError."""
        with pytest.raises(ValueError, match="request_id must not be empty"):
            Intake(Recording(), LIMITS).read(make_request(""))

    @pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 2**20])
    def test_id_may_be_any_string(self, name):
        """Odd ids are ids."""
        assert Intake(Recording(), LIMITS).read(make_request(name)).request_id == name

    def test_needs_parameters(self):
        """A request with neither sampling nor pooling parameters is refused."""
        with pytest.raises(ValueError, match="'a' has neither sampling_params nor pooling_params; give it one"):
            read(sampling_params=None)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("priority", "high"),
            ("priority", True),
            ("arrival_time", "now"),
            ("arrival_time", []),
            ("client_index", 1.5),
            ("cache_salt", 5),
        ],
    )
    def test_wrong_types_are_named(self, field, value):
        """A field of the wrong type is a TypeError that names it and shows the value."""
        with pytest.raises(TypeError, match=field):
            read(**{field: value})

    def test_negative_client_index_is_refused(self):
        """A client index counts from 0."""
        with pytest.raises(ValueError, match="client_index must be at least 0"):
            read(client_index=-1)

    def test_resumable_requests_are_refused(self):
        """What would be ignored in silence is refused in a sentence."""
        with pytest.raises(ValueError, match="resumable requests are not supported"):
            read(resumable=True)

    def test_any_object_serves(self):
        """A message needs its id, prompt and parameters; everything else may be missing."""
        message = SimpleNamespace(request_id="a", prompt_token_ids=[1], sampling_params=SimpleNamespace())
        request = Intake(Recording(), LIMITS).read(message)
        assert (request.client_index, request.rank[0], request.abort_immediately) == (0, 0, False)
        assert request.accept(range(1, 63))[1] is None
        assert request.accept([5])[1].finish_reason is FinishReason.LENGTH  # max_model_len, for want of max_tokens

    def test_rank_orders_by_priority_arrival_and_order(self):
        """Lower numbers, earlier times and earlier messages come first."""
        intake = Intake(Recording(), LIMITS)
        ranks = [
            intake.read(make_request("a", priority=priority, arrival_time=arrival)).rank
            for priority, arrival in [(0, 5.0), (0, 5.0), (0, 4.0), (-1, 9.0), (0, None)]
        ]
        assert sorted(range(5), key=ranks.__getitem__) == [3, 2, 0, 1, 4]


class TestExecutorsSay:
    def test_executor_may_refuse(self):
        """What the executor's ``check_request`` raises is why the request is refused."""

        class Picky(Recording):
            def check_request(self, request):
                raise ValueError(f"not {request.request_id}")

        with pytest.raises(ValueError, match="not a"):
            read(executor=Picky())

    def test_lora_needs_the_executor(self):
        """An adapter is refused by an executor that has none, and accepted by one that has."""
        lora = LoRARequest("adapter", 1, "/path")
        with pytest.raises(ValueError, match="LoRA adapters are not supported by Recording"):
            read(lora_request=lora)
        assert read(executor=WithLora(), lora_request=lora).space == (("adapter", 1), None)

    def test_pooling_task_must_be_supported(self):
        """A pooling task that the executor does not have is refused, with those that it has."""
        assert read(executor=Pooling(None), pooling_params=PoolingParams(task="embed")).is_pooling
        with pytest.raises(ValueError, match=r"unsupported pooling task 'classify'; Pooling supports \['embed'\]"):
            read(executor=Pooling(None), pooling_params=PoolingParams(task="classify"))
        with pytest.raises(ValueError, match=r"unsupported pooling task None; Recording supports \[\]"):
            read(pooling_params=PoolingParams())

    def test_generation_must_be_supported(self):
        """A pooling model refuses to generate."""
        with pytest.raises(ValueError, match="Pooling does not generate text"):
            read(executor=Pooling(None))


class TestCacheSpace:
    def test_separates_by_adapter_and_salt(self):
        """Only prompts of one adapter and one salt share prefixes."""
        assert read().space == (None, None)
        assert read(cache_salt="mine").space == (None, "mine")

    def test_inputs_beside_the_tokens_stay_out(self):
        """Multi-modal prompts are not in the cache, and nothing is when it is off."""
        assert read(mm_features=["image"]).space is None
        assert read(limits=Limits(prefix_caching=False)).space is None

    @pytest.mark.parametrize("settings", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
    def test_some_must_not_read(self, settings):
        """Requests that need every prompt token computed, or say so, do not read the cache."""
        assert read().reads_cache
        assert not read(**settings).reads_cache
        assert not read(executor=Pooling(None), pooling_params=PoolingParams(task="embed")).reads_cache


class TestStops:
    def ends(self, request, tokens):
        taken, end = request.accept(tokens)
        return len(taken), end and end.finish_reason, end and end.stop_reason

    def test_eos_is_the_executors(self):
        """The executor's end-of-sequence token ends the text, unless it is ignored."""
        assert self.ends(read(), [5, 0, 5]) == (2, FinishReason.STOP, None)
        assert self.ends(read(ignore_eos=True), [5, 0, 5]) == (3, None, None)

    def test_parameters_may_know_eos(self):
        """Parameters that carry an end-of-sequence token, as the reference's do, have the last word."""
        params = SimpleNamespace(eos_token_id=7)
        assert self.ends(read(sampling_params=params), [0, 7, 5]) == (2, FinishReason.STOP, None)

    def test_stop_tokens_may_be_an_array(self):
        """Stop tokens may come in any sequence."""
        params = SimpleNamespace(stop_token_ids=np.array([8, 9]))
        assert self.ends(read(sampling_params=params), [5, 9, 5]) == (2, FinishReason.STOP, 9)

    @pytest.mark.parametrize("stop", ["hi", ["hi"], ("no", "hi")])
    def test_stop_strings_need_decode(self, stop):
        """Stop strings work with an executor that decodes, and are refused by one that does not."""
        params = SimpleNamespace(stop=stop)
        assert self.ends(read(executor=Scripted(), sampling_params=params), b"ohi!") == (3, FinishReason.STOP, "hi")
        with pytest.raises(ValueError, match=r"need an executor with decode.*Recording has not: use stop_token_ids"):
            read(sampling_params=params)

    @pytest.mark.parametrize(
        ("params", "error", "text"),
        [
            ({"stop": [5]}, TypeError, "stop must be strings"),
            ({"stop": ["a", ""]}, TypeError, "not empty"),
            ({"stop_token_ids": ["x"]}, TypeError, "stop_token_ids must be a list of integers"),
            ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, not 0"),
            ({"max_tokens": "5"}, TypeError, "max_tokens must be an integer, not '5'"),
            ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0"),
        ],
    )
    def test_wrong_parameters_are_named(self, params, error, text):
        """Parameters that did not check themselves are checked here."""
        with pytest.raises(error, match=text):
            read(executor=Scripted(), sampling_params=SimpleNamespace(**params))
