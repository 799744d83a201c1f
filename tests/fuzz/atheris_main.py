"""Fuzz with atheris, which looks for new paths through the code: ``tox -e fuzz -- --seconds 600 codec``.

Each target runs in a process of its own, since libFuzzer ends the one that it runs in.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> int:
    """Run the targets one after the other; return 1 if one has found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("targets", nargs="*", default=["framing", "codec", "handshake"])
    options = parser.parse_args()
    failed = False
    for target in options.targets:
        flags = [f"-max_total_time={options.seconds}", "-max_len=4096", "-rss_limit_mb=2048", "-timeout=20"]
        print(f"{target}:", flush=True)
        failed |= bool(subprocess.run([sys.executable, __file__, "--one", target, *flags], check=False).returncode)
    return int(failed)


def run_one(target: str, flags: list[str]) -> None:
    """Be the process that fuzzes one target."""
    import atheris

    with atheris.instrument_imports(include=["engine_client"]):
        from targets import TARGETS
    atheris.Setup([sys.argv[0], *flags], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
