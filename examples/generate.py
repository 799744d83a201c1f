"""Continue three prompts as one batch, in an engine process of its own, and print each as soon as it is complete."""

from __future__ import annotations

import time

from engine_client import EngineConfig, EngineCoreRequest, SamplingParams, SyncMPClient
from engine_client.executors.ngram import NGramExecutor

PROMPTS = ["The with statement is used to", "A list comprehension", "Exceptions are"]


def request_for(request_id: str, tokens: list[int], params: SamplingParams) -> EngineCoreRequest:
    """Return a plain text request; the other fields are for adapters, images, several engines."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


with SyncMPClient(EngineConfig(), NGramExecutor, log_stats=False) as client:
    params = SamplingParams(temperature=0.5, seed=7, stop=["."], max_tokens=200)
    texts: dict[str, list[int]] = {}
    for prompt in PROMPTS:
        [tokens] = client.collective_rpc("encode", args=(prompt,))
        client.add_request(request_for(prompt, tokens, params))
        texts[prompt] = []
    while texts:
        for output in client.get_output().outputs:
            texts[output.request_id] += output.new_token_ids
            if output.finished:
                [text] = client.collective_rpc("decode", args=(texts.pop(output.request_id),))
                print(f"{output.request_id}{text} [{output.finish_reason}]\n")
