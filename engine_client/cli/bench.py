"""``engine-client bench``: this library measured, and compared with its peers.

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from engine_client.bench import workloads

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP: Final = "measure this library, beside vLLM's own clients or plain ZeroMQ"
DESCRIPTION: Final = (
    "Measure clients and engine process without a model: latency, tokens per second, bandwidth, start and end. With a "
    "peer, both do the same work in turn, and the table shows the ratios. Workloads: "
    f"{', '.join(workloads.WORKLOADS)}. Those from {workloads.GROWTH[0].name!r} on run with --growth, or when named."
)
_MISSED: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help="what to run (default: all but those of --growth)")
    add(
        "--peer",
        metavar="PYTHON",
        help="compare with vLLM's own clients, in this interpreter, which has vLLM; or 'zmq': with ZeroMQ and msgpack",
    )
    add("--rounds", type=_positive, default=5, metavar="N", help="runs of each workload (default: %(default)s)")
    add("--growth", action="store_true", help="measure cost as batch, payload, ranks, messages and requests grow")
    add("--quick", action="store_true", help="few repetitions: a first look, not a measurement")
    add("--check", action="store_true", help="fail when a target is missed, and say which")
    add("--json", metavar="FILE", help="write all figures of all runs to FILE")
    add("--from", dest="source", metavar="FILE", help="show an earlier run's FILE of --json instead of measuring")
    add("--plot", metavar="FILE", help="draw FILE.svg or FILE.png (needs engine_client[plot])")


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read, and show; return 1 if ``--check`` finds a target missed or a workload failed."""
    # None of this is for other commands.
    from engine_client.bench import plot, progress, results, rounds, table, targets  # noqa: PLC0415

    if arguments.plot:
        plot.check(arguments.plot)
    chosen = workloads.choose(arguments.workloads, growth=arguments.growth)
    if arguments.source:
        found = results.Results.load(arguments.source)
    else:
        with progress.Progress() as show:
            found = rounds.measure(
                chosen, arguments.peer, rounds=arguments.rounds, quick=arguments.quick, progress=show
            )
    if arguments.json:
        found.save(arguments.json)
    print(table.render(found), flush=True)
    if arguments.plot:
        plot.draw(found, arguments.plot)
    verdicts = targets.judge(found)
    if arguments.check:
        print("", *verdicts, sep="\n")
        if not verdicts:
            print("no target applies to what was measured", file=sys.stderr)
    failed = any(measured.errors for measured in found.workloads.values())
    missed = not verdicts or any(not verdict.met for verdict in verdicts)
    return _MISSED if failed or (arguments.check and missed) else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
