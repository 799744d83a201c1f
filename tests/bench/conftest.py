"""What others' packages keep for the life of a process is there before a test, so that it is no leak of that test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def zmq_thread() -> Iterator[None]:
    """Have what pyzmq lets go of buffers by that were sent without a copy: a thread, and sockets to it."""
    import zmq
    from zmq.utils.garbage import gc

    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://first")
        theirs.connect("inproc://first")
        ours.send(bytearray(1 << 17), copy=False)
        theirs.recv()
    yield
    gc.stop()


@pytest.fixture(scope="module")
def open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have matplotlib's fonts open, which it never closes."""
    from bench.test_charts import full_results
    from engine_client.bench import plot

    plot.draw(full_results(), str(tmp_path_factory.mktemp("plot") / "first.svg"))
