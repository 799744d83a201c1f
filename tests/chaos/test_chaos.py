"""A short run of what ``tox -e chaos`` does for minutes; and its model finds what it is there for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chaos.__main__ import main, play_rounds
from chaos.engine import token_of
from chaos.model import Model, Violation, payload_of
from chaos.player import DEATH_BOUND, Player
from chaos.schedule import KINDS, plan
from engine_client import FinishReason

LENGTH = FinishReason.LENGTH


def output(*positions: int, name: str = "a", number: int = 7, reason: Any = None, value: Any = None) -> Any:
    """Return an output with the tokens at these positions."""
    tokens = [token_of(number, position) for position in positions]
    return SimpleNamespace(request_id=name, new_token_ids=tokens, finish_reason=reason, pooling_output=value)


@pytest.fixture
def model() -> Model:
    model = Model()
    model.sends(7, "a", 3)
    return model


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_rounds() -> None:
    """Five seconds of random use, with faults: every request ends once and whole, and nothing is left."""
    rounds, ends, slowest = play_rounds(20, 5.0)
    assert rounds
    assert ends["finished"]
    assert not ends["open"]
    assert slowest < DEATH_BOUND


def test_a_seed_is_a_schedule() -> None:
    """The same seed and number plan the same round; others plan others, of every kind."""
    assert plan(3, 4) == plan(3, 4)
    assert len({str(plan(3, number).actions) for number in range(20)}) == 20
    assert plan(3, 4).actions != plan(4, 4).actions
    assert {plan(3, number).kind for number in range(100)} == set(KINDS)


def test_a_failure_tells_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seed, the round and the last actions are printed, and the exit status is 1."""

    def fail(player: Player) -> None:
        player.done += player.round.actions[:2]
        raise Violation("found")

    monkeypatch.setattr(Player, "play", fail)
    assert main(["--seed", "5", "--round", "6"]) == 1
    told = capsys.readouterr().out
    assert "found" in told
    assert "python -m chaos --seed 5 --round 6" in told
    assert all(str(action) in told for action in plan(5, 6).actions[:2])


def test_the_model_knows_an_ordinary_life(model: Model) -> None:
    """Outputs in order, the last of them with a reason, are what is asked for."""
    assert [sent.name for sent in model.open()] == ["a"]
    model.took(model.now(), output(0))
    model.took(model.now(), output(1, 2, reason=LENGTH))
    model.check_all_ended()
    assert model.counts() == {"finished": 1}
    assert "finished" in repr(model)


@pytest.mark.parametrize(
    "outputs",
    [
        [output(0), output(2)],
        [output(0), output(0)],
        [output(1)],
        [output(0, number=8)],
        [output(0, 1, reason=LENGTH)],
        [output(0, 1, 2, reason=LENGTH), output(reason=LENGTH)],
        [output(0, name="never sent")],
        [output(reason=FinishReason.ABORT)],
        [output(reason=FinishReason.ERROR)],
    ],
    ids=["a gap", "twice", "begun late", "another's", "too few", "two ends", "a stranger's", "cut", "failed"],
)
def test_the_model_finds_wrong_outputs(model: Model, outputs: list[Any]) -> None:
    """What is not complete, in order and the request's own is a violation, and so is an end without a reason."""
    with pytest.raises(Violation):
        for one in outputs:
            model.took(model.now(), one)


def test_the_model_finds_what_comes_after_an_abort(model: Model) -> None:
    """What another thread had in hand may come when an abort has returned, what it asked for later may not."""
    before = model.now()
    model.aborts(["a"])
    model.aborted(["a"])
    model.took(before, output(0))
    with pytest.raises(Violation, match="aborted"):
        model.took(model.now(), output(0))


def test_the_model_finds_a_request_that_never_ends(model: Model) -> None:
    """An open request at the end is a violation."""
    with pytest.raises(Violation, match="never ended"):
        model.check_all_ended()


def test_the_model_finds_a_changed_tensor(model: Model) -> None:
    """A tensor is compared to its last byte."""
    model.sends(8, "b", 1, 100)
    value = payload_of(8, 100)
    value[99] += 1
    with pytest.raises(Violation, match="changed"):
        model.took(model.now(), output(0, name="b", number=8, reason=LENGTH, value=value))


def test_the_model_finds_a_death_without_a_cause(model: Model) -> None:
    """Nobody is refused, told of a death, or left by a stream, unless something was done that explains it."""
    model.sends(9, "s", 1, is_stream=True)
    for happens in (
        lambda: model.refused("a", OSError()),
        lambda: model.failed("s", OSError()),
        lambda: model.stopped("s", is_closed=False),
        model.died,
    ):
        with pytest.raises(Violation):
            happens()
    assert not model.allows_death()
    model.disturbed()
    model.took(model.now(), output(reason=FinishReason.ERROR))
    model.failed("s", OSError())
    model.calm()
    model.dies()
    model.died()
    assert model.counts() == {"failed": 2}
