"""``engine-client generate``: continue prompts, all of them as one batch.

::

    prompts ─▶ encode ─▶ add_request ─▶ get_output … ─▶ decode ─▶ output, in the order given
               └─ executor's hook, by collective_rpc ─┘

Only the public API is used, so whatever this command does, a program can do too.

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from engine_client.cli.output import (
    Continuation,
    InOrder,
    LiveText,
    as_json,
    as_text,
    cut_at,
    logprob_rows,
    pace_text,
    write,
)

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP: Final = "continue prompts"
DESCRIPTION: Final = (
    "Continue prompts with the built-in model, a byte-level language model of Python's own documentation (a token is "
    "a byte), or with your own executor. Prompts are arguments, or else lines of a file or of stdin; blank lines are "
    "skipped. Several prompts run as one batch and are printed in the order given."
)
_DEFAULT_EXECUTOR: Final = "engine_client.executors.ngram:NGramExecutor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    add("-f", "--file", metavar="FILE", help="read prompts from FILE, one a line; - is stdin")
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--mode",
        choices=("mp", "inproc"),
        default="mp",
        help="run the engine in a child process (default) or in this one",
    )
    add("--async", dest="asyncio", action="store_true", help="use the asyncio client")
    add("--data-parallel", type=int, default=1, metavar="N", help="balance over N engines (default: %(default)s)")
    add("--executor", metavar="MODULE:CLASS", default=_DEFAULT_EXECUTOR, help="executor to run (default: %(default)s)")
    add("--corpus", metavar="FILE", help="text file to build the built-in model from")
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("-n", "--max-tokens", type=int, default=100, metavar="N", help="most tokens to add (default: %(default)s)")
    add("-t", "--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the most probable token")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most probable tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most probable tokens that make up P")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the most probable one")
    add("--seed", type=int, metavar="N", help="make drawing repeatable")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end of a document")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "--logprobs", type=int, metavar="N", help="show log-probabilities of each token and of the N most probable ones"
    )
    add("--json", action="store_true", help="print one JSON object a line")
    add("--stats", action="store_true", help="print counts and times to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if a prompt had to be refused."""
    from engine_client import ClientOptions, EngineCoreClient, ProgressBar  # noqa: PLC0415  # not for --help

    prompts = _read_prompts(arguments)
    config = _make_config(arguments, prompts)
    executor_class = _load_executor(arguments.executor)
    params = _make_params(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letter must not end the run
    began = time.monotonic()
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressBar(optional=True))
        options = ClientOptions(on_progress=progress)
        multiprocess = arguments.mode == "mp"
        client: Any = EngineCoreClient.make_client(
            multiprocess, arguments.asyncio, config, executor_class, True, options=options
        )
        if arguments.asyncio:
            from engine_client.cli.awaited import Awaited  # noqa: PLC0415  # it loads asyncio

            client = Awaited(client)
        stack.callback(client.shutdown)
        progress.end()
        ready = time.monotonic()
        generation = _Generation(client, params, arguments, progress)
        generation.run(prompts)
        ended = time.monotonic()
    if arguments.stats:
        print(generation.stats.line(ready - began, ended - ready), file=sys.stderr)
    return 1 if generation.stats.refused else 0


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the prompts; bytes that are not UTF-8 are kept as surrogates, as in arguments."""
    prompts: list[str] = list(arguments.prompts)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give at least one character to continue")
    if arguments.file is None and prompts:
        return prompts
    if arguments.file in (None, "-"):
        if sys.stdin.isatty():
            print("Type prompts, one a line, then Ctrl-D.", file=sys.stderr)
        data = sys.stdin.buffer.read()
    else:
        data = Path(arguments.file).read_bytes()
    lines = (line.removesuffix("\r") for line in data.decode("utf-8", "surrogateescape").split("\n"))
    prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt: give one as an argument, by --file or on stdin")
    return prompts


def _make_config(arguments: argparse.Namespace, prompts: list[str]) -> Any:
    """Return a configuration with room for the longest prompt (in bytes) and its continuation."""
    from engine_client import EngineConfig  # noqa: PLC0415  # not for --help

    config = EngineConfig()
    if arguments.data_parallel < 1:
        raise ValueError(f"--data-parallel must be at least 1, not {arguments.data_parallel}")
    if arguments.mode == "inproc" and (arguments.asyncio or arguments.data_parallel > 1):
        raise ValueError("--async and --data-parallel need engines in processes of their own: leave --mode inproc out")
    config.parallel_config.data_parallel_size = arguments.data_parallel
    longest = max(len(os.fsencode(prompt)) for prompt in prompts)
    config.model_config.max_model_len = max(config.model_config.max_model_len, longest + arguments.max_tokens)
    if arguments.corpus is not None:
        corpus = Path(arguments.corpus).absolute()
        corpus.open("rb").close()  # an error here is plainer than one of a failed start
        config.additional_config["corpus"] = str(corpus)
    return config


def _load_executor(name: str) -> Callable[..., Any]:
    """Return the class that ``module:Class`` names; modules of the working directory are found too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--executor must be MODULE:CLASS, not {name!r}")
    # Not for the default: what lies around in a directory must not stand in for other modules.
    if name != _DEFAULT_EXECUTOR and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"--executor {name}: {error}") from error
    if found is None:
        raise ValueError(f"--executor {name}: module {module!r} has no {attribute!r}")
    if not isinstance(found, type):
        raise TypeError(f"--executor {name}: {attribute} is not a class")
    return found


