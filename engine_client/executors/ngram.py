"""The built-in model: an executor around ``NGramModel``, so that everything runs on real text at once.

Tokens are bytes; a prompt of n bytes of UTF-8 has n tokens.  The model is built when the engine starts, from the text
file that ``vllm_config.additional_config["corpus"]`` names, or else from the standard library's own documentation.

A step looks only at the last few tokens of each request, so nothing is kept per request, and what a request gets does
not depend on its batch, on chunks of its prompt, on the prefix cache or on preemption.

Threads: the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from engine_client.engine.executor import Batch, Executor, ModelOutput, ScheduledRequest, report_progress
from engine_client.executors.corpus import default_corpus, load_corpus
from engine_client.executors.ngram_model import EOS, VOCABULARY, NGramModel
from engine_client.executors.sampling import adjust, check_params, draw, option, rank_tokens, seeded_uniform
from engine_client.messages import LogprobsLists

__all__ = ["NGramExecutor"]


class NGramExecutor(Executor):
    """Continues text, byte by byte, in the manner of its corpus.

    Sampling without a seed differs from run to run; everything else is repeatable to the bit.  Asleep at level 2 it
    has no model, and builds it again when it wakes up.

    Raises:
        OSError, ValueError: the corpus cannot be read, or has no text in it.
    """

    eos_token_id: int | None = EOS
    vocab_size: int | None = VOCABULARY

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._random = Random()  # noqa: S311  # for requests without a seed; nothing is secret
        self._model: NGramModel | None = self._build()

    def _build(self) -> NGramModel:
        phase = "building model"
        report_progress(phase, 0)
        path = (getattr(self.vllm_config, "additional_config", None) or {}).get("corpus")
        text = default_corpus() if path is None else load_corpus(path)
        return NGramModel(text, progress=lambda done, total: report_progress(phase, done, total))

    @property
    def model(self) -> NGramModel:
        """Return the model.

        Raises:
            RuntimeError: it was dropped by ``sleep(level=2)``.
        """
        if self._model is None:
            raise RuntimeError("the model is asleep; call wake_up first")
        return self._model

    def check_request(self, request: Any) -> None:
        """Refuse what a model of text cannot use, and sampling parameters of wrong types."""
        if getattr(request, "prompt_embeds", None) is not None:
            raise ValueError("prompt_embeds is not supported: an n-gram model takes tokens, not embeddings")
        if getattr(request, "mm_features", None):
            raise ValueError("mm_features is not supported: an n-gram model takes text alone")
        params = getattr(request, "sampling_params", None)
        if params is not None:
            check_params(params)

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Look up the last bytes of every request whose chunk is its last, and choose."""
        model = self.model
        tokens: list[list[int]] = []
        logprobs: list[LogprobsLists | None] = []
        prompt_logprobs: list[LogprobsLists | None] = []
        for request in batch:
            new, row, prompt_rows = self._continue(model, request) if request.is_last_chunk else ([], None, None)
            tokens.append(new)
            logprobs.append(row)
            prompt_logprobs.append(prompt_rows)
        return ModelOutput(
            tokens,
            logprobs=logprobs if any(logprobs) else None,
            prompt_logprobs=prompt_logprobs if any(prompt_logprobs) else None,
        )

    def _continue(
        self, model: NGramModel, request: ScheduledRequest
    ) -> tuple[list[int], LogprobsLists | None, LogprobsLists | None]:
        """Return the next token of one request, with the log-probabilities that it asked for."""
        params, prompt_length = request.sampling_params, request.num_prompt_tokens
        position = len(request.token_ids) - prompt_length
        probabilities = model.probabilities(request.token_ids[-model.order :])
        weights = adjust(
            probabilities,
            params,
            lambda: (request.token_ids[:prompt_length], request.token_ids[prompt_length:]),
            _banned(request, position),
        )
        seed = option(params, "seed")
        token = draw(weights, params, self._random.random() if seed is None else seeded_uniform(seed, position))
        row = prompt_rows = None
        count = option(params, "logprobs")
        if count is not None:
            row = _rows([rank_tokens(probabilities, token, count)])
        count = option(params, "prompt_logprobs")
        if count is not None and position == 0:
            prompt_rows = _prompt_rows(model, request.token_ids[:prompt_length], count)
        return [token], row, prompt_rows

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text; undecodable bytes of the command line come back as what they were."""
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of bytes; incomplete and invalid ones become U+FFFD, the end of a document nothing."""
        return bytes(token for token in token_ids if 0 <= token < EOS).decode("utf-8", "replace")

    def sleep(self, level: int = 1) -> None:
        """Drop the model at level 2; at level 1 there is nothing to drop."""
        super().sleep(level)
        if level >= 2:
            self._model = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Build the model again if it was dropped."""
        super().wake_up(tags)
        if self._model is None and "weights" not in self.sleeping_tags:
            self._model = self._build()


def _banned(request: ScheduledRequest, position: int) -> set[int]:
    """Return the tokens that may not come next: the end before ``min_tokens``, and what completes a bad word."""
    params = request.sampling_params
    banned: set[int] = set()
    if position < option(params, "min_tokens"):
        banned.update((EOS, *(option(params, "stop_token_ids") or ())))
    for word in option(params, "bad_words") or ():
        *start, last = word.encode("utf-8", "surrogatepass")
        if not start or request.token_ids[-len(start) :] == start:
            banned.add(last)
    return banned


def _prompt_rows(model: NGramModel, prompt: Sequence[int], count: int) -> LogprobsLists:
    """Return a row for every prompt token but the first, which nothing precedes."""
    return _rows(
        [
            rank_tokens(model.probabilities(prompt[max(0, at - model.order) : at]), prompt[at], count)
            for at in range(1, len(prompt))
        ]
    )


def _rows(ranked: Iterable[tuple[list[int], list[float], int]]) -> LogprobsLists:
    ids, logprobs, ranks = map(list, zip(*ranked, strict=True)) if ranked else ([], [], [])
    return LogprobsLists(ids, logprobs, ranks)
