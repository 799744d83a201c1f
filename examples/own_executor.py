"""Run a model of your own: this one counts, and knows how to stop.  Note that no ``__main__`` guard is needed."""

from __future__ import annotations

import time

from engine_client import Batch, EngineConfig, EngineCoreRequest, Executor, ModelOutput, SamplingParams, SyncMPClient


class Counter(Executor):
    """Goes on counting from the last token of the prompt, up to a limit from the configuration."""

    eos_token_id = 0

    def __init__(self, vllm_config: EngineConfig) -> None:
        super().__init__(vllm_config)
        self.limit = vllm_config.additional_config["limit"]

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Compute one step for all requests that take part in it."""
        return batch.sample(lambda request: (request.token_ids[-1] + 1) % (self.limit + 1))

    def how_far(self) -> int:
        """Return the limit; whatever an executor has can be called from outside."""
        return self.limit


config = EngineConfig(additional_config={"limit": 12})
with SyncMPClient(config, Counter, log_stats=False) as client:
    print("counting up to", client.collective_rpc("how_far")[0])
    client.add_request(
        EngineCoreRequest(
            request_id="from eight",
            prompt_token_ids=[7, 8],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=100),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    finished = False
    while not finished:
        for output in client.get_output().outputs:
            finished = output.finished
            print(output.request_id, output.new_token_ids, output.finish_reason if finished else "…")
