"""Measure what batching gives: eight prompts at once, beside one after the other.

    python tests/with_transformers/throughput.py [FOLDER]

Without a folder it makes that of SmolLM2-135M-Instruct.  Fails if eight at once are not three times as fast.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine_client import EngineConfig, EngineCoreClient, EngineCoreRequest, ModelConfig, SamplingParams
from engine_client.executors.transformers import TransformersExecutor
from helpers.smollm import make_smollm

WANTED = 3.0
TOKENS = 32
PROMPTS = 8
ROUNDS = 3


def seconds(client: Any, requests: list[EngineCoreRequest]) -> float:
    began = time.perf_counter()
    for request in requests:
        client.add_request(request)
    left = len(requests)
    while left:
        left -= sum(output.finished for output in client.get_output().outputs)
    return time.perf_counter() - began


def main() -> int:
    """Measure, print, and tell by the status whether it was enough."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else make_smollm(Path(tempfile.mkdtemp()))
    config = EngineConfig(model_config=ModelConfig(model=str(folder)))
    config.cache_config.enable_prefix_caching = False  # each round is to compute everything
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    ratios = []
    with EngineCoreClient.make_client(True, False, config, TransformersExecutor, False) as client:
        prompts = [
            client.collective_rpc("encode", args=(f"Tell me {'more ' * number}about the number {number}.",))[0]
            for number in range(PROMPTS)
        ]

        def request(name: str, prompt: list[int]) -> EngineCoreRequest:
            return EngineCoreRequest(name, prompt, None, params, None, 0.0, None, None, None)

        seconds(client, [request("warm", prompts[0])])
        for number in range(ROUNDS):
            alone = sum(seconds(client, [request(f"{number}-{i}", p)]) for i, p in enumerate(prompts))
            together = seconds(client, [request(f"{number}-all-{i}", p) for i, p in enumerate(prompts)])
            ratios.append(alone / together)
            count = PROMPTS * TOKENS
            print(
                f"{count / alone:6.1f} tokens/s one at a time, {count / together:6.1f} together: {ratios[-1]:.2f} times"
            )
    print(f"median {statistics.median(ratios):.2f} times, wanted {WANTED}")
    return 0 if statistics.median(ratios) >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
