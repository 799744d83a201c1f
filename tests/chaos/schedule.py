"""What is done in a round, as the seed says: the same seed and number give the same round, whatever came of others.

A schedule is made before it is played and never looks at what came of it, so it can be replayed; where an action makes
no sense any more (the rank that is to be stopped is dead), the player does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

__all__ = ["ENDS", "KINDS", "Action", "Round", "plan"]

KINDS: Final = ("sync", "async", "dp", "lb", "lb-continue", "lb-restart", "lock-step")
"""Blocking; asyncio; one of several ranks; several balanced ranks, of which a death ends all, one, or none for long;
ranks in lock-step."""

ENDS: Final = ("shutdown", "settle", "settle", "drop", "kill", "freeze", "race")
"""Shut down in the middle; when all is done (twice as often); dropped; all ranks killed; stopped and shut down; killed
while it is shut down."""

_SIZES: Final = (0, 0, 100, 70_000, 1 << 20, 5 << 20)
_MOST_RANKS: Final = 3


@dataclass(frozen=True)
class Action:
    """One thing to do; ``repr`` is how it stands in the tail of a schedule."""

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Round:
    """One client's life."""

    seed: int
    number: int
    kind: str
    ranks: int
    options: dict[str, Any]
    script: dict[str, Any]
    actions: tuple[Action, ...]
    end: str

    def __str__(self) -> str:
        return f"round {self.number} of seed {self.seed}: {self.kind}, {len(self.actions)} actions, {self.end}"


class _Planner:
    """Draws the actions of one round; keeps of its state what a sensible next action hangs on."""

    def __init__(self, dice: Random, kind: str, ranks: int) -> None:
        self.dice = dice
        self.kind = kind
        self.ranks = ranks
        self.requests = 0
        self.is_paused = False
        self.is_disturbed = False

    def draw(self) -> Action:
        """Return the next action."""
        makers = list(self._makers())
        [maker] = self.dice.choices([maker for _, maker in makers], [weight for weight, _ in makers])
        return maker()

    def _makers(self) -> Iterator[tuple[int, Callable[[], Action]]]:
        yield 30, self.add
        yield 8, self.stream
        yield 8, self.call
        yield 4, lambda: Action("fail")
        yield 5, lambda: Action("give_up", {"seconds": self.dice.choice((0.0, 0.005, 0.03))})
        yield 5, self.cancel
        yield 3, lambda: Action("nap", {"seconds": self.dice.choice((0.001, 0.01, 0.05))})
        yield (
            4,
            lambda: Action("stop", {"rank": self.dice.randrange(8), "seconds": self.dice.choice((0.01, 0.05, 0.2))}),
        )
        yield 2, lambda: Action("health")
        yield 5, self.resume if self.is_paused else self.pause
        if self.requests:
            yield 8, self.abort
            yield 4, lambda: Action("renew", {"number": self.recent(), **self.size_of_a_request()})
        if self.is_disturbed:
            yield 10, self.recover
        elif self.kind == "lb-restart" or (self.kind == "lb-continue" and self.ranks > 1):
            yield 3, self.kill
        if self.kind in ("lb", "lock-step", "lb-restart") and not self.is_paused and not self.is_disturbed:
            yield 1, self.scale

    def recent(self) -> int:
        """Return the number of a request that was sent not long ago."""
        return self.dice.randrange(max(0, self.requests - 20), self.requests)

    def size_of_a_request(self) -> dict[str, int]:
        size = self.dice.choice(_SIZES)
        return {"tokens": 1 if size else self.dice.choice((1, 2, 20, 200)), "size": size}

    def add(self) -> Action:
        self.requests += 1
        return Action("add", {"number": self.requests - 1, **self.size_of_a_request()})

    def stream(self) -> Action:
        self.requests += 1
        leaves = self.dice.choice((None, None, 0, 1, 5))
        return Action("stream", {"number": self.requests - 1, **self.size_of_a_request(), "leaves_after": leaves})

    def cancel(self) -> Action:
        what = self.dice.choice(("call", "outputs", "stream"))
        arguments = {"what": what, "seconds": self.dice.choice((0.0, 0.005, 0.03))}
        if what == "stream":
            self.requests += 1
            arguments |= {"number": self.requests - 1, **self.size_of_a_request()}
        return Action("cancel", arguments)

    def stop(self) -> Action:
        return Action("stop", {"rank": self.dice.randrange(8), "seconds": self.dice.choice((0.01, 0.05, 0.2))})

    def call(self) -> Action:
        return Action("call", {"size": self.dice.choice(_SIZES), "seconds": self.dice.choice((None, None, 0.0, 0.02))})

    def abort(self) -> Action:
        return Action("abort", {"numbers": [self.recent() for _ in range(self.dice.choice((1, 1, 5)))]})

    def pause(self) -> Action:
        self.is_paused = True
        return Action("pause", {"mode": self.dice.choice(("keep", "abort"))})

    def resume(self) -> Action:
        self.is_paused = False
        return Action("resume")

    def kill(self) -> Action:
        self.is_disturbed = True
        self.ranks -= self.kind == "lb-continue"
        return Action("kill", {"rank": self.dice.randrange(8)})

    def recover(self) -> Action:
        self.is_disturbed = self.is_paused = False  # those that came back may be paused or not: all are resumed
        return Action("recover")

    def scale(self) -> Action:
        self.ranks = self.dice.randrange(1, _MOST_RANKS + 1)
        return Action("scale", {"ranks": self.ranks})


def plan(seed: int, number: int, kinds: tuple[str, ...] = KINDS) -> Round:
    """Return a round."""
    dice = Random(f"{seed}/{number}")
    kind = dice.choice(kinds)
    ranks = 1 if kind in ("sync", "async", "dp") else 2
    options = {
        "arena_limit": dice.choice((0, 1 << 20, 64 << 20)),
        "high_water": dice.choice((1 << 16, 1 << 20, 32 << 20)),
        "backlog_limit": dice.choice((1 << 16, 64 << 20)),
        "spin_us": dice.choice((None, None, 0, 200)),
    }
    script = {"tokens_per_step": dice.choice((1, 3)), "step_seconds": dice.choice((0.0, 0.0, 0.002))}
    planner = _Planner(dice, kind, ranks)
    actions = [planner.draw() for _ in range(dice.randrange(20, 80))]
    end = dice.choice(ENDS)
    if end == "settle":
        actions += [Action("recover")] if planner.is_disturbed else []
        actions += [Action("resume")]
    return Round(seed, number, kind, ranks, options, script, tuple(actions), end)
