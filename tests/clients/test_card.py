"""What a notebook shows of a client."""

from __future__ import annotations

import pytest

from engine_client.clients.card import CardRow, render_card


def test_a_card_is_a_table() -> None:
    """A row for each engine, with numbers as people write them."""
    html = render_card("A client", [CardRow(0, "ready", 7, 123 << 20, 61.0, 2, 3, 1234.56), CardRow(1, "dead", 8)])
    assert html.count("<tr>") == 3
    for text in ("A client", "123.0 MiB", "1 min 1 s", ">2<", ">3<", "1,234.6", ">ready<", ">dead<"):
        assert text in html


def test_values_are_escaped_and_short() -> None:
    """An error of many lines, or of HTML, stays text; a very long one is cut."""
    html = render_card("<b>", [CardRow(0, "<i>", 7, error='<script>alert("&")</script>' + "x" * 100_000)])
    assert not any(tag in html for tag in ("<b>", "<i>", "<script"))
    assert "&lt;script&gt;alert(&quot;&amp;&quot;)" in html
    assert len(html) < 5_000


@pytest.mark.parametrize(
    ("memory", "uptime", "texts"),
    [
        (None, None, ("?", "?")),
        (0, 0.0, ("0 B", "0.0 s")),
        (1023, 59.94, ("1023 B", "59.9 s")),
        (1024, 60.0, ("1.0 KiB", "1 min 0 s")),
        (3 << 40, 7_322.0, ("3.0 TiB", "2 h 2 min")),
        (1 << 52, 90_000.0, ("4096.0 TiB", "25 h 0 min")),
    ],
)
def test_units(memory: int | None, uptime: float | None, texts: tuple[str, str]) -> None:
    """Bytes and seconds are in the unit that suits them; what is not known is a question mark."""
    assert CardRow(0, "ready", 1, memory, uptime).cells()[3:5] == texts
