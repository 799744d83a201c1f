"""A real model under this scheduler says what transformers itself has it say, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_client import CacheConfig, EngineCoreRequest, FinishReason, SamplingParams, SchedulerConfig

LENGTH = 10
PROMPTS = (
    "The capital of France is",
    "A",
    "The quick brown fox jumps over the lazy dog, and then it runs through the wood until it meets",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, humans first",
    "Once upon a time there was",
    "My favourite colour is",
)


@pytest.fixture(scope="module")
def expected(smollm: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Give the prompts as tokens, and what transformers' own greedy generation adds to each."""
    tokenizer = AutoTokenizer.from_pretrained(str(smollm))
    model = AutoModelForCausalLM.from_pretrained(str(smollm), dtype="float32").eval()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return prompts, answers


def request(name: str, tokens: list[int], **wishes: Any) -> EngineCoreRequest:
    params = SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **wishes})
    return EngineCoreRequest(name, tokens, None, params, None, 0.0, None, None, None)


def finish(client: Any, requests: Iterable[EngineCoreRequest]) -> dict[str, list[Any]]:
    """Add requests and run them to their ends; return each one's outputs."""
    found: dict[str, list[Any]] = {}
    for each in requests:
        found[each.request_id] = []
        client.add_request(each)
    left = len(found)
    while left:
        for output in client.get_output().outputs:
            if output.request_id in found:
                found[output.request_id].append(output)
                left -= output.finished
    return found


