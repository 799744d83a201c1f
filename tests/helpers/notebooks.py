"""Notebooks with a real kernel: cells are run one by one, as a person does, by nbclient in a process of its own.

nbclient's process answers questions, a line of JSON each; it holds all the threads, sockets and warnings that come with
pyzmq and Jupyter, so that none of them are in the process of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.procs import script_environment, wait_gone
from helpers.timing import DEADLOCK

__all__ = ["Cell", "Notebook"]

QUIET = ("-W", "ignore")
"""What Jupyter's packages warn each other of is not for our tests; the kernel has flags of its own."""


@dataclass
class Cell:
    """What is to be seen under a cell.

    Args:
        text: what was printed, to both streams, in order, without colours.
        result: the text of the last expression.
        html: its HTML; empty if it has none.
        error: ``Type: message`` of what the cell raised; empty if nothing.
        elapsed: seconds that it ran.
    """

    text: str = ""
    result: str = ""
    html: str = ""
    error: str = ""
    elapsed: float = 0.0
    outputs: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> Cell:
        """Fail if the cell raised."""
        assert not self.error, f"{self.error}\n{self.text}"
        return self


class Notebook:
    """A kernel and who runs cells in it; a context manager.

    Args:
        folder: an empty directory for what Jupyter keeps; the kernel works there, too.
        setup: cells to run first.
    """

    def __init__(self, folder: Path, *setup: str) -> None:
        environment = script_environment(
            PYTEST_CURRENT_TEST=None,  # else a kernel leaves descriptors 1 and 2 as they are
            PYTHONUNBUFFERED=None,
            PYTHONWARNINGS=None,
            IPYTHONDIR=str(folder / "ipython"),
            JUPYTER_PLATFORM_DIRS="1",
            JUPYTER_CONFIG_DIR=str(folder / "config"),
            JUPYTER_DATA_DIR=str(folder / "data"),
            JUPYTER_RUNTIME_DIR=str(folder / "runtime"),
            PYDEVD_DISABLE_FILE_VALIDATION="1",
        )
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, *QUIET, "-m", "helpers.notebooks"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._setup = setup

    def __enter__(self) -> Notebook:
        for source in ("pass", *self._setup):  # the kernel is there, whether anything is to be run in it or not
            self.run(source).check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process, self._log:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(DEADLOCK)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
        assert error is not None or self._process.returncode == 0

    def _ask(self, **question: Any) -> Any:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise AssertionError(f"nbclient ended:\n{self._log.read()}")
        return json.loads(answer)

    def run(self, source: str, *, interrupt_at: str = "") -> Cell:
        """Run a cell to its end.

        Args:
            source: of it.
            interrupt_at: press the stop button as soon as the cell has printed this.
        """
        return Cell(**self._ask(do="run", source=source, interrupt_at=interrupt_at))

    def value(self, expression: str) -> Any:
        """Return what an expression is in the kernel, as JSON can tell it."""
        return json.loads(self.run(f"import json as _json; print(_json.dumps({expression}))").check().text)

    def restart(self) -> None:
        """Restart the kernel, as the button does: it is asked to end first."""
        self._ask(do="restart")

    def kill(self) -> int:
        """Kill the kernel where it stands; return its pid."""
        return int(self._ask(do="kill"))

    def wait_gone(self, *pids: int) -> None:
        """Wait until processes are gone."""
        for pid in pids:
            wait_gone(pid, 2.0)


# -- nbclient's process ------------------------------------------------------------------------------------------------


async def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the kernel and its children print besides
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    notebook = nbformat.v4.new_notebook()
    client = NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=DEADLOCK)
    loop = asyncio.get_running_loop()
    async with client.async_setup_kernel():
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            question = json.loads(line)
            answer: Any = None
            if question["do"] == "run":
                notebook.cells.append(nbformat.v4.new_code_cell(question["source"]))
                answer = await run_cell(client, notebook.cells[-1], question["interrupt_at"])
            elif question["do"] == "restart":
                await client.km.restart_kernel()
                client.kc.stop_channels()
                await client.async_start_new_kernel_client()
            else:
                answer = client.km.provisioner.pid
                await client.km.signal_kernel(9)
                with suppress(DeadKernelError):
                    await client.km.provisioner.wait()
            print(json.dumps(answer), file=answers, flush=True)


async def run_cell(client: Any, cell: Any, interrupt_at: str) -> dict[str, Any]:
    async def interrupt() -> None:
        while interrupt_at not in text_of(cell.outputs):  # noqa: ASYNC110  # nobody tells of outputs
            await asyncio.sleep(0.01)
        await client.km.interrupt_kernel()

    interrupter = asyncio.ensure_future(interrupt()) if interrupt_at else None
    began = time.monotonic()
    await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    elapsed = time.monotonic() - began
    if interrupter is not None:
        interrupter.cancel()
    data = next((output["data"] for output in cell.outputs if "data" in output), {})
    return {
        "text": text_of(cell.outputs),
        "result": data.get("text/plain", ""),
        "html": data.get("text/html", ""),
        "error": next((f"{o['ename']}: {o['evalue']}" for o in cell.outputs if o["output_type"] == "error"), ""),
        "elapsed": elapsed,
        "outputs": cell.outputs,
    }


def text_of(outputs: list[Any]) -> str:
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


if __name__ == "__main__":
    asyncio.run(serve())
