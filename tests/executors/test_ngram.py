"""The built-in executor, driven directly with batches as the scheduler makes them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.config import EngineConfig
from engine_client.engine.batch import Batch, ScheduledRequest, check_output
from engine_client.engine.executor import progress_to
from engine_client.executors.ngram import NGramExecutor
from engine_client.executors.ngram_model import EOS
from engine_client.params import SamplingParams

TEXT = "the cat sat on the mat. the cat ate the rat. the dog ate the cat. ünder the mat.\n" * 3


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> NGramExecutor:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return NGramExecutor(EngineConfig(additional_config={"corpus": str(file)}))


def scheduled(tokens: list[int], prompt_length: int | None = None, *, last: bool = True, **params: Any):
    """Make a request whose tokens, those of the prompt first, are all computed in this step."""
    return ScheduledRequest(
        request_id="r",
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt_length is None else prompt_length,
        num_computed_tokens=0,
        num_scheduled_tokens=len(tokens),
        is_last_chunk=last,
        block_ids=[0],
        sampling_params=SamplingParams(**{"temperature": 0, **params}),
    )


def step(executor: NGramExecutor, *requests: ScheduledRequest):
    batch = Batch(requests, sum(request.num_scheduled_tokens for request in requests))
    output = executor.execute_model(batch)
    check_output(batch, output)
    return output


def generate(executor: NGramExecutor, prompt: str, count: int, **params: Any) -> list[int]:
    tokens = executor.encode(prompt)
    length = len(tokens)
    for _ in range(count):
        tokens.append(*step(executor, scheduled(tokens, length, **params)).tokens[0])
    return tokens[length:]


def test_greedy_continues_in_the_manner_of_the_corpus(executor: NGramExecutor):
    """Greedy continuation is text of the corpus, and the same each time."""
    tokens = generate(executor, "the dog", 12)
    assert executor.decode(tokens) == " ate the cat"
    assert generate(executor, "the dog", 12) == tokens


def test_seeded_sampling_does_not_depend_on_the_batch(executor: NGramExecutor):
    """A seeded request gets the same tokens alone, beside others, and at every place in the batch."""
    prompt = executor.encode("the cat ")
    alone = generate(executor, "the cat ", 20, temperature=1.5, seed=7)
    assert alone != generate(executor, "the cat ", 20, temperature=1.5, seed=8)
    rng = random.Random(3)
    for position in range(20):
        mine = scheduled(prompt + alone[:position], len(prompt), temperature=1.5, seed=7)
        others = [scheduled(executor.encode("the "), temperature=1.5, seed=s) for s in range(rng.randrange(5))]
        at = rng.randrange(len(others) + 1)
        output = step(executor, *others[:at], mine, *others[at:])
        assert output.tokens[at] == [alone[position]]


def test_parameters_of_any_class_serve(executor: NGramExecutor):
    """Parameters may be any object; what they lack has its default, such as temperature 1."""
    request = scheduled([116])._replace(sampling_params=SimpleNamespace(seed=5))
    assert step(executor, request).tokens == step(executor, scheduled([116], seed=5, temperature=1.0)).tokens


def test_sampling_without_a_seed_varies(executor: NGramExecutor):
    """Without a seed, requests draw different tokens."""
    assert len({tuple(generate(executor, "the ", 20, temperature=2.0)) for _ in range(5)}) > 1


def test_chunks_that_are_not_the_last_give_no_token(executor: NGramExecutor):
    """A prompt's earlier chunks need nothing but their place in the output."""
    output = step(executor, scheduled([116], last=False, logprobs=2), scheduled([116]), scheduled([116], last=False))
    assert [len(tokens) for tokens in output.tokens] == [0, 1, 0]
    assert output.logprobs is None
    assert output.prompt_logprobs is None


def test_logprobs_are_the_models(executor: NGramExecutor):
    """A row holds the sampled token, then the most probable ones, with the model's own log-probabilities."""
    prompt = executor.encode("the ")
    output = step(executor, scheduled(prompt), scheduled(prompt, logprobs=3, logit_bias={ord("z"): 1e9}))
    assert output.logprobs[0] is None
    rows = output.logprobs[1]
    probabilities = executor.model.probabilities(prompt)
    [ids], [logprobs], [rank] = rows[:3]
    assert output.tokens[1] == [ord("z")] == ids[:1]
    assert len(ids) == 4
    assert ids[1] == output.tokens[0][0]
    assert logprobs == [math.log(probabilities[token]) for token in ids]
    assert rank == sum(probability >= probabilities[ord("z")] for probability in probabilities)


def test_prompt_logprobs_come_once(executor: NGramExecutor):
    """Each prompt token but the first has a row, in the step that ends the prompt and no later one."""
    prompt = executor.encode("the cat")
    rows = step(executor, scheduled(prompt, prompt_logprobs=1)).prompt_logprobs[0]
    assert [row[0] for row in rows.logprob_token_ids] == prompt[1:]
    assert rows.logprobs[-1][0] == math.log(executor.model.probabilities(prompt[:-1])[prompt[-1]])
    assert step(executor, scheduled([*prompt, 32], len(prompt), prompt_logprobs=1)).prompt_logprobs is None
    assert step(executor, scheduled([116], prompt_logprobs=0)).prompt_logprobs[0].logprobs == []


