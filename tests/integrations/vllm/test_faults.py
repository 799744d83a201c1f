"""Signals from outside, to vLLM's process or its engine's, in the middle of calls that would wait for long."""

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
    llm = LLM(**SETTINGS)
    expected = generate(llm)
    for name, signals in (("once", [interrupt]), ("twice", [interrupt, interrupt])):
        timer = after(0.5, *signals)
        outcome, seconds = timed(lambda: generate(llm, max_tokens=4000))
        try:
            timer.join()  # the second interrupt of an impatient user may come here
        except KeyboardInterrupt:
            timer.join()
        left = llm.llm_engine.get_num_unfinished_requests()
        tell(**{name: [outcome[0], seconds < 20, left, generate(llm) == expected]})
    after(0.5, interrupt)
    outcome, seconds = timed(lambda: llm.collective_rpc(doze, args=(8,)))
    tell(call=[outcome[0], seconds < 7])
    tell(next_call=llm.collective_rpc(doze, args=(0,)), next=generate(llm) == expected)
    after(0.5, kill_engine)
    outcome, seconds = timed(lambda: llm.collective_rpc(doze, args=(600,)))
    tell(death=[outcome[0], "SIGKILL(-9)" in outcome[1], seconds < 30], is_vllms=EngineDeadError.__name__ == outcome[0])
    for name, call in (("generate", lambda: generate(llm)), ("again", lambda: llm.collective_rpc(doze, args=(0,)))):
        outcome, seconds = timed(call)
        tell(**{name: [outcome[0], seconds < 20]})
"""


@pytest.fixture(scope="module")
def signals(tmp_path_factory):
    """Tell what ``LLM`` has met that was interrupted several times, and whose engine was killed at last."""
    return told(run_vllm(tmp_path_factory.mktemp("signals"), SIGNALS))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("times", ["once", "twice"])
def test_interrupted_generate(signals, times):
    """After Ctrl-C, or two, nothing of that ``generate`` is left, and the next one returns its own outputs."""
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
    """An engine that is killed during ``collective_rpc`` ends that call, and every later one, with vLLM's error."""
    assert signals["death"] == ["EngineDeadError", True, True]
    assert signals["is_vllms"] is True
    assert signals["generate"] == signals["again"] == ["EngineDeadError", True]


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
