"""Plant bugs in a copy of the package, one at a time, and see that the test that is named beside each finds it.

    python tests/mutations.py                all of them
    python tests/mutations.py lease pid      those whose name has one of these words

Each bug is one line that somebody might write in good faith.  The named tests pass on the copy as it is, first; then
each must fail, or hang, with its bug.  What a bug leaves behind is of sessions of their own and is killed.  The exit
status is 1 if a test fails without a bug or passes with one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
SEEN_BY: Final = ("engine_client", "tests", "setup.cfg", "pyproject.toml")
"""What the copy has of the project."""
LIMIT: Final = 60
"""Seconds after which a test that hangs has failed."""


class Mutation(NamedTuple):
    """A bug: the text that is in a file of the package exactly once, what stands there instead, and who finds it."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS: Final = (
    Mutation(
        "long waits polled for",
        "ipc/polling.py",
        "        if seconds > _SHORT:\n",
        "        if seconds > 1000 * _SHORT:\n",
        "tests/ipc/test_polling.py::test_short_waits_have_the_next_one_polled_for",
    ),
    Mutation(
        "nap in a quick exchange",
        "ipc/moderation.py",
        "            self._in_a_row = 0\n            spin = spin if",
        "            spin = spin if",
        "tests/ipc/test_moderation.py::test_who_polls_does_not_nap",
    ),
    Mutation(
        "a loan whose end leaves what was read to the borrower",
        "ipc/loan.py",
        "        self._sizes.clear()\n        self._permit.clear()\n",
        "        self._sizes.clear()\n",
        "tests/ipc/test_loan.py::test_an_end_at_any_point_leaves_each_frame_one_taker",
    ),
    Mutation(
        "a loan whose end does not wait for who polls",
        "ipc/loan.py",
        "        while self._is_reading():\n",
        "        while False:\n",
        "tests/ipc/test_loan.py::test_the_end_comes_while_somebody_polls",
    ),
    Mutation(
        "an exit that forgets a loan",
        "ipc/reader.py",
        "        self._end_loan()  # which may have been made in this very round\n",
        "",
        "tests/ipc/test_reader.py::test_an_exit_in_the_round_in_which_a_loan_is_made_ends_it",
    ),
    Mutation(
        "a reply taken before it is settled",
        "clients/taking.py",
        "            self.calls.settle(frame.ref, result=frame)\n            return loan.take([])\n",
        "            return loan.take([]) and self.calls.settle(frame.ref, result=frame)\n",
        "tests/faults/test_interrupts.py::test_bc50_an_interrupt_at_any_point_of_a_call_that_reads_its_answer_itself",
    ),
    Mutation(
        "finalizer without pid check",
        "clients/session.py",
        "        if self.owner_pid != os.getpid():\n            return\n        if self._reader.is_alive()",
        "        if self._reader.is_alive()",
        "tests/faults/test_fork.py::test_bc53_forked_while_another_thread_holds_a_lock",
    ),
    Mutation(
        "process group without pid check",
        "ipc/process_group.py",
        "return os.getpid() != self._owner",
        "return False",
        "tests/ipc/test_process_group.py::test_a_forked_copy_does_nothing",
    ),
    Mutation(
        "futures not failed",
        "clients/traffic.py",
        "        self.calls.fail_all(ending.error)\n",
        "",
        "tests/faults/test_death.py::test_bc02_a_death_without_a_word[sync]",
    ),
    Mutation(
        "futures of a lost rank not failed",
        "clients/calls.py",
        "            if reply.rank == rank:\n                self.settle(call_id, error=make_error())",
        "            if reply.rank == rank:\n                self.discard(call_id)",
        "tests/clients/test_calls.py::test_the_calls_to_one_engine_fail_alone",
    ),
    Mutation(
        "callbacks before those who wait",
        "clients/calls.py",
        "self._callbacks.appendleft(wake)",
        "self._callbacks.append(wake)",
        "tests/clients/test_mailbox.py::test_a_slow_callback_of_a_reply_holds_up_nobody_who_waits_for_it",
    ),
    Mutation(
        "the host's garbage in a forked engine",
        "ipc/boot.py",
        "    gc.freeze()\n",
        "    gc.collect()\n",
        "tests/ipc/test_boot.py::test_garbage_of_the_host_is_finalized_by_the_host_alone",
    ),
    Mutation(
        "one error for all waiters",
        "clients/calls.py",
        "            reply.set_exception(make_error())",
        '            reply.set_exception(self.__dict__.setdefault("_error", make_error()))',
        "tests/clients/test_calls.py::test_all_fail_each_with_an_error_of_its_own",
    ),
    Mutation(
        "lease freed early",
        "ipc/arena_reader.py",
        "table.states[slot] = LEASED",
        "table.states[slot] = RELEASED",
        "tests/faults/test_memory.py::test_bc32_memory_is_given_back_with_the_last_view",
    ),
    Mutation(
        "segment of another reader leased",
        "ipc/arena_reader.py",
        "if party_of(segment.stamp) != self._party:",
        "if party_of(segment.stamp) > 64:",
        "tests/ipc/test_arena_reader.py::test_a_segment_is_for_its_reader_only",
    ),
    Mutation(
        "sentinel before data",
        "ipc/reader.py",
        "                exits.append(rank)",
        "                self._handler.on_exit(rank)",
        "tests/ipc/test_reader.py::test_what_is_there_is_told_before_an_exit_that_was_seen_first",
    ),
    Mutation(
        "end before what was received",
        "clients/outputs.py",
        "if self._make_error is not None and self.queue.empty():",
        "if self._make_error is not None:",
        "tests/clients/test_outputs.py::test_the_end_comes_after_the_last_batch_and_stays",
    ),
    Mutation(
        "outputs lost by an interrupt",
        "clients/outputs.py",
        "        self.unread.extend(taken)\n",
        "",
        "tests/clients/test_outputs.py::test_an_interrupted_batch_is_delivered_to_the_next_call",
    ),
    Mutation(
        "requests of a lost rank not failed",
        "clients/traffic.py",
        "        keys = self.streams.fail(self.in_flight.of_rank(rank), ending.error)",
        "        keys = self.streams.fail([], ending.error)",
        "tests/clients/test_traffic.py::test_the_loss_of_a_rank_fails_what_it_had",
    ),
    Mutation(
        "engine not tied to its launcher",
        "engine/lifeline.py",
        "    lifeline.arm()\n    return lifeline",
        "    return lifeline",
        "tests/engine/test_lifeline.py::test_closing_the_lifeline_ends_the_engine",
    ),
    Mutation(
        "room not free at the end",
        "clients/room.py",
        "<= self._high_water or link.over.done() or self._must_not_wait()",
        "<= self._high_water",
        "tests/clients/test_room.py::test_those_who_wait_look_when_they_are_woken",
    ),
    Mutation(
        "room made by a sender not told",
        "clients/traffic.py",
        "            elif self.room.waiters:",
        "            elif not self.room.waiters:",
        "tests/clients/test_traffic.py::test_room_that_a_sender_makes_is_told",
    ),
    Mutation(
        "late reply kept",
        "clients/calls.py",
        '        """Give a call up: a reply that still comes is dropped."""\n        self.replies.pop(call_id, None)',
        '        """Give a call up: a reply that still comes is dropped."""',
        "tests/clients/test_calls.py::test_a_reply_to_a_call_that_was_given_up_is_dropped",
    ),
    Mutation(
        "id taken by a request that was not sent",
        "clients/traffic.py",
        "        except Exception:\n            self.in_flight.discard(key)\n",
        "        except Exception:\n",
        "tests/clients/test_traffic.py::test_a_request_that_cannot_be_sent_is_not_in_flight",
    ),
    Mutation(
        "abort after the outputs of its step",
        "engine/busy_loop.py",
        "        self._read_aborts()\n        if outputs:",
        "        if outputs:",
        "tests/engine/test_busy_loop.py::test_an_abort_during_a_step_counts_before_its_outputs_go_out",
    ),
    Mutation(
        "deferred calls left unanswered",
        "engine/busy_loop.py",
        "        self._calls.fail_all(_shutting_down)\n",
        "",
        "tests/engine/test_busy_loop.py::test_deferred_calls_that_are_cancelled_or_never_done_fail",
    ),
    Mutation(
        "requests of a front-end that left go on",
        "engine/busy_loop.py",
        "        self._engine.abort_requests(request_ids)\n        if self._gate.has_nobody():",
        "        if self._gate.has_nobody():",
        "tests/engine/test_busy_loop.py::"
        "test_a_front_end_that_leaves_has_its_requests_aborted_and_the_last_one_ends_the_loop",
    ),
    Mutation(
        "caller's memory sent after the call",
        "ipc/channel.py",
        "                if new is not None and self.waiting:\n                    self._backlog.own(new)",
        "                pass",
        "tests/ipc/test_channel.py::test_a_frame_bigger_than_the_pipe_waits_in_the_backlog",
    ),
    Mutation(
        "channel used after a fault in mid-frame",
        "ipc/channel.py",
        "self._broken = self._broken or fault",
        "pass",
        "tests/ipc/test_channel.py::test_garbage_is_a_fault",
    ),
    Mutation(
        "broken channel keeps its caller",
        "ipc/channel.py",
        "self._broken = error.with_traceback(None)",
        "self._broken = error",
        "tests/ipc/test_channel.py::test_a_broken_channel_keeps_nothing_of_whoever_met_it",
    ),
    Mutation(
        "memory of a frame that was not sent is lost",
        "ipc/channel.py",
        "                    self._writer.cancel(segment)",
        "                    pass",
        "tests/ipc/test_channel.py::test_an_interrupted_send_gives_its_memory_back",
    ),
    Mutation(
        "length believed",
        "protocol/framing.py",
        "self.body = bytearray(min(length, _GROWTH))",
        "self.body = bytearray(length)",
        "tests/protocol/test_framing.py::test_a_lying_length_within_the_limit_allocates_one_growth_step_at_most",
    ),
    Mutation(
        "engine of another client taken",
        "clients/start.py",
        "if token != self._token:",
        "if not token:",
        "tests/clients/test_start.py::test_an_engine_of_another_client_is_refused",
    ),
    Mutation(
        "failed start without its cause",
        "clients/start.py",
        "        startup_error.__cause__ = cause\n",
        "",
        "tests/clients/test_start.py::test_the_engine_s_exception_is_the_cause_and_only_failed_ranks_are_named",
    ),
    Mutation(
        "end of the reader not told",
        "ipc/reader.py",
        "            self._handler.on_reader_failed(error)",
        "            del error",
        "tests/ipc/test_reader.py::test_whatever_ends_the_thread_is_told",
    ),
    Mutation(
        "engine's children left",
        "ipc/process_group.py",
        "            _kill_group(handle.pid)",
        "            pass",
        "tests/faults/test_death.py::test_bc02_grandchildren_end_with_the_engine",
    ),
    Mutation(
        "request for a rank that is closed",
        "clients/router.py",
        "        return [link for rank, link in list(self._links.items()) if rank not in self.closed]",
        "        return [link for rank, link in list(self._links.items())]",
        "tests/clients/test_router.py::test_closed_engines_get_nothing",
    ),
    Mutation(
        "request for a rank that was closed meanwhile",
        "clients/traffic.py",
        "            self.router.ensure_open(link)\n",
        "",
        "tests/clients/test_traffic.py::test_a_request_for_a_rank_that_is_closed_once_it_was_chosen_goes_elsewhere",
    ),
    Mutation(
        "stream of an aborted request waits on",
        "clients/streams.py",
        "            queue.end(StreamOverError)  # before",
        "            pass  # before",
        "tests/clients/test_streams.py::test_those_who_wait_in_a_stream_that_is_over_are_let_go[abort]",
    ),
    Mutation(
        "wake-up swallowed in lock-step",
        "protocol/waves.py",
        "            self._shared.ring()\n            return Event.STARTED",
        "            return Event.STARTED",
        "tests/protocol/test_waves.py::test_a_swallowed_ring_is_rung_again",
    ),
)


