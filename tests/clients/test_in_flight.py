"""The table of requests in flight."""

from __future__ import annotations

import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from engine_client.clients.in_flight import InFlight, check_request
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.batch import encode_outputs
from helpers.clients import make_request
from helpers.transport import columns_of


def columns(keys: dict[str, int], *outputs: EngineCoreOutput):
    frame, _ = encode_outputs(EngineCoreOutputs(0, list(outputs)), keys)
    assert frame is not None
    return columns_of(frame)[0]


def test_an_id_is_taken_until_its_last_output_was_handed_out() -> None:
    """The id is free as soon as the user has the finish reason."""
    table = InFlight()
    key = table.add("a")
    with pytest.raises(ValueError, match="already running"):
        table.add("a")
    running = table.outputs(columns({"a": key}, EngineCoreOutput("a", [1])))
    assert running.outputs == [EngineCoreOutput("a", [1])]
    assert len(table) == 1
    done = table.outputs(columns({"a": key}, EngineCoreOutput("a", [2], finish_reason=FinishReason.STOP)))
    assert done.outputs[0].finished
    assert len(table) == 0
    assert table.add("a") != key
    assert "1" in repr(table)


def test_outputs_of_an_aborted_request_are_dropped_even_if_its_id_is_used_again() -> None:
    """The key tells the old request from the new one of the same id."""
    table = InFlight()
    old = table.add("a")
    assert table.keys_of(["a", "a", "unknown", 7, None, ["list"]]) == {old: 0}
    table.discard(old)
    assert table.keys_of(["a"]) == {}
    new = table.add("a")
    stale = table.outputs(columns({"a": old}, EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP)))
    assert stale.outputs == []
    fresh = table.outputs(columns({"a": new}, EngineCoreOutput("a", [2])))
    assert fresh.outputs == [EngineCoreOutput("a", [2])]


def test_discard_ignores_what_is_not_there() -> None:
    """Forgetting an unknown key does nothing."""
    table = InFlight()
    table.discard(5)
    key = table.add("a")
    table.discard(key)
    table.discard(key)
    assert len(table) == 0


def test_a_thread_knows_its_own_requests() -> None:
    """``mine`` returns the keys that the calling thread has added."""
    table = InFlight()
    mine = table.add("mine")
    thread = threading.Thread(target=table.add, args=("other",))
    thread.start()
    thread.join()
    assert list(table.mine()) == [mine]
    table.discard(mine)
    assert table.mine() == {}


@given(st.lists(st.tuples(st.sampled_from(["add", "abort", "finish"]), st.sampled_from("abc")), max_size=40))
def test_the_table_agrees_with_a_model(steps: list[tuple[str, str]]) -> None:
    """Whatever the order, an id is in flight exactly from its add to its finish or abort."""
    table = InFlight()
    model: dict[str, int] = {}
    for step, name in steps:
        if step == "add":
            if name in model:
                with pytest.raises(ValueError, match="already"):
                    table.add(name)
            else:
                model[name] = table.add(name)
        elif step == "abort":
            keys = table.keys_of([name])
            assert list(keys) == ([model.pop(name)] if name in model else [])
            for key in keys:
                table.discard(key)
        elif name in model:
            output = EngineCoreOutput(name, [], finish_reason=FinishReason.STOP)
            assert table.outputs(columns(model, output)).outputs == [output]
            del model[name]
        assert len(table) == len(model)
        assert sorted(table.mine()) == sorted(model.values())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"request_id": None}, TypeError),
        ({"request_id": ""}, ValueError),
        ({"prompt_token_ids": None}, ValueError),
        ({"prompt_token_ids": []}, ValueError),
        ({"prompt_token_ids": ["x"]}, TypeError),
        ({"prompt_token_ids": [1.5]}, TypeError),
        ({"prompt_token_ids": [-1]}, ValueError),
        ({"prompt_token_ids": [1 << 32]}, ValueError),
        ({"prompt_token_ids": b"abcd"}, TypeError),
        ({"prompt_token_ids": bytearray(4)}, TypeError),
        ({"prompt_token_ids": "abcd"}, TypeError),
        ({"prompt_token_ids": {1, 2}}, TypeError),
        ({"prompt_token_ids": {1: 2}}, TypeError),
        ({"prompt_token_ids": 7}, TypeError),
        ({"prompt_token_ids": [1] * 11}, ValueError),
        ({"sampling_params": None}, ValueError),
        ({"sampling_params": "greedy"}, TypeError),
        ({"sampling_params": None, "pooling_params": 3}, TypeError),
        ({"priority": "high"}, TypeError),
        ({"arrival_time": "now"}, TypeError),
        ({"cache_salt": 5}, TypeError),
        ({"trace_headers": [1]}, TypeError),
        ({"data_parallel_rank": "0"}, TypeError),
    ],
)
def test_a_field_that_cannot_be_served_is_named(change: dict[str, Any], error: type[Exception]) -> None:
    """A wrong type is a TypeError, a wrong value a ValueError, before anything is sent."""
    request = make_request("a", 1)
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(error):
        check_request(request, 10)