def test_penalties_see_prompt_and_output(executor: NGramExecutor):
    """A repetition penalty counts the prompt, a presence penalty the output alone."""
    prompt = executor.encode("the cat ate the cat")
    plain = step(executor, scheduled(prompt, 16)).tokens[0]
    assert executor.decode(plain) in " ."
    assert step(executor, scheduled(prompt, 19, presence_penalty=100.0)).tokens[0] == plain
    assert step(executor, scheduled([*prompt, *plain], 19, presence_penalty=100.0)).tokens[0] != plain
    assert step(executor, scheduled(prompt, 19, repetition_penalty=100.0)).tokens[0][0] not in prompt


def test_text_may_not_end_before_min_tokens(executor: NGramExecutor):
    """Until min_tokens, neither the end of the text nor a stop token comes."""
    prompt = executor.encode("ünder the mat.\n" + TEXT[-20:])
    params = {"logit_bias": {EOS: 1000.0, 65: 900.0}, "min_tokens": 2}
    assert step(executor, scheduled(prompt, logit_bias={EOS: 1000.0})).tokens == [[EOS]]
    assert step(executor, scheduled(prompt, **params)).tokens == [[65]]
    assert step(executor, scheduled(prompt, **params, stop_token_ids=[65])).tokens[0][0] not in (65, EOS)
    assert step(executor, scheduled(prompt, len(prompt) - 2, **params)).tokens == [[EOS]]


def test_bad_words_are_not_completed(executor: NGramExecutor):
    """A bad word's last byte is banned where the rest of it stands, and only there."""
    assert executor.decode(generate(executor, "the dog", 12, bad_words=["ate"])) != " ate the cat"
    assert executor.decode(generate(executor, "the dog", 12, bad_words=["mate", "x"])) == " ate the cat"
    assert b"t" not in bytes(generate(executor, "the ", 30, bad_words=["t"]))


def test_text_survives_encoding_and_decoding(executor: NGramExecutor):
    """Text becomes its bytes and comes back; undecodable bytes of a command line are those bytes."""
    assert executor.decode(executor.encode("Grüße, 世界 🎈")) == "Grüße, 世界 🎈"
    assert executor.encode("a\udcff") == [97, 255]
    with pytest.raises(ValueError, match="surrogates"):
        executor.encode("\ud800")


def test_incomplete_characters_do_not_break_decoding(executor: NGramExecutor):
    """A character cut in the middle is U+FFFD; the end of a document and unknown tokens are nothing."""
    balloon = executor.encode("🎈")
    assert [executor.decode(balloon[:length]) for length in range(5)] == ["", "\ufffd", "\ufffd", "\ufffd", "🎈"]
    assert executor.decode([104, EOS, 105, 999, -1]) == "hi"


def test_building_reports_progress(tmp_path: Path):
    """Whoever waits for the engine hears about the building of the model, up to its end."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    reports: list[tuple[str, int, int]] = []
    with progress_to(lambda phase, done, total: reports.append((phase, done, total))):
        NGramExecutor(EngineConfig(additional_config={"corpus": file}))
    assert {phase for phase, _, _ in reports} == {"building model"}
    assert reports[0] == ("building model", 0, 0)
    assert reports[-1][1] == reports[-1][2] == len(TEXT.encode()) + 1


def test_default_corpus_needs_no_configuration():
    """Any configuration object will do; without a corpus in it the model is made of Python's documentation."""
    executor = NGramExecutor(SimpleNamespace())
    assert "bytes of text" in repr(executor.model)
    assert executor.decode(generate(executor, "The with statement is us", 2)) == "ed"
    assert (executor.eos_token_id, executor.vocab_size) == (256, 257)


def test_unusable_corpus_is_named(tmp_path: Path):
    """A corpus that is missing or empty is an error that names the file."""
    with pytest.raises(OSError, match=r"absent\.txt"):
        NGramExecutor(EngineConfig(additional_config={"corpus": tmp_path / "absent.txt"}))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt"):
        NGramExecutor(EngineConfig(additional_config={"corpus": tmp_path / "empty.txt"}))


def test_unusable_requests_are_refused():
    """Embeddings, images and parameters of wrong types are refused before they can harm a step."""
    executor = NGramExecutor(EngineConfig())

    def request(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{"prompt_embeds": None, "mm_features": None, "sampling_params": SamplingParams(), **fields}
        )

    executor.check_request(request())
    executor.check_request(SimpleNamespace(sampling_params=SimpleNamespace(temperature=0.5)))
    executor.check_request(request(sampling_params=None))
    with pytest.raises(ValueError, match="prompt_embeds"):
        executor.check_request(request(prompt_embeds=[[1.0]]))
    with pytest.raises(ValueError, match="mm_features"):
        executor.check_request(request(mm_features=["image"]))
    with pytest.raises(TypeError, match="logit_bias"):
        executor.check_request(request(sampling_params=SamplingParams(logit_bias={"a": 1})))


def test_deep_sleep_drops_the_model_and_waking_builds_it_again(tmp_path: Path):
    """At level 1 the model stays, at level 2 it goes, and wake_up brings the same one back."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    executor = NGramExecutor(EngineConfig(additional_config={"corpus": file}))
    before = generate(executor, "the ", 10)
    executor.sleep(1)
    assert executor.is_sleeping
    assert executor.model
    executor.wake_up()
    executor.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        _ = executor.model
    executor.wake_up(["kv_cache"])
    with pytest.raises(RuntimeError, match="asleep"):
        _ = executor.model
    executor.wake_up(["weights"])
    assert not executor.is_sleeping
    assert generate(executor, "the ", 10) == before
