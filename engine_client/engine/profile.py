"""``cProfile`` around an engine's thread, for executors without a profiler of their own.

Threads: start, stop and what is profiled are on one thread, the engine's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cProfile import Profile

__all__ = ["Profiler"]


class Profiler:
    """Profiles the calling thread from ``start`` to ``stop``, which writes a file that ``pstats`` reads."""

    def __init__(self) -> None:
        self._profile: Profile | None = None
        self._path = ""
        self._serial = 0

    @property
    def is_running(self) -> bool:
        """Tell whether there is something to stop."""
        return self._profile is not None

    def start(self, prefix: str | None = None) -> str:
        """Start; return the path of the file to come, ``<prefix>-<process id>-<serial>.prof``.

        Args:
            prefix: a name, or a path whose directory exists; None: ``engine`` in the working directory.

        Raises:
            ValueError: a profiler is running already.
            NotADirectoryError: there is no such directory.
        """
        if self._profile is not None:
            raise ValueError(f"a profile is being taken already, for {self._path}; stop it first")
        path = os.path.abspath(f"{prefix or 'engine'}-{os.getpid()}-{self._serial}.prof")
        if not os.path.isdir(os.path.dirname(path)):
            raise NotADirectoryError(f"there is no directory {os.path.dirname(path)!r} to write a profile to")
        from cProfile import Profile  # noqa: PLC0415  # few engines are ever profiled

        profile = Profile()
        profile.enable()
        self._profile, self._path = profile, path
        self._serial += 1
        return path

    def stop(self) -> str:
        """Stop and write the file; return its path.

        Raises:
            ValueError: nothing is running.
            OSError: the file cannot be written; the profile is lost.
        """
        if self._profile is None:
            raise ValueError("no profile is being taken; start one first")
        profile, self._profile = self._profile, None
        profile.disable()
        profile.dump_stats(self._path)
        return self._path