def copy_project(folder: Path) -> None:
    """Copy what the tests need into a folder."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for name in SEEN_BY:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder)


def start_test(folder: Path, tests: Iterable[str]) -> subprocess.Popen[str]:
    """Start pytest on a copy, as the leader of a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", f"timeout={LIMIT}", "-o", "faulthandler_timeout=0"]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_test(folder: Path, tests: Iterable[str], limit: float) -> tuple[int, str]:
    """Run tests on a copy; return pytest's exit status and what it wrote, -1 where it had to be killed."""
    process = start_test(folder, tests)
    try:
        output, _ = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        output, status = "", -1
    finally:
        with suppress(ProcessLookupError):  # the group is empty
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()
    return status, output


def is_ours(folder: Path) -> bool:
    """Tell whether a process that runs in the copy imports the package from there."""
    code = "import engine_client; print(engine_client.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=True)
    return folder in Path(found.stdout.decode().strip()).parents


def try_mutation(folder: Path, mutation: Mutation) -> bool:
    """Plant a bug, run its test, take the bug out again; tell whether it was found."""
    path = folder / "engine_client" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: its text is in {mutation.file} {text.count(mutation.old)} times")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        status, output = run_test(folder, [mutation.test], 2.0 * LIMIT)
    finally:
        path.write_text(text, encoding="utf-8")
    if status not in (0, 1, -1):  # no test was run: it was not found, or cannot even be imported
        raise ValueError(f"{mutation.name}: pytest ended with {status}\n{output}")
    return status != 0


def main(words: list[str]) -> int:
    """Try the bugs whose name has one of these words, by default all; return the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="engine-client-mutations-") as name:
        folder = Path(name).resolve()
        copy_project(folder)
        if not is_ours(folder):
            print("the copy is not what its tests would import")
            return 1
        status, output = run_test(folder, sorted({mutation.test for mutation in chosen}), 20.0 * LIMIT)
        if status != 0:
            print(f"without a bug, a test fails:\n{output}")
            return 1
        missed = 0
        for mutation in chosen:
            began = time.monotonic()
            is_caught = try_mutation(folder, mutation)
            missed += not is_caught
            verdict = "caught" if is_caught else "MISSED"
            print(f"{verdict}  {mutation.name}  ({mutation.test}, {time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
