"""Which vLLM this integration is for, and which one is here.

The client takes vLLM's requests and gives its outputs field by field, so another release of vLLM is another protocol.

Threads: functions without state.
"""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine_client.integrations.vllm.refusals import unsupported

__all__ = ["TESTED", "check_version", "installed_version"]

TESTED: Final = "0.25.1"
"""The version whose requests, outputs and factories this integration knows."""

_SERIES: Final = TESTED.rpartition(".")[0] + "."


def installed_version() -> str | None:
    """Return the version of the vLLM that an import would load, without loading it.

    Returns:
        Its public part, such as ``"0.25.1"``; ``"unknown"`` if its files do not tell; None if there is no vLLM.
    """
    spec = find_spec("vllm")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder, "_version.py")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"+]+)", text, re.MULTILINE)
        if found:
            return found[1]
    return "unknown"


def check_version() -> None:
    """Warn of a vLLM that is not tested, and refuse one of another release.

    Raises:
        UnsupportedError: its requests and outputs have other fields, or may have.
    """
    version = installed_version()
    if version is None or version == TESTED:
        return
    if version == "unknown" or version.startswith(_SERIES):
        message = f"engine_client is tested with vLLM {TESTED}; the version of this one is {version}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    raise unsupported(
        f"vLLM {version}",
        f"it knows the fields of requests and outputs of {TESTED} only",
        f"install vLLM {TESTED}, or use vLLM's own client (with pyzmq)",
    )
