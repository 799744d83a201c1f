"""Signals to vLLM's process or its engine's, in the middle of a start and of calls that would wait for long."""

from __future__ import annotations

import signal

import pytest

from helpers.vllm_scripts import run_vllm, told

SIGNALS = """
def doze(worker, seconds):
    time.sleep(seconds)
    return "slept"

def timed(call):
    began = time.monotonic()
    try:
        outcome = call()
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    return outcome, time.monotonic() - began

def after(seconds, *actions):
    def act():
        for action in actions:
            action()
            time.sleep(0.002)
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    from vllm import LLM
    from vllm.v1.engine.exceptions import EngineDeadError
    longer = dict(max_model_len=60_000, hf_overrides={"max_position_embeddings": 60_000})
    llm = LLM(**{**SETTINGS, **longer})
    expected = generate(llm)
    for name, signals in (("once", [interrupt]), ("twice", [interrupt, interrupt])):
        timer = after(0.5, *signals)
        outcome, seconds = timed(lambda: generate(llm, max_tokens=59_000))  # minutes
        try:
            timer.join()  # the second interrupt of an impatient user may come here
        except KeyboardInterrupt:
            timer.join()
        left = llm.llm_engine.get_num_unfinished_requests()
        tell(**{name: [outcome[0], seconds < 5, left, generate(llm) == expected]})
    after(0.5, interrupt)
    outcome, seconds = timed(lambda: llm.collective_rpc(doze, args=(8,)))
    tell(call=[outcome[0], seconds < 5])
    tell(next_call=llm.collective_rpc(doze, args=(0,)), next=generate(llm) == expected)
    after(0.5, kill_engine)
    outcome, seconds = timed(lambda: llm.collective_rpc(doze, args=(600,)))
    tell(death=[outcome[0], "SIGKILL(-9)" in outcome[1], seconds < 0.5 + 2])
    tell(is_vllms=EngineDeadError.__name__ == outcome[0])
    for name, call in (("generate", lambda: generate(llm)), ("again", lambda: llm.collective_rpc(doze, args=(0,)))):
        outcome, seconds = timed(call)
        tell(**{name: [outcome[0], seconds < 2]})
"""


@pytest.fixture(scope="module")
def signals(tmp_path_factory):
    """Tell what ``LLM`` has met that was interrupted several times, and whose engine was killed at last."""
    return told(run_vllm(tmp_path_factory.mktemp("signals"), SIGNALS))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("times", ["once", "twice"])
def test_interrupted_generate(signals, times):
    """Ctrl-C, or two, ends a ``generate`` of minutes at once and leaves nothing; the next returns its own outputs."""
    assert signals[times] == ["KeyboardInterrupt", True, 0, True]


@pytest.mark.slow
@pytest.mark.crash
def test_interrupted_call(signals):
    """Ctrl-C ends the wait for a utility at once; the next call and the next ``generate`` get what is theirs."""
    assert signals["call"] == ["KeyboardInterrupt", True]
    assert signals["next_call"] == ["slept"]
    assert signals["next"] is True


@pytest.mark.slow
@pytest.mark.crash
def test_death_during_a_call(signals):
    """An engine killed during ``collective_rpc`` ends that call, and every later one, in time with vLLM's error."""
    assert signals["death"] == ["EngineDeadError", True, True]
    assert signals["is_vllms"] is True
    assert signals["generate"] == signals["again"] == ["EngineDeadError", True]


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_engine_ends_generate(tmp_path):
    """An engine that is killed during ``LLM.generate`` ends it within two seconds with the error that vLLM knows."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    from vllm.v1.engine.exceptions import EngineDeadError
    llm = LLM(**SETTINGS)
    killed = []
    threading.Timer(1.0, lambda: (killed.append(time.monotonic()), kill_engine())).start()
    try:
        generate(llm, max_tokens=4000)
    except EngineDeadError as error:
        tell(error=str(error), exit_name=error.exit_name, in_time=time.monotonic() - killed[0] < 2)
""",
    )
    found = told(result)
    assert found["exit_name"] == "SIGKILL(-9)"
    assert found["in_time"] is True


@pytest.mark.slow
@pytest.mark.crash
def test_a_kill_at_the_start(tmp_path):
    """An engine that is killed while it loads fails the start at once, by name."""
    result = run_vllm(
        tmp_path,
        """
def kill_when_it_is_there():
    import psutil
    while not any("engine_client" in " ".join(child.cmdline()) for child in psutil.Process().children()):
        time.sleep(0.05)
    time.sleep(1.0)
    killed.append(time.monotonic())
    kill_engine()

if __name__ == "__main__":
    from vllm import LLM
    killed = []
    threading.Thread(target=kill_when_it_is_there, daemon=True).start()
    try:
        LLM(**SETTINGS)
    except RuntimeError as error:
        tell(kind=type(error).__name__, error=str(error), seconds=time.monotonic() - killed[0])
""",
    )
    error = told(result)
    assert error["kind"] == "StartupError"
    assert "SIGKILL(-9)" in error["error"]
    assert error["seconds"] < 5


@pytest.mark.slow
@pytest.mark.crash
def test_no_orphan_of_a_start(tmp_path):
    """When vLLM's process is killed while its engine loads, the engine ends, too."""
    result = run_vllm(
        tmp_path,
        """
def kill_when_it_loads():
    import psutil
    while not any("engine_client" in " ".join(child.cmdline()) for child in psutil.Process().children()):
        time.sleep(0.05)
    time.sleep(1.0)
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    from vllm import LLM
    threading.Thread(target=kill_when_it_loads, daemon=True).start()
    LLM(**SETTINGS)
""",
    )
    assert result.stdout == "killed\n"
    result.check(-signal.SIGKILL, stderr=result.stderr)


@pytest.mark.slow
@pytest.mark.crash
def test_no_orphan_of_a_call(tmp_path):
    """When vLLM's process is killed while its engine is deep in a call, the engine ends, too."""
    result = run_vllm(
        tmp_path,
        """
def doze(worker):
    time.sleep(600)

if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    print("calls", flush=True)
    llm.collective_rpc(doze)
""",
    )
    assert result.stdout == "calls\n"
    result.check(-signal.SIGKILL, stderr=result.stderr)


@pytest.mark.slow
@pytest.mark.crash
def test_no_orphan_of_a_generate(tmp_path):
    """When vLLM's process is killed while its engine generates, the engine ends, too."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    generate(llm, max_tokens=4000)
""",
    )
    result.check(-signal.SIGKILL, stderr=result.stderr)
