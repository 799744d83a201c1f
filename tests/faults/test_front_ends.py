"""Several front-end processes share engines that another process has launched: nobody's end or stall is another's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from engine_client.protocol.frames import Kind
from engine_client.protocol.wire import encode_text
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.clients import make_request, pids_of, session_of
from helpers.guests import Guest, add, await_death, finish, guest_client, launched, run, shake
from helpers.procs import script_environment, wait_gone
from helpers.timing import DEADLOCK, MS, eventually

LONG = 1_000_000


def requests_of(engines: Any) -> list[set[str]]:
    """Return the ids of the requests in each engine, with the number of their front-end in front."""
    return [set(info["requests"]) for info in engines.call_utility("info", ranks=range(len(pids_of(engines))))]


def all_requests(engines: Any) -> set[str]:
    return set().union(*requests_of(engines))


def memory_of(pid: int) -> set[str]:
    """Return what memory a process has open, by what it is for."""
    names = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}").partition("engine-client-engine-")[2].split(" ")[0])
    return names


def guests_of(stack: ExitStack, engines: Any, **options: Any) -> list[Guest]:
    """Start a front-end process for each endpoint."""
    return [stack.enter_context(Guest(endpoint, **options)) for endpoint in engines.endpoints]


def check_deaths(guests: Iterable[Guest], began: float, text: str) -> None:
    """Make sure that all front-ends, which were told to await it, had the error within two seconds."""
    for guest in guests:
        at, message = guest.answer()
        assert text in message
        assert at - began < 2000 * MS


# -- they serve ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_front_ends_with_equal_request_ids_each_get_their_own(method: str) -> None:
    """Endpoints travel by every start method; outputs go to whoever asked, though all use the same ids."""
    with launched(2, 2) as engines, ExitStack() as stack:
        guests = guests_of(stack, engines, method=method)
        names = [f"r{number}" for number in range(50)]
        for number, guest in enumerate(guests):
            guest.ask(finish, names, 3 + number)
        for number, guest in enumerate(guests):
            assert guest.answer()[0] == dict.fromkeys(names, 3 + number)
        assert [guest.end() for guest in guests] == [0, 0]
        assert all_requests(engines) == set()
        engines.check_health()
        stack.pop_all()


@pytest.mark.parametrize("end", ["client.shutdown()", "del client", "pass", "sys.exit()"])
def test_a_program_of_its_own_is_a_front_end(end: str) -> None:
    """It gets the text of the endpoint and its descriptors; however it ends, it does so at once and in silence."""
    code = """
    import sys
    from engine_client.clients.endpoint import Endpoint
    from helpers.guests import finish, guest_client
    client = guest_client(Endpoint.from_text(sys.argv[1]))
    assert client.client_count == 2 and client.client_index == 1
    print(finish(client, ["a"], 5)[0])
    """
    with launched(1, 2) as engines, engines.endpoints[1] as endpoint:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code) + end, str(endpoint)],
            pass_fds=endpoint.pass_fds,
            env=script_environment(),
            capture_output=True,
            text=True,
            timeout=DEADLOCK,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout == "{'a': 5}\n"
        engines.check_health()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "count", "requests", "is_moe"),
    [
        pytest.param(2, 3, 150, False, id="small"),
        pytest.param(2, 2, 60, True, id="lock-step"),
        pytest.param(8, 4, 2000, False, id="full", marks=[pytest.mark.stress, pytest.mark.timeout(600)]),
    ],
)
def test_every_output_is_accounted_for_exactly_once(ranks: int, count: int, requests: int, is_moe: bool) -> None:
    """Requests of all front-ends are aborted at random; each is aborted or complete, and nothing comes twice."""
    with launched(ranks, count, is_moe=is_moe) as engines, ExitStack() as stack:
        guests = guests_of(stack, engines)
        for number, guest in enumerate(guests):
            guest.ask(shake, requests, 8, number)
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda guest: eventually(guest.pipe.poll, 500) and guest.answer(), guests))
        for complete, aborted in answers:
            assert complete + aborted == requests
            assert complete > requests / 4
            assert aborted > requests / 8
        eventually(lambda: all_requests(engines) == set(), DEADLOCK)
        steps = [info["steps"] for info in engines.call_utility("info", ranks=range(ranks))]
        assert min(steps) > 0


@pytest.mark.crash
@pytest.mark.slow
def test_what_is_left_is_accounted_for_when_others_are_killed_in_between() -> None:
    """Two of three front-ends are killed at some moment; the third one's outputs are all there, once."""
    with launched(2, 3) as engines, ExitStack() as stack:
        guests = guests_of(stack, engines)
        for number, guest in enumerate(guests):
            guest.ask(shake, 300, 8, number)
        for guest in guests[1:]:
            time.sleep(0.1)
            guest.kill()
        complete, aborted = guests[0].answer()
        assert complete + aborted == 300
        eventually(lambda: all_requests(engines) == set(), DEADLOCK)
        engines.check_health()


