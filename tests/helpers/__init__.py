"""What the tests share: ``from helpers.procs import run_script``, since folders are packages and ``tests/`` is not."""
