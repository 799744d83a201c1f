"""Measure how much of each module its own test file covers: ``tox -e owncov [module …]``.

A module that only the tests of others cover is one whose behaviour nobody has thought about.  Prints a line for each
module; fails if one is below its floor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.tree import MODULES, TESTS, Module

FLOOR, PURE_FLOOR = 95.0, 100.0
"""Per cent of branches; the second for ``protocol/``."""


def measure(module: Module) -> tuple[float, str]:
    """Return the per cent covered and the lines that are not."""
    *rooms, name = module.name.split(".")[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COVERAGE_FILE"] = str(Path(folder, "data"))
        coverage = [sys.executable, "-m", "coverage"]
        tests = TESTS.joinpath(*rooms, f"test_{name}.py")
        run = [*coverage, "run", "-m", "pytest", "-q", "-m", "not full and not stress and not timing", str(tests)]
        done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout)
            return 0.0, "its tests fail"
        subprocess.run([*coverage, "combine", "-q"], check=True)
        report = Path(folder, "report.json")
        include = f"*/{module.path.relative_to(module.path.parents[len(rooms) + 1])}"
        subprocess.run([*coverage, "json", "-q", "-o", str(report), f"--include={include}"], check=True)
        (facts,) = json.loads(report.read_text())["files"].values()
        missing = [f"{line}" for line in facts["missing_lines"]]
        missing += [
            f"{begin}->{end}" for begin, end in facts["missing_branches"] if begin not in facts["missing_lines"]
        ]
        return facts["summary"]["percent_covered"], " ".join(missing)


def main(names: list[str]) -> int:
    """Measure the modules named, or all; return the exit status."""
    below = 0
    for module in MODULES:
        chosen = not names or module.name.removeprefix("engine_client.") in names
        if not chosen or module.path.name in ("__init__.py", "__main__.py"):
            continue
        percent, missing = measure(module)
        floor = PURE_FLOOR if ".protocol." in module.name else FLOOR
        below += percent < floor
        print(f"{'ok ' if percent >= floor else 'LOW'} {percent:6.1f} {module.name}  {missing}", flush=True)
    return min(below, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
