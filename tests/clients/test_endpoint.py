"""What travels to a front-end's process, and how often it can be used."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterator

import pytest

from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.ipc.arena import create_memory
from engine_client.messages import EngineCoreReadyResponse
from helpers.procs import run_script

RESPONSE = dict(zip(EngineCoreReadyResponse.__dataclass_fields__, (4096, 8, 16, None, "auto", "1", 1, 2), strict=False))


def make(index: int = 0) -> Endpoint:
    """Return an endpoint of two engines in lock-step, whose descriptors are all memory."""
    requests, group, *fds = (create_memory(f"test-{index}") for _ in range(8))
    ends = [RankEnd(rank, 77 + rank, *fds[3 * rank : 3 * rank + 3], RESPONSE) for rank in range(2)]
    return Endpoint(index, 3, requests, ends, group=group, main={}, launcher_pid=os.getpid())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = make()
    yield made
    made.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_it_travels_by_text_with_its_descriptors(endpoint: Endpoint) -> None:
    """A process that has inherited the descriptors makes the same of the text, once."""
    code = """
    import sys
    from engine_client.clients.endpoint import Endpoint
    endpoint = Endpoint.from_text(sys.argv[1])
    assert str(endpoint) == sys.argv[1]
    assert not any(map(__import__("os").get_inheritable, endpoint.pass_fds))
    print(endpoint, endpoint.ranks[1].ready_response().max_model_len, repr(endpoint))
    try:
        Endpoint.from_text(sys.argv[1])
    except ValueError as error:
        print(error)
    """
    import subprocess
    import sys
    import textwrap

    command = [sys.executable, "-c", textwrap.dedent(code), str(endpoint)]
    done = subprocess.run(command, pass_fds=endpoint.pass_fds, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4096 <Endpoint 0 of 3 open ranks=[0, 1]>" in done.stdout
    assert "an endpoint was made from this text already" in done.stdout


def test_a_process_that_has_not_inherited_the_descriptors_is_told(endpoint: Endpoint) -> None:
    """Nothing there, or something else under these numbers: neither is touched."""
    code = """
    import os, sys
    from engine_client.clients.endpoint import Endpoint
    other = os.open("/dev/null", os.O_RDONLY)
    for _ in range(2):
        try:
            Endpoint.from_text(sys.argv[1])
        except ValueError as error:
            print(error)
        for fd in range(3, 64):
            if fd != other:
                os.dup2(other, fd)
    os.fstat(other)
    """
    done = run_script(code, str(endpoint)).check()
    assert done.stdout.count("were not inherited: start the process with pass_fds=endpoint.pass_fds") == 2


@pytest.mark.parametrize("text", ["", "x", "[]", "[0, 1, 2, null, {}, 3, [{}], []]", "null"])
def test_another_text_is_refused(text: str) -> None:
    """A text that is no endpoint's is a ValueError, whatever it is."""
    with pytest.raises(ValueError, match="this is no endpoint's text"):
        Endpoint.from_text(text)


@pytest.mark.parametrize("spoil", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled_elsewhere(endpoint: Endpoint, spoil) -> None:
    """A queue or a pipe cannot carry it; the error says what can."""
    with pytest.raises(TypeError, match=r"give it to multiprocessing\.Process as an argument"):
        spoil(endpoint)


def test_it_cannot_be_used_twice(endpoint: Endpoint) -> None:
    """The second use is refused: of the same object, and of any copy, here or in another process."""
    fds = list(map(os.dup, endpoint.pass_fds))
    other = Endpoint.from_text(str(endpoint), fds)
    endpoint.take()
    assert repr(endpoint) == "<Endpoint 0 of 3 taken ranks=[0, 1]>"
    for each in (endpoint, other):
        with pytest.raises(ValueError, match="endpoint 0 was used or closed already"):
            each.take()
    with pytest.raises(ValueError, match="used or closed"):
        _ = endpoint.pass_fds
    other.close()
    assert not any(map(is_open, fds))


def test_a_closed_one_cannot_be_passed_on(endpoint: Endpoint) -> None:
    """Its numbers may be other descriptors by now."""
    with endpoint:
        numbers = endpoint.pass_fds
    endpoint.close()
    assert not any(map(is_open, numbers))
    assert repr(endpoint) == "<Endpoint 0 of 3 closed ranks=[0, 1]>"
    with pytest.raises(ValueError, match="used or closed"):
        _ = endpoint.pass_fds
    with pytest.raises(ValueError, match="used or closed"):
        multiprocessing.get_context("spawn").Process(target=print, args=(endpoint,)).start()


def test_one_that_is_dropped_is_closed() -> None:
    """The descriptors go with the last reference, but for those that have another owner."""
    endpoint = make()
    endpoint.take()
    mine = endpoint.disown(endpoint.arena_out)
    rest = [end.channel for end in endpoint.ranks]
    del endpoint
    gc.collect()
    assert is_open(mine)
    os.close(mine)
    assert not any(map(is_open, rest))


def test_without_seals_it_can_still_be_used(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> None:
    """Memory that is an unlinked file knows no seals."""

    def refuse(*_: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("engine_client.clients.endpoint.fcntl.fcntl", refuse)
    endpoint.take()
    with pytest.raises(ValueError, match="used or closed"):
        endpoint.take()


def test_a_forked_front_end_lets_go_of_the_others() -> None:
    """It has inherited the endpoints of all; what it was given itself it keeps."""
    mine, other = make(0), make(1)
    numbers = other.pass_fds
    pid = os.fork()
    if not pid:
        code = 1
        try:
            given = Endpoint.from_text(str(mine), list(map(os.dup, mine.pass_fds)))
            mine.take()
            code = any(map(is_open, numbers)) + 2 * (not all(map(is_open, given.pass_fds)))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(map(is_open, numbers))
    mine.close()
    other.close()