def test_a_prompt_becomes_numbers_of_four_bytes() -> None:
    """Any sequence of integers will do; embeddings alone are a prompt without numbers; without a limit any length."""
    for prompt in ([1, 2], (1, 2), range(1, 3), array("B", [1, 2])):
        assert check_request(make_request("a", 1, prompt), 10) == array("I", [1, 2])
    request = make_request("a", 1, None, prompt_embeds=[0.5])
    assert check_request(request, 10) is None
    assert len(check_request(make_request("a", 1, range(1, 50)), None) or ()) == 49
    for missing in ("prompt_token_ids", "sampling_params"):
        with pytest.raises(ValueError, match="has n"):
            check_request(SimpleNamespace(**{**vars(make_request("a", 1)), missing: None}), 10)
    with pytest.raises(TypeError, match="request_id"):
        check_request(SimpleNamespace(), 10)


def test_outputs_that_nobody_got_can_be_taken_back() -> None:
    """After ``undo_outputs`` the same batch says the same again."""
    table = InFlight()
    batch = columns({"a": table.add("a")}, EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP))
    first = table.outputs(batch)
    table.undo_outputs(batch)
    assert len(table) == 1
    assert table.outputs(batch).outputs == first.outputs
    assert len(table) == 0
    assert table.outputs(batch).outputs == []


def test_requests_are_counted_by_rank() -> None:
    """Each rank has those that were added for it, until they are aborted, or their last output was handed out."""
    table = InFlight()
    keys = {name: table.add(name, rank=rank) for name, rank in (("a", 0), ("b", 2), ("c", 2))}
    assert [table.count(rank) for rank in range(4)] == [1, 0, 2, 0]
    assert sorted(table.of_rank(2)) == [keys["b"], keys["c"]]
    assert table.of_rank(1) == []
    assert table.ranks_of([keys["a"], keys["c"], 999]) == {keys["a"]: 0, keys["c"]: 2}
    assert table.keys_of(["b", "nobody", 7]) == {keys["b"]: 2}
    table.discard(keys["b"])
    assert table.count(2) == 1
    frame, _ = encode_outputs(EngineCoreOutputs(0, [EngineCoreOutput("c", [1], finish_reason=FinishReason.STOP)]), keys)
    assert frame is not None
    table.outputs(columns_of(frame)[0])
    assert (table.count(2), table.of_rank(2), len(table)) == (0, [], 1)


def test_owners_other_than_threads_know_their_requests() -> None:
    """What an event loop has added is not its thread's, and the other way round."""
    table = InFlight()
    loop = object()
    key, other = table.add("a", rank=1, owner=loop), table.add("b")
    assert table.mine(loop) == {key: 1}
    assert table.mine() == {other: 0}
    table.discard(key)
    assert table.mine(loop) == {}


def test_an_end_weighs_until_somebody_could_have_noticed_it() -> None:
    """What a rank was sent in one go counts as its load, ended or not, until anybody takes a last output."""
    table = InFlight()
    keys = {name: table.add(name, rank=rank) for name, rank in (("a", 0), ("b", 1), ("c", 1), ("d", 1))}
    batch = columns(
        keys,
        EngineCoreOutput("b", [1], finish_reason=FinishReason.STOP),
        EngineCoreOutput("c", [1], finish_reason=FinishReason.STOP),
    )
    table.arrived([keys["b"], keys["c"], 999])
    assert [table.count(1), table.load(1)] == [1, 3]
    assert [table.load(rank) for rank in (0, 2)] == [1, 0]
    table.outputs(columns(keys, EngineCoreOutput("a", [1])))
    assert table.load(1) == 3
    table.outputs(batch)
    assert [table.load(rank) for rank in range(3)] == [1, 1, 0]
