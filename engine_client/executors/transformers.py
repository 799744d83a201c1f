"""Any causal language model of the transformers library, on a GPU if there is one, else on the CPU.

::

    batch ─▶ passes: all requests of one token · prompts of like length · pooling ─▶ model ─▶ logits ─▶ a token each
                                └─ keys and values of each token, in the scheduler's own blocks ─┘

``vllm_config.model_config.model`` names the folder, the GGUF file or the repository; ``pip install
engine_client[transformers]``, and for GGUF ``gguf`` and ``accelerate``.
Requests join and leave the batch with every step.  Prefixes are shared, prompts may come in chunks, and a preempted
request is computed again; none of that changes what is chosen, but by the rounding of sums in another order.

``additional_config`` may have: ``kv_cache_bytes`` (default 1 GiB), the most memory for keys and values; ``device``.

Threads: the engine's; torch has its own for one operation at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from engine_client.engine.executor import Batch, Executor, ModelOutput, ScheduledRequest, report_progress
from engine_client.executors.paged_cache import BlockStore, Rows, make_cache
from engine_client.executors.passes import passes
from engine_client.executors.sampling import check_params, option, seeded_uniform
from engine_client.executors.torch_sampling import choose, is_plain, logprob_rows
from engine_client.executors.transformers_gguf import locate
from engine_client.executors.transformers_progress import progress_of_transformers
from engine_client.messages import LogprobsLists

__all__ = ["TransformersExecutor", "layer_types"]

_KV_CACHE_BYTES: Final = 1 << 30
_TASKS: Final = ("embed", "token_embed")


class TransformersExecutor(Executor):
    """Generates text, and embeds it.

    Tasks: ``generate``; ``embed`` (the last token's hidden state, of length 1 unless ``use_activation`` is False, cut
    to ``dimensions``); ``token_embed`` (the hidden state of every token of the prompt).  Both are numpy arrays of
    float32.

    Raises:
        ImportError: transformers, torch, or what reads GGUF files is not installed; says what to install.
        OSError, ValueError: the model cannot be read, or is of a kind that this cannot run.
    """

    supported_tasks: tuple[str, ...] = ("generate", *_TASKS)

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        try:
            import torch  # noqa: PLC0415  # optional
            import transformers  # noqa: PLC0415  # optional
        except ImportError as error:
            raise ImportError("TransformersExecutor needs: pip install engine_client[transformers]") from error
        self._torch = torch
        self._random = Random()  # noqa: S311  # for requests without a seed; nothing is secret
        more = getattr(vllm_config, "additional_config", None) or {}
        self.device = torch.device(more.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._options = {"trust_remote_code": bool(vllm_config.model_config.trust_remote_code)}
        report_progress("loading tokenizer", 0)
        name, more_options = locate(vllm_config.model_config.tokenizer or vllm_config.model_config.model)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, **more_options, **self._options)
        self._model: Any = self._load()
        self._read_config(int(more.get("kv_cache_bytes") or _KV_CACHE_BYTES))

    def __repr__(self) -> str:
        return f"<TransformersExecutor {type(self._model).__name__} on {self.device}>"

    @property
    def model(self) -> Any:
        """Return the model, as transformers has it.

        Raises:
            RuntimeError: it was dropped by ``sleep(level=2)``, or the engine has ended.
        """
        if self._model is None:
            raise RuntimeError("the model is asleep; call wake_up first")
        return self._model

    def _load(self) -> Any:
        """Read the weights, and tell how far that is."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  # optional

        report_progress("loading weights", 0)
        dtype = self.vllm_config.model_config.dtype
        if dtype == "auto" and self.device.type == "cpu":
            dtype = "float32"  # most processors have nothing faster
        with progress_of_transformers():
            name, more_options = locate(self.vllm_config.model_config.model)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **more_options, **self._options)
        return model.to(self.device).eval()

    def _read_config(self, kv_cache_bytes: int) -> None:
        """Take from the model what the engine has to know of it."""
        model, torch = self._model, self._torch
        config = model.config.get_text_config()
        self._layer_types = layer_types(config)
        self._window = getattr(config, "sliding_window", None) if "sliding_attention" in self._layer_types else None
        self._num_layers = config.num_hidden_layers
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.max_model_len = getattr(config, "max_position_embeddings", None)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos = self.tokenizer.eos_token_id if eos is None else eos
        self.eos_token_ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        cache = self.vllm_config.cache_config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * self._num_layers * heads * size * torch.finfo(model.dtype).bits // 8
        most = max(1, kv_cache_bytes // (per_token * cache.block_size))
        longest = min(self.vllm_config.model_config.max_model_len, self.max_model_len or 1 << 30)
        needed = self.vllm_config.scheduler_config.max_num_seqs * -(-longest // cache.block_size)
        self.num_kv_blocks = getattr(cache, "num_gpu_blocks_override", None) or min(most, needed)
        self._store = BlockStore(self.num_kv_blocks, cache.block_size, self.device)

    # -- requests ------------------------------------------------------------------------------------------------------

    def check_request(self, request: Any) -> None:
        """Refuse what a model of text cannot use, parameters of wrong types, and tasks that there are not."""
        if getattr(request, "prompt_embeds", None) is not None or getattr(request, "mm_features", None):
            raise ValueError("not supported: TransformersExecutor takes tokens alone, no embeddings and no images")
        if getattr(request, "lora_request", None) is not None:
            raise ValueError("not supported: TransformersExecutor has no LoRA adapters")
        params = getattr(request, "sampling_params", None)
        if params is not None:
            check_params(params)
            return
        task = getattr(request.pooling_params, "task", None)
        if task not in (None, *_TASKS):
            raise ValueError(f"the pooling task must be one of {', '.join(_TASKS)}, not {task!r}")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model wants at its beginning."""
        return list(self.tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; those that only mark something have none."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the prompt of a conversation, up to where the answer begins.

        Args:
            messages: each with ``role`` (``system``, ``user``, ``assistant``) and ``content``.

        Raises:
            ValueError: the model has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"{self.vllm_config.model_config.model} has no chat template: it is no model for chats")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stop_token_ids(self) -> list[int]:
        """Return what ends a text beside ``eos_token_id``, for ``SamplingParams.stop_token_ids``."""
        return list(self.eos_token_ids[1:])

    # -- a step --------------------------------------------------------------------------------------------------------

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Compute keys and values of all tokens, and a token or a vector where one is due."""
        places = {request.request_id: index for index, request in enumerate(batch.requests)}
        tokens: list[list[int]] = [[] for _ in places]
        logprobs: list[LogprobsLists | None] = [None] * len(tokens)
        prompt_logprobs: list[LogprobsLists | None] = [None] * len(tokens)
        pooling: list[Any] = [None] * len(tokens)
        with self._torch.inference_mode():
            for requests in passes(batch.requests):
                indices = [places[request.request_id] for request in requests]
                if requests[0].pooling_params is not None:
                    for index, request, hidden in zip(indices, requests, self._hidden(requests), strict=True):
                        pooling[index] = self._pool(request, hidden) if request.is_last_chunk else None
                    continue
                logits = self._logits(requests)
                for index, token in zip(indices, self._choose(requests, logits), strict=True):
                    tokens[index] = token
                for index, request, row in zip(indices, requests, logits, strict=True):
                    if tokens[index]:
                        count = option(request.sampling_params, "logprobs")
                        if count is not None:
                            logprobs[index] = logprob_rows(row[None], tokens[index], count)
                        prompt_logprobs[index] = self._prompt_logprobs(request)
        return ModelOutput(
            tokens,
            logprobs=logprobs if any(logprobs) else None,
            prompt_logprobs=prompt_logprobs if any(prompt_logprobs) else None,
            pooling=pooling,
        )

    def _inputs(self, requests: Sequence[ScheduledRequest]) -> dict[str, Any]:
        """Return the arguments of a forward pass."""
        rows = Rows(requests, self._store)
        dtype = self.model.dtype
        masks = {
            kind: rows.mask(dtype, self._window if kind == "sliding_attention" else None) for kind in self._layer_types
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        cache = make_cache(rows, self._num_layers)
        return {
            "input_ids": rows.input_ids,
            "position_ids": rows.positions,
            "attention_mask": mask,
            _cache_name(self.model): cache,
            "use_cache": True,
        }

    def _logits(self, requests: Sequence[ScheduledRequest]) -> Any:
        """Run the model; return the logits behind each request's newest token."""
        return self.model(**self._inputs(requests), logits_to_keep=1).logits[:, -1]

    def _hidden(self, requests: Sequence[ScheduledRequest]) -> Any:
        """Run the model without its head; return the hidden state of each request's newest token."""
        return self.model.base_model(**self._inputs(requests)).last_hidden_state[:, -1]

    def _choose(self, requests: Sequence[ScheduledRequest], logits: Any) -> list[list[int]]:
        """Return the next token of each request whose prompt is complete."""
        best = logits.argmax(-1).tolist()
        return [
            []
            if not request.is_last_chunk
            else [token if is_plain(request.sampling_params) else self._draw(request, row)]
            for request, token, row in zip(requests, best, logits, strict=True)
        ]

    def _draw(self, request: ScheduledRequest, logits: Any) -> int:
        params, tokens = request.sampling_params, request.token_ids
        position = len(tokens) - request.num_prompt_tokens
        seed = option(params, "seed")

        def draw() -> float:
            return self._random.random() if seed is None else seeded_uniform(seed, position)

        return choose(logits, params, tokens[:], request.num_prompt_tokens, self._banned(request, position), draw)

    def _banned(self, request: ScheduledRequest, position: int) -> list[int]:
        """Return what may not come next: an end before ``min_tokens``, and what completes a bad word."""
        params = request.sampling_params
        banned: list[int] = []
        if position < option(params, "min_tokens"):
            banned += (*self.eos_token_ids, *(option(params, "stop_token_ids") or ()))
        for word in option(params, "bad_words") or ():
            for text in {word, f" {word.lstrip()}"}:
                *start, last = self.tokenizer.encode(text, add_special_tokens=False) or [-1]
                if not start or request.token_ids[-len(start) :] == start:
                    banned.append(last)
        return banned

    def _prompt_logprobs(self, request: ScheduledRequest) -> LogprobsLists | None:
        """Return a row for every prompt token but the first; computed at once, whatever chunks there were."""
        count = option(request.sampling_params, "prompt_logprobs")
        if count is None or len(request.token_ids) > request.num_prompt_tokens:
            return None
        prompt = request.token_ids[: request.num_prompt_tokens]
        logits = self.model(input_ids=self._tensor([prompt]), use_cache=False).logits[0, :-1]
        return logprob_rows(logits, prompt[1:], count) if len(prompt) > 1 else LogprobsLists([], [], [])

    def _pool(self, request: ScheduledRequest, hidden: Any) -> Any:
        params = request.pooling_params
        if getattr(params, "task", None) == "token_embed":
            prompt = request.token_ids[: request.num_prompt_tokens]
            hidden = self.model.base_model(input_ids=self._tensor([prompt]), use_cache=False).last_hidden_state[0]
        hidden = hidden.float()
        if getattr(params, "dimensions", None):
            hidden = hidden[..., : params.dimensions]
        if getattr(params, "use_activation", None) is not False:
            hidden = self._torch.nn.functional.normalize(hidden, dim=-1)
        return hidden.cpu().numpy().copy()

    def _tensor(self, values: Any) -> Any:
        return self._torch.tensor(values, device=self.device)

    def execute_dummy_batch(self) -> None:
        """Run the model on one token that nobody has asked for."""
        with self._torch.inference_mode():
            self.model(input_ids=self._tensor([[0]]), use_cache=False)

    # -- memory --------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Drop keys and values; at level 2 the weights, too."""
        super().sleep(level)
        self._store.drop()
        if level >= 2:
            self._model = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Read the weights again if they were dropped."""
        super().wake_up(tags)
        if self._model is None and "weights" not in self.sleeping_tags:
            self._model = self._load()

    def shutdown(self) -> None:
        """Let go of everything."""
        self._store.drop()
        self._model = None


def layer_types(config: Any) -> set[str]:
    """Return which kinds of attention a model has.

    Raises:
        ValueError: one of them keeps something else than keys and values.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"}
    others = kinds - {"full_attention", "sliding_attention"}
    if others or not hasattr(config, "num_attention_heads"):
        text = ", ".join(sorted(others)) or "state"
        raise ValueError(
            f"TransformersExecutor cannot run {config.model_type}: it has {text}, which is not kept in blocks"
        )
    return kinds


def _cache_name(model: Any) -> str:
    """Return what this release of transformers calls the cache."""
    from inspect import signature  # noqa: PLC0415  # heavy

    return "past_key_values" if "past_key_values" in signature(model.forward).parameters else "cache"
