"""A request's own bookkeeping."""

from __future__ import annotations

import numpy as np

from engine_client.engine.request import Request, RequestState
from engine_client.engine.stop import End, StopRule
from engine_client.messages import FinishReason
from engine_client.params import PoolingParams
from helpers.engines import make_request


def request(tokens=(1, 2, 3), *, max_len=100, stop_tokens=(), min_tokens=0, **settings):
    stop = StopRule(
        eos=None, tokens=frozenset(stop_tokens), strings=None, first=len(tokens), min_tokens=min_tokens, max_len=max_len
    )
    return Request(make_request("a", tokens, **settings), list(tokens), stop, space=())


class TestScheduled:
    def test_shows_what_the_client_gave(self):
        """The executor sees the parameters, the adapter and the prompt's other forms."""
        trace = {"traceparent": "00-1-2-01"}
        settings = {"lora_request": "adapter", "mm_features": ["image"], "trace_headers": trace}
        shown = request(**settings, max_tokens=7).scheduled(3)
        assert shown.sampling_params.max_tokens == 7
        assert (shown.pooling_params, shown.lora_request, shown.mm_features) == (None, "adapter", ["image"])
        assert shown.trace_headers == trace

    def test_last_chunk_reaches_the_end(self):
        """A chunk is the last one when all tokens so far are computed after it."""
        member = request()
        assert not member.scheduled(2).is_last_chunk
        assert member.scheduled(3).is_last_chunk
        member.num_computed_tokens = 2
        assert member.scheduled(1).is_last_chunk
        assert member.num_scheduled_tokens == 1

    def test_tokens_follow_and_numbers_stay(self):
        """Later tokens show in a batch's sequences, its numbers are of its step."""
        member = request()
        shown = member.scheduled(3)
        member.num_computed_tokens = 3
        member.accept([9])
        assert shown.token_ids == [1, 2, 3, 9]
        assert (shown.num_computed_tokens, shown.num_prompt_tokens) == (0, 3)

    def test_pooling_shows_its_parameters_alone(self):
        """A pooling request has pooling parameters and no sampling parameters."""
        params = PoolingParams(task="embed")
        member = Request(make_request("p", pooling_params=params), [1], None)
        shown = member.scheduled(1)
        assert (shown.pooling_params, shown.sampling_params) == (params, None)
        assert member.is_pooling


class TestAccept:
    def test_takes_all_tokens(self):
        """Tokens that end nothing are appended, as Python integers whatever they were."""
        member = request()
        taken, end = member.accept(np.array([5, 6]))
        assert (taken, end) == ([5, 6], None)
        assert [type(token) for token in taken] == [int, int]
        assert member.tokens == [1, 2, 3, 5, 6]

    def test_leaves_tokens_behind_the_end(self):
        """Of several tokens those behind the one that ends the text are dropped."""
        member = request(stop_tokens=[6])
        assert member.accept([5, 6, 7]) == ([5, 6], End(FinishReason.STOP, 6))
        assert member.tokens[-1] == 6

    def test_passes_over_what_comes_too_early(self):
        """A stop token before ``min_tokens`` is a token like any other."""
        assert request(stop_tokens=[6], min_tokens=3).accept([6, 5, 6, 7]) == ([6, 5, 6], End(FinishReason.STOP, 6))

    def test_ends_at_the_length(self):
        """The text ends with the token that reaches its length."""
        assert request(max_len=4).accept([5, 6]) == ([5], End(FinishReason.LENGTH))


def test_restart_forgets_what_was_computed():
    """A preempted request keeps its tokens, and nothing else."""
    member = request()
    member.state = RequestState.RUNNING
    member.num_computed_tokens, member.capacity, member.chain, member.next_stored = 3, 4, 17, 4
    member.restart()
    assert (member.state, member.num_computed_tokens, member.capacity) == (RequestState.WAITING, 0, 0)
    assert member.chain == ()
    assert member.next_stored > 10**9
    assert member.was_preempted
    assert member.tokens == [1, 2, 3]


def test_repr_says_where_it_stands():
    """The repr shows id, state and progress."""
    assert repr(request()) == "<Request 'a' waiting tokens=3 computed=0 blocks=0>"
