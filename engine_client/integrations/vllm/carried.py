"""vLLM's configuration on its way to the engine process, where vLLM may be impossible to import as things are.

Decoding a ``VllmConfig`` imports vLLM, which imports zmq.  A pickle is decoded from front to back, so the carrier puts
something in front of the configuration that provides the stub::

    pickle:  _arrive( _Prelude → provide_everywhere()  ,  VllmConfig → import vllm → import zmq )
                        first                    then

Threads: plain data.
"""

from __future__ import annotations

from typing import Any

from engine_client.integrations.vllm.subprocesses import provide_everywhere

__all__ = ["CarriedConfig"]


class _Prelude:
    """Decodes to the result of ``provide_everywhere()``."""

    def __reduce__(self) -> Any:
        return provide_everywhere, ()


class CarriedConfig:
    """Has the attributes of a ``VllmConfig``; arrives as the configuration itself."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_vllm_config":  # not there yet, in a copy under way
            raise AttributeError(name)
        return getattr(self._vllm_config, name)

    def __reduce__(self) -> Any:
        return _arrive, (_Prelude(), self._vllm_config)


def _arrive(prelude: Any, vllm_config: Any) -> Any:  # decoded for its effect
    return vllm_config
