"""Real engine processes in lock-step, spoken to by hand over the protocol: no client is between the test and them."""

from __future__ import annotations

import os
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_client.config import ClientOptions, EngineConfig
from engine_client.ipc.arena import ArenaWriter, create_memory
from engine_client.ipc.channel import Channel
from engine_client.ipc.engine_fds import EngineFds, GroupFds
from engine_client.ipc.group_page import GroupMember, GroupPage, create_group
from engine_client.ipc.launcher import launch
from engine_client.ipc.process_group import ProcessGroup
from engine_client.protocol.codec import dumps
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    Init,
    decode_reply,
    encode_add,
    encode_init,
    encode_text,
    encode_utility,
)
from engine_client.testing.executors import EchoExecutor
from helpers.engines import make_request
from helpers.timing import DEADLOCK, eventually
from helpers.transport import columns_of

OWN_CORE = "engine_client.engine.main:build_engine"


class Counting(EchoExecutor):
    """Counts steps and dummy steps; each takes ``step_seconds`` (0); knows the rank that it was built for."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        parallel = vllm_config.parallel_config
        self.built_for = parallel.data_parallel_rank, parallel.data_parallel_index
        self.steps = self.dummy_steps = 0

    def execute_model(self, batch):
        self.steps += 1
        time.sleep(self.vllm_config.additional_config.get("step_seconds", 0))
        return super().execute_model(batch)

    def execute_dummy_batch(self) -> None:
        assert not self.is_sleeping
        self.dummy_steps += 1
        time.sleep(self.vllm_config.additional_config.get("step_seconds", 0))

    def facts(self) -> dict[str, Any]:
        return {"steps": self.steps, "dummy_steps": self.dummy_steps, "built_for": self.built_for}


class Member:
    """One rank: its process, and the front-end's end of its channel."""

    def __init__(self, rank: int, group: GroupFds | None, owner: ProcessGroup) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        lifeline, self.held = os.pipe()
        requests = create_memory("requests")
        self.writer = ArenaWriter(requests, limit=1 << 20)
        own = [theirs.detach(), lifeline, *(create_memory(name) for name in ("page", "faults", "results"))]
        fds = EngineFds(*own[:4], arena_in=requests, arena_out=own[4], group=group)
        self.handle = launch("exec", name=f"engine-core-{rank}", fds=fds)
        owner.add(rank, self.handle)
        for fd in own:
            os.close(fd)
        self.channel = Channel(ours.detach(), name=f"engine core {rank}", writer=self.writer)
        self.frames: list[Frame] = []
        self.tokens: Counter[int] = Counter()  # by key
        self.ended: dict[int, int] = {}  # finish reason by key
        self.waves: list[int] = []  # that it has said are complete

    def close(self) -> None:
        self.channel.close()
        self.writer.close()
        os.close(self.held)

    def poll(self) -> None:
        """Take what has arrived."""
        for frame in self.channel.receive():
            if frame.kind != Kind.OUTPUTS:
                self.frames.append(frame)
                continue
            columns, _ = columns_of(frame)
            self.waves += [columns.meta["wave_complete"]] if "wave_complete" in (columns.meta or {}) else []
            for key, count in zip(columns.keys, columns.counts or [1] * len(columns.keys), strict=True):
                self.tokens[key] += count
            self.ended.update({columns.keys[row]: reason for row, reason, _ in columns.finishes})

    def find(self, kind: Kind) -> Frame | None:
        """Return, once, the first frame of a kind that has arrived."""
        self.poll()
        for frame in self.frames:
            if frame.kind == kind:
                self.frames.remove(frame)
                return frame
        return None

    def receive(self, kind: Kind) -> Frame:
        """Wait for a frame of a kind."""
        found: list[Frame] = []

        def look() -> bool:
            frame = self.find(kind)
            found.extend([] if frame is None else [frame])
            return bool(found) or self.channel.ended

        eventually(look, DEADLOCK)
        assert found, f"no {kind.name} before the end; {[Kind(frame.kind).name for frame in self.frames]}"
        return found[0]

    def add(self, key: int, max_tokens: int, **fields: Any) -> None:
        request = make_request(f"{self.rank}-{key}", max_tokens=max_tokens, **fields)
        self.channel.send(encode_add(key, request, array("I", request.prompt_token_ids or ())))

    def ask(self, method: str, *args: Any) -> None:
        """Begin a call."""
        self.channel.send(encode_utility(1, method, args))

    def answer(self) -> Any:
        """Wait for its end."""
        failed, value = decode_reply(self.receive(Kind.REPLY))
        if failed:
            raise value
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer()

    def facts(self) -> dict[str, Any]:
        return self.call("collective_rpc", "facts")[0]

    def wait_for(self, key: int) -> int:
        """Wait for a request's end; return its reason."""

        def look() -> bool:
            self.poll()
            return key in self.ended

        eventually(look, DEADLOCK)
        return self.ended[key]

    def ask_to_end(self) -> None:
        self.channel.send(encode_text(Kind.SHUTDOWN, "the test is over"))

    def exit_code(self) -> int | None:
        """Read, which the process may wait for, until it has ended."""
        eventually(lambda: self.poll() or not self.handle.is_alive(), DEADLOCK)
        return self.handle.exitcode

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used."""
        with open(f"/proc/{self.handle.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def neighbour(member: GroupMember, rank: int) -> GroupMember:
    """Return another rank's hold on the same group."""
    return GroupMember(GroupFds(*map(os.dup, (member._fd, *member._pipe))), rank)


class Group:
    """The ranks, ready to serve, and the launcher's view of their page."""

    def __init__(self, members: list[Member], page: GroupPage) -> None:
        self.members = members
        self.page = page

    def __getitem__(self, rank: int) -> Member:
        return self.members[rank]

    def settle(self, wave: int) -> None:
        """Wait until every rank sleeps, with this wave to be started next."""
        idle = [(wave, False)] * len(self.members)
        eventually(lambda: [self.page.wave(m.rank) for m in self.members] == idle, DEADLOCK)

    def steps(self) -> list[int]:
        """Return how many steps each rank has made, dummy steps included."""
        return [facts["steps"] + facts["dummy_steps"] for facts in map(Member.facts, self.members)]


@contextmanager
def lock_step(
    count: int,
    *,
    target: str = OWN_CORE,
    shutdown_timeout: float = 0,
    backlog_limit: int = 1 << 26,
    in_step: bool = True,
    **additional: Any,
) -> Iterator[Group]:
    """Yield a group of engines, without ``in_step`` of independent ones; what is left of them is killed afterwards."""
    config = EngineConfig(additional_config=additional)
    config.parallel_config.data_parallel_size = count
    config.shutdown_timeout = shutdown_timeout
    owner = ProcessGroup()
    fds = create_group()
    page = GroupPage(fds.page)
    page.set_members((1 << count) - 1)
    members: list[Member] = []
    try:
        members += [Member(rank, fds if in_step else None, owner) for rank in range(count)]
        for member in members:
            payload = dumps((config, Counting, False))
            options = {**ClientOptions().for_engine(), "backlog_limit": backlog_limit}
            init = Init("token", member.rank, target, list(sys.path), ["script"], {}, options, payload)
            member.channel.send(encode_init(init))
        for member in members:
            member.receive(Kind.READY)
        yield Group(members, page)
    finally:
        owner.kill_now()
        owner.close()
        for member in members:
            member.close()
        page.close()
        os.close(fds.bell)
        os.close(fds.striker)
