"""What the project says in two places is the same in both."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / name, encoding="utf-8")
    return parser


def test_oldest_versions_are_tested():
    """The mindeps environment pins exactly the floors that setup.cfg promises."""
    floors = read("setup.cfg")["options"]["install_requires"].split()
    pins = read("tox.ini")["testenv:mindeps"]["deps"].split()
    assert sorted(pins) == sorted(floor.replace(">=", "==") for floor in floors)


def test_every_environment_is_described():
    """``tox list`` says of each environment what it is for."""
    parser = read("tox.ini")
    sections = [name for name in parser.sections() if name.startswith("testenv")]
    assert [name for name in sections if "description" not in parser[name]] == []


def test_every_python_is_tested():
    """The Pythons in the classifiers are those that tox runs."""
    classifiers = re.findall(r"Python :: (3\.\d+)", read("setup.cfg")["metadata"]["classifiers"])
    environments = read("tox.ini")["tox"]["env_list"].split(", ")
    assert sorted(f"py{version.replace('.', '')}" for version in classifiers) == sorted(
        name for name in environments if re.fullmatch(r"py\d+", name)
    )


def test_tools_have_one_version():
    """pre-commit runs the versions of ruff and mypy that tox does."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    ruff = re.search(r"ruff==(\S+)", (ROOT / "tox.ini").read_text(encoding="utf-8"))[1]
    mypy = re.search(r"mypy==(\S+)", (ROOT / "tox.ini").read_text(encoding="utf-8"))[1]
    assert f"rev: v{ruff}" in hooks
    assert f"mypy=={mypy}" in hooks


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_papers_are_there(name):
    """The papers that a visitor looks for are at the top."""
    assert (ROOT / name).stat().st_size > 1000


@pytest.mark.parametrize(("name", "limit"), [("CONTRIBUTING.md", 120), ("ARCHITECTURE.md", 250)])
def test_papers_are_short(name, limit):
    """A newcomer can read them in one sitting."""
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    """Relative links in the papers lead to files that are there."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (ROOT / link).exists()] == []


LATER = "run -e chaos,docs,vllm,vllm-zmq"
"""What ``.ci/run`` runs behind ``tox``."""


@pytest.mark.parametrize(
    ("arguments", "fails", "calls", "status"),
    [
        ([], "", ["run", LATER], 0),
        ([], "run", ["run", LATER], 3),
        ([], LATER, ["run", LATER], 3),
        (["-e", "lint"], "", ["run -e lint"], 0),
        (["-e", "lint"], "run -e lint", ["run -e lint"], 3),
    ],
)
def test_continuous_integration_runs_everything(tmp_path, arguments, fails, calls, status):
    """``.ci/run`` runs what tox lists, then the rest, whatever fails; or what it is told."""
    fake = tmp_path / "tox"
    fake.write_text(f'''#!/bin/sh
[ "$1" = --version ] && exit 0
echo "$*" >> {tmp_path}/calls
[ "$*" != "{fails}" ] || exit 3
''')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run", *arguments], env=environment, check=False)
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert done.returncode == status
