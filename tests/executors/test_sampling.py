"""Choosing tokens: greedy, drawn, cut, biased, banned, ranked, repeatable."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from engine_client.executors.sampling import adjust, best, check_params, draw, rank_tokens, seeded_uniform
from engine_client.params import SamplingParams

FIVE = [0.1, 0.4, 0.2, 0.2, 0.1]


def no_history() -> tuple[list[int], list[int]]:
    raise AssertionError("only penalties need the tokens so far")


def shares(weights: list[float], params: SamplingParams, steps: int = 10_000) -> dict[int, float]:
    """Return how much of [0, 1) falls to each token."""
    counts = Counter(draw(weights, params, (step + 0.5) / steps) for step in range(steps))
    return {token: count / steps for token, count in sorted(counts.items())}


def test_greedy_takes_the_smallest_of_equals():
    """Of equally probable tokens, greedy takes the one with the smallest id, whatever the number drawn."""
    assert best([0.2, 0.4, 0.4]) == 1
    for uniform in (0.0, 0.5, 0.999):
        assert draw([0.2, 0.4, 0.4], SamplingParams(temperature=0), uniform) == 1


def test_plain_sampling_follows_the_probabilities():
    """At temperature 1, without cuts, tokens come as often as they are probable."""
    assert shares(FIVE, SamplingParams()) == pytest.approx(dict(enumerate(FIVE)), abs=2e-4)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float):
    """Probabilities are raised to 1/temperature and normalised."""
    powers = [weight ** (1 / temperature) for weight in FIVE]
    expected = {token: power / sum(powers) for token, power in enumerate(powers)}
    assert shares(FIVE, SamplingParams(temperature=temperature)) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("temperature", [1e-320, 1e-5])
def test_tiny_temperatures_are_greedy(temperature: float):
    """However small the temperature, nothing overflows: the most probable token is left."""
    assert set(shares(FIVE, SamplingParams(temperature=temperature), 50)) == {1}


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.7}, {1, 2, 3}),
        ({"top_p": 0.999}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.5}, {1, 2, 3}),
        ({"min_p": 0.51}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.1}, {0, 1, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.6}, {1, 2}),
        ({"top_k": 2, "min_p": 0.1}, {1, 2}),
    ],
)
def test_cuts_keep_the_most_probable(params: dict[str, float], left: set[int]):
    """top_k, top_p (of what top_k left) and min_p keep exactly these tokens, in their proportions."""
    total = sum(FIVE[token] for token in left)
    expected = {token: FIVE[token] / total for token in sorted(left)}
    assert shares(FIVE, SamplingParams(**params)) == pytest.approx(expected, abs=2e-4)


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any),
    temperature=st.sampled_from([0, 0.01, 0.7, 1, 3]),
    top_k=st.integers(-1, 25),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_excluded_tokens_are_never_drawn(weights, temperature, top_k, top_p, min_p, uniform):
    """Whatever the parameters, a token comes back, and never one of weight 0."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert weights[draw(weights, params, uniform)] > 0


def test_nothing_asked_changes_nothing():
    """Without wishes the very same probabilities come back."""
    assert adjust(FIVE, SamplingParams(), no_history) is FIVE


def test_bias_is_added_to_the_logit():
    """logit_bias multiplies the probability by e to the bias; ids outside of the vocabulary mean nothing."""
    weights = adjust(FIVE, SamplingParams(logit_bias={0: math.log(8), 99: 5.0, -1: 5.0}), no_history)
    assert [weight / sum(weights) for weight in weights] == pytest.approx([p / 1.7 for p in [0.8, 0.4, 0.2, 0.2, 0.1]])


def test_huge_bias_does_not_overflow():
    """A bias beyond the range of e^x forces or forbids its token."""
    assert best(adjust(FIVE, SamplingParams(logit_bias={4: 1e6}), no_history)) == 4
    assert adjust(FIVE, SamplingParams(logit_bias={1: -1e6}), no_history)[1] == 0
    assert adjust(FIVE, SamplingParams(logit_bias={1: -math.inf}), no_history)[1] == 0


def test_allowed_and_banned_tokens():
    """Only allowed tokens keep weight, and banned ones lose theirs."""
    weights = adjust(FIVE, SamplingParams(allowed_token_ids=[0, 2, 77]), no_history)
    assert [bool(weight) for weight in weights] == [True, False, True, False, False]
    weights = adjust(FIVE, SamplingParams(allowed_token_ids=[0, 2]), no_history, banned={2, 300})
    assert [bool(weight) for weight in weights] == [True, False, False, False, False]