def tokens_of(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("multiprocess", [False, True])
def test_all_at_once_is_what_transformers_says(make: Callable[..., Any], expected: Any, multiprocess: bool) -> None:
    """Eight prompts of different lengths in one batch give, token by token, what each gives alone."""
    prompts, answers = expected
    found = finish(make(multiprocess), [request(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert [tokens_of(found[str(i)]) for i in range(len(prompts))] == answers


def test_requests_come_and_go(make: Callable[..., Any], expected: Any) -> None:
    """Some join while others run, one is aborted, one ends early: the others do not notice."""
    prompts, answers = expected
    client = make()
    client.add_request(request("0", prompts[0]))
    client.add_request(request("gone", prompts[2], max_tokens=100))
    found: dict[str, list[int]] = {}
    finished: set[str] = set()
    late = {2: "1", 3: "2", 5: "3"}
    for step in range(100):
        if step in late:
            client.add_request(request(late[step], prompts[int(late[step])], max_tokens=4 if step == 3 else LENGTH))
        if step == 4:
            client.abort_requests(["gone"])
        for output in client.get_output().outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
            finished |= {output.request_id} if output.finished else set()
        if step > 5 and finished >= {"0", "1", "2", "3"}:
            break
    assert found["gone"] == answers[2][: len(found["gone"])]
    assert [found[str(i)] for i in range(4)] == [answers[0], answers[1], answers[2][:4], answers[3]]


def test_chunks_preemption_and_prefixes_change_nothing(make: Callable[..., Any], expected: Any) -> None:
    """With few tokens a step and few blocks prompts come in chunks and requests lose their blocks; all is as before."""
    prompts, answers = expected
    client = make(
        scheduler_config=SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=4),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks_override=13),
    )
    for _ in range(2):  # the second time some of the prompts' blocks are there already
        found = finish(client, [request(str(i), prompt) for i, prompt in enumerate(prompts[:5])])
        assert [tokens_of(found[str(i)]) for i in range(5)] == answers[:5]
    counted = client.engine_core.counters.read()
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0


def test_a_batch_is_one_pass(make: Callable[..., Any], expected: Any) -> None:
    """Eight requests that run together need about as many passes through the model as one does."""
    prompts, _ = expected
    client = make()
    executor = client.engine_core.model_executor
    passes = []
    executor.model.register_forward_hook(lambda *_: passes.append(1))
    finish(client, [request("alone", prompts[0], ignore_eos=True)])
    alone = len(passes)
    finish(client, [request(str(i), prompt, ignore_eos=True) for i, prompt in enumerate(prompts)])
    assert alone == LENGTH
    assert len(passes) - alone <= LENGTH + len(prompts)


def test_sampling_is_repeatable_in_any_company(make: Callable[..., Any], expected: Any) -> None:
    """A seed gives the same tokens alone and in a batch; without one the draws differ; wishes are heard."""
    prompts, answers = expected
    client = make()
    seeded = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 7}
    alone = tokens_of(finish(client, [request("a", prompts[0], **seeded)])["a"])
    others = [request(f"o{i}", prompts[i], temperature=1.5) for i in range(1, 4)]
    found = finish(client, [*others, request("a", prompts[0], **seeded)])
    assert tokens_of(found["a"]) == alone != answers[0]
    draws = finish(client, [request(f"d{i}", prompts[0], temperature=2.0) for i in range(3)])
    assert len({tuple(tokens_of(outputs)) for outputs in draws.values()}) > 1
    first = answers[0][0]
    wishes = {
        "bias": {"logit_bias": {first: -100.0}},
        "allowed": {"allowed_token_ids": [5, 6]},
        "bad": {"bad_words": ["Paris"]},
        "penalty": {"repetition_penalty": 1.5},
    }
    found = finish(client, [request(name, prompts[0], **wish) for name, wish in wishes.items()])
    assert tokens_of(found["bias"])[0] != first
    assert set(tokens_of(found["allowed"])) <= {5, 6}
    assert "Paris" not in client.collective_rpc("decode", args=(tokens_of(found["bad"]),))[0]
    assert len(tokens_of(found["penalty"])) == LENGTH


def test_texts_end_where_they_should(make: Callable[..., Any], expected: Any) -> None:
    """At a stop string, a stop token, the end of the text; and not before ``min_tokens``."""
    prompts, answers = expected
    client = make()
    executor = client.engine_core.model_executor
    [text] = client.collective_rpc("decode", args=(answers[0],))
    word = text.split()[1]
    chat = client.collective_rpc("encode_chat", args=([{"role": "user", "content": "Say only: yes"}],))[0]
    third = answers[0][2]
    found = finish(
        client,
        [
            request("string", prompts[0], stop=[word]),
            request("token", prompts[0], stop_token_ids=[third]),
            request("eos", chat, max_tokens=60),
            request("min", chat, max_tokens=60, min_tokens=59, ignore_eos=False),
        ],
    )
    assert found["string"][-1].stop_reason == word
    assert (found["token"][-1].stop_reason, tokens_of(found["token"])) == (third, answers[0][:3])
    assert found["eos"][-1].finish_reason is FinishReason.STOP
    assert tokens_of(found["eos"])[-1] == executor.eos_token_id
    assert len(tokens_of(found["min"])) >= 59


def test_logprobs_are_the_model_s(make: Callable[..., Any], expected: Any) -> None:
    """Of new tokens and of the prompt's: what a plain forward pass gives, with the best ones and the rank."""
    prompts, answers = expected
    client = make(scheduler_config=SchedulerConfig(max_num_batched_tokens=8))
    outputs = finish(client, [request("a", prompts[2], logprobs=2, prompt_logprobs=1, max_tokens=3)])["a"]
    model = client.engine_core.model_executor.model
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompts[2] + answers[2][:3]])).logits[0]
    logprobs = logits.log_softmax(-1)
    for index, output in enumerate(outputs):
        at = len(prompts[2]) - 1 + index
        [ids], [values], [rank] = output.new_logprobs[:3]
        assert ids[:2] == [answers[2][index]] * 2
        assert rank == 1
        assert values == pytest.approx(logprobs[at][ids].tolist(), abs=1e-3)
    prompt_rows = outputs[0].new_prompt_logprobs_tensors
    assert [ids[0] for ids in prompt_rows.logprob_token_ids] == prompts[2][1:]
    own = [float(logprobs[at][token]) for at, token in enumerate(prompts[2][1:])]
    assert [values[0] for values in prompt_rows.logprobs] == pytest.approx(own, abs=1e-3)


def test_it_sleeps_and_wakes(make: Callable[..., Any], expected: Any) -> None:
    """Asleep it holds neither weights nor keys and values; awake again it says the same."""
    prompts, answers = expected
    client = make()
    assert tokens_of(finish(client, [request("a", prompts[0])])["a"]) == answers[0]
    client.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        _ = client.engine_core.model_executor.model
    client.wake_up()
    assert tokens_of(finish(client, [request("b", prompts[0])])["b"]) == answers[0]


def test_what_it_cannot_do_is_refused(make: Callable[..., Any]) -> None:
    """A request that this model cannot serve is refused by itself, and says why."""
    client = make()
    with pytest.raises(ValueError, match="LoRA"):
        bad = request("a", [1])
        bad.lora_request = object()
        client.add_request(bad)
    with pytest.raises(ValueError, match="2048"):
        client.add_request(request("a", [1] * 3000))
