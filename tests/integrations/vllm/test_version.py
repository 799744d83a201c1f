"""Which vLLM is accepted, and which one is here."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from engine_client.integrations.vllm import version
from engine_client.integrations.vllm.install import install
from engine_client.integrations.vllm.refusals import UnsupportedError
from engine_client.integrations.vllm.version import TESTED, check_version, installed_version


@pytest.fixture
def vllm_says(tmp_path):
    """Give a function that has vLLM's files say something about its version."""
    with mock.patch.object(version, "find_spec") as find:
        find.return_value = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        yield lambda text: (tmp_path / "_version.py").write_text(text, encoding="utf-8")


def test_the_one_that_is_here():
    """The tests run with the version that is said to be tested, and nothing is said about it."""
    assert installed_version() == TESTED
    check_version()


def test_another_release_is_refused(vllm_says):
    """``install()`` names what is here, what is tested, and the way out."""
    vllm_says("__version__ = version = '0.32.0'\n")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.32\.0: .* of 0\.25\.1 only; install vLLM 0\.25\.1, or"):
        install()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version = '0.25.3.dev4+cpu'\n", "0.25.3.dev4"),
        ("version: str\n", "unknown"),
    ],
)
def test_what_may_work_is_a_warning(vllm_says, text, told):
    """A version of the same release, or one that cannot be told, is not refused."""
    vllm_says(text)
    with pytest.warns(RuntimeWarning, match=f"tested with vLLM {TESTED}; the version of this one is {told}"):
        check_version()


def test_local_builds_are_the_same(vllm_says):
    """What follows the plus sign names a build, not other fields."""
    vllm_says(f'__version__ = version = "{TESTED}+cpu"\n')
    check_version()


def test_no_vllm():
    """Where there is none, there is nothing to say; the import will."""
    with mock.patch.object(version, "find_spec", return_value=None):
        assert installed_version() is None
        check_version()
