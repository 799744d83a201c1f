"""A batch is divided so that little of a pass is padding."""

from __future__ import annotations

from engine_client.engine.batch import ScheduledRequest
from engine_client.executors.passes import passes


def test_passes_have_little_padding() -> None:
    """Requests of one token run together, prompts of like length too; pooling runs by itself; each request once."""

    def request(name: str, number: int, pooling: object = None) -> ScheduledRequest:
        return ScheduledRequest(name, range(number), number, 0, number, True, [], None, pooling)

    decodes = [request(f"d{i}", 1) for i in range(5)]
    prompts = [request("p30", 30), request("p28", 28), request("p5", 5)]
    pooled = [request("e1", 1, object()), request("e2", 30, object())]
    groups = list(passes([prompts[0], *decodes, pooled[1], prompts[1], prompts[2], pooled[0]]))
    names = [[each.request_id for each in group] for group in groups]
    assert names == [["d0", "d1", "d2", "d3", "d4"], ["p5"], ["p28", "p30"], ["e1"], ["e2"]]
