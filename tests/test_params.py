"""Parameters of requests refuse what no engine could do."""

from __future__ import annotations

import pickle

import pytest

from engine_client.params import LoRARequest, PoolingParams, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
    ],
)
def test_sampling_out_of_range(field, value):
    """A value out of its range is a ValueError that names the field."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "top_p": 1e-6, "top_k": -1, "min_p": 1},
        {"max_tokens": None, "logprobs": -1, "stop": None},
        {"logprobs": 0, "max_tokens": 1, "min_tokens": 0},
    ],
)
def test_sampling_in_range(fields):
    """The ends of the ranges are allowed."""
    params = SamplingParams(**fields)
    assert pickle.loads(pickle.dumps(params)) == params


def test_stop_is_a_list():
    """One stop string is the same as a list of it."""
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ["end"]


def test_lora_request():
    """An adapter has a name, a number and a path, and is equal to one of the same name."""
    adapter = LoRARequest("a", 1, "/path")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("a", 1, "/path")
    assert adapter == LoRARequest("a", 2, "/other")
    assert adapter != LoRARequest("b", 1, "/path")
    assert adapter != "a"
    assert len({adapter, LoRARequest("a", 2, "/other")}) == 1


@pytest.mark.parametrize(("number", "path", "field"), [(0, "/path", "lora_int_id"), (1, "", "lora_path")])
def test_lora_request_that_cannot_work(number, path, field):
    """Numbers start at 1, and there is a path."""
    with pytest.raises(ValueError, match=field):
        LoRARequest("a", number, path)


def test_pooling_params():
    """Pooling parameters are plain data."""
    assert PoolingParams(task="embed") == pickle.loads(pickle.dumps(PoolingParams(task="embed")))
