"""The language model itself: counted, smoothed, normalised, repeatable, good enough and quick enough."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from engine_client.executors.corpus import default_corpus
from engine_client.executors.ngram_model import DISCOUNT, EOS, STRENGTH, VOCABULARY, NGramModel
from helpers.timing import MS

SMALL = b"the cat sat on the mat. the cat ate the rat.\xffa man, a plan, a canal\xff"


@pytest.fixture(scope="module")
def corpus() -> bytes:
    return default_corpus()


@pytest.fixture(scope="module")
def model(corpus: bytes) -> NGramModel:
    return NGramModel(corpus)


def greedy(model: NGramModel, prompt: bytes, count: int) -> bytes:
    tokens = list(prompt)
    for _ in range(count):
        probabilities = model.probabilities(tokens)
        tokens.append(probabilities.index(max(probabilities)))
    return bytes(token for token in tokens[len(prompt) :] if token < 256)


def by_definition(text: bytes, order: int, context: bytes) -> list[float]:
    """Interpolated Kneser-Ney, written down from n-grams without any cleverness."""
    result = [1 / VOCABULARY] * VOCABULARY
    for length in range(min(order, len(context)) + 1):
        grams = [
            (text[end - length - 1 : end - length] or b"\xff", text[end])
            for end in range(length, len(text))
            if text[end - length : end] == context[len(context) - length :]
        ]
        counts = Counter(token for _, token in (grams if length == order else set(grams)))
        if not counts:
            break
        total = sum(counts.values()) + STRENGTH
        rest = (STRENGTH + DISCOUNT * len(counts)) / total
        result = [rest * lower + max(0, counts[token] - DISCOUNT) / total for token, lower in enumerate(result)]
    result[255], result[256] = result[256], result[255]
    return result


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("context", [b"", b"t", b"the ", b"the cat", b" plan, a", b"zzz", b"z the", b"a", b"SAT on"])
def test_probabilities_are_interpolated_kneser_ney(order: int, context: bytes):
    """The sorted text gives what the definition gives."""
    expected = by_definition(SMALL, order, context)
    assert NGramModel(SMALL, order=order).probabilities(context) == pytest.approx(expected, rel=1e-12)


@given(text=st.binary(min_size=1, max_size=60), context=st.lists(st.integers(0, 254), max_size=6))
def test_any_text_gives_the_defined_probabilities(text: bytes, context: list[int]):
    """It holds for every text, binary ones included."""
    expected = by_definition(text, 3, bytes(context))
    assert NGramModel(text, order=3).probabilities(context) == pytest.approx(expected, rel=1e-12)


def test_kept_contexts_change_nothing():
    """Contexts that are frequent enough to be kept have the same probabilities as the definition says."""
    rng = random.Random(5)
    text = bytes(rng.choices(b"ab ", k=2000))
    model = NGramModel(text, order=4)
    for context in (b"", b"a", b"ba", b" ab", b"abab", b"bbbbb", b" a b a"):
        assert model.probabilities(context) == pytest.approx(by_definition(text, 4, context), rel=1e-12)


def test_probabilities_sum_to_one_everywhere(model: NGramModel, corpus: bytes):
    """After any context all 257 probabilities are positive and sum to 1."""
    rng = random.Random(1)
    contexts = [corpus[at : at + 20] for at in rng.choices(range(len(corpus)), k=100)]
    contexts += [bytes(rng.choices(range(255), k=rng.randrange(20))) for _ in range(100)]
    for context in contexts:
        probabilities = model.probabilities(list(context))
        assert len(probabilities) == VOCABULARY
        assert min(probabilities) > 0
        assert math.fsum(probabilities) == pytest.approx(1, abs=1e-12)


def test_only_the_last_tokens_matter(model: NGramModel):
    """The context is cut to the order, and equal contexts give identical numbers."""
    tail = b"f the object"
    assert len(tail) == model.order
    assert model.probabilities(list(b"first list o" + tail)) == model.probabilities(list(tail))


@pytest.mark.parametrize("token", [255, 257, -1, 10**30])
def test_tokens_that_no_text_holds_cut_the_context(model: NGramModel, token: int):
    """What stands before a token that no text can hold is forgotten."""
    assert model.probabilities([*b"the obj", token, *b"ect"]) == model.probabilities(list(b"ect"))
    assert model.probabilities([token]) == model.probabilities([])


def test_end_of_a_document_is_a_token_of_its_own():
    """Where documents end, the end is probable; after it, what documents begin with."""
    model = NGramModel(b"one.\xfftwo.\xffone.\xff")
    after_stop = model.probabilities(list(b"one."))
    assert after_stop.index(max(after_stop)) == EOS
    assert after_stop[255] == min(after_stop)
    after_end = model.probabilities([*b"one.", EOS])
    assert after_end.index(max(after_end)) == ord("t")


@pytest.mark.slow
def test_held_out_perplexity(corpus: bytes):
    """Trained on nine tenths of the text, a byte of the last tenth costs fewer than 2 bits."""
    cut = len(corpus) * 9 // 10
    perplexity = NGramModel(corpus[:cut]).perplexity(corpus[cut:])
    assert 2 < perplexity < 4


def test_perplexity_by_hand():
    """Perplexity is the inverse of the geometric mean of the probabilities; nothing at all has none to speak of."""
    model = NGramModel(SMALL, order=2)
    text = b"the\xff"
    product = 1.0
    for at, token in enumerate([*b"the", EOS]):
        product *= model.probabilities(list(text[:at]))[token]
    assert model.perplexity(text) == pytest.approx(product ** (-1 / 4))
    assert model.perplexity(b"") == 1


def test_greedy_text_consists_of_words_of_the_corpus(model: NGramModel, corpus: bytes):
    """Greedy continuations of several prompts read like the corpus: at least 80 % of their words occur in it."""
    words = set(corpus.split())
    for prompt in (b"The with statement is used to", b"A list comprehension", b"Exceptions are", b"The import"):
        found = greedy(model, prompt, 100).split()[1:-1]
        assert len(found) > 8
        assert sum(word in words for word in found) >= 0.8 * len(found)


def test_other_processes_agree_to_the_bit(model: NGramModel):
    """Another process, with another hash seed, computes the very same numbers."""
    code = (
        "from engine_client.executors.corpus import default_corpus\n"
        "from engine_client.executors.ngram_model import NGramModel\n"
        "model = NGramModel(default_corpus())\n"
        "print([p.hex() for p in model.probabilities(b'The class of ')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str([p.hex() for p in model.probabilities(b"The class of ")])


def test_building_reports_rising_progress():
    """Progress goes up to the size of the text."""
    reports: list[tuple[int, int]] = []
    NGramModel(SMALL, progress=lambda done, total: reports.append((done, total)))
    assert reports == sorted(reports)
    assert reports[-1] == (len(SMALL), len(SMALL))
    assert {total for _, total in reports} == {len(SMALL)}


@pytest.mark.timing
def test_model_is_quick(corpus: bytes):
    """It is built in under two seconds, and 64 lookups, a step of 64 requests, take under 20 ms (best of nine)."""
    start = time.process_time()
    model = NGramModel(corpus)
    assert time.process_time() - start < 2000 * MS
    rng = random.Random(2)
    times = []
    for _ in range(9):
        contexts = [list(corpus[at : at + 30]) for at in rng.choices(range(len(corpus)), k=64)]
        start = time.process_time()
        for context in contexts:
            model.probabilities(context)
        times.append(time.process_time() - start)
    assert min(times) < 60 * MS  # generous: 8 ms on a quiet machine


def test_what_cannot_be_a_model_is_refused():
    """A model needs text and an order."""
    with pytest.raises(ValueError, match="needs some text"):
        NGramModel(b"")
    with pytest.raises(ValueError, match="at least 1"):
        NGramModel(b"text", order=0)
    assert repr(NGramModel(b"text", order=3)) == "<NGramModel of order 3, 4 bytes of text>"
