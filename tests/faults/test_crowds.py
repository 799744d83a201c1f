"""Many threads and event loops on one client, and an end in the middle of all that it does (BC-10, BC-04, BC-42)."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_client import PoolingParams
from helpers.calls import async_client
from helpers.clients import make_request, scripted_client
from helpers.payloads import pattern
from helpers.procs import run_script, script_environment
from helpers.timing import DEADLOCK

pytestmark = pytest.mark.crash

THREADS, LOOPS = 16, 3
SIZES = (10, 5_000, 70_000, 400_000)


async def exchange(client: Any, name: str, rounds: int, seed: int) -> int:
    """Send payloads of random sizes by calls and requests; check each by its checksum; return how many came back."""
    rng = random.Random(seed)
    for number in range(rounds):
        sent = pattern(seed + number, rng.choice(SIZES))
        checksum = zlib.crc32(sent)
        if rng.random() < 0.5:
            assert zlib.crc32(await client.call_utility_async("echo", sent)) == checksum
            continue
        request = make_request(
            f"{name}-{number}", prompt=None, prompt_embeds=sent, sampling_params=None, pooling_params=PoolingParams()
        )
        outputs = [output async for output in client.stream(request)]
        assert [output.request_id for output in outputs] == [f"{name}-{number}"]
        assert zlib.crc32(outputs[0].pooling_output) == checksum
    return rounds


def crowd(work: list[Callable[[], Any]]) -> list[Any]:
    """Do all of this at once, each on a thread of its own; return the results, or raise the first error."""
    results: list[Any] = []
    errors: list[BaseException] = []
    go = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> None:
        try:
            go.wait(DEADLOCK)
            results.append(one())
        except BaseException as error:  # noqa: BLE001  # it is raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_bc10_sixteen_threads_and_three_loops(ranks: int) -> None:
    """All that they send on one client comes back whole, to whoever sent it, while the client is asked how it is."""
    rounds = 6

    async def many(client: Any, loop: int) -> int:
        names = [f"loop{loop}-{task}" for task in range(4)]
        found = await asyncio.gather(*(exchange(client, name, rounds, hash(name) % 1000) for name in names))
        return sum(found)

    def one(client: Any, number: int) -> int:
        client.check_health(DEADLOCK)
        client.engine_status()
        return asyncio.run(exchange(client, f"thread{number}", rounds, number))

    with async_client(ranks) as client:
        work: list[Callable[[], int]] = [lambda n=n: one(client, n) for n in range(THREADS)]  # type: ignore[misc]
        work += [lambda n=n: asyncio.run(many(client, n)) for n in range(LOOPS)]  # type: ignore[misc]
        assert sum(crowd(work)) == (THREADS + 4 * LOOPS) * rounds
        assert client.utility_results == {}
        assert all(status.running == status.waiting == 0 for status in client.engine_status())


def test_bc10_sixteen_threads_on_the_blocking_client() -> None:
    """Calls, requests and streams of all threads at once: each payload comes back whole, each request ends once."""

    def one(number: int) -> int:
        rng = random.Random(number)
        for turn in range(6):
            sent = pattern(number + turn, rng.choice(SIZES))
            assert zlib.crc32(client.call_utility("echo", sent)) == zlib.crc32(sent)
            outputs = list(client.stream(make_request(f"{number}-{turn}", 5)))
            assert sum(len(output.new_token_ids) for output in outputs) == 5
            assert {output.request_id for output in outputs} == {f"{number}-{turn}"}
        return 1

    with scripted_client() as client:
        assert crowd([lambda n=n: one(n) for n in range(THREADS)]) == [1] * THREADS  # type: ignore[misc]
        assert client.utility_results == {}


EVERYTHING = """
import asyncio, sys, threading, time
import numpy as np
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, scripted_client

sync = scripted_client(Script(step_seconds=0.01))
other = async_client(2, Script(step_seconds=0.01))
kept = sync.call_utility("echo", np.arange(100_000))
stream = sync.stream(make_request("stream", 100_000))
next(stream)
sync.add_request(make_request("left", 100_000))

def forever(call):
    def run():
        try:
            while True:
                call()
        except BaseException:
            pass  # what a daemon thread is told at the end is nobody's business
    threading.Thread(target=run, daemon=True).start()

for number in range(4):
    forever(lambda: sync.call_utility("echo", np.arange(50_000)))
    forever(sync.get_output)
forever(sync.dump_stacks)
forever(lambda: sync.call_utility("deferred"))

async def consume():
    async def calls():
        while True:
            await other.call_utility_async("echo", bytes(70_000))
    async def read(name):
        async for _ in other.stream(make_request(name, 100_000)):
            pass
    await asyncio.gather(calls(), read("a"), read("b"), other.get_output_async(), other.call_utility_async("deferred"))

forever(lambda: asyncio.run(consume()))
time.sleep(AGE)
print("end", flush=True)
END
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "pass", pytest.param("del sync, other", marks=pytest.mark.full)])
@pytest.mark.parametrize("age", [0.5, pytest.param(0.05, marks=pytest.mark.full)])
def test_bc04_bc42_the_interpreter_ends_with_everything_in_flight(end: str, age: float) -> None:
    """Streams, calls, loops and stacks on threads that know nothing of it: status 0, not a word, nothing left."""
    script = EVERYTHING.replace("AGE", str(age)).replace("END", end)
    result = run_script(script, flags=()).check(0)
    assert result.stdout == "end\n"


def test_bc10_on_the_free_threaded_build(tmp_path: Path) -> None:
    """Where there is a Python without the global lock, threads share a client there as well."""
    python = free_threaded(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(FREE_THREADED, encoding="utf-8")
    began = time.monotonic()
    done = subprocess.run(
        [python, str(script)], env=script_environment(), capture_output=True, text=True, timeout=DEADLOCK, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True 16\n"), (done.stderr, time.monotonic() - began)


def free_threaded(folder: Path) -> str:
    """Return a free-threaded Python that has what the library needs, in an environment of its own if it must be."""
    python = shutil.which("python3.13t")
    if python is None:
        pytest.skip("needs a free-threaded Python: there is no python3.13t on PATH")

    def done(*arguments: str) -> bool:
        return not subprocess.run([python, *arguments], capture_output=True, timeout=300, check=False).returncode

    if not done("-c", "import psutil, tblib"):
        assert done("-m", "venv", str(folder / "venv"))
        python = str(folder / "venv" / "bin" / "python")
        if not done("-m", "pip", "install", "psutil>=5.9.6", "tblib>=3.0.0"):
            pytest.skip("python3.13t has neither psutil nor tblib, and pip cannot install them")
    return python


FREE_THREADED = """
import sys, threading, zlib
from helpers.clients import make_request, scripted_client

def main():
    found = []
    with scripted_client() as client:
        def work(number):
            for turn in range(20):
                sent = bytes([number]) * (1000 << turn % 10)
                assert zlib.crc32(client.call_utility("echo", sent)) == zlib.crc32(sent)
                assert len(list(client.stream(make_request(f"{number}-{turn}", 3)))) == 3
            found.append(number)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    print(not sys._is_gil_enabled(), len(found))

if __name__ == "__main__":
    main()
"""
