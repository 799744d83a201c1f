"""Install the distributions as a user would, on a bare Python, and see that engines work.

    python tests/run_install.py DIST [PYTHON …]      DIST holds one wheel and one source distribution

On each Python (by default the oldest and the newest that are supported), in virtual environments of their own: the
wheel, the source distribution, and the wheel with each of its extras, one by one.  Each time the distribution's
promises hold (``pip check``), nothing is installed that nobody asked for, ``engine-client doctor`` finds nothing wrong,
and text is generated; with each extra what it is for is done, too (``USES``).  Two of them are gigabytes: in all it
takes twenty minutes and more.  A Python that is not there is a failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

PYTHONS = ("3.10", "3.13")
BARE = {"engine_client", "pip", "psutil", "setuptools", "tblib"}
"""What a virtual environment has once the library is in it and nothing else was asked for."""

IMPORTS = "import engine_client; [getattr(engine_client, name) for name in engine_client.__all__]"

METRICS = """
from engine_client import EngineConfig, EngineCoreClient
from engine_client.executors.ngram import NGramExecutor
from engine_client.testing import make_request
with EngineCoreClient.make_client(True, False, EngineConfig(), NGramExecutor, False) as client:
    client.add_request(make_request("a", max_tokens=3))
    while not any(output.finished for output in client.get_output().outputs):
        pass
    text = client.metrics()
[line] = [line for line in text.splitlines() if line.startswith("engine_client:generation_tokens_total{")]
assert float(line.split()[-1]) == 3.0, line
"""
NOTEBOOK = """
from engine_client import EngineConfig, EngineCoreClient
from engine_client.testing import EchoExecutor
with EngineCoreClient.make_client(True, False, EngineConfig(), EchoExecutor, False) as client:
    [answer] = client.collective_rpc(lambda executor, number: (type(executor).__name__, number + 1), args=(41,))
assert answer == ("EchoExecutor", 42), answer
"""
PROGRESS = """
import tqdm
from engine_client import ProgressBar
with ProgressBar() as bar:
    bar("phase", 1, 2)
"""
TRANSFORMERS = """
import torch, transformers
from engine_client.executors.transformers import TransformersExecutor
"""
VLLM = """
from engine_client.integrations import vllm
from engine_client.integrations.vllm.version import TESTED, check_version, installed_version
check_version()
assert installed_version() == TESTED, installed_version()
"""
USES: dict[str, tuple[tuple[str, ...], ...]] = {
    "notebook": (("python", "-c", NOTEBOOK),),
    "progress": (("python", "-c", PROGRESS),),
    "metrics": (("python", "-c", METRICS),),
    "plot": (
        ("engine-client", "bench", "stream_1", "stream_64", "--quick", "--rounds", "1", "--json", "figures.json"),
        ("engine-client", "bench", "--from", "figures.json", "--plot", "figures.svg"),
        ("python", "-c", "from pathlib import Path; assert '<svg' in Path('figures.svg').read_text(encoding='utf-8')"),
    ),
    "transformers": (("python", "-c", TRANSFORMERS),),
    "vllm": (("python", "-c", VLLM),),
    "docs": (("python", "-c", "import furo, myst_parser, sphinx"),),
    "test": (("python", "-c", "import hypothesis, pytest, zmq"),),
}
"""What each extra is for, as commands of its virtual environment."""


def run(command: list[str], folder: Path) -> str:
    """Run a command; return what it printed, or fail with it."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def find_python(version: str) -> str:
    """Return an interpreter of a version: one on the path, or one of pyenv's."""
    found = [shutil.which(f"python{version}")]
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        root = Path(run([pyenv, "root"], Path.cwd()).strip())
        found += sorted(str(path) for path in root.glob(f"versions/{version}.*/bin/python{version}"))
    for python in filter(None, found):
        # A shim of pyenv's is on the path though it leads nowhere.
        asked = subprocess.run([python, "-c", "import venv"], capture_output=True, check=False)
        if asked.returncode == 0:
            return python
    raise AssertionError(f"there is no Python {version}")


def extras_of(wheel: Path) -> list[str]:
    """Return the names of a wheel's extras."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Provides-Extra", [])


def names_of(python: str, folder: Path) -> set[str]:
    """Return what is installed."""
    code = "from importlib.metadata import distributions as found; print(*{each.metadata['Name'] for each in found()})"
    return {name.replace("-", "_").lower() for name in run([python, "-c", code], folder).split()}


def use(extra: str, tools: dict[str, list[str]], folder: Path) -> None:
    """Do what an extra is for; ``tools`` are the commands that stand for ``python`` and ``engine-client``."""
    for name, *arguments in USES[extra]:
        run([*tools[name], *arguments], folder)


def install(python: str, what: str, extra: str = "") -> str:
    """Install into a new virtual environment and try it; return a sentence on what was seen.

    Args:
        python: interpreter.
        what: as pip has it.
        extra: that this has; none: there is to be nothing that nobody asked for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([python, "-m", "venv", "env"], folder)
        tools = folder / "env" / "bin"
        pip = [str(tools / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*pip, "install", what], folder)
        run([*pip, "check"], folder)
        installed = names_of(pip[0], folder)
        assert extra or installed <= BARE, f"not asked for: {sorted(installed - BARE)}"
        run([str(tools / "python"), "-W", "error", "-c", IMPORTS], folder)
        doctor = run([str(tools / "engine-client"), "doctor"], folder)
        wrong = [line for line in doctor.splitlines() if not line.startswith(("ok ", "none ", "Engines work"))]
        assert not wrong, f"engine-client doctor says:\n{doctor}"
        text = run([str(tools / "engine-client"), "generate", "--max-tokens", "5", "The with"], folder)
        assert text.startswith("The with"), text
        if extra:
            use(extra, {name: [str(tools / name)] for name in ("python", "engine-client")}, folder)
        return f"{len(installed)} packages; the doctor finds nothing wrong"


def main(folder: str, *pythons: str) -> None:
    """Try everything; the first failure ends it."""
    [wheel], [source] = sorted(Path(folder).glob("*.whl")), sorted(Path(folder).glob("*.tar.gz"))
    for version in pythons or PYTHONS:
        python = find_python(version)
        cases = [(str(wheel.resolve()), "wheel", ""), (str(source.resolve()), "sdist", "")]
        cases += [(f"{wheel.resolve()}[{extra}]", extra, extra) for extra in extras_of(wheel)]
        for what, name, extra in cases:
            began = time.monotonic()
            seen = install(python, what, extra)
            print(f"Python {version}  {name:12}  {time.monotonic() - began:5.0f} s  {seen}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
