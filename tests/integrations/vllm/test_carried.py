"""The configuration's way into a process where vLLM cannot be imported yet."""

from __future__ import annotations

import copy
import pickle
import pickletools
from types import SimpleNamespace

from engine_client.integrations.vllm.carried import CarriedConfig


class Config(SimpleNamespace):
    """Stands for vLLM's configuration."""


def test_it_has_the_attributes_and_arrives_as_itself():
    """The carrier answers for the configuration, and decodes to it."""
    config = Config(parallel_config=SimpleNamespace(data_parallel_size=3))
    carried = CarriedConfig(config)
    assert carried.parallel_config is config.parallel_config
    assert pickle.loads(pickle.dumps(carried)) == config
    assert copy.copy(carried) == config
    assert not hasattr(carried, "nonsense")


def test_the_stub_comes_first():
    """In the pickle, what provides the stub is called before the first name of the configuration is looked up."""
    opcodes = list(pickletools.genops(pickle.dumps(CarriedConfig(Config()))))
    texts = [(index, argument) for index, (_, argument, _) in enumerate(opcodes) if isinstance(argument, str)]
    provided = next(index for index, text in texts if text == "provide_everywhere")
    called = next(i for i, (code, *_) in enumerate(opcodes) if i > provided and code.name == "REDUCE")
    assert called < next(index for index, text in texts if text == "Config")
