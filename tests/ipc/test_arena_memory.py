"""Memory without a name: made anywhere, grown without SIGBUS, and never more than the machine can give."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile

import pytest

from engine_client.ipc.arena_memory import create_memory, describe_memory, memory_room, reserve
from helpers.procs import run_script

MIB = 1 << 20
MARGIN = 32 * MIB


@pytest.fixture
def fd():
    fd = create_memory("test")
    yield fd
    os.close(fd)


def names_in(*directories):
    return {name for directory in directories if os.path.isdir(directory) for name in os.listdir(directory)}


# -- the descriptor ----------------------------------------------------------------------------------------------------


def test_new_memory_is_empty_private_and_nameless():
    """New memory has size 0, is nobody else's to open, is not inherited by accident, and has no name anywhere."""
    before = names_in("/dev/shm", tempfile.gettempdir())
    fd = create_memory("test")
    status = os.fstat(fd)
    assert fd >= 3
    assert status.st_size == 0
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert not os.get_inheritable(fd)
    assert names_in("/dev/shm", tempfile.gettempdir()) == before
    os.close(fd)


def test_nobody_can_shrink_it(fd):
    """Whoever holds the memory cannot make it shorter under the mappings of others; making it longer works."""
    os.ftruncate(fd, 8192)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 4096)
    os.ftruncate(fd, 16384)


def test_equal_and_long_names_do_not_matter():
    """Two memories of one name, and a name of any length, are fine."""
    fds = [create_memory("x" * 1000) for _ in range(2)]
    os.ftruncate(fds[0], 4096)
    assert os.fstat(fds[1]).st_size == 0
    for fd in fds:
        os.close(fd)


def test_standard_streams_are_never_hit():
    """In a process without descriptors 0 to 2, memory of either kind gets 3 or above."""
    run_script("""
        import os
        from engine_client.ipc.arena_memory import create_memory

        for fd in range(3):
            os.close(fd)
        fds = [create_memory("test")]
        del os.memfd_create
        fds.append(create_memory("test"))
        os._exit(0 if min(fds) >= 3 else 1)
    """).check()


