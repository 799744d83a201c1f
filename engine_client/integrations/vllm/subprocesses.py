"""The stand-in for pyzmq, in the Python processes that vLLM starts by itself, too.

vLLM looks at a model's class in a process of its own, unless a cache in the user's home tells what it would find there.
That process imports vLLM, and with it zmq::

    ModelConfig ─▶ registry: cached? ─ no ─▶ python -m vllm.model_executor.models.registry ─▶ import zmq
                                             replaced by: provide the stub, then run that module

Threads: ``provide_everywhere`` from any thread; the rest is plain data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import engine_client
from engine_client.integrations.vllm.after_import import after_import
from engine_client.integrations.vllm.zmq_stub import is_stub, provide

__all__ = ["provide_everywhere"]

_REGISTRY: Final = "vllm.model_executor.models.registry"

_RUN: Final = """
import runpy, sys
sys.path.append({folder!r})
from engine_client.integrations.vllm.zmq_stub import provide
provide()
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def provide_everywhere() -> None:
    """Put the stub into ``sys.modules`` if pyzmq is missing, here and where vLLM starts a Python of its own."""
    if provide():
        after_import(_REGISTRY, _patch_registry)


def _patch_registry(module: ModuleType) -> None:
    """Have models looked at by a Python that has the stub; vLLM keeps its command in a variable to be changed."""
    if is_stub() and hasattr(module, "_SUBPROCESS_COMMAND"):
        folder = str(Path(engine_client.__file__).parent.parent)
        source = _RUN.format(folder=folder, module=_REGISTRY)
        module._SUBPROCESS_COMMAND = [sys.executable, "-c", source]  # type: ignore[attr-defined]  # noqa: SLF001  # it is there, and meant to be changed
