"""Ctrl-C in ``LLM.generate``, wherever it comes: the next call returns its own outputs and nothing else."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from engine_client.integrations.vllm import interrupts
from helpers.vllm_scripts import ASYNC, run_vllm, told


class Engine:
    """Stands for vLLM's ``LLMEngine``, with a request that was added half."""

    def __init__(self, impatience=0):
        self.impatience = impatience
        self.aborted = []
        self.renderer = mock.Mock()
        state = SimpleNamespace(external_req_id="outer")
        self.output_processor = SimpleNamespace(
            request_states={"child": state}, parent_requests={"parent": None}, external_req_ids={"outer": []}
        )

    def add_request(self):
        raise KeyboardInterrupt

    def step(self):
        raise LookupError

    def abort_request(self, request_ids, *, internal):
        assert internal
        assert self.output_processor.external_req_ids["outer"] == ["child"]
        if self.impatience:
            self.impatience -= 1
            raise KeyboardInterrupt
        self.aborted.append(request_ids)


@pytest.fixture
def engine_class():
    """Give a class whose calls take back what they have begun; patching it twice is patching it once."""
    patched = type("LLMEngine", (Engine,), {})
    module = ModuleType("llm_engine")
    vars(module)["LLMEngine"] = patched
    interrupts.patch_llm_engine(module)
    interrupts.patch_llm_engine(module)
    assert patched.step.__wrapped__ is Engine.step
    return patched


@pytest.mark.parametrize("impatience", [0, 2])
def test_requests_are_taken_back(engine_class, impatience):
    """An interrupt aborts what is known, children before parents, even if taking back is interrupted, too."""
    engine = engine_class(impatience)
    with pytest.raises(KeyboardInterrupt):
        engine.add_request()
    assert engine.aborted == [["child", "parent"]]
    engine.renderer.clear_mm_cache.assert_called_once_with()


def test_other_errors_take_nothing_back(engine_class):
    """Only an interrupt ends requests that others may have in flight."""
    engine = engine_class()
    with pytest.raises(LookupError):
        engine.step()
    assert engine.aborted == []


def test_the_outermost_call_is_wrapped():
    """``LLM``'s methods are wrapped as far as there are any, by the engine that they have."""
    module = ModuleType("llm")
    vars(module)["LLM"] = type(
        "LLM", (), {"llm_engine": Engine(), "generate": lambda self: self.llm_engine.add_request()}
    )
    interrupts.patch_llm(module)
    llm = vars(module)["LLM"]()
    with pytest.raises(KeyboardInterrupt):
        llm.generate()
    assert llm.llm_engine.aborted == [["child", "parent"]]
    assert not hasattr(llm, "chat")


class AsyncEngine:
    """Stands for vLLM's ``AsyncLLM``, whose client cannot send now."""

    def __init__(self):
        self.renderer = mock.Mock()
        self.aborted = []

    async def _add_request(self, request, prompt, parent_req, index, queue):
        raise asyncio.CancelledError

    async def abort(self, request_ids, *, internal):
        assert internal
        self.aborted.append(request_ids)
        raise RuntimeError("the engine is dead")


@pytest.mark.parametrize("several", [False, True])
def test_what_is_cancelled_while_it_is_sent(several):
    """A request that could not be sent is forgotten, with its siblings and its images; the cancellation counts."""
    patched = type("AsyncLLM", (AsyncEngine,), {})
    module = ModuleType("async_llm")
    vars(module)["AsyncLLM"] = patched
    interrupts.patch_async_llm(module)
    interrupts.patch_async_llm(module)
    engine, parent = patched(), SimpleNamespace(request_id="parent") if several else None
    request = SimpleNamespace(request_id="child", mm_features=["image"] if several else None)
    add = vars(patched)["_add_request"](engine, request, None, parent, 0, None)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(add)
    assert engine.aborted == [["child", "parent"] if several else ["child"]]
    assert engine.renderer.clear_mm_cache.called is several


STREAMING = (
    ASYNC
    + """
async def parts(seen):
    from vllm.engine.protocol import StreamingInput
    seen.append("first")
    yield StreamingInput(prompt={"prompt_token_ids": [1, 5, 9]})
    await asyncio.sleep(1.0)  # the first has all its tokens by then
    seen.append("second")
    yield StreamingInput(prompt={"prompt_token_ids": [7, 8]})

async def main(llm):
    from engine_client.integrations.vllm import UnsupportedError
    from vllm.sampling_params import RequestOutputKind
    seen, lengths = [], []
    try:
        delta = params(4, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate(parts(seen), delta, request_id="streamed"):
            lengths.append(len(output.outputs[0].token_ids))
    except UnsupportedError as error:
        tell(error=str(error))
    tell(seen=seen, lengths=lengths, left=len(llm.output_processor.request_states), next=len((await one(llm, 0))[1]))

if __name__ == "__main__":
    run(main)
"""
)


@pytest.mark.slow
def test_streaming_input(tmp_path):
    """Input that comes in parts is refused before any of it was taken, however late the second part is."""
    values = told(run_vllm(tmp_path, STREAMING, env={"VLLM_LOGGING_LEVEL": "CRITICAL"}))
    assert "engine_client does not carry streaming input" in values.pop("error", "")
    assert values == {"seen": [], "lengths": [], "left": 0, "next": 12}


EVERYWHERE = """
FILES = ("vllm/entrypoints/llm.py", "vllm/entrypoints/offline_utils.py", "vllm/v1/engine/llm_engine.py",
         "vllm/v1/engine/output_processor.py", "vllm/v1/engine/parallel_sampling.py")
OURS = ("/engine_client/clients/", "/engine_client/ipc/", "/engine_client/protocol/")

class Interrupter:
    # CPython looks for signals where a function begins and where one in C returns; these are the events of a profile.
    def __init__(self, number):
        self.left, self.where = number, None

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and (name.endswith(FILES) or any(room in name for room in OURS)):
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {event}"
                raise KeyboardInterrupt

def interrupted(llm, number):
    interrupter = Interrupter(number)
    several = SamplingParams(temperature=1, seed=5, n=2, max_tokens=3, ignore_eos=True, detokenize=False)
    sys.setprofile(interrupter)
    try:
        llm.generate(PROMPTS[:2], [params(3), several], use_tqdm=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return interrupter.where

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    llm = LLM(**SETTINGS)
    engine = llm.llm_engine
    processor = engine.output_processor
    def rows():
        outputs = llm.generate(PROMPTS[2:], params(3), use_tqdm=False)
        return [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in outputs]
    expected, wrong, number, places = rows(), [], 0, set()
    while where := interrupted(llm, number := number + 1):
        places.add(where)
        left = [engine.get_num_unfinished_requests(), len(processor.parent_requests), len(processor.external_req_ids)]
        if left != [0, 0, 0] or rows() != expected:
            wrong.append([where, left])
    deadline = time.monotonic() + 30
    while (status := engine.engine_core.engine_status()[0]).running + status.waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    tell(number=number, places=sorted(places), wrong=wrong, busy=status.running + status.waiting)
"""


@pytest.mark.slow
def test_interrupts_everywhere(tmp_path):
    """An interrupt at any point of vLLM's code or the client's leaves no request; the next call has its own outputs."""
    values = told(run_vllm(tmp_path, EVERYWHERE, timeout=600))
    assert values["wrong"] == []
    assert values["busy"] == 0
    assert values["number"] > 100
    for name in ("llm.py", "offline_utils.py", "llm_engine.py", "output_processor.py", "sync.py"):
        assert [place for place in values["places"] if place.startswith(name)], f"no point of {name} was met"
