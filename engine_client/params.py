"""Parameters that a request carries: sampling, pooling, LoRA adapter.

Names and defaults are the reference's (``vllm/sampling_params.py``, ``pooling_params.py``, ``lora/request.py`` of
vLLM 0.25.1), restricted to the fields that this library uses.  Any object with these attributes serves instead.

Threads: plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Union

__all__ = ["LoRARequest", "PoolingParams", "SamplingParams"]


@dataclass
class SamplingParams:
    """How to choose the next tokens.

    Args:
        temperature: 0 is greedy; higher is more random.
        top_p: keep the smallest set of tokens whose probabilities sum to this, in (0, 1].
        top_k: keep this many most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1].
        seed: makes random sampling repeatable for this request.
        stop: strings that end the text; not part of the output unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the text.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: the most tokens to produce; None: up to the model's length.
        min_tokens: produce at least this many before eos or a stop token may end the text.
        logprobs: return the log-probabilities of this many most probable tokens beside the sampled one.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        ValueError: a value is out of its range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Union[str, list[str], None] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be zero or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (all tokens) or at least 1, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be zero or more, got {self.min_tokens}")
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError(f"logprobs must be zero or more (or -1 for all), got {self.logprobs}")
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop is not None and "" in self.stop:
            raise ValueError("stop must not hold an empty string")


@dataclass
class PoolingParams:
    """How to turn a prompt into one tensor; ``task`` names the pooling task, such as ``"embed"``."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = field(default=None)


@dataclass(eq=False)
class LoRARequest:
    """A LoRA adapter by name, number (from 1) and path; two are equal when their names are.

    Raises:
        ValueError: ``lora_int_id`` is below 1, or ``lora_path`` is empty.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path must not be empty")

    @property
    def adapter_id(self) -> int:
        """Return the adapter's number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """Return the adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Return the adapter's path."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
