"""The queue of outputs: its end, and what an interrupt leaves in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_client.clients.in_flight import InFlight
from engine_client.clients.outputs import OutputQueue
from engine_client.deadline import Deadline
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from engine_client.protocol.batch import Columns, encode_outputs
from helpers.timing import DEADLOCK, eventually
from helpers.transport import columns_of


def batch(keys: dict[str, int], *outputs: EngineCoreOutput, **fields: Any) -> Columns:
    frame, _ = encode_outputs(EngineCoreOutputs(0, list(outputs), **fields), keys)
    assert frame is not None
    return columns_of(frame)[0]


def get(queue: OutputQueue, timeout: float | None) -> EngineCoreOutputs:
    """As the client does it."""
    taken: list[Any] = []
    try:
        return queue.get(Deadline(timeout), taken)
    except KeyboardInterrupt:
        queue.put_back(taken)
        raise


def last(name: str) -> EngineCoreOutput:
    return EngineCoreOutput(name, [1], finish_reason=FinishReason.STOP)


@pytest.fixture
def table() -> InFlight:
    return InFlight()


@pytest.fixture
def queue(table: InFlight) -> OutputQueue:
    return OutputQueue(table)


def test_batches_come_in_order(table: InFlight, queue: OutputQueue) -> None:
    """What the reader puts, ``get`` returns; batches of which nothing is left are passed over, statistics are not."""
    key = table.add("a")
    queue.put(batch({"b": 99}, EngineCoreOutput("b", [5])))
    queue.put(batch({"a": key}, EngineCoreOutput("a", [1])))
    queue.put(batch({}, scheduler_stats=SchedulerStats(step_counter=7)))
    queue.put(batch({"a": key}, last("a")))
    assert "batches=4" in repr(queue)
    assert get(queue, 0).outputs == [EngineCoreOutput("a", [1])]
    stats = get(queue, 0).scheduler_stats
    assert stats is not None
    assert stats.step_counter == 7
    assert get(queue, 0).outputs == [last("a")]
    with pytest.raises(TimeoutError, match="within 0 s"):
        get(queue, 0)


def test_the_end_comes_after_the_last_batch_and_stays(table: InFlight, queue: OutputQueue) -> None:
    """Everything that was put is delivered, then every call raises an error of its own."""
    queue.put(batch({"a": table.add("a")}, last("a")))
    queue.end(lambda: ConnectionError("over"))
    assert get(queue, None).outputs == [last("a")]
    errors = []
    for _ in range(3):
        with pytest.raises(ConnectionError) as caught:
            get(queue, None)
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert "ended" in repr(queue)


def test_the_end_reaches_everybody_who_waits(queue: OutputQueue) -> None:
    """Each blocked thread is told."""
    told: list[str] = []

    def wait() -> None:
        try:
            get(queue, None)
        except ConnectionError as error:
            told.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    queue.end(lambda: ConnectionError("over"))
    for thread in threads:
        thread.join(DEADLOCK)
    assert told == ["over"] * 5


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_batch_is_delivered_to_the_next_call(
    table: InFlight, queue: OutputQueue, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """An interrupt between queue and caller loses nothing, last outputs included."""
    outputs = table.outputs

    def interrupted(columns: Columns) -> EngineCoreOutputs:
        if moment == "after":
            outputs(columns)
        raise KeyboardInterrupt

    queue.put(batch({"a": table.add("a"), "b": table.add("b")}, last("a"), EngineCoreOutput("b", [2])))
    for _ in range(2):
        monkeypatch.setattr(table, "outputs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get(queue, 0)
    monkeypatch.setattr(table, "outputs", outputs)
    assert get(queue, 0).outputs == [last("a"), EngineCoreOutput("b", [2])]
    assert len(table) == 1


def test_an_interrupted_batch_wakes_another_thread(
    table: InFlight, queue: OutputQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits at the queue gets what an interrupted one has put back."""
    outputs = table.outputs
    got: list[EngineCoreOutputs] = []
    thread = threading.Thread(target=lambda: got.append(get(queue, DEADLOCK)))

    def interrupted(columns: Columns) -> EngineCoreOutputs:
        monkeypatch.setattr(table, "outputs", outputs)
        thread.start()
        eventually(queue.queue.empty, DEADLOCK)
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "outputs", interrupted)
    queue.put(batch({"a": table.add("a")}, last("a")))
    with pytest.raises(KeyboardInterrupt):
        get(queue, 0)
    thread.join(DEADLOCK)
    assert got[0].outputs == [last("a")]


def test_rows_of_the_interrupted_thread_are_dropped(table: InFlight, queue: OutputQueue) -> None:
    """What its session aborts meanwhile does not reach the next call."""
    keys = {"mine": table.add("mine"), "other": table.add("other")}
    queue.unread.append(batch(keys, last("mine"), last("other")))
    table.discard(keys["mine"])
    assert get(queue, 0).outputs == [last("other")]


def test_an_interrupt_at_the_end_marker_loses_no_end(queue: OutputQueue) -> None:
    """The end is found even if the one mark of it went to a call that was interrupted."""
    queue.end(lambda: ConnectionError("over"))
    queue.unread.append(queue.queue.get())
    with pytest.raises(ConnectionError):
        get(queue, None)


def test_listeners_are_told_of_all_news(table: InFlight, queue: OutputQueue) -> None:
    """At each batch, at what an interrupt put back, and at the end; not any more once they have left."""
    key = table.add("a")
    news: list[str] = []

    def listener() -> bool:
        news.append("news")
        return True

    queue.listen(listener)
    queue.put(batch({"a": key}, EngineCoreOutput("a", [1])))
    taken: list[Any] = []
    queue.take(Deadline(0), taken)
    queue.put_back(taken)
    queue.end(KeyError)
    assert len(news) == 3
    queue.unlisten(listener)
    queue.unlisten(listener)
    queue.put(batch({"a": key}, EngineCoreOutput("a", [1])))
    assert len(news) == 3


def test_a_listener_that_is_gone_is_reported_once(table: InFlight) -> None:
    """One that says so is not called again, and whoever has the queue hears of it."""
    orphaned: list[None] = []
    queue = OutputQueue(table, on_orphaned=lambda: orphaned.append(None))
    key = table.add("a")
    queue.listen(lambda: False)
    for _ in range(2):
        queue.put(batch({"a": key}, EngineCoreOutput("a", [1])))
    assert len(orphaned) == 1


def test_a_batch_that_was_put_back_is_turned_again(table: InFlight, queue: OutputQueue) -> None:
    """Taken by hand, as coroutines do it, turned and put back, it ends its request for the next one only."""
    key = table.add("a")
    queue.put(batch({"a": key}, last("a")))
    taken: list[Any] = []
    assert queue.turn(queue.take(Deadline(0), taken)) is not None
    queue.put_back(taken)
    assert get(queue, 0).outputs == [last("a")]
    assert len(table) == 0
