"""What ``run_install.py`` does with each extra is complete, and works where the extra is installed."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

import pytest

import run_install
from engine_client.testing.leaks import LeakGuard
from helpers.procs import script_environment

ROOT = Path(__file__).parent.parent
TOOLS = {"python": [sys.executable], "engine-client": [sys.executable, "-m", "engine_client"]}


def test_every_extra_has_a_use() -> None:
    """None is only installed."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(run_install.USES) == set(settings["options.extras_require"])


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("notebook", "cloudpickle"),
        ("progress", "tqdm"),
        pytest.param("metrics", "prometheus_client", marks=pytest.mark.slow),
        pytest.param("plot", "matplotlib", marks=pytest.mark.slow),
    ],
)
def test_an_extra_does_what_it_is_for(extra: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands succeed, and leave nothing running."""
    pytest.importorskip(module)
    for name, value in script_environment().items():
        monkeypatch.setenv(name, value)
    with LeakGuard():
        run_install.use(extra, TOOLS, tmp_path)


def test_a_use_that_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command that fails is told, with what it has printed."""
    monkeypatch.setitem(run_install.USES, "metrics", (("python", "-c", "1 / 0"), ("python", "-c", "print(7)")))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_install.use("metrics", TOOLS, tmp_path)
