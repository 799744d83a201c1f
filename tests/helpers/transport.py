"""What a channel does to a payload, without a channel."""

from __future__ import annotations

from typing import Any

from engine_client.protocol.batch import Columns, decode_columns, with_values
from engine_client.protocol.codec import Payload, dumps, loads
from engine_client.protocol.frames import Frame


def carry(payload: Payload) -> Any:
    """Decode a payload from memory of the receiver's own, which an inline segment would be."""
    return loads(payload.header, [memoryview(bytearray(buffer)) for buffer in payload.buffers])


def cross(value: Any, *, main_importable: bool = True) -> Any:
    """Encode a value and decode it on the other side."""
    return carry(dumps(value, main_importable=main_importable))


def columns_of(frame: Frame) -> tuple[Columns, list[int]]:
    """Decode an OUTPUTS frame with its values; return also the keys of requests that fail for theirs."""
    return with_values(decode_columns(frame))
