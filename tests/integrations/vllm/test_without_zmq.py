"""What needs a ZMQ socket, where there is no pyzmq: one error that says which feature wanted it, and why not."""

from __future__ import annotations

import pytest

from helpers.vllm_scripts import run_vllm, told

REFUSED = """
if __name__ == "__main__":
    from vllm import LLM
    try:
        LLM(**SETTINGS, **json.loads(sys.argv[2]))
    except RuntimeError as error:
        cause = error.__cause__
        tell(kind=type(error).__name__, cause=type(cause).__name__, why=str(cause))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ('{"tensor_parallel_size": 2}', "the 'mp' executor (several workers, as for tensor parallelism)"),
        ('{"kv_events_config": {"enable_kv_cache_events": true}}', "publishing KV cache events"),
    ],
    ids=["several workers", "events"],
)
def test_it_is_refused_at_the_start(tmp_path, settings, feature):
    """The start fails, and its cause is the stub's error."""
    refused = REFUSED.replace("sys.argv[2]", repr(settings))
    error = told(run_vllm(tmp_path, refused, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}))
    assert error["kind"] == "StartupError"
    assert error["cause"] == "ZMQUnavailableError"
    assert error["why"].startswith(f"{feature} needs ZMQ sockets (vllm.")
    assert "and pyzmq is not installed" in error["why"]
