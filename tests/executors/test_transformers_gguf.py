"""A GGUF file is found where it is the model, and left alone where it is not; what is missing to read it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_client.executors import transformers_gguf
from engine_client.executors.transformers_gguf import locate


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give a function that says which packages there are."""

    def install(*packages: str) -> None:
        found = {package: SimpleNamespace() for package in packages}
        monkeypatch.setattr(transformers_gguf, "find_spec", found.get)

    return install


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path, install: Callable[..., None]) -> None:
    """Either is found by the folder and the file's name, whatever else the folder has."""
    install("gguf", "accelerate")
    file = tmp_path / "x.Q4.gguf"
    file.touch()
    (tmp_path / "__init__.py").touch()
    assert locate(str(tmp_path)) == locate(str(file)) == (str(tmp_path), {"gguf_file": "x.Q4.gguf"})


def test_others_are_left_to_transformers(tmp_path: Path, install: Callable[..., None]) -> None:
    """A repository, a folder with a configuration, one without any file, and a file that is not there."""
    install()
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.gguf").touch()
    (tmp_path / "config.json").touch()
    for model in ("owner/model", str(tmp_path), str(tmp_path / "empty"), str(tmp_path / "absent.gguf")):
        assert locate(model) == (model, {})


def test_of_several_one_must_be_named(tmp_path: Path, install: Callable[..., None]) -> None:
    """The error shows what could be named; naming one is enough."""
    install("gguf", "accelerate")
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"several GGUF files: name one of \S+/a\.gguf, \S+/b\.gguf$"):
        locate(str(tmp_path))
    assert locate(str(tmp_path / "b.gguf"))[1] == {"gguf_file": "b.gguf"}


@pytest.mark.parametrize(
    ("there", "told"), [((), "gguf accelerate"), (("gguf",), "accelerate"), (("accelerate",), "gguf")]
)
def test_what_is_missing_is_named(
    tmp_path: Path, install: Callable[..., None], there: tuple[str, ...], told: str
) -> None:
    """The error says what to install, and no more than that."""
    install(*there)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ImportError, match=f"x.gguf, transformers needs: pip install {told}$"):
        locate(str(tmp_path))
