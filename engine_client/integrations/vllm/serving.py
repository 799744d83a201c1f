"""One API server in front of all engines, where vLLM would start a server for each.

Several API servers, ranks without a server, and a server for each rank launch vLLM's own engines, which listen on ZMQ
sockets; the client never gets to see them.  So the functions that launch them are replaced by a refusal.

Threads: as vLLM's command line, on the main thread.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Final, NoReturn

from engine_client.integrations.vllm.after_import import wrap_once
from engine_client.integrations.vllm.refusals import unsupported

__all__ = ["patch_serve"]

_LAUNCHERS: Final = {
    "run_multi_api_server": "several API servers (--api-server-count), or one in Rust",
    "run_headless": "engines without an API server (--headless)",
    "run_dp_supervisor": "an API server for each rank (--data-parallel-multi-port-external-lb)",
}
"""Which feature each function of vLLM's command line is for."""


def patch_serve(module: ModuleType) -> None:
    """Have ``vllm serve`` start one API server unless it is told otherwise, and refuse what it cannot carry.

    Args:
        module: ``vllm.entrypoints.cli.serve``.
    """
    command = vars(module)["ServeSubcommand"]
    wrap_once(command, "cmd", _with_one_server)
    for name, feature in _LAUNCHERS.items():
        if hasattr(module, name):
            setattr(module, name, functools.partial(_refuse, feature))


def _with_one_server(command: Any) -> Any:
    @functools.wraps(command)
    def wrapper(args: Any) -> None:
        if args.api_server_count is None and not args.headless:  # vLLM's default is one for each rank
            args.api_server_count = 1
        command(args)

    return wrapper


def _refuse(feature: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise unsupported(
        feature,
        "vLLM launches their engines by itself, and talks to them over ZMQ",
        "use one API server (--api-server-count 1), which serves all engines of this host, or vLLM alone, with pyzmq",
    )
