"""``engine-client doctor``: what is found, what stands in for what is missing, and whether engines work."""

from __future__ import annotations

import configparser
import fcntl
import importlib.util
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine_client
from engine_client.cli import doctor
from engine_client.cli.doctor import Finding, examine, memory_limits
from engine_client.cli.main import main


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the engine out where the test is about something else."""
    monkeypatch.setattr(doctor, "_engine", lambda timeout: iter((Finding("ok", "engine", "not tried"),)))


def findings() -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(30.0)}


def refused(*args: object) -> Any:
    raise PermissionError(1, "Operation not permitted")


def test_doctor_starts_an_engine(capsys: pytest.CaptureFixture[str]):
    """Where engines work, the last finding says how quick one is, and the status is 0."""
    assert main(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "Engines work here."
    assert lines[0].startswith("ok    python              cpython 3.")
    assert lines[-1].startswith("ok    engine              ready after ")
    assert {line[:6].strip() for line in lines} <= {"ok", "none"}


def test_engine_that_does_not_start_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Where engines do not work, the reason is shown, and the status is 1."""

    def fail(*args: object, **kwargs: object) -> None:
        raise engine_client.StartupError("it fell over")

    monkeypatch.setattr(engine_client, "SyncMPClient", fail)
    assert main(["doctor", "--timeout", "5"]) == 1
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line == "FAIL  engine              StartupError: it fell over"
    assert last == "Engines do not work here: see FAIL above."


@pytest.mark.usefixtures("no_engine")
def test_start_methods_are_told(monkeypatch: pytest.MonkeyPatch):
    """The default needs an interpreter to execute; without one the others are named."""
    assert findings()["start method"].text.startswith(f"exec: {sys.executable}")
    monkeypatch.setattr(sys, "executable", "")
    finding = findings()["start method"]
    assert finding.state == "FAIL"
    assert "spawn" in finding.text


@pytest.mark.usefixtures("no_engine")
def test_without_memfd_a_file_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without memfd_create an unlinked file stands in, in /dev/shm if there is room, else in $TMPDIR."""
    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "_free", lambda directory: 0)
    finding = findings()["shared memory"]
    assert finding.state == "none"
    assert "Operation not permitted" in finding.text
    assert f"an unlinked temporary file in {tmp_path} is used" in finding.text
    monkeypatch.setattr(doctor, "_free", lambda directory: 1 << 30)
    if os.access("/dev/shm", os.W_OK):
        assert "temporary file in /dev/shm is used" in findings()["shared memory"].text
    monkeypatch.setattr(doctor, "_free", lambda directory: 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    finding = findings()["shared memory"]
    assert finding.state == "FAIL"
    assert "that fails" in finding.text


@pytest.mark.usefixtures("no_engine")
def test_missing_system_calls_have_stand_ins(monkeypatch: pytest.MonkeyPatch):
    """Without pidfd_open and F_SETSIG, the finding says what is used instead."""
    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    monkeypatch.delattr(fcntl, "F_SETSIG", raising=False)
    found = findings()
    assert found["pidfd"].state == "none"
    assert "a pipe that only the engine holds" in found["pidfd"].text
    assert found["launcher's death"].state == "none"
    assert "a thread of the engine" in found["launcher's death"].text


EXTRAS = configparser.ConfigParser()
EXTRAS.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("extra", [name for name in EXTRAS["options.extras_require"] if name not in ("docs", "test")])
def test_every_extra_is_told(monkeypatch: pytest.MonkeyPatch, extra: str):
    """What an extra brings is there, or is missing and says how to get it; it is not imported to know that."""
    module = re.match(r"\s*(\w+)", EXTRAS["options.extras_require"][extra])[1]
    was_there = module in sys.modules
    found = findings()[module]
    assert found.state == ("none" if importlib.util.find_spec(module) is None else "ok")
    assert (module in sys.modules) is was_there
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert findings()[module] == Finding("none", module, f"not installed (pip install engine_client[{extra}])")


@pytest.mark.usefixtures("no_engine")
def test_dev_shm_is_not_needed(monkeypatch: pytest.MonkeyPatch):
    """/dev/shm may be missing, or closed to us."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm")
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    assert findings()["/dev/shm"].text.startswith("0 MiB free")
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert findings()["/dev/shm"] == Finding("none", "/dev/shm", "not there, and not needed")


