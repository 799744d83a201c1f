"""Every utility of the surface against vLLM's engine: what it does there, what it returns, and what it raises."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_client.integrations.vllm.engine import VllmEngine
from helpers.vllm_scripts import ASYNC, run_vllm, told

ELASTIC = {"reinitialize_distributed", "eep_handle_engine_core_notification"}
"""What vLLM calls only to scale a mixture of experts over several ranks, which this library refuses to start."""

FOR_OTHERS = {"get_kv_cache_group_metadata"}
"""What no client of vLLM calls by itself, but users may by ``call_utility``."""


def syntax(module):
    """Return the syntax tree of one of vLLM's modules, which is not imported."""
    (folder,) = find_spec("vllm").submodule_search_locations
    return ast.parse(Path(folder, "v1", "engine", f"{module}.py").read_text(encoding="utf-8"))


def called_names():
    """Return the names that vLLM's own clients pass to their engine to be called."""
    names = ("call_utility", "call_utility_async", "_call_utility_async")
    calls = [node for node in ast.walk(syntax("core_client")) if isinstance(node, ast.Call)]
    first = [call.args[0] for call in calls if getattr(call.func, "attr", None) in names]
    assert {ast.unparse(name) for name in first if not isinstance(name, ast.Constant)} == {"method"}
    return {name.value for name in first if isinstance(name, ast.Constant)}


def test_every_name_is_known():
    """Each utility that vLLM's own clients call, except for elastic scaling, can be called here, and hardly more."""
    (core,) = [node for node in syntax("core").body if isinstance(node, ast.ClassDef) and node.name == "EngineCore"]
    methods = {node.name: node for node in core.body if isinstance(node, ast.FunctionDef)}
    ours = set(VllmEngine(SimpleNamespace(**methods, step_fn=None)).utilities())
    assert called_names() - ours == ELASTIC
    assert ours - called_names() == FOR_OTHERS


ADAPTED = """
def adapter(folder):
    import torch
    from safetensors.torch import save_file
    os.makedirs(folder)
    torch.manual_seed(1)
    tensors = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 64)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(64, 8)
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "base_model_name_or_path": "tiny",
              "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    with open(f"{folder}/adapter_config.json", "w") as file:
        json.dump(config, file)

def raised(call):
    try:
        return ["returned", call()]
    except Exception as error:
        import traceback
        return [type(error).__name__, str(error), "".join(traceback.format_exception(error))]

if __name__ == "__main__":
    from vllm import LLM
    from vllm.lora.request import LoRARequest
    traces, folder = f"{sys.argv[1]}/traces", f"{sys.argv[1]}/adapter"
    profiler = {"profiler": "torch", "torch_profiler_dir": traces}
    llm = LLM(**SETTINGS, enable_lora=True, max_lora_rank=8, max_loras=1, max_cpu_loras=2, profiler_config=profiler)
    engine = llm.llm_engine
    adapter(folder)
    request = LoRARequest("one", 1, folder)
    plain = generate(llm)
    tell(added=engine.add_lora(request), pinned=engine.pin_lora(1), listed=list(engine.list_loras()))
    adapted = llm.generate(PROMPTS, params(), use_tqdm=False, lora_request=request)
    tell(adapted=[list(output.outputs[0].token_ids) for output in adapted] != plain, again=generate(llm) == plain)
    tell(missing=raised(lambda: engine.add_lora(LoRARequest("two", 2, f"{folder}/missing"))))
    tell(unpinned=raised(lambda: engine.pin_lora(7)), zero=raised(lambda: engine.remove_lora(0)))
    tell(unknown=engine.remove_lora(7), removed=engine.remove_lora(1), left=list(engine.list_loras()))
    llm.start_profile("mine")
    generate(llm)
    llm.stop_profile()
    tell(traces=os.listdir(traces))
    tell(applied=llm.apply_model(lambda model: type(model).__name__), rpc=llm.collective_rpc("check_health"))
    tell(cache=llm.reset_prefix_cache(), tokens=generate(llm) == plain)
    llm.reset_mm_cache()
    llm.sleep(1)
    tell(asleep=engine.is_sleeping())
    llm.wake_up()
    tell(awake=not engine.is_sleeping(), after=generate(llm) == plain)
"""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Tell what a synchronous client of an engine with adapters and a profiler has met."""
    return told(run_vllm(tmp_path_factory.mktemp("adapted"), ADAPTED))


@pytest.mark.slow
def test_adapters(adapted):
    """A LoRA adapter is added, pinned, listed, used and removed; one that is not there is False, or vLLM's error."""
    assert adapted["added"] is adapted["pinned"] is adapted["removed"] is True
    assert (adapted["listed"], adapted["left"]) == ([1], [])
    assert adapted["adapted"] is adapted["again"] is True
    assert adapted["unknown"] is False
    kind, text, traceback = adapted["missing"]
    assert (kind, "No adapter found for" in text) == ("LoRAAdapterNotFoundError", True)
    assert "in _load_adapter" in traceback
    assert "FileNotFoundError" in traceback, "the cause has not come along"
    assert adapted["unpinned"][:2] == ["ValueError", "Pinning failed. LoRA 7 is not registered."]
    assert adapted["zero"][:2] == ["AssertionError", "lora_id must be greater than 0."]


