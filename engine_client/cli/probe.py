"""The smallest engine there is, for ``engine-client doctor`` to start.

Threads: the engine's.
"""

from __future__ import annotations

from engine_client import Batch, Executor, ModelOutput

__all__ = ["ProbeExecutor"]


class ProbeExecutor(Executor):
    """Answers with the last token."""

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Return one token for each request."""
        return batch.sample(lambda request: request.token_ids[-1])
