"""vLLM's own engine, front-ends and server on this library's processes, pipes and shared memory; no ZMQ needed.

::

    LLM · AsyncLLM · server ── make_client ─▶ our client ═══ pipe · arenas ═══ BusyLoop ── adapter ── vLLM's EngineCore
                             ▲ patched by install()                                      ▲ build_engine

Call ``install()`` before vLLM is imported; or start ``python -m engine_client.integrations.vllm``.
"""

from __future__ import annotations

from engine_client.integrations.vllm.install import install
from engine_client.integrations.vllm.refusals import UnsupportedError

__all__ = ["UnsupportedError", "install"]