def _make_params(arguments: argparse.Namespace) -> Any:
    from engine_client import SamplingParams  # noqa: PLC0415  # not for --help

    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=arguments.stop or None,
        ignore_eos=arguments.ignore_eos,
        max_tokens=arguments.max_tokens,
        logprobs=arguments.logprobs,
    )


@dataclass
class _Stats:
    """Counts of one run."""

    prompts: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    refused: int = 0

    def line(self, start_seconds: float, seconds: float) -> str:
        """Return them as one line of ``name=value``."""
        return (
            f"prompts={self.prompts} prompt_tokens={self.prompt_tokens} tokens={self.tokens} steps={self.steps} "
            f"seconds={seconds:.3f} tokens_per_second={self.tokens / max(seconds, 1e-9):.0f} "
            f"start_seconds={start_seconds:.3f}"
        )


class _Generation:
    """Sends all prompts, collects what comes, and shows it.

    Args:
        client: to an engine whose executor has ``encode`` and ``decode``.
        params: the sampling parameters of every prompt.
        arguments: of the command line.
        progress: shows how many prompts are done, how fast it goes, and how long it may still take.
    """

    def __init__(self, client: Any, params: Any, arguments: argparse.Namespace, progress: Any) -> None:
        self.stats = _Stats()
        self._client = client
        self._params = params
        self._arguments = arguments
        self._progress = progress
        self._running: dict[str, Continuation] = {}
        self._in_order = InOrder(self._show)
        self._live: LiveText | None = None
        self._name = lru_cache(maxsize=None)(lambda token: self._decode([token]))

    def run(self, prompts: list[str]) -> None:
        """Continue the prompts."""
        self.stats.prompts = len(prompts)
        arguments = self._arguments
        live = len(prompts) == 1 and sys.stdout.isatty() and not arguments.json and arguments.logprobs is None
        encoded = [self._client.collective_rpc("encode", args=(prompt,))[0] for prompt in prompts]
        for index, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
            self._add(Continuation(index, prompt, len(tokens)), tokens)
        if live and self._running:
            write(prompts[0])
            self._live = LiveText(arguments.stop, write)
        began = time.monotonic()
        while self._running:
            if self._live is None and self._progress.is_visible:
                self._show_progress(time.monotonic() - began)
            self._step()
        self._progress.end()

    def _show_progress(self, seconds: float) -> None:
        running, prompts = self._running, self.stats.prompts
        most_left = sum(self._arguments.max_tokens - len(each.token_ids) for each in running.values())
        note = pace_text(self.stats.tokens, most_left, seconds)
        self._progress("generating", prompts - len(running), prompts, note or "waiting for the first token")

    def _add(self, continuation: Continuation, tokens: list[int]) -> None:
        from engine_client import EngineCoreRequest  # noqa: PLC0415  # as in run

        self.stats.prompt_tokens += len(tokens)
        request_id = str(continuation.index)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=self._params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        try:
            self._client.add_request(request)
        except (TypeError, ValueError) as error:
            continuation.error = str(error)
            self._in_order.add(continuation)
        else:
            self._running[request_id] = continuation

    def _step(self) -> None:
        """Take the outputs of one step."""
        outputs = self._client.get_output()
        if outputs.scheduler_stats is not None:
            self.stats.steps = max(self.stats.steps, outputs.scheduler_stats.step_counter)
        for output in outputs.outputs:
            continuation = self._running[output.request_id]
            continuation.token_ids += output.new_token_ids
            self.stats.tokens += len(output.new_token_ids)
            if output.new_logprobs is not None:
                continuation.logprobs += logprob_rows(output.new_logprobs)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                self._finish(continuation, output)
            elif self._live is not None:
                self._live.update(self._decode(continuation.token_ids))

    def _finish(self, continuation: Continuation, output: Any) -> None:
        continuation.finish_reason = str(output.finish_reason)
        continuation.stop_reason = output.stop_reason
        if continuation.finish_reason in ("abort", "error"):
            continuation.error = str(output.stop_reason or "the engine ended it")
        continuation.text = cut_at(self._decode(continuation.token_ids), output.stop_reason)
        self._in_order.add(continuation)

    def _show(self, continuation: Continuation) -> None:
        self._progress.clear()  # both may be on the same screen
        if continuation.error is not None:
            self.stats.refused += 1
            print(f"engine-client: error: prompt {continuation.index + 1}: {continuation.error}", file=sys.stderr)
        if self._arguments.json:
            write(as_json(continuation))
        elif self._live is not None:
            self._live.finish(continuation.text)
            write("\n")
        elif continuation.error is None:
            write(as_text(continuation, self._name))

    def _decode(self, token_ids: list[int]) -> str:
        [text] = self._client.collective_rpc("decode", args=(token_ids,))
        return str(text)
