"""Which rank gets the next request: an even spread of a burst, and the score of the reference otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine_client.protocol.routing import Load, choose_rank

COUNT = st.integers(0, 50)
LOADS = st.dictionaries(st.integers(0, 63), st.builds(Load, COUNT, COUNT, COUNT), min_size=1, max_size=8)


def test_no_rank_is_an_error() -> None:
    """Where there is nobody to choose, ValueError says so."""
    for in_burst in (False, True):
        with pytest.raises(ValueError, match="no engine"):
            choose_rank({}, 0, in_burst=in_burst)


@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 120), st.data())
def test_a_burst_over_equal_ranks_is_even_whatever_the_pages_say(
    ranks: int, start: int, count: int, data: st.DataObject
) -> None:
    """Pages may know of any part of what was sent, as waiting or running: no rank gets two more than another."""
    sent = dict.fromkeys(range(ranks), 0)
    for turn in range(start, start + count):
        loads = {}
        for rank, own in sent.items():
            known = data.draw(st.integers(0, own))
            running = data.draw(st.integers(0, known))
            loads[rank] = Load(known - running, running, own)
        sent[choose_rank(loads, turn, in_burst=True)] += 1
        assert max(sent.values()) - min(sent.values()) <= 2


@given(LOADS, st.integers(0, 1000))
def test_outside_of_a_burst_the_lowest_score_wins(loads: dict[int, Load], start: int) -> None:
    """Whoever has the lowest 4 * waiting + running is chosen, where the page knows of all requests."""
    loads = {rank: load._replace(own=min(load.own, load.waiting + load.running)) for rank, load in loads.items()}
    chosen = loads[choose_rank(loads, start, in_burst=False)]
    assert 4 * chosen.waiting + chosen.running == min(4 * load.waiting + load.running for load in loads.values())


@given(LOADS, st.integers(0, 1000))
def test_in_a_burst_the_choice_is_among_the_least_loaded(loads: dict[int, Load], start: int) -> None:
    """The chosen one has at most one request more than the least loaded, and the lowest score of those."""
    chosen = loads[choose_rank(loads, start, in_burst=True)]
    least = min(load.total for load in loads.values())
    assert chosen.total <= least + 1
    assert chosen.score == min(load.score for load in loads.values() if load.total <= least + 1)


def test_requests_that_a_rank_has_not_looked_at_wait() -> None:
    """What was sent and is on no page yet counts as waiting; what the page tells of others' requests counts too."""
    assert Load(0, 0, 3) == (0, 0, 3)
    assert (Load(0, 0, 3).total, Load(0, 0, 3).score) == (3, 12)
    assert (Load(0, 2, 3).total, Load(0, 2, 3).score) == (3, 6)
    assert (Load(5, 2, 3).total, Load(5, 2, 3).score) == (7, 22)
    assert choose_rank({0: Load(0, 0, 3), 1: Load(0, 4, 0)}, 0, in_burst=False) == 1


@pytest.mark.parametrize("in_burst", [False, True])
@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [7, 3]])
def test_ties_go_round(ranks: list[int], in_burst: bool) -> None:
    """Ranks that are equally loaded get one request each in every round, in their order."""
    loads = dict.fromkeys(ranks, Load(1, 1, 1))
    chosen = [choose_rank(loads, turn, in_burst=in_burst) for turn in range(3 * len(ranks))]
    assert chosen == ranks * 3


def test_in_a_burst_what_others_have_is_as_it_was_seen_once() -> None:
    """Pages of different ages do not count; own requests and what others had in one look at all pages do."""
    loads = {0: Load(0, 9, 5), 1: Load(0, 20, 5)}
    assert choose_rank(loads, 0, in_burst=True) == 0
    assert choose_rank(loads, 0, in_burst=True, others={0: 8, 1: 3}) == 1
