"""The descriptors of an engine as arguments."""

from __future__ import annotations

from engine_client.ipc.engine_fds import EngineFds, FrontEndFds, GroupFds


def test_arguments():
    """Descriptors travel as arguments and come back the same."""
    for fds in (
        EngineFds(3, 4, 5, 6, 7, 8),
        EngineFds(3, 4, 5, 6, 7, 8, GroupFds(9, 10, 11)),
        EngineFds(3, 4, 5, 6, 7, 8, GroupFds(9, 10, 11), (FrontEndFds(12, 13, 14), FrontEndFds(15, 16, 17))),
    ):
        assert EngineFds.from_args([*fds.to_args(), "/path"]) == (fds, ["/path"])
        assert fds.replaced(number + 100 for number in fds).replaced(fds) == fds
        assert list(fds) == list(range(3, 3 + len(list(fds))))
