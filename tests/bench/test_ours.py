"""This library's side: its clients, requests and tensors, with whatever array package there is."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engine_client import __version__
from engine_client.bench import ours
from engine_client.bench.ours import make_side


def test_what_runs_is_told():
    """The side tells the version, and what its tensors are."""
    assert make_side().about()["engine_client"] == __version__


def test_requests_are_like_the_others():
    """A request has 128 prompt tokens and what it was given."""
    request = make_side().make_request("a", 7, b"x", rank=2)
    assert (request.request_id, request.prompt_token_ids) == ("a", list(range(128)))
    assert (request.params.max_tokens, request.prompt_embeds, request.data_parallel_rank) == (7, b"x", 2)


@pytest.mark.parametrize(("found", "name"), [((), "memoryview"), (("numpy",), "numpy"), (("numpy", "torch"), "torch")])
def test_tensors_are_of_what_there_is(found: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch):
    """Tensors are torch's, or else numpy's, or else plain memory; they may lie in memory that is given."""
    made = SimpleNamespace(frombuffer=lambda memory, dtype: (memory, dtype), float32="float32")
    monkeypatch.setattr(ours, "find_spec", lambda name: name in found or None)
    for package in found:
        monkeypatch.setitem(sys.modules, package, made)
    side = make_side()
    assert side.about()["tensors"] == name
    memory = memoryview(bytearray(8))
    assert side.make_tensor(8, memory) == (memory if not found else (memory, "float32"))
    tensor = side.make_tensor(4096)
    assert (tensor[0] if found else tensor).nbytes == 4096