def test_contradictory_wishes_are_ignored():
    """Where bans leave no token at all, the model's own probabilities stand."""
    assert adjust(FIVE, SamplingParams(allowed_token_ids=[77]), no_history) is FIVE
    assert adjust(FIVE, SamplingParams(allowed_token_ids=[1]), no_history, banned={1}) is FIVE
    assert adjust(FIVE, SamplingParams(logit_bias={1: math.inf}), no_history) is FIVE


def test_penalties_lower_what_was_said():
    """Presence counts once, frequency each time, repetition also for the prompt."""
    log = [math.log(probability) for probability in FIVE]

    def logits(prompt: list[int], outputs: list[int], **params: float) -> list[float]:
        weights = adjust(FIVE, SamplingParams(**params), lambda: (prompt, outputs))
        return [math.log(weight) - math.log(weights[0]) + log[0] for weight in weights]

    presence = logits([2], [1, 1, 300], presence_penalty=0.5)
    assert presence == pytest.approx([log[0], log[1] - 0.5, *log[2:]])
    frequency = logits([2], [1, 1, 3], frequency_penalty=0.5)
    assert frequency == pytest.approx([log[0], log[1] - 1.0, log[2], log[3] - 0.5, log[4]])
    repetition = logits([2, 999], [1, 1], repetition_penalty=1.5)
    assert repetition == pytest.approx([log[0], log[1] * 1.5, log[2] * 1.5, *log[3:]])


def test_ranking_puts_the_sampled_token_first():
    """A row is the sampled token, then the most probable ones; the rank counts the tokens at least as probable."""
    ids, logprobs, rank = rank_tokens(FIVE, 3, 2)
    assert ids == [3, 1, 2]
    assert logprobs == pytest.approx([math.log(0.2), math.log(0.4), math.log(0.2)])
    assert rank == 3
    assert rank_tokens(FIVE, 1, 0) == ([1], [math.log(0.4)], 1)
    assert rank_tokens(FIVE, 0, -1)[0] == [0, 1, 2, 3, 0, 4]


def test_seeded_numbers_are_repeatable_and_spread():
    """Seed and position give a number in [0, 1), always the same, different for every pair."""
    numbers = [seeded_uniform(seed, position) for seed in (0, 1, -5, 2**70) for position in range(100)]
    assert numbers == [seeded_uniform(seed, position) for seed in (0, 1, -5, 2**70) for position in range(100)]
    assert len(set(numbers)) == 400
    assert all(0 <= number < 1 for number in numbers)
    assert 0.4 < sum(numbers) / 400 < 0.6
    assert seeded_uniform(42, 0) == 0.09825770352709029


def test_usual_parameters_pass():
    """What SamplingParams accepts, sampling can use."""
    check_params(SamplingParams())
    check_params(
        SamplingParams(
            temperature=0,
            seed=-(2**80),
            logprobs=-1,
            prompt_logprobs=0,
            logit_bias={1: -math.inf, 2: 5},
            allowed_token_ids=[1],
            stop_token_ids=[2],
            bad_words=["no"],
        )
    )


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", "hot", TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", 10**400, ValueError),
        ("top_p", 1.1, ValueError),
        ("min_p", 2, ValueError),
        ("presence_penalty", None, TypeError),
        ("frequency_penalty", math.inf, ValueError),
        ("repetition_penalty", -1, ValueError),
        ("top_k", 1.5, TypeError),
        ("top_k", None, TypeError),
        ("seed", "x", TypeError),
        ("min_tokens", [], TypeError),
        ("logprobs", "all", TypeError),
        ("prompt_logprobs", 1.0, TypeError),
        ("logit_bias", {"1": 2.0}, TypeError),
        ("logit_bias", {1: "2"}, TypeError),
        ("logit_bias", {1: math.nan}, ValueError),
        ("logit_bias", {1: 10**400}, ValueError),
        ("allowed_token_ids", ["a"], TypeError),
        ("stop_token_ids", [None], TypeError),
        ("bad_words", [""], TypeError),
        ("bad_words", [3], TypeError),
    ],
)
def test_parameters_of_wrong_types_are_named(name: str, value: object, error: type[Exception]):
    """What a user's own parameters object may carry by mistake is refused by name, so that no step fails over it."""
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(error, match=name):
        check_params(params)
