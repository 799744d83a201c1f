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


CONNECTOR = """
if __name__ == "__main__":
    from vllm import LLM
    try:
        LLM(**SETTINGS, kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    except Exception as error:
        import psutil
        tell(kind=type(error).__name__, why=str(error), engines=len(psutil.Process().children()))
"""


@pytest.mark.slow
def test_a_connector_that_would_listen_in_a_thread(tmp_path):
    """A KV connector whose start would wait for its listener is refused before there is an engine."""
    error = told(run_vllm(tmp_path, CONNECTOR))
    assert error["kind"] == "ZMQUnavailableError"
    assert error["why"].startswith("the KV connector NixlConnector needs ZMQ sockets")
    assert error["engines"] == 0


OWN_CLIENT = "vLLM's own engine client (several API servers, several hosts, or no install() in this process)"

SOCKETS = """
def queue():
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    MessageQueue(1, 1)

def events():
    from vllm.distributed.kv_events import ZmqEventPublisher
    ZmqEventPublisher(0)

def connector():
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
    with zmq_ctx(zmq.ROUTER, "tcp://127.0.0.1:0"):
        pass

def coordinator():
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    DPCoordinatorProc(2)

def client():
    from vllm.v1.engine.core_client import MPClient
    MPClient(False, None, None, False)

def frontend():
    from vllm.v1.engine.core_client import MPClient
    MPClient(True, None, None, False)

if __name__ == "__main__":
    from engine_client.integrations.vllm.zmq_stub import ZMQUnavailableError
    for make in (queue, events, connector, coordinator, client, frontend):
        try:
            make()
        except ZMQUnavailableError as error:
            tell(**{make.__name__: str(error)})
"""


@pytest.mark.slow
def test_every_way_to_a_socket_is_refused(tmp_path):
    """Whatever of vLLM makes a socket gets the error, with the name of the feature that it is for."""
    refused = told(run_vllm(tmp_path, SOCKETS))
    assert {name: error.partition(" needs ZMQ sockets")[0] for name, error in refused.items()} == {
        "queue": "the 'mp' executor (several workers, as for tensor parallelism)",
        "events": "publishing KV cache events",
        "connector": "a KV connector",
        "coordinator": "vLLM's data-parallel coordinator",
        "client": OWN_CLIENT,
        "frontend": OWN_CLIENT,
    }
