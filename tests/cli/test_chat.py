"""``engine-client chat``: what is remembered, what is shown, how it ends; ``with_transformers`` has a real model."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import SamplingParams
from engine_client.cli.chat import Chat
from engine_client.cli.main import main


class Stream:
    """One answer: an output per word, or an exception in its place."""

    def __init__(self, words: list[Any]) -> None:
        self._words = words
        self.is_closed = False

    def __iter__(self) -> Iterator[Any]:
        for word in self._words:
            if isinstance(word, BaseException):
                raise word
            yield SimpleNamespace(new_token_ids=[word])

    def close(self) -> None:
        self.is_closed = True


class Client:
    """Answers with what the test says; a token is a word."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)
        self.prompts: list[Any] = []
        self.streams: list[Stream] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "stop_token_ids":
            return [[7]]
        if method == "encode_chat":
            self.prompts.append([f"{message['role']}:{message['content']}" for message in args[0]])
            return [[1, 2]]
        return ["".join(args[0])]

    def stream(self, request: Any) -> Stream:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self.streams.append(Stream(answer))
        return self.streams[-1]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch):
    """Give a function that runs a chat on lines of stdin."""

    def talk(client: Client, lines: str, system: str | None = None) -> tuple[bool, Chat]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        chat = Chat(client, SamplingParams(), system)
        return chat.talk(), chat

    return talk


def test_it_remembers_what_was_said(talk, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prompt has all messages before it; blank lines are passed over; what ends texts is asked of the model."""
    client = Client(["Hel", "lo"], ["Bye"])
    is_good, chat = talk(client, "hi\n\n  and now?  \n", "be kind")
    assert is_good
    assert client.prompts == [
        ["system:be kind", "user:hi"],
        ["system:be kind", "user:hi", "assistant:Hello", "user:and now?"],
    ]
    assert capsys.readouterr().out == "Hello\nBye\n"
    assert all(stream.is_closed for stream in client.streams)
    assert len(chat.messages) == 5


def test_ctrl_c_ends_an_answer_alone(talk, capsys: pytest.CaptureFixture[str]) -> None:
    """What was shown by then is the answer; its request is given up, and the chat goes on."""
    client = Client(["Once ", "upon", KeyboardInterrupt()], ["Yes"])
    assert talk(client, "a story\nsure?\n")[0]
    assert client.streams[0].is_closed
    assert client.prompts[1] == ["user:a story", "assistant:Once upon", "user:sure?"]
    assert capsys.readouterr().out == "Once upon [interrupted]\nYes\n"


def test_commands(talk) -> None:
    """/clear forgets all but the system's message, /exit leaves without reading on."""
    client = Client(["a"], ["b"])
    talk(client, "one\n/clear\ntwo\n/exit\nthree\n", "s")
    assert client.prompts == [["system:s", "user:one"], ["system:s", "user:two"]]


def test_a_line_that_cannot_be_answered_is_forgotten(talk, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one line, what was asked is not remembered, and the next line is answered."""
    client = Client(ValueError("too long"), ["ok"])
    is_good, chat = talk(client, "long\nshort\n")
    assert not is_good
    assert [message["content"] for message in chat.messages] == ["short", "ok"]
    assert "engine-client: error: too long" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_is_no_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """There it says how to leave."""

    class Keyboard(io.StringIO):
        lines = iter([KeyboardInterrupt(), "hi\n", ""])

        def isatty(self) -> bool:
            return True

        def readline(self, *_: Any) -> str:
            line = next(self.lines)
            if isinstance(line, BaseException):
                raise line
            return line

    monkeypatch.setattr(sys, "stdin", Keyboard())
    assert Chat(Client(["ok"]), SamplingParams()).talk()
    assert capsys.readouterr().out == "> \n(Ctrl-D leaves)\n> ok\n> "


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --model it is an error of usage."""
    with pytest.raises(SystemExit) as caught:
        main(["chat"])
    assert caught.value.code == 2
    assert "--model" in capsys.readouterr().err
