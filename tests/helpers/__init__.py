"""What the tests share; import it as ``from helpers.procs import run_script`` (folders are packages, ``tests/`` is not)."""
