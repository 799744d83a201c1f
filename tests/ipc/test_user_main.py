"""The user's main file in an engine process: when it is run, and how far (BC-05, BC-12)."""

from __future__ import annotations

import os
import py_compile
import sys
import types
import zipfile

import pytest

from engine_client.errors import StartupError
from engine_client.ipc import user_main
from engine_client.ipc.user_main import MainReplayed, decoding, describe_main, ensure_main, importable, replay_guard
from helpers.procs import run_script

# A script in every form: says what its __main__ is called elsewhere, and what an engine makes of that.
REPORT = """
import pickle, sys
from engine_client.ipc.user_main import describe_main

class Kept:
    pass

if __name__ == "__main__":
    import json, subprocess
    code = '''
import json, pickle, sys
from engine_client.ipc.user_main import ensure_main
description, text, sys.path[:] = json.loads(sys.argv[1])
ensure_main(description)
print(pickle.loads(bytes.fromhex(text)).__class__.__name__)
'''
    message = json.dumps([describe_main(), pickle.dumps(Kept()).hex(), sys.path])
    subprocess.run([sys.executable, "-c", code, message], check=True)
"""


@pytest.fixture
def main(monkeypatch):
    """A main module that a test may describe and replace, and no memory of an earlier replay."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    monkeypatch.setattr(user_main, "_Replay", type("Fresh", (), {"running": False, "done": False, "decoding": False}))
    return module


class TestDescription:
    """What a client says of its main module."""

    def test_a_session_without_a_file(self, main, monkeypatch):
        """Interactive sessions, notebooks, python -c and standard input have no main file."""
        assert describe_main() == {}
        assert not importable({})
        main.__file__ = "<stdin>"
        assert describe_main() == {}
        monkeypatch.delitem(sys.modules, "__main__")
        assert describe_main() == {}

    def test_a_script(self, main, tmp_path, monkeypatch):
        """A script is known by its absolute path."""
        (tmp_path / "script.py").touch()
        main.__file__ = "script.py"
        assert describe_main() == {}
        monkeypatch.chdir(tmp_path)
        assert describe_main() == {"file": str(tmp_path / "script.py")}
        assert importable(describe_main())

    def test_a_module(self, main):
        """A module that was run by python -m is known by its name."""
        main.__spec__ = types.SimpleNamespace(name="package.module")
        assert describe_main() == {"module": "package.module"}


class TestForms:
    """Objects of a main module find their class in an engine, whatever form the main module has."""

    def test_a_script(self, tmp_path):
        """A script, with a name that is no module's; nothing is written beside it."""
        script = tmp_path / "my script"
        script.write_text(REPORT)
        assert run_script(script).check().stdout == "Kept\n"
        assert os.listdir(tmp_path) == ["my script"]

    def test_a_compiled_script(self, tmp_path):
        """A script that is there in compiled form only."""
        (tmp_path / "script.py").write_text(REPORT)
        compiled = py_compile.compile(str(tmp_path / "script.py"), cfile=str(tmp_path / "other.pyc"))
        (tmp_path / "script.py").unlink()
        assert run_script(tmp_path / os.path.basename(compiled)).check().stdout == "Kept\n"

    @pytest.mark.parametrize("name", ["package.module", "package"])
    def test_a_module(self, tmp_path, name):
        """A module or a package that is run by python -m."""
        package = tmp_path / "package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "module.py").write_text(f"from . import __name__ as parent\n{REPORT}")
        (package / "__main__.py").write_text(f"from . import __name__ as parent\n{REPORT}")
        result = run_script("", flags=("-W", "error", "-m", name), cwd=tmp_path)
        assert result.check().stdout == "Kept\n"

    def test_a_directory(self, tmp_path):
        """A directory that is run."""
        (tmp_path / "__main__.py").write_text(f"import beside\n{REPORT}")
        (tmp_path / "beside.py").write_text("")
        assert run_script(tmp_path).check().stdout == "Kept\n"

    def test_a_zip_application(self, tmp_path):
        """A zip application that is run, with a line for the shell in front."""
        file = tmp_path / "application"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("__main__.py", f"import beside\n{REPORT}")
            archive.writestr("beside.py", "")
        file.write_bytes(b"#!/usr/bin/env python3\n" + file.read_bytes())
        assert run_script(file).check().stdout == "Kept\n"


class TestReplay:
    """How a main file is run in an engine."""

    def test_definitions_only(self, main, tmp_path):
        """What stands under the main guard is not run; what stands above it becomes __main__'s."""
        script = tmp_path / "script.py"
        script.write_text("class Kept: pass\nif __name__ == '__main__': raise AssertionError")
        ensure_main({"file": str(script)})
        module = sys.modules["__main__"]
        assert module is sys.modules["__mp_main__"]
        assert module.Kept.__module__ == "__mp_main__"
        assert module.__file__ == str(script)

    def test_once(self, main, tmp_path):
        """It is run once."""
        script = tmp_path / "script.py"
        script.write_text("import sys; sys.ran = getattr(sys, 'ran', 0) + 1")
        for _ in range(3):
            ensure_main({"file": str(script)})
        assert sys.ran == 1
        del sys.ran

    @pytest.mark.parametrize("end", ["replay_guard()", "raise SystemExit(1)"])
    def test_an_unguarded_script(self, main, tmp_path, end):
        """An unguarded script stops where it makes a client or ends, also within a broad except; the rest is kept."""
        script = tmp_path / "script.py"
        script.write_text(
            "from engine_client.ipc.user_main import replay_guard\n"
            "class Kept: pass\n"
            f"try:\n    {end}\nexcept Exception:\n    raise AssertionError\n"
            "class Lost: pass\n"
        )
        ensure_main({"file": str(script)})
        assert hasattr(sys.modules["__main__"], "Kept")
        assert not hasattr(sys.modules["__main__"], "Lost")
        replay_guard()  # passes again

    def test_a_failing_script(self, main, tmp_path):
        """An exception of the main file is told once, and what was defined above it is kept."""
        script = tmp_path / "script.py"
        script.write_text("class Kept: pass\nraise LookupError('nothing there')")
        with pytest.raises(LookupError, match="nothing there"):
            ensure_main({"file": str(script)})
        ensure_main({"file": str(script)})
        assert hasattr(sys.modules["__main__"], "Kept")
        replay_guard()

    def test_a_module_that_is_not_there(self, main, monkeypatch):
        """A main module that the engine cannot find is named."""
        with pytest.raises(ImportError, match="no_such_module"):
            ensure_main({"module": "no_such_module"})

    def test_no_main_file(self, main):
        """Without a main file nothing is run."""
        ensure_main({})
        assert sys.modules["__main__"] is main

    def test_after_a_fork(self, main, tmp_path):
        """Where __main__ is the described file already, as after a fork, it is not run again."""
        script = tmp_path / "script.py"
        script.write_text("raise AssertionError")
        main.__file__ = str(script)
        ensure_main({"file": str(script)})
        assert sys.modules["__main__"] is main

    def test_the_guard_passes_elsewhere(self):
        """Outside of a replay anybody may make a client."""
        replay_guard()
        assert not issubclass(MainReplayed, Exception)


class TestDecoding:
    def test_a_module_that_makes_a_client_while_an_engine_imports_it(self):
        """It is told what to do, instead of starting an engine from an engine; afterwards clients can be made."""
        with pytest.raises(StartupError, match="makes a client while it is imported"), decoding:
            replay_guard()
        replay_guard()
