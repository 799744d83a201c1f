"""The stand-in for pyzmq in the processes that vLLM starts by itself."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest

from engine_client.integrations.vllm import subprocesses
from helpers.vllm_scripts import run_vllm, told


@pytest.mark.parametrize("missing", [True, False])
def test_the_command_is_replaced_where_pyzmq_is_missing(missing):
    """Only without pyzmq another command looks at models."""
    module = ModuleType("registry")
    vars(module)["_SUBPROCESS_COMMAND"] = ["as it was"]
    with (
        mock.patch.object(subprocesses, "provide", return_value=missing),
        mock.patch.object(subprocesses, "is_stub", return_value=missing),
        mock.patch.object(subprocesses, "after_import", side_effect=lambda name, action: action(module)),
    ):
        subprocesses.provide_everywhere()
    assert (vars(module)["_SUBPROCESS_COMMAND"][0] == sys.executable) is missing


@pytest.mark.slow
def test_a_model_that_is_in_no_cache(tmp_path):
    """A model that vLLM sees for the first time on this machine is looked at in a process of vLLM's own."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm.model_executor.models import registry
    model = registry.ModelRegistry.models["CLIPModel"]
    found = model.inspect_model_cls()
    import zmq
    tell(architecture=found.architecture, multimodal=found.supports_multimodal)
    tell(stub=registry._run_in_subprocess(lambda: __import__("zmq").__spec__.origin == "engine_client"))
""",
        env={"VLLM_CACHE_ROOT": str(tmp_path / "cache")},
    )
    values = told(result)
    assert values["architecture"] == "CLIPEmbeddingModel"
    assert values["multimodal"] is True
    assert values["stub"] is (find_spec("zmq") is None)
    assert list((tmp_path / "cache").rglob("*CLIP*.json")), "it was in a cache"