# -- a front-end ends ----------------------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.slow
def test_a_front_end_that_dies_has_its_requests_aborted() -> None:
    """The engine learns of it although the launcher holds a copy of every pipe; the others go on."""
    with launched(1, 2, Script(step_seconds=0.002)) as engines, ExitStack() as stack:
        first, second = guests_of(stack, engines)
        first.do(add, ["a", "b"], LONG)
        second.do(add, ["a"], LONG)
        eventually(lambda: all_requests(engines) == {"0/a", "0/b", "1/a"}, DEADLOCK)
        first.kill()
        eventually(lambda: all_requests(engines) == {"1/a"}, 2000 * MS)
        engines.endpoints[0].close()  # then nobody holds its memory
        for pid in (os.getpid(), *pids_of(engines)):
            assert {"requests-0", "requests-1"} & memory_of(pid) == {"requests-1"}
        assert second.do(finish, ["b"], 5)[0] == {"b": 5}


@pytest.mark.crash
@pytest.mark.slow
def test_a_front_end_that_dies_before_the_engine_has_looked_is_noticed() -> None:
    """What it had sent by then is read after its death, and aborted."""
    with launched(1, 1, Script(step_seconds=0.002)) as engines:
        busy = threading.Thread(target=engines.call_utility, args=("wait", 2.0))
        busy.start()
        with Guest(engines.endpoints[0]) as guest:
            guest.do(add, ["a"], LONG)
            guest.kill()
        busy.join()
        eventually(lambda: all_requests(engines) == set(), 2000 * MS)
        assert engines.call_utility("info")["steps"] < 100


@pytest.mark.parametrize("how", ["shut down", "dropped"])
def test_a_front_end_that_leaves_is_noticed_though_its_process_lives_on(how: str) -> None:
    """Its requests are aborted; it ends no engine, and neither does a SHUTDOWN message of a guest."""

    async def main() -> None:
        clients = [guest_client(endpoint) for endpoint in engines.endpoints]
        for client in clients:
            await client.add_request_async(make_request("a", LONG))
        eventually(lambda: all_requests(engines) == {"0/a", "1/a"}, DEADLOCK)
        first, second = clients
        clients.clear()
        if how == "shut down":
            first.shutdown()
            assert not first.is_alive
        del first, client
        eventually(lambda: all_requests(engines) == {"1/a"}, DEADLOCK)
        with second:
            for link in session_of(second).links.values():
                session_of(second).send(link, encode_text(Kind.SHUTDOWN, "a guest asks"))
            assert await second.call_utility_async("echo", 5) == 5
            engines.check_health()
        eventually(lambda: all_requests(engines) == set(), DEADLOCK)

    with launched(2, 2, Script(step_seconds=0.002)) as engines:
        asyncio.run(main())


@pytest.mark.crash
@pytest.mark.slow
def test_a_front_end_that_stalls_holds_up_nobody_and_is_cut_off() -> None:
    """Stopped while outputs flow, it loses its place once too much waits for it; the others feel no pause."""
    script = Script(step_seconds=0.005, tokens_per_step=5000)
    with launched(1, 2, script, backlog_limit=8 << 20, arena_limit=0) as engines, ExitStack() as stack:
        first, second = guests_of(stack, engines)
        first.do(add, ["a", "b", "c", "d"], 1 << 40)
        second.do(finish, ["warm"], 5000)
        first.ask(await_death)
        with frozen(first.pid):
            tokens, silence = second.do(finish, ["x"], 5000 * 200)
            assert tokens == {"x": 5000 * 200}
            assert silence < 1000 * MS
            eventually(lambda: not any(name.startswith("0/") for name in all_requests(engines)), DEADLOCK)
            assert second.do(finish, ["y"], 5000)[0] == {"y": 5000}
        _, message = first.answer()
        assert "serves this front-end no longer, though it runs" in message
        engines.check_health()


@pytest.mark.crash
@pytest.mark.slow
def test_a_front_end_that_stalls_does_not_fill_the_memory() -> None:
    """Big outputs wait in shared memory, which all share; they count, too."""
    with launched(1, 2, Script(step_seconds=0.004), backlog_limit=8 << 20) as engines, ExitStack() as stack:
        first, second = guests_of(stack, engines)
        engines.call_utility("set_echo_tensor", True)
        first.do(add_big, 128 << 10)
        with frozen(first.pid):
            eventually(lambda: all_requests(engines) == set(), DEADLOCK)
            assert os.fstat(engines.endpoints[0].ranks[0].arena_in).st_blocks * 512 < 256 << 20
        assert second.do(finish, ["a"], 3)[0] == {"a": 3}