def test_old_kernels_do_not_know_every_flag(monkeypatch):
    """Where a newer flag is refused, the memory is made without it, and sealed all the same."""
    real = os.memfd_create

    def refuse_unknown(name, flags):
        if flags & 0x8:
            raise OSError(22, "invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse_unknown)
    fd = create_memory("test")
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert describe_memory(fd) == "shared memory (memfd_create)"
    os.close(fd)


@pytest.mark.parametrize("how", ["missing", "forbidden", "unsealable"])
def test_without_memfd_it_is_an_unlinked_file(how, monkeypatch):
    """Without memfd_create, or without seals, memory is a file that has no name, and is described as one."""
    if how == "missing":
        monkeypatch.delattr(os, "memfd_create")
    elif how == "forbidden":
        monkeypatch.setattr(os, "memfd_create", _raise(OSError(1, "operation not permitted")))
    else:
        monkeypatch.delattr(fcntl, "F_ADD_SEALS")
    before = names_in("/dev/shm", tempfile.gettempdir())
    fd = create_memory("test")
    status = os.fstat(fd)
    assert (status.st_size, status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0, 0o600)
    assert not os.get_inheritable(fd)
    assert names_in("/dev/shm", tempfile.gettempdir()) == before
    assert "no memfd_create here: an unlinked temporary file in " in describe_memory(fd)
    _check_usable(fd)
    os.close(fd)


@pytest.mark.parametrize("shm", ["absent", "read-only", "tiny"])
def test_without_a_roomy_dev_shm_the_file_is_elsewhere(shm, monkeypatch, tmp_path):
    """Where /dev/shm is absent, not writable or tiny, the file is made in the directory for temporary files."""
    real_access, real_statvfs = os.access, os.statvfs
    if shm == "tiny":
        real = real_statvfs("/")
        tiny = os.statvfs_result((4096, 4096, 16, 16, 16, *tuple(real)[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path: tiny if path == "/dev/shm" else real_statvfs(path))
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and real_access(path, mode))
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fd = create_memory("test")
    assert str(tmp_path) in describe_memory(fd)
    with monkeypatch.context() as blind:
        blind.setattr(os, "readlink", _raise(OSError(2, "no /proc")))
        assert "temporary file" in describe_memory(fd)
    assert not list(tmp_path.iterdir())
    _check_usable(fd)
    os.close(fd)


def test_without_any_place_it_is_an_oserror(monkeypatch, tmp_path):
    """Where neither memfd_create nor a directory can be had, the caller gets OSError."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(OSError, match=r"No such file"):
        create_memory("test")


def test_without_descriptors_it_is_an_oserror():
    """Out of descriptors, the caller gets OSError."""
    run_script("""
        import os, resource, tempfile, random
        from engine_client.ipc.arena_memory import create_memory

        tempfile.gettempdir()
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        fds = []
        try:
            while True:
                fds.append(os.dup(2))
        except OSError:
            pass
        try:
            create_memory("test")
        except OSError as error:
            assert error.errno == 24, error
        else:
            raise SystemExit("no error")
        for each in fds:
            os.close(each)
    """).check()


def _raise(error):
    def function(*args, **kwargs):
        raise error

    return function


def _check_usable(fd):
    for _ in reserve(fd, 0, 3 * MIB):
        pass
    assert os.fstat(fd).st_blocks * 512 >= 3 * MIB


# -- growth ------------------------------------------------------------------------------------------------------------


def test_reserved_memory_exists(fd):
    """What was reserved is there (and counted by the system), and what exists already keeps its content."""
    steps = list(reserve(fd, 0, 2 * MIB + 4096))
    assert steps[-1] == 2 * MIB + 4096
    assert steps == sorted(set(steps))
    assert os.fstat(fd).st_blocks * 512 >= 2 * MIB + 4096
    os.pwrite(fd, b"kept", 0)
    list(reserve(fd, 2 * MIB + 4096, 3 * MIB))
    assert os.pread(fd, 5, 0) == b"kept\0"
    assert list(reserve(fd, 5, 5)) == []


def test_growth_survives_a_profilers_timer(fd):
    """A signal every millisecond, which restarts interrupted system calls, does not keep growth from its end."""
    import signal

    before = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        assert list(reserve(fd, 0, 64 * MIB))[-1] == 64 * MIB
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_posix_fallocate_zeros_are_written(fd, monkeypatch):
    """On a system without posix_fallocate, zeros are written, also when a write takes only a part."""
    monkeypatch.delattr(os, "posix_fallocate")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:300_000], at))
    assert list(reserve(fd, 4096, 2 * MIB))[-1] == 2 * MIB
    status = os.fstat(fd)
    assert status.st_size == 2 * MIB
    assert status.st_blocks * 512 >= 2 * MIB - 4096


def test_what_was_reserved_before_a_failure_stays(fd, monkeypatch):
    """When room runs out half way, the error comes after what did succeed was told."""
    real = os.posix_fallocate

    def limited(fd, offset, length):
        if offset + length > 2 * MIB:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    steps = reserve(fd, 0, 4 * MIB)
    assert [next(steps), next(steps)] == [MIB, 2 * MIB]
    with pytest.raises(OSError, match="No space"):
        next(steps)


# -- room --------------------------------------------------------------------------------------------------------------


class System:
    """A pretended /proc and /sys/fs/cgroup."""

    def __init__(self, path):
        self.proc = path / "proc"
        self.cgroups = path / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()

    def meminfo(self, available):
        text = f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
        (self.proc / "meminfo").write_text(text)

    def member_of(self, *lines):
        (self.proc / "self" / "cgroup").write_text("".join(line + "\n" for line in lines))

    def group(self, path, **values):
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name.replace("memory_", "memory.")).write_text(f"{value}\n")

    def room(self, fd):
        return memory_room(fd, str(self.proc), str(self.cgroups))


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def test_where_nothing_tells_room_is_unlimited(fd, system):
    """On a system without /proc and cgroups the room is as large as can be."""
    assert system.room(fd) == sys.maxsize - MARGIN


def test_the_systems_memory_limits_room(fd, system):
    """The room is what the system has available, less a margin."""
    system.meminfo(500 * MIB)
    assert system.room(fd) == 500 * MIB - MARGIN
    system.meminfo(1 * MIB)
    assert system.room(fd) == 0


def test_a_version_2_group_limits_room(fd, system):
    """Limit less use plus page cache that can be dropped; ``max`` is no limit; ``memory.high`` counts too."""
    system.member_of("0::/a/b")
    system.group("a/b", memory_max="max", memory_high="max", memory_current=5)
    assert system.room(fd) == sys.maxsize - MARGIN
    stat_text = f"anon 1\ninactive_file {70 * MIB}\nactive_file 3"
    system.group("a/b", memory_max=300 * MIB, memory_current=200 * MIB, memory_stat=stat_text)
    assert system.room(fd) == 170 * MIB - MARGIN
    system.group("a/b", memory_high=250 * MIB)
    assert system.room(fd) == 120 * MIB - MARGIN


def test_the_tightest_level_limits_room(fd, system):
    """A limit on any level above counts, up to the top of what can be seen."""
    system.member_of("0::/a/b")
    system.group("a/b", memory_max="max", memory_current=1)
    system.group("a", memory_max=100 * MIB, memory_current=0)
    assert system.room(fd) == 100 * MIB - MARGIN
    system.group("", memory_max=90 * MIB, memory_current=0)
    assert system.room(fd) == 90 * MIB - MARGIN


def test_a_container_that_cannot_see_its_path_is_limited(fd, system):
    """Where the group's path is the host's, the mounted group itself is what limits."""
    system.member_of("0::/docker/0123456789")
    system.group("", memory_max=80 * MIB, memory_current=10 * MIB)
    assert system.room(fd) == 70 * MIB - MARGIN


def test_a_hybrid_mount_is_found(fd, system):
    """Version 2 beside version 1 is mounted one level deeper."""
    system.member_of("4:cpu,cpuacct:/", "0::/x")
    system.group("unified/x", memory_max=80 * MIB, memory_current=0)
    assert system.room(fd) == 80 * MIB - MARGIN


def test_a_version_1_group_limits_room(fd, system):
    """Version 1 has other names, and a huge number for no limit."""
    system.member_of("9:name=systemd:/", "4:memory:/job", "3:cpuset:/")
    system.group("memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=77)
    system.group("memory/job", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=150 * MIB)
    assert system.room(fd) == 50 * MIB - MARGIN
    system.group("memory/job", memory_stat=f"inactive_file 7\ntotal_inactive_file {20 * MIB}")
    assert system.room(fd) == 70 * MIB - MARGIN


def test_memory_beside_other_controllers_is_found(fd, system):
    """A controller list that contains memory counts."""
    system.member_of("4:cpu,memory:/job")
    system.group("memory/job", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=100 * MIB)
    assert system.room(fd) == 100 * MIB - MARGIN


def test_an_overdrawn_or_unreadable_group_does_no_harm(fd, system):
    """Use above the limit is no room, not a negative one; half a group's files say nothing."""
    system.member_of("0::/a")
    system.group("a", memory_max=100 * MIB)
    assert system.room(fd) == sys.maxsize - MARGIN
    system.group("a", memory_current=200 * MIB, memory_stat="inactive_file")
    assert system.room(fd) == 0


def test_the_file_system_limits_room(fd, system, monkeypatch):
    """Memory that is a file can be as large as its file system has bytes free."""
    real = os.fstatvfs(fd)
    small = os.statvfs_result((4096, 4096, 1000, 900, 800, *tuple(real)[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: small)
    assert system.room(fd) == 800 * 4096


def test_this_machine_has_room(fd):
    """On a real system the answer is a number below its memory."""
    assert 0 <= memory_room(fd) < 1 << 50
