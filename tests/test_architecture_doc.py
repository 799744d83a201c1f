"""ARCHITECTURE.md says what is: its tables are those of the code, and every invariant that the code cites is there."""

from __future__ import annotations

import re

import pytest

from engine_client.engine import busy_loop
from engine_client.protocol import lifecycle, waves
from engine_client.protocol.frames import Kind
from helpers.tree import MODULES, TESTS, Module

TEXT = (TESTS.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """Return the rows of the table that has this header."""
    rows = TEXT.partition(header)[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")][1:]


def test_the_life_of_an_engine():
    """The table of states is the code's, row by row."""
    shown = {
        (state, event): (target, action)
        for state, events, target, action in table("| state | on | to | action |")
        for event in events.split(", ")
    }
    actual = {
        (state.name, (lifecycle.Event if event >= 100 else Kind)(event).name): (move.state.name, move.action.name)
        for state, moves in lifecycle.TRANSITIONS.items()
        for event, move in moves.items()
    }
    assert shown == actual


def test_the_busy_loop():
    """The table of the loop's states is the code's."""
    shown = {state: [name for name in names.split(", ") if name] for state, names in table("| state | may become |")}
    actual = {state.name: [to.name for to in targets] for state, targets in busy_loop.TRANSITIONS.items()}
    assert shown == actual


def test_the_waves_of_ranks():
    """The table of lock-step ranks is the code's."""
    shown = {(state, event): move for state, event, *move in table("| rank | when | becomes | action |")}
    actual = {
        (state.name, event.name): [move.state.name, move.action.name]
        for state, moves in waves.TRANSITIONS.items()
        for event, move in moves.items()
    }
    assert shown == actual


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_cited_invariants_are_there(module: Module):
    """Every I-number in a module stands in ARCHITECTURE.md."""
    defined = set(re.findall(r"^(I\d+) ", TEXT, re.MULTILINE))
    cited = set(re.findall(r"\bI\d+\b", module.path.read_text(encoding="utf-8")))
    assert cited <= defined


@pytest.mark.parametrize("module", [m for m in MODULES if m.path.name != "__init__.py"], ids=str)
def test_every_room_is_on_the_map(module: Module):
    """The folder of every module is in the table of rooms."""
    room = module.name.split(".")[1]
    assert re.search(rf"`{room}[/`]", TEXT) or room == "__main__"