@pytest.mark.usefixtures("no_engine")
def test_limits_of_the_process_are_told(monkeypatch: pytest.MonkeyPatch):
    """Limits that matter are shown; too few descriptors are a failure."""
    limits = {resource.RLIMIT_NOFILE: 32, resource.RLIMIT_FSIZE: 4096, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    found = findings()
    assert found["descriptors"] == Finding("FAIL", "descriptors", "32 per process (ulimit -n)")
    assert found["file size"].text.startswith("4096 bytes")
    assert "address space" not in found
    limits[resource.RLIMIT_NOFILE] = resource.RLIM_INFINITY
    assert findings()["descriptors"] == Finding("ok", "descriptors", "unlimited per process")


@pytest.mark.usefixtures("no_engine")
def test_a_look_that_is_forbidden_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    """Where a sandbox forbids even to look, the others go on."""
    monkeypatch.setattr(os, "pipe", refused)
    found = findings()
    assert found["death signal"].state == "none"
    assert "cannot be looked at" in found["death signal"].text
    assert found["engine"].state == "ok"


@pytest.mark.usefixtures("no_engine")
def test_systems_without_proc_say_less(monkeypatch: pytest.MonkeyPatch):
    """Without /proc there is nothing to tell of memory or of the largest buffer of a pipe."""
    monkeypatch.setattr(doctor, "_read", lambda path: "")
    found = findings()
    assert "memory" not in found
    assert found["memory limit"].text == "none (no control group limits it)"
    assert "possible" not in found["pipe"].text


@pytest.mark.usefixtures("no_engine")
def test_memory_limits_are_told(monkeypatch: pytest.MonkeyPatch):
    """A control group's limit is shown with what is left of it."""

    def limits() -> Iterator[tuple[int, int, str]]:
        yield 512 << 20, 112 << 20, "/sys/fs/cgroup/box"

    monkeypatch.setattr(doctor, "memory_limits", limits)
    assert findings()["memory limit"].text.startswith("512 MiB, 400 MiB left (/sys/fs/cgroup/box)")


def cgroup(root: Path, lines: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_of_control_groups(tmp_path: Path):
    """Every level that limits counts, up to the mount; "max" is no limit."""
    root = cgroup(
        tmp_path,
        "0::/a/b\n",
        a__b__memory_dot_max="max\n",
        a__b__memory_dot_current="5\n",
        a__memory_dot_max="100\n",
        a__memory_dot_current="60\n",
        memory_dot_max="1000\n",
        memory_dot_current="500\n",
    )
    top = tmp_path / "sys/fs/cgroup"
    assert list(memory_limits(str(root))) == [(100, 60, str(top / "a")), (1000, 500, str(top))]


def test_version_1_of_control_groups(tmp_path: Path):
    """The memory controller's files count, its huge default does not, and other controllers do not matter."""
    root = cgroup(
        tmp_path,
        "3:cpu,cpuacct:/a\n2:name=systemd:/\n1:memory:/host/path\n",
        memory__memory_dot_limit_in_bytes="4096\n",
        memory__memory_dot_usage_in_bytes="96\n",
        memory__host__memory_dot_limit_in_bytes=f"{2**63 - 4096}\n",
        memory__host__memory_dot_usage_in_bytes="96\n",
    )
    assert list(memory_limits(str(root))) == [(4096, 96, str(tmp_path / "sys/fs/cgroup/memory"))]


def test_no_control_groups(tmp_path: Path):
    """Without control groups there is no limit."""
    assert list(memory_limits(str(tmp_path))) == []
