"""The batch that an executor gets, and the checks of what it gives back."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from engine_client.engine.batch import Batch, IntView, ModelOutput, ScheduledRequest, check_output


def scheduled(name="a", *, last=True, pooling=None):
    return ScheduledRequest(
        name, IntView([7, 8, 9]), 3, 1, 2 if last else 1, last, IntView([4]), pooling_params=pooling
    )


def batch_of(*requests):
    return Batch(requests, sum(request.num_scheduled_tokens for request in requests))


class TestIntView:
    def test_reads_like_the_list_it_shows(self):
        """A view has its list's items, length and order, and follows it as it grows."""
        items = [3, 4, 5]
        view = IntView(items)
        items.append(6)
        assert list(view) == [3, 4, 5, 6]
        assert (len(view), view[0], view[-1], view[1:3]) == (4, 3, 6, [4, 5])
        assert 5 in view
        assert 9 not in view
        assert view.index(4) == 1
        assert repr(view) == "[3, 4, 5, 6]"

    def test_equals_what_has_the_same_items(self):
        """A view equals lists, tuples and views of the same numbers, and nothing else."""
        view = IntView([1, 2])
        assert view == [1, 2]
        assert view == (1, 2)
        assert view == IntView([1, 2])
        assert view != [1]
        assert view != "12"

    def test_cannot_be_changed_or_hashed(self):
        """A view has no way to write, and no hash, since what it shows grows."""
        view = IntView([1])
        with pytest.raises(TypeError):
            view[0] = 2
        with pytest.raises(TypeError):
            hash(view)

    def test_pickles_with_its_content(self):
        """A batch can be sent to a worker in another process."""
        request = scheduled()
        assert pickle.loads(pickle.dumps(request)) == request


class TestBatch:
    def test_new_token_ids_are_those_to_compute(self):
        """A scheduled request names the tokens that this step computes."""
        assert scheduled().new_token_ids == [8, 9]
        assert scheduled(last=False).new_token_ids == [8]

    def test_iterates_over_its_requests(self):
        """A batch has its requests' number and order."""
        batch = batch_of(scheduled("a"), scheduled("b"))
        assert [request.request_id for request in batch] == ["a", "b"]
        assert len(batch) == 2

    def test_sample_asks_only_where_a_token_is_due(self):
        """``sample`` leaves chunks that are not the last, and pooling requests, empty."""
        batch = batch_of(scheduled("a"), scheduled("b", last=False), scheduled("c", pooling=object()))
        assert batch.sample(lambda request: 5).tokens == [[5], [], []]

    def test_pool_asks_only_where_a_value_is_due(self):
        """``pool`` computes a value for last chunks only, and no tokens."""
        batch = batch_of(scheduled("a", pooling=1), scheduled("b", last=False, pooling=1))
        output = batch.pool(lambda request: sum(request.token_ids))
        assert output.pooling == [24, None]
        check_output(batch, output)


class TestCheckOutput:
    @pytest.mark.parametrize("token", [5, np.int64(5), np.uint8(5)])
    def test_accepts_integers_of_any_kind(self, token):
        """Tokens may be Python's or numpy's integers, in a list or in an array."""
        check_output(batch_of(scheduled()), ModelOutput([[token]]))
        check_output(batch_of(scheduled()), ModelOutput([np.array([token, token])]))

    @pytest.mark.parametrize("output", [None, [[1]], SimpleNamespace(tokens=[[1]])])
    def test_refuses_what_is_no_model_output(self, output):
        """Another type than ModelOutput is named."""
        with pytest.raises(TypeError, match="must return a ModelOutput, not"):
            check_output(batch_of(scheduled()), output)

    @pytest.mark.parametrize("column", ["tokens", "logprobs", "prompt_logprobs", "pooling"])
    def test_refuses_columns_of_another_length(self, column):
        """Every column has an entry per request; the message says which has how many."""
        columns = {"tokens": [[1]], column: [[1], [1]]}
        with pytest.raises(ValueError, match=f"ModelOutput.{column} has 2 entries for a batch of 1 requests"):
            check_output(batch_of(scheduled()), ModelOutput(**columns))

    @pytest.mark.parametrize("tokens", [None, 5])
    def test_refuses_columns_that_are_no_sequences(self, tokens):
        """A number or nothing in the place of the tokens' list is named."""
        with pytest.raises(TypeError, match=r"ModelOutput.tokens must be a sequence, not (NoneType|int)"):
            check_output(batch_of(scheduled()), ModelOutput(tokens))

    def test_refuses_a_bare_token(self):
        """A token that is not in a list is an error that names the request."""
        with pytest.raises(TypeError, match="for request 'a' must be a list"):
            check_output(batch_of(scheduled()), ModelOutput([5]))

    def test_refuses_a_missing_token(self):
        """A last chunk without a token is an error that names the request."""
        with pytest.raises(ValueError, match="no token for request 'b', whose last chunk this was"):
            check_output(batch_of(scheduled("a"), scheduled("b")), ModelOutput([[1], []]))

    def test_refuses_a_token_too_early(self):
        """A token for a chunk that is not the last is an error that says so."""
        with pytest.raises(ValueError, match="must be empty for request 'a': this was not its last chunk"):
            check_output(batch_of(scheduled(last=False)), ModelOutput([[1]]))

    def test_refuses_a_token_for_pooling(self):
        """A pooling request gets no tokens."""
        with pytest.raises(ValueError, match="must be empty for request 'a': it is a pooling request"):
            check_output(batch_of(scheduled(pooling=1)), ModelOutput([[1]], pooling=[2.0]))

    @pytest.mark.parametrize("pooling", [None, [None]])
    def test_refuses_a_missing_pooled_value(self, pooling):
        """The last chunk of a pooling request needs a value."""
        with pytest.raises(ValueError, match="no value for pooling request 'a'"):
            check_output(batch_of(scheduled(pooling=1)), ModelOutput([[]], pooling=pooling))

    @pytest.mark.parametrize("token", [-1, 1.0, "x", None, True, np.int64(-3)])
    def test_refuses_tokens_that_are_none(self, token):
        """A token is a non-negative integer; the message shows what came instead."""
        with pytest.raises(ValueError, match="for request 'a' must be non-negative integers, not"):
            check_output(batch_of(scheduled()), ModelOutput([[token]]))
