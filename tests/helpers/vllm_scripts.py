"""Scripts that run vLLM with a tiny model of random weights, each in a process of its own; they print JSON."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from helpers.procs import ScriptResult, run_script, script_environment

__all__ = ["ASYNC", "CHAT", "ENVIRONMENT", "GENERATE", "HAS_ZMQ", "PRELUDE", "model_folder", "run_vllm", "told"]

HAS_ZMQ: Final = find_spec("zmq") is not None
"""Whether pyzmq is installed; found out before a test may provide the stub."""

_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

ENVIRONMENT: Final = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "0",
}

PRELUDE: Final = """
import json, os, signal, sys, threading, time
SETTINGS = dict(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
                max_model_len=4096, seed=0)
PROMPTS = [{"prompt_token_ids": [1, 5, 9, number]} for number in range(3, 7)]

def tell(**values):
    print(chr(10) + json.dumps(values, default=repr), flush=True)  # the engine may be in the middle of a line

def kill_engine():
    import psutil
    for child in psutil.Process().children():
        child.kill()

def params(max_tokens=12, **values):
    from vllm import SamplingParams
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **values)

def generate(llm, **values):
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params(**values), use_tqdm=False)]
"""
"""What the scripts have in common.  vLLM is not imported yet."""

GENERATE: Final = """
def logprobs_of(steps):
    return [step and {str(token): [value.logprob, value.rank] for token, value in step.items()} for step in steps or []]

def row(output):
    parts = [[part.finish_reason, part.stop_reason, list(part.token_ids), logprobs_of(part.logprobs)]
             for part in output.outputs]
    return [parts, logprobs_of(output.prompt_logprobs), output.num_cached_tokens]

def kinds(llm, stop):
    from vllm import SamplingParams
    plain = dict(ignore_eos=True, detokenize=False)
    greedy = dict(plain, temperature=0, max_tokens=4)
    chosen = [SamplingParams(**greedy, logprobs=3, prompt_logprobs=2), SamplingParams(**greedy, stop_token_ids=[stop]),
              SamplingParams(**greedy, logit_bias={7: 50.0}), SamplingParams(**greedy, allowed_token_ids=[8, 9]),
              SamplingParams(temperature=1, seed=5, n=3, max_tokens=6, **plain),
              SamplingParams(temperature=0.8, seed=7, top_p=0.9, top_k=40, repetition_penalty=2, max_tokens=9, **plain)]
    long = [{"prompt_token_ids": [number % 500 for number in range(3000)]}]
    runs = [(PROMPTS, params) for params in chosen]
    runs += [(long, SamplingParams(**greedy, prompt_logprobs=5)), (long, SamplingParams(**greedy))]
    return [[row(output) for output in llm.generate(*run, use_tqdm=False)] for run in runs]

def has_stub(worker=None):
    import zmq
    return zmq.__spec__.origin == "engine_client"

if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    tokens = generate(llm)
    tell(tokens=tokens, kinds=kinds(llm, tokens[0][2]), client=type(llm.llm_engine.engine_core).__module__)
    tell(stubs=[has_stub(), *llm.collective_rpc(has_stub)])
"""
"""What the tiny model generates: greedy tokens, other kinds of outputs, who has carried them, and whether the front-end
and the engine have the stub."""

CHAT: Final = """
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=1024)
    questions = [[{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("France", "Italy")]
    outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    tell(texts=[o.outputs[0].text for o in outputs], tokens=[list(o.outputs[0].token_ids) for o in outputs])
    tell(client=type(llm.llm_engine.engine_core).__module__)
"""
"""Greedy answers of a model with a tokenizer, and who has carried them."""

_WITHOUT_ZMQ: Final = """
import sys
from importlib.machinery import PathFinder

class WithoutZmq(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "zmq" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutZmq
"""
"""Run by every interpreter that has it as ``sitecustomize``: there is no pyzmq, even where it is installed."""

ASYNC: Final = """
import asyncio

async def one(llm, number, max_tokens=12, seen=None):
    async for output in llm.generate(PROMPTS[number], params(max_tokens), request_id=f"{number}-{time.monotonic_ns()}"):
        if seen is not None:
            seen.append(output)
    return output.outputs[0].finish_reason, list(output.outputs[0].token_ids)

async def advance(seen):
    count, deadline = len(seen), time.monotonic() + 60
    while len(seen) == count and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return len(seen) > count

def run(main, **settings):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS, **settings))
    asyncio.run(main(llm))
    llm.shutdown()
    del llm  # its finalizer does not bear the interpreter's end
"""
"""What scripts with ``AsyncLLM`` have in common: a request whose outputs are seen, and the run of ``main(llm)``."""


def model_folder(where: Path) -> Path:
    """Write the description of the model; its weights are random, and the same each time."""
    (where / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return where


def run_vllm(
    folder: Path,
    source: str,
    *,
    model: Path | None = None,
    install: bool = True,
    pyzmq: bool = True,
    timeout: float = 300,
    **options: Any,
) -> ScriptResult:
    """Run a script after the prelude.

    Args:
        folder: for the script, and the tiny model.
        source: what to do.
        model: folder of another model.
        install: put this library in place first.
        pyzmq: False hides it, if it is installed, from the script and from the processes that it starts.
        timeout: seconds; vLLM alone takes twenty to start.
        options: for ``run_script``.
    """
    start = "from engine_client.integrations.vllm import install\ninstall()\n" if install else ""
    # What vLLM knows of models from other runs, such as one with pyzmq, must not help this session.
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache"), **options.pop("env", {})}
    if not pyzmq:
        (folder / "sitecustomize.py").write_text(_WITHOUT_ZMQ, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), script_environment()["PYTHONPATH"]])
    script = folder / "script.py"
    script.write_text(PRELUDE + start + source, encoding="utf-8")
    return run_script(script, str(model or model_folder(folder)), flags=(), timeout=timeout, env=environment, **options)


def told(result: ScriptResult, *, clean: bool = True) -> dict[str, Any]:
    """Return what a script has told, all in one, after a look at how it ended; vLLM's own client leaks a little."""
    result.check(stderr=None if clean else result.stderr)
    values: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        if line.startswith("{"):
            values.update(json.loads(line))
    return values
