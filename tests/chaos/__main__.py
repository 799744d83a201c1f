"""Use clients at random, and stop, kill and restart their engines, against a model of what must hold.

    python -m chaos                            two minutes (``tox -e chaos``)
    python -m chaos --seconds 3600 --seed 7    longer, from a seed
    python -m chaos --seed 7 --round 41        one round again

A round is the life of one client; see ``schedule`` for what is done in it and ``model`` for what must hold.  Around
each stands the leak guard.  A failure prints the seed, the round and the last actions, and the same seed plays the same
rounds again; the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from random import SystemRandom

from chaos.player import Player
from chaos.schedule import Round, plan
from engine_client.testing.leaks import LeakGuard
from helpers.timing import DEADLOCK

__all__ = ["main", "play_rounds"]

_TAIL = 40
"""Actions that a failure prints."""


def tell(round_: Round, player: Player) -> None:
    """Print what was done last, and how to do it again."""
    print(f"\nFAILED in {round_}; options {round_.options}, script {round_.script}; {player.model!r}")
    print(f"the last of {len(player.done)} actions:")
    for number, action in list(enumerate(player.done))[-_TAIL:]:
        print(f"  {number:4}  {action}")
    print(f"again: python -m chaos --seed {round_.seed} --round {round_.number}", flush=True)


def give_up(round_: Round, player: Player) -> None:
    """End this process when a round hangs, with all stacks."""
    tell(round_, player)
    print("it hangs:", flush=True)
    faulthandler.dump_traceback(sys.__stdout__, all_threads=True)
    sys.__stdout__.flush()  # type: ignore[union-attr]
    with suppress(Exception):  # whatever is left of the engines
        print(player.engines(), flush=True)
    os._exit(1)


def play(round_: Round) -> Player:
    """Play a round; return who has played it, with what became of the requests.

    Raises:
        BaseException: what went wrong, after it was told.
    """
    player = Player(round_)
    watchdog = threading.Timer(6 * DEADLOCK, give_up, (round_, player))
    watchdog.daemon = True
    try:
        with LeakGuard():
            watchdog.start()
            try:
                player.play()
            finally:
                watchdog.cancel()
                watchdog.join()
    except BaseException:
        tell(round_, player)
        raise
    return player


def play_rounds(seed: int, seconds: float, first: int = 0) -> tuple[int, Counter[str], float]:
    """Play rounds until the time is over, at least one.

    Returns:
        How many, what became of their requests, and the most seconds until a death or an end was told to all.
    """
    ends: Counter[str] = Counter()
    slowest = 0.0
    until = time.monotonic() + seconds
    number = first
    while number == first or time.monotonic() < until:
        player = play(plan(seed, number))
        ends += player.model.counts()
        slowest = max(slowest, player.slowest)
        number += 1
    return number - first, ends, slowest


def main(arguments: list[str]) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Random use of clients against a model.")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (120)")
    parser.add_argument("--seed", type=int, default=None, help="which schedule (a random one)")
    parser.add_argument("--round", type=int, default=None, help="this round alone")
    options = parser.parse_args(arguments)
    seed = SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    first, seconds = (0, options.seconds) if options.round is None else (options.round, 0.0)
    print(f"seed {seed}", flush=True)
    try:
        rounds, ends, slowest = play_rounds(seed, seconds, first)
    except Exception:  # noqa: BLE001  # told, with all that is known
        traceback.print_exc(file=sys.stdout)
        return 1
    print(f"each death or end was told to all within {slowest:.2f} s")
    print(f"{rounds} rounds, requests: {', '.join(f'{count} {how}' for how, count in ends.most_common())}")
    return 0


if __name__ == "__main__":
    logging.getLogger("engine_client").setLevel(logging.CRITICAL + 1)  # deaths are what this is about
    sys.exit(main(sys.argv[1:]))
