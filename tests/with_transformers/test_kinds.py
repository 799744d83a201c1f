"""Models of other kinds, tiny and of random weights: what they say here is what they say in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from engine_client import CacheConfig, EngineConfig, EngineCoreClient, ModelConfig, SchedulerConfig
from engine_client.executors.transformers import TransformersExecutor
from with_transformers.test_generation import finish, request, tokens_of

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 49,
    "pad_token_id": 49,
    "bos_token_id": 48,
}
KINDS = {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 49},
    ),
    "qwen2": ("Qwen2Config", SIZES),
    "a sliding window": ("MistralConfig", {**SIZES, "sliding_window": 6}),
    "two kinds of layers": ("Gemma2Config", {**SIZES, "sliding_window": 6, "head_dim": 8}),
}
PROMPTS = ([1, 2, 3], [4], list(range(5, 30)), [7, 7, 7, 8, 9, 10, 11, 12])


def save(folder: Path, name: str, settings: dict[str, Any]) -> Any:
    """Write a model of random weights, and a tokenizer; return the model."""
    torch.manual_seed(1)
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # so that no two tokens are about equally probable
    model.save_pretrained(str(folder))
    words = {f"w{number}": number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # a word
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w49").save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_they_say_the_same_here(kind: str, tmp_path: Path) -> None:
    """Greedy, in one batch, in chunks of prompts: the tokens are those of transformers' own generation."""
    model = save(tmp_path, *KINDS[kind])
    config = EngineConfig(
        model_config=ModelConfig(model=str(tmp_path)),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=10),
        cache_config=CacheConfig(block_size=4),
    )
    with EngineCoreClient.make_client(False, False, config, TransformersExecutor, False) as client:
        found = finish(client, [request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)])
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokens_of(found[str(index)]) == out[0, len(prompt) :].tolist()


def test_one_that_keeps_something_else_is_refused(tmp_path: Path) -> None:
    """A model whose state is not keys and values is refused when the engine starts, by name."""
    settings = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    save(tmp_path, "MambaConfig", settings)
    config = EngineConfig(model_config=ModelConfig(model=str(tmp_path)))
    with pytest.raises(ValueError, match="cannot run mamba"):
        EngineCoreClient.make_client(False, False, config, TransformersExecutor, False)
