"""News from threads into event loops: one wake-up for a burst, nothing for a loop that is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from engine_client.clients.calls import Reply
from engine_client.clients.mailbox import Mailboxes
from helpers.timing import DEADLOCK, eventually


def run(coroutine: Awaitable[Any]) -> Any:
    """Run a coroutine in a loop of its own; what hangs fails."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, DEADLOCK)

    return asyncio.run(bounded())


def test_a_burst_wakes_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is posted before the loop looks is delivered by one wake-up, in order; what comes later by another."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake_ups: list[Any] = []
        real = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: wake_ups.append(call) or real(call))
        seen: list[int] = []
        for number in range(100):
            assert boxes.post(loop, lambda number=number: seen.append(number))  # type: ignore[misc]
        assert seen == []
        await asyncio.sleep(0)
        assert seen == list(range(100))
        assert len(wake_ups) == 1
        boxes.post(loop, lambda: seen.append(100))
        await asyncio.sleep(0)
        assert seen[-1] == 100
        assert len(wake_ups) == 2

    boxes = Mailboxes()
    assert "loops=0" in repr(boxes)
    run(main())


def test_a_slow_callback_of_a_reply_holds_up_nobody_who_waits_for_it() -> None:
    """Also where it was added before the wait began: it runs on the reader's thread, which tells the loop first."""
    go_on = threading.Event()

    async def main() -> None:
        reply = Reply()
        reply.add_done_callback(lambda _: go_on.wait(DEADLOCK))
        waiting = asyncio.ensure_future(boxes.wait(reply))
        await asyncio.sleep(0)
        ending = threading.Thread(target=reply.set_result, args=(1,))
        ending.start()
        try:
            assert await asyncio.wait_for(waiting, DEADLOCK / 2)
            assert ending.is_alive()
        finally:
            go_on.set()
            ending.join(DEADLOCK)

    boxes = Mailboxes()
    run(main())


def test_posts_of_many_threads_all_arrive() -> None:
    """Whoever posts while the loop delivers is not forgotten."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        all_seen = asyncio.Event()

        def see() -> None:
            seen.append(1)
            if len(seen) == 2000:
                all_seen.set()

        threads = [threading.Thread(target=lambda: [boxes.post(loop, see) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        await all_seen.wait()
        for thread in threads:
            thread.join()

    boxes = Mailboxes()
    run(main())


def test_a_closed_loop_takes_nothing_and_is_told_once() -> None:
    """Posting to it says so, and so does a waker of it; ``take_closed`` names it one time; no other loop is touched."""

    async def main() -> tuple[Any, Any]:
        return boxes.current(), boxes.waker(boxes.future())

    boxes = Mailboxes()
    assert boxes.take_closed() == []
    loops = [asyncio.new_event_loop() for _ in range(2)]
    try:
        (current, waker), (other, _) = [loop.run_until_complete(main()) for loop in loops]
        assert current != other
        assert loops[0].run_until_complete(main())[0] == current
        assert boxes.take_closed() == []
        loops[0].close()
        for _ in range(2):
            assert not boxes.post(loops[0], list)
            assert not waker("whatever")
        assert boxes.take_closed() == [current]
        assert boxes.take_closed() == []
        assert boxes.post(loops[1], list)
    finally:
        for loop in loops:
            loop.close()
    assert boxes.take_closed() == [other]


def test_a_loop_that_is_closed_before_it_delivers_is_found_out() -> None:
    """News that were due when the loop was closed are dropped, and whoever brings the next is told."""
    boxes = Mailboxes()
    loop = asyncio.new_event_loop()
    assert boxes.post(loop, list)
    loop.close()
    assert not boxes.post(loop, list)


def test_a_loop_that_is_closed_under_a_post_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed between the look and the call, it makes no difference."""
    boxes = Mailboxes()
    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    assert not boxes.post(loop, list)


def test_a_loop_that_is_gone_counts_as_closed() -> None:
    """The mailboxes keep no loop alive, and what stood for it is still told."""

    def use() -> Any:
        return asyncio.run(main())

    async def main() -> Any:
        return boxes.current()

    boxes = Mailboxes()
    current = use()
    eventually(lambda: gc.collect() >= 0 and "loops=0" in repr(boxes), DEADLOCK)
    assert not current.post(list)
    assert boxes.take_closed() == [current]


def test_waiting_for_a_reply() -> None:
    """It ends when the reply does, at once if it has; in time if it does not; cancelled, it harms nothing."""

    async def main() -> None:
        reply = Reply()
        assert not await boxes.wait(reply, 0.01)
        task = asyncio.create_task(boxes.wait(reply))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        threading.Timer(0.02, reply.set_result, (1,)).start()
        assert await boxes.wait(reply)
        assert await boxes.wait(reply, 0)

    boxes = Mailboxes()
    run(main())


def test_a_consumer_lets_others_take_turns() -> None:
    """It goes on without a pause for some milliseconds only, and does not pause when the loop has just turned."""

    async def main() -> None:
        turns: list[int] = []
        await asyncio.sleep(0)
        boxes.current()
        asyncio.get_running_loop().call_soon(turns.append, 1)
        await boxes.take_turns()
        assert turns == []
        time.sleep(0.01)  # noqa: ASYNC251  # a consumer that is busy
        await boxes.take_turns()
        assert turns == [1]

    boxes = Mailboxes()
    run(main())


@pytest.mark.parametrize(("together", "order"), [(True, [1, 2, 3, "other", 0]), (False, ["other", 0, 1, 2, 3])])
def test_many_take_turns_together_or_each(together: bool, order: list[Any]) -> None:
    """Senders stay together: one of them waits, for all.  Of consumers each lets the others of the loop go on."""

    async def task(number: int) -> None:
        await boxes.take_turns(together=together)
        found.append(number)

    async def main() -> None:
        boxes.current()
        tasks = [asyncio.ensure_future(task(number)) for number in range(4)]
        asyncio.get_running_loop().call_soon(found.append, "other")
        time.sleep(0.01)  # noqa: ASYNC251
        await asyncio.gather(*tasks)

    found: list[Any] = []
    boxes = Mailboxes()
    run(main())
    assert found == order