def add_big(client: Any, size: int) -> None:
    """Send a request that is answered by its own bytes, again and again."""
    import numpy as np

    run(client.add_request_async(make_request("a", LONG, prompt_embeds=np.ones(size, np.uint8))))


# -- the launcher or an engine ends --------------------------------------------------------------------------------


@pytest.mark.slow
def test_front_ends_learn_that_their_launcher_has_shut_down() -> None:
    """Whoever waits gets the error within two seconds; so does whoever comes later."""
    with launched(2, 3) as engines, ExitStack() as stack:
        guests = [stack.enter_context(Guest(endpoint)) for endpoint in engines.endpoints[:2]]
        late = guest_client(engines.endpoints[2])
        for guest in guests:
            guest.do(finish, ["a"], 1)
            guest.ask(await_death)
        began = time.monotonic()
        engines.shutdown()
        check_deaths(guests, began, "was shut down (its client asked)")
        with late:
            assert "was shut down" in await_death(late)[1]


@pytest.mark.crash
@pytest.mark.slow
def test_front_ends_learn_that_their_launcher_was_killed(tmp_path: Path) -> None:
    """Its engines end with it, however it ends, and the front-ends are told within two seconds."""
    code = """
    import json, sys, time
    from helpers.clients import pids_of
    from helpers.guests import Guest, await_death, finish, launched

    if __name__ == "__main__":
        with launched(2, 2) as engines:
            guests = [Guest(endpoint) for endpoint in engines.endpoints]
            for number, guest in enumerate(guests):
                guest.do(finish, ["a"], 1)
                guest.ask(report, sys.argv[1] + str(number))
            print(json.dumps([pids_of(engines), [guest.pid for guest in guests]]), flush=True)
            time.sleep(600)
    """
    script = tmp_path / "launcher.py"
    script.write_text(
        textwrap.dedent("""
        def report(client, path):
            from helpers.drivers import tell
            from helpers.guests import await_death
            at, message = await_death(client)
            tell(path, at=at, message=message)
        """)
        + textwrap.dedent(code)
    )
    command = [sys.executable, str(script), str(tmp_path / "told")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=script_environment(), text=True) as launcher:
        assert launcher.stdout is not None
        pids, guests = json.loads(launcher.stdout.readline())
        time.sleep(0.1)  # the front-ends are about to wait
        began = time.monotonic()
        launcher.kill()
        for number in range(2):
            path = tmp_path / f"told{number}"
            eventually(path.exists, DEADLOCK)
            facts = json.loads(path.read_text())
            assert facts["at"] - began < 2000 * MS
            assert "died" in facts["message"] or "its client has gone" in facts["message"]
        for pid in [*pids, *guests]:
            wait_gone(pid, DEADLOCK)


@pytest.mark.crash
@pytest.mark.slow
def test_front_ends_learn_that_an_engine_was_killed() -> None:
    """Under the default policy all of them end, as the launcher does, within two seconds."""
    with launched(2, 2) as engines, ExitStack() as stack:
        guests = guests_of(stack, engines)
        for guest in guests:
            guest.do(finish, ["a"], 1)
            guest.ask(await_death)
        began = time.monotonic()
        os.kill(pids_of(engines)[1], signal.SIGKILL)
        check_deaths(guests, began, "engine core")


@pytest.mark.crash
@pytest.mark.slow
def test_front_ends_that_go_on_lose_one_rank_alone() -> None:
    """With ``on_engine_death="continue"`` here and there, the other rank serves on."""
    with launched(2, 2, on_engine_death="continue") as engines, ExitStack() as stack:
        guests = guests_of(stack, engines, on_engine_death="continue")
        os.kill(pids_of(engines)[1], signal.SIGKILL)
        wait_gone(pids_of(engines)[1], DEADLOCK)
        for guest in guests:
            assert guest.do(finish_on, 0)[0] == {"x": 4}
            with pytest.raises(AssertionError, match="EngineDeadError: engine core 1"):
                guest.do(finish_on, 1)
        engines.check_health()


def finish_on(client: Any, rank: int) -> tuple[dict[str, int], float]:
    """Have a rank answer a request."""

    async def main() -> tuple[dict[str, int], float]:
        await client.add_request_async(make_request("x", 4, data_parallel_rank=rank))
        outputs = []
        while not outputs or not outputs[-1].finished:
            outputs += (await client.get_output_async(timeout=DEADLOCK)).outputs
        return {"x": sum(len(output.new_token_ids) for output in outputs)}, 0.0

    return run(main())