@pytest.mark.slow
def test_profile(adapted):
    """With a profiler configured, starting and stopping it writes a trace of what the engine did in between."""
    assert [name for name in adapted["traces"] if name.endswith(".pt.trace.json.gz")]


@pytest.mark.slow
def test_the_synchronous_client(adapted):
    """The utilities of ``LLM`` itself reach the engine, which afterwards generates as before."""
    assert adapted["applied"] == ["LlamaForCausalLM"]
    assert adapted["rpc"] == [None]
    assert adapted["cache"] is adapted["tokens"] is adapted["asleep"] is adapted["awake"] is adapted["after"] is True


PLAIN = (
    ASYNC
    + """
import dataclasses

@dataclasses.dataclass
class Report:
    name: str
    parts: dict

class OwnError(LookupError):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint

def report(worker):
    return Report(type(worker).__name__, {"rows": [(1, 2.5), {"inner": Report("two", {})}]})

def specification(worker, scale, *, offset):
    spec = next(iter(worker.get_kv_cache_spec().values()))
    return [type(spec).__name__, dataclasses.is_dataclass(spec), spec, scale * 2 + offset]

def bad(worker):
    raise LookupError("no such thing", 7)

def own(worker):
    raise OwnError(9, hint="look elsewhere") from KeyError("inner")

def doze(worker, seconds, answer):
    time.sleep(seconds)
    return answer

def weights(worker):
    return {name: value.detach() for name, value in worker.model_runner.model.named_parameters()}

async def raised(awaitable):
    try:
        return ["returned", await awaitable]
    except Exception as error:
        import traceback
        return [type(error).__name__, error.args, "".join(traceback.format_exception(error)), vars(error)]

class Inputs(dict):
    clear_cache = dict.clear

def caches(worker, fill):
    frame = sys._getframe()
    while type(frame.f_locals.get("self")).__name__ != "EngineCore":
        frame = frame.f_back
    core = frame.f_locals["self"]
    if fill:
        core.mm_receiver_cache = Inputs(one=1)  # a text model has none
        core.scheduler.encoder_cache_manager.cached["one"] = worker.model_runner.encoder_cache["one"] = set()
    encoder = len(core.scheduler.encoder_cache_manager.cached), len(worker.model_runner.encoder_cache)
    return [len(core.mm_receiver_cache), *encoder]

async def cached_tokens(llm):
    prompt = {"prompt_token_ids": [number % 500 for number in range(300)]}
    async for output in llm.generate(prompt, params(1), request_id=f"{time.monotonic_ns()}"):
        pass
    return output.num_cached_tokens

async def resets(llm):
    tell(prefix=[await cached_tokens(llm) for _ in range(2)], reset_prefix=await llm.reset_prefix_cache(),
         prefix_after=await cached_tokens(llm))
    steps = [await llm.collective_rpc(caches, None, (True,))]
    for reset in (llm.reset_mm_cache, llm.reset_encoder_cache):
        steps += [await reset(), await llm.collective_rpc(caches, None, (False,))]
    tell(resets=steps)

async def values(llm):
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    core = llm.engine_core
    (made,) = await llm.collective_rpc(report)
    (spec,) = await llm.collective_rpc(specification, None, (4,), {"offset": 1})
    row, last = made.parts["rows"]
    tell(report=[type(made) is Report, made.name, row, last == {"inner": Report("two", {})}])
    tell(spec=[*spec[:2], type(spec[2]) is FullAttentionSpec, spec[2].block_size > 0, spec[3]])
    tell(by_name=await llm.collective_rpc("check_health"))
    tell(groups=await core.call_utility_async("get_kv_cache_group_metadata"))
    tell(tasks=await llm.get_supported_tasks())
    await core.execute_dummy_batch_async()

async def errors(llm):
    from vllm.lora.request import LoRARequest
    core = llm.engine_core
    calls = dict(bad=llm.collective_rpc(bad), own=llm.collective_rpc(own), nonsense=llm.collective_rpc("nonsense"),
                 add=llm.add_lora(LoRARequest("one", 1, "/nowhere")), list=llm.list_loras(), remove=llm.remove_lora(3),
                 pin=llm.pin_lora(3), profile=llm.start_profile(), mode=core.pause_scheduler_async("sideways"),
                 unknown=core.call_utility_async("shutdown"), late=llm.collective_rpc(doze, None, (0, 1, 2, 3)))
    tell(**{f"{name}_error": await raised(call) for name, call in calls.items()})

async def save(llm):
    import torch
    from safetensors.torch import load_file
    folder = f"{sys.argv[1]}/sharded"
    os.mkdir(folder)
    await llm.engine_core.save_sharded_state_async(folder)
    saved = {}
    for name in os.listdir(folder):
        saved.update(load_file(f"{folder}/{name}"))
    (held,) = await llm.collective_rpc(weights)
    tell(saved=len(saved), equal=all(torch.equal(saved[name], held[name]) for name in saved if name in held))
    tell(missing=[name for name, value in held.items() if value.numel() and name not in saved])

async def pause(llm, mode):
    seen, late = [], []
    task = asyncio.create_task(one(llm, 1, 1000, seen))
    await advance(seen)
    await llm.pause_generation(mode=mode)
    told = dict(paused=await llm.is_paused(), done=task.done(), reached=len(seen))
    waiting = asyncio.create_task(one(llm, 2, 12, late))
    told.update(again=await llm.collective_rpc(doze, None, (0.3, "x")), late=len(late))
    told.update(frozen=len(seen) == told["reached"])
    await llm.resume_generation()
    reason, tokens = await task
    told.update(after=await llm.is_paused(), reason=reason, all=len(tokens), next=(await waiting)[1])
    tell(**{f"pause_{mode}": told})

async def future(llm):
    core, seen = llm.engine_core, []
    task = asyncio.create_task(one(llm, 1, 3000, seen))
    await advance(seen)
    pausing = asyncio.create_task(core.pause_scheduler_async("wait"))
    between = await llm.collective_rpc(doze, None, (0.1, "meanwhile"))
    told = dict(between=between, pending=not pausing.done(), goes_on=await advance(seen))
    task.cancel()
    await asyncio.wait_for(pausing, 60)
    tell(future=told, shown=core.engine_status()[0].is_paused)
    await core.resume_scheduler_async()
    task = asyncio.create_task(one(llm, 1, 300, seen))
    await advance(seen)
    await asyncio.wait_for(core.sleep_async(1, "wait"), 60)
    tell(slept=[(await task)[0], await llm.is_sleeping(), core.engine_status()[0].is_sleeping])
    await core.wake_up_async()

async def sleep(llm):
    expected = await one(llm, 0)
    for level, tags in ((0, [["scheduling"]]), (1, [["weights"], ["kv_cache"]]), (2, [None])):
        await llm.sleep(level)
        states, late = [await llm.is_sleeping()], []
        held = asyncio.create_task(one(llm, 0, 12, late))
        for tag in tags:
            await asyncio.sleep(0.1)
            states.append(len(late))
            await llm.wake_up(tag)
            states.append(await llm.is_sleeping())
        tell(**{f"sleep_{level}": [states, await held == expected]})

async def cancel(llm):
    seen = []
    stream = asyncio.create_task(one(llm, 3, 400, seen))
    await advance(seen)
    given_up = asyncio.create_task(llm.collective_rpc(doze, None, (0.5, "nobody waits")))
    kept = asyncio.create_task(llm.collective_rpc(doze, None, (0.1, "kept")))
    await asyncio.sleep(0.1)
    given_up.cancel()
    await asyncio.wait([given_up])
    following = await llm.collective_rpc(doze, None, (0, "following"))
    reason, tokens = await stream
    same = tokens == (await one(llm, 3, 400))[1]
    tell(cancel=[given_up.cancelled(), await kept, following, reason, same, repr(llm.engine_core._session)])

async def main(llm):
    for part in (values, resets, errors, save, future, sleep, cancel):
        await part(llm)
    for mode in ("abort", "wait", "keep"):
        await pause(llm, mode)

if __name__ == "__main__":
    run(main)
"""
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Tell what an asynchronous client of a plain engine has met."""
    return told(run_vllm(tmp_path_factory.mktemp("plain"), PLAIN))


@pytest.mark.slow
def test_values(plain):
    """A callable or a name is called in the engine; dataclasses, nested, of the script and of vLLM, come back whole."""
    assert plain["report"] == [True, "WorkerWrapperBase", [1, 2.5], True]
    assert plain["spec"] == ["FullAttentionSpec", True, True, True, 9]
    assert plain["by_name"] == [None]
    assert plain["groups"][0]["kind"] == "full_attention"
    assert plain["tasks"] == ["generate"]


@pytest.mark.slow
def test_caches(plain):
    """The caches of prefixes, of multimodal inputs and of the encoder are full, and empty after their reset."""
    assert plain["prefix"] == [0, 256]
    assert plain["reset_prefix"] is True
    assert plain["prefix_after"] == 0
    assert plain["resets"] == [[[1, 1, 1]], None, [[0, 1, 1]], None, [[0, 0, 0]]]


@pytest.mark.slow
def test_errors(plain):
    """What a utility raises arrives with its type, arguments, attributes, cause, and the engine's traceback."""
    kind, arguments, traceback, _ = plain["bad_error"]
    assert (kind, arguments) == ("LookupError", ["no such thing", 7])
    assert "in bad" in traceback
    kind, arguments, traceback, attributes = plain["own_error"]
    assert (kind, arguments) == ("OwnError", ["code 9"])
    assert (attributes["code"], attributes["hint"]) == (9, "look elsewhere")
    assert "KeyError: 'inner'" in traceback
    assert "in own" in traceback
    assert plain["nonsense_error"][0] == "NotImplementedError"
    assert plain["mode_error"][0] == "ValueError"
    assert plain["unknown_error"][0] == "AttributeError"
    assert plain["late_error"][0] == "TypeError"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add", "list", "remove", "pin"])
def test_adapters_that_are_not_enabled(plain, name):
    """Without LoRA each of its utilities raises vLLM's own error."""
    text = "LoRA is not enabled. Use --enable-lora to enable LoRA."
    assert plain[f"{name}_error"][:2] == ["RuntimeError", [text]]


@pytest.mark.slow
def test_a_profiler_that_is_not_configured(plain):
    """Without a profiler, starting it raises vLLM's own error."""
    assert plain["profile_error"][:2] == ["RuntimeError", ["Profiler is not enabled."]]


@pytest.mark.slow
def test_sharded_state(plain):
    """The state that the engine saves is the model's."""
    assert plain["saved"] > 10
    assert plain["missing"] == []
    assert plain["equal"] is True


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause(plain, mode):
    """A pause aborts what runs, lets it end, or freezes it; nothing new starts until it is resumed, utilities do."""
    paused = plain[f"pause_{mode}"]
    assert paused["paused"] is paused["frozen"] is True
    assert paused["after"] is False
    assert paused["again"] == ["x"]
    assert paused["late"] == 0
    assert len(paused["next"]) == 12
    assert paused["done"] is (mode != "keep")
    assert paused["reason"] == ("abort" if mode == "abort" else "length")
    assert paused["all"] < 1000 if mode == "abort" else paused["all"] == 1000


@pytest.mark.slow
def test_a_future(plain):
    """A utility that returns a future is answered when that is done; others are answered meanwhile, and steps made."""
    assert plain["future"] == {"between": ["meanwhile"], "pending": True, "goes_on": True}
    assert plain["shown"] is True
    assert plain["slept"] == ["length", True, True], "a sleep that waits for requests"


@pytest.mark.slow
def test_sleep(plain):
    """An engine sleeps at every level and wakes by tags; a request meanwhile waits, and then has its own tokens."""
    assert plain["sleep_0"] == plain["sleep_2"] == [[True, 0, False], True]
    assert plain["sleep_1"] == [[True, 0, True, 0, False], True], "it sleeps until the last tag"


@pytest.mark.slow
def test_cancellation(plain):
    """A call that is given up leaves nothing behind: other calls, the next one, and a stream get what is theirs."""
    cancelled, kept, following, reason, same, session = plain["cancel"]
    assert cancelled is same is True
    assert (kept, following, reason) == (["kept"], ["following"], "length")
    assert "pending=0" in session
