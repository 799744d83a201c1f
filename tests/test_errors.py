"""The tree of errors: what each one also is, what it carries, and that it survives pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from engine_client import errors
from engine_client.errors import (
    ClosedError,
    EngineClientError,
    EngineDeadError,
    EngineGenerateError,
    EngineStalledError,
    ForeignProcessError,
    HandshakeTimeout,
    LocalProtocolError,
    ProtocolError,
    RemoteCallError,
    RemoteProtocolError,
    SerializationError,
    StartupError,
)

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (EngineDeadError, (EngineClientError,)),
        (ClosedError, (EngineDeadError,)),
        (EngineGenerateError, (EngineClientError,)),
        (EngineStalledError, (EngineClientError, TimeoutError)),
        (StartupError, (EngineClientError, RuntimeError)),
        (HandshakeTimeout, (StartupError, TimeoutError)),
        (ForeignProcessError, (EngineClientError, RuntimeError)),
        (LocalProtocolError, (ProtocolError,)),
        (RemoteProtocolError, (ProtocolError,)),
        (SerializationError, (EngineClientError, TypeError)),
        (RemoteCallError, (EngineClientError,)),
    ],
)
def test_tree(error, bases):
    """Each error is what the tree says, so that drop-in code catches it by the type that it knows."""
    assert all(issubclass(error, base) for base in bases)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_pickle_and_copy(error):
    """Every error can be pickled and copied, with its text and attributes."""
    original = error("what happened")
    original.note = "kept"
    for twin in (pickle.loads(pickle.dumps(original)), copy.copy(original)):
        assert type(twin) is error
        assert str(twin) == "what happened"
        assert vars(twin) == vars(original)


def test_dead_error_has_a_sentence():
    """Without arguments, as the reference's code makes it, the error still says something."""
    assert str(EngineDeadError()) == "the engine core is dead"


def test_dead_error_carries_the_facts():
    """Rank, pid, exit and remote traceback are attributes, and survive pickling."""
    error = EngineDeadError("gone", rank=1, pid=7, exit_name="SIGKILL(-9)", remote_traceback="there")
    for twin in (error, pickle.loads(pickle.dumps(error))):
        assert (twin.rank, twin.pid, twin.exit_name, twin.remote_traceback) == (1, 7, "SIGKILL(-9)", "there")


@pytest.mark.parametrize("suppress", [False, True])
def test_dead_error_can_hide_its_context(suppress):
    """``suppress_context`` is the reference's keyword: the exception that was being handled is not shown."""
    assert EngineDeadError(suppress_context=suppress).__suppress_context__ is suppress


def test_remote_call_error():
    """A stand-in carries the type and the traceback of the original."""
    error = RemoteCallError("pkg.Odd: text", "pkg.Odd", "there")
    assert (str(error), error.type_name, error.remote_traceback) == ("pkg.Odd: text", "pkg.Odd", "there")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.type_name, twin.remote_traceback) == ("pkg.Odd", "there")
    assert str(RemoteCallError()) == ""
