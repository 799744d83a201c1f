"""``engine-client chat``: talk to a model of the transformers library in the terminal.

::

    line ─▶ messages ─▶ encode_chat ─▶ stream ─▶ decode ─▶ LiveText ─▶ stdout
              ▲                          │ Ctrl-C: the request is aborted,
              └── the answer, or what there is of it ──┘ and the chat goes on

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import closing, suppress
from typing import Any, Final

from engine_client.cli.output import LiveText, write

__all__ = ["DESCRIPTION", "HELP", "Chat", "add_arguments", "run"]

HELP: Final = "talk to a model of the transformers library"
DESCRIPTION: Final = (
    "Talk to a chat model of the transformers library, in the terminal or by lines of stdin. Ctrl-C ends an answer and "
    "keeps the chat; Ctrl-D or /exit leaves, /clear starts over. Needs engine_client[transformers]."
)
_PROMPT: Final = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder, GGUF file or repository of the model")
    add("--system", metavar="TEXT", help="what the model is told first (default: the model's own)")
    add("--mode", choices=("mp", "inproc"), default="mp", help="run the engine in a child process (default) or here")
    add("-n", "--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: %(default)s)")
    add("-t", "--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the most probable token")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most probable tokens that make up P")
    add("--seed", type=int, metavar="N", help="make drawing repeatable")


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends; return 1 if an answer failed."""
    # None of this is for --help.
    from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ModelConfig, ProgressBar  # noqa: PLC0415
    from engine_client.executors.transformers import TransformersExecutor  # noqa: PLC0415  # as above

    model = arguments.model
    config = EngineConfig(model_config=ModelConfig(model=os.path.abspath(model) if os.path.isdir(model) else model))
    params = _make_params(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letter must not end the chat
    with ProgressBar(optional=True) as progress:
        client: Any = EngineCoreClient.make_client(
            arguments.mode == "mp",
            False,
            config,
            TransformersExecutor,
            False,
            options=ClientOptions(on_progress=progress),
        )
    with client:
        chat = Chat(client, params, arguments.system)
        return 0 if chat.talk() else 1


def _make_params(arguments: argparse.Namespace) -> Any:
    from engine_client import SamplingParams  # noqa: PLC0415  # not for --help

    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
    )


class Chat:
    """One conversation.

    Args:
        client: to an engine whose executor has ``encode_chat``, ``stop_token_ids`` and ``decode``.
        params: the sampling parameters of every answer.
        system: what the model is told first; None: nothing.
    """

    def __init__(self, client: Any, params: Any, system: str | None = None) -> None:
        self._client = client
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)
        self._count = 0
        params.stop_token_ids = self._call("stop_token_ids")

    def _call(self, method: str, *args: Any) -> Any:
        return self._client.collective_rpc(method, args=args)[0]

    def talk(self) -> bool:
        """Answer line after line until there are no more; return whether every answer came."""
        is_good = True
        while (line := self._read()) is not None:
            if line == "/clear":
                self.messages = list(self._first)
            elif line:
                is_good = self.answer(line) and is_good
        return is_good

    def _read(self) -> str | None:
        """Return the next line, without the space around it; None at the end."""
        while True:
            try:
                if sys.stdin.isatty():
                    write(_PROMPT)
                line = sys.stdin.readline()
            except KeyboardInterrupt:
                write("\n(Ctrl-D leaves)\n")
                continue
            return None if not line or line.strip() == "/exit" else line.strip()

    def answer(self, line: str) -> bool:
        """Show the answer to a line as it comes, and remember both; return whether it came.

        Ctrl-C ends it: what was shown by then is the answer.
        """
        self.messages.append({"role": "user", "content": line})
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            write(text)

        try:
            try:
                self._stream(LiveText((), show))
            except KeyboardInterrupt:
                write(" [interrupted]")
        except (TypeError, ValueError) as error:
            # Nothing of it is remembered, so that the next line has a chance.
            self.messages.pop()
            print(f"engine-client: error: {error} (/clear starts over)", file=sys.stderr)
            return False
        write("\n")
        self.messages.append({"role": "assistant", "content": "".join(shown)})
        return True

    def _stream(self, live: LiveText) -> None:
        from engine_client import EngineCoreRequest  # noqa: PLC0415  # as in run

        self._count += 1
        prompt = self._call("encode_chat", self.messages)
        request = EngineCoreRequest(
            request_id=f"answer-{self._count}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=self._params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        tokens: list[int] = []
        text = ""
        with closing(self._client.stream(request)) as stream:
            for output in stream:
                tokens += output.new_token_ids
                text = self._call("decode", tokens)
                live.update(text)
        with suppress(KeyboardInterrupt):  # the answer is complete
            live.finish(text)
