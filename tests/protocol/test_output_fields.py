"""What outputs of other classes say beside id and tokens, found quickly where the class can tell."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.output_fields import comparison, set_fields
from engine_client.protocol.outputs import outputs_from
from helpers.transport import columns_of


class Struct:
    """Stands for msgspec's base class, which compares all fields; takes a note of each comparison."""

    compared: ClassVar[list[Any]] = []
    __hash__ = None

    def __init__(self, request_id: str, new_token_ids: list[int], **values: Any) -> None:
        default = {field.name: field.default for field in fields(EngineCoreOutput)}
        vars(self).update({**default, **values, "request_id": request_id, "new_token_ids": new_token_ids})

    def __eq__(self, other: object) -> bool:
        self.compared.append(vars(self)["request_id"])
        return all(bool(value == vars(other)[name]) for name, value in vars(self).items())


Struct.__module__ = "msgspec"


class Output(Struct):
    """An output as the reference's: a class of msgspec with our fields."""


class ComparedById(Output):
    """An output that compares something else."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("its own comparison tells nothing about fields")


class WithAnotherDefault(Output):
    """An output whose default is not ours."""

    def __init__(self, request_id: str, new_token_ids: list[int], **values: Any) -> None:
        super().__init__(request_id, new_token_ids, **{"num_nans_in_logits": 5, **values})


class WithoutDefaults(Output):
    """An output that cannot be made of an id and tokens."""

    def __init__(self, request_id: str, new_token_ids: list[int], nans: int) -> None:
        super().__init__(request_id, new_token_ids, num_nans_in_logits=nans)


class Undecided:
    """Cannot say whether it equals anything, as an array."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    def __reduce__(self) -> Any:
        return str, ("undecided",)


@pytest.mark.parametrize(
    ("kind", "values", "is_compared"),
    [
        (Output, {}, True),
        (ComparedById, {}, False),
        (WithAnotherDefault, {}, False),
        (WithoutDefaults, {"nans": 1}, False),
    ],
)
def test_outputs_arrive_whole(kind: Any, values: dict[str, int], is_compared: bool) -> None:
    """A class that can tell whether it has more than id and tokens is asked; what there is arrives either way."""
    Struct.compared.clear()
    rows = [kind(name, [number], **values) for number, name in enumerate("abcd")]
    usual = vars(rows[0])["num_nans_in_logits"]
    rows[1].finish_reason, rows[1].stop_reason = FinishReason.STOP, "x"
    rows[2].num_nans_in_logits = 2
    rows[3].routed_experts = Undecided()
    outputs = EngineCoreOutputs(0, rows, timestamp=1.0)
    frame, finished = encode_outputs(outputs, {name: number for number, name in enumerate("abcd")})
    assert frame is not None
    columns, _ = columns_of(frame)
    result, _ = outputs_from(columns, dict(enumerate("abcd")))
    assert result.outputs == [
        EngineCoreOutput("a", [0], num_nans_in_logits=usual),
        EngineCoreOutput("b", [1], finish_reason=FinishReason.STOP, stop_reason="x", num_nans_in_logits=usual),
        EngineCoreOutput("c", [2], num_nans_in_logits=2),
        EngineCoreOutput("d", [3], routed_experts="undecided", num_nans_in_logits=usual),  # type: ignore[arg-type]
    ]
    assert finished == ["b"]
    assert Struct.compared == (list("abcd") if is_compared else [])


def test_other_classes_are_looked_at_field_by_field() -> None:
    """Of a class that nothing is known about, every output may have more; what it lacks is at its default."""
    output = SimpleNamespace(request_id="a", new_token_ids=[1], finish_reason=1)
    assert comparison(SimpleNamespace)(output) is True
    assert set_fields(output) == {"finish_reason": 1}


def test_our_own_outputs_say_what_others_with_the_same_fields_say() -> None:
    """A field that was set to its default says nothing, and neither does what is no field."""
    values: dict[str, Any] = {"finish_reason": FinishReason.STOP, "num_nans_in_logits": 3, "pooling_output": [1]}
    output = EngineCoreOutput("a", [1], **values)
    output.stop_reason = None
    output.num_nans_in_logits = 0
    output.mark = "no field"  # type: ignore[attr-defined]
    expected = {"finish_reason": FinishReason.STOP, "pooling_output": [1]}
    assert set_fields(output) == set_fields(SimpleNamespace(**vars(output))) == expected
