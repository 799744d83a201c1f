"""The client layer between an LLM server's front-end and its engine core, on pipes and shared memory.

Public names are those of vLLM 0.25.1's client layer.  Importing this package is cheap: a name is loaded when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_client.config import (
        CacheConfig,
        ClientOptions,
        EngineConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from engine_client.errors import EngineDeadError, EngineGenerateError

_HOMES = {
    "engine_client.config": (
        "CacheConfig",
        "ClientOptions",
        "EngineConfig",
        "ModelConfig",
        "ParallelConfig",
        "SchedulerConfig",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
