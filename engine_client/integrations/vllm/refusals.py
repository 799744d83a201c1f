"""What this library does not carry for vLLM, as one error that says which feature it is and why.

Threads: functions without state.
"""

from __future__ import annotations

from typing import Final

from engine_client import EngineClientError

__all__ = ["UnsupportedError", "unsupported"]

_INSTEAD: Final = "use vLLM's own client (with pyzmq) for it"


class UnsupportedError(EngineClientError, RuntimeError):
    """vLLM was asked for something that cannot work on this library; nothing was started."""


def unsupported(feature: str, why: str, instead: str = _INSTEAD) -> UnsupportedError:
    """Return the error for a feature of vLLM.

    Args:
        feature: as the user knows it.
        why: it cannot be carried.
        instead: what to do.
    """
    return UnsupportedError(f"engine_client does not carry {feature}: {why}; {instead}")
