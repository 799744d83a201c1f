"""Prompt embeddings and multimodal tensors: equal on arrival, and through shared memory.

Each test looks where the tensors lie, in the engine and in the client: in an arena or not, by ``/proc/self/maps``.
"""

from __future__ import annotations

import pytest

from helpers.vllm_scripts import ASYNC, run_vllm, told

LOOK = """
def medium(tensor):
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "arena" if "engine-client-" in line else "own memory"

def core_of_engine():
    frame = sys._getframe()
    while type(frame.f_locals.get("self")).__name__ != "EngineCore":
        frame = frame.f_back
    return frame.f_locals["self"]

def counters(client):
    (link,) = client._session.links.values()
    return [link.channel.in_memory, link.channel.in_pipe]
"""

REQUESTS = (
    ASYNC
    + LOOK
    + """
def requests(worker):
    return list(core_of_engine().scheduler.requests.values())

def embeddings(worker):
    (request,) = requests(worker)
    held = request.prompt_embeds
    return medium(held), held

def features(worker):
    (request,) = requests(worker)
    return [[medium(tensor) for tensor in leaves(feature)] for feature in request.mm_features], request.mm_features

def leaves(feature):
    data = feature.data.get_data()
    return [data["pixels"], *data["patches"], data["half"], data["turned"], feature.mm_position.is_embed]

def made():
    import torch
    from vllm.multimodal.inputs import (MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem,
                                        MultiModalKwargsItem, PlaceholderRange)
    torch.manual_seed(7)
    values = {"pixels": torch.randn(3, 224, 224), "patches": [torch.randn(200, 100), torch.arange(3)],
              "half": torch.randn(300, 200).bfloat16(), "turned": torch.randn(150, 200).T}
    item = {key: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for key, value in values.items()}
    place = PlaceholderRange(offset=1, length=3, is_embed=torch.tensor([True, False, True]))
    return [MultiModalFeatureSpec(MultiModalKwargsItem(item), "image", "one", place, "hash")]

async def prompt_embeddings(llm):
    import torch
    torch.manual_seed(3)
    embeds, seen = torch.randn(600, 64), []
    async def stream():
        async for output in llm.generate({"prompt_embeds": embeds}, params(2000), request_id="embeds"):
            seen.append(output)
    before = counters(llm.engine_core)
    task = asyncio.create_task(stream())
    await advance(seen)
    ((where, held),) = await llm.collective_rpc(embeddings)
    tell(embeds=[where, medium(held), torch.equal(held, embeds)])
    tell(embeds_before=before, embeds_after=counters(llm.engine_core))
    await llm.abort("embeds")
    await asyncio.wait([task])

async def multimodal(llm):
    import torch
    from vllm.v1.engine import EngineCoreRequest
    core, (feature,) = llm.engine_core, made()
    await core.pause_scheduler_async("keep")
    before = counters(core)
    rest = (params(), None, time.time(), None, None, None)
    await core.add_request_async(EngineCoreRequest("mm", [1, 5, 9, 3, 4], [feature], *rest))
    (((where,), (held,)),) = await llm.collective_rpc(features)
    equal = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(leaves(held), leaves(feature), strict=True)]
    tell(mm=where, mm_back=[medium(tensor) for tensor in leaves(held)], equal=equal, whole=held.data == feature.data)
    position = held.mm_position
    tell(mm_before=before, mm_after=counters(core), place=[position.offset, position.length, held.mm_hash])
    await core.abort_requests_async(["mm"])

async def main(llm):
    await prompt_embeddings(llm)
    await multimodal(llm)

if __name__ == "__main__":
    run(main, enable_prompt_embeds=True)
"""
)


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """Tell what arrived in the scheduler of a text model, and what came back."""
    return told(run_vllm(tmp_path_factory.mktemp("requests"), REQUESTS))


@pytest.mark.slow
def test_prompt_embeddings(requests):
    """Prompt embeddings of 150 KiB lie in the arena where the model reads them; nothing of them was in the pipe."""
    assert requests["embeds"] == ["arena", "arena", True]
    assert requests["embeds_before"] == [0, 0]
    assert requests["embeds_after"] == [1, 0]


@pytest.mark.slow
def test_multimodal_structs(requests):
    """vLLM's structs for an image arrive equal; those tensors lie in the arena that have 64 KiB, and no others."""
    places = ["arena", "arena", "own memory", "arena", "arena", "own memory"]
    assert requests["mm"] == requests["mm_back"] == places
    assert requests["equal"] == [True] * 6
    assert requests["whole"] is True
    assert requests["place"] == [1, 3, "hash"]
    (memory, pipe), (before, pipe_before) = requests["mm_after"], requests["mm_before"]
    assert memory - before == 4
    assert pipe == pipe_before == 0


IMAGES = (
    LOOK
    + """
def tiny_clip(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPProcessor, PreTrainedTokenizerFast
    words = ["w0", "<s>", "</s>", *[f"w{number}" for number in range(3, 64)]]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **tokens)
    size = {"height": 224, "width": 224}
    CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=size), tokenizer).save_pretrained(folder)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, projection_dim=64)
    vision = dict(sizes, image_size=224, patch_size=32)
    text = dict(sizes, vocab_size=64, max_position_embeddings=77, bos_token_id=1, eos_token_id=2)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    config.architectures = ["CLIPModel"]
    config.save_pretrained(folder)

def cached(worker):
    cache = core_of_engine().mm_receiver_cache._cache
    return [medium(value) for item in cache.values() for value in item.get_data().values()]

def encoded(worker):
    return [len(core_of_engine().scheduler.encoder_cache_manager.cached), len(worker.model_runner.encoder_cache)]

if __name__ == "__main__":
    folder = f"{sys.argv[1]}/clip"
    tiny_clip(folder)
    import numpy
    from PIL import Image
    from vllm import LLM
    settings = dict(SETTINGS, model=folder, skip_tokenizer_init=False, max_model_len=77)
    llm = LLM(**settings, runner="pooling", limit_mm_per_prompt={"image": 1})
    core = llm.llm_engine.engine_core
    shapes = numpy.random.default_rng(3)
    images = [Image.fromarray(shapes.integers(0, 256, (224, 224, 3), numpy.uint8)) for _ in range(3)]
    def embed(image):
        outputs = llm.embed([{"prompt": "", "multi_modal_data": {"image": image}}], use_tqdm=False)
        return list(outputs[0].outputs.embedding)
    tell(vectors=[embed(image) for image in (images[0], images[1], images[0])])
    if hasattr(core, "_session"):
        tell(counters=counters(core), cached=llm.collective_rpc(cached), used=core._session.writer.used)
        tell(encoded=llm.collective_rpc(encoded))
        llm.llm_engine.reset_encoder_cache()
        llm.reset_mm_cache()
        tell(encoded_after=llm.collective_rpc(encoded), cached_after=llm.collective_rpc(cached))
        tell(vector_after=embed(images[0]), counters_after=counters(core))
    def interrupt(*args, **kwargs):
        del llm._add_request
        raise KeyboardInterrupt
    llm._add_request = interrupt  # the image is in the front-end's cache, as one that the engine has, too
    try:
        embed(images[2])
    except KeyboardInterrupt:
        tell(after_interrupt=embed(images[2]))
"""
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Tell what a model for images made of two of them, the first of which came twice."""
    return told(run_vllm(tmp_path_factory.mktemp("images"), IMAGES))


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    """Tell what the model makes of the images in process."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return told(run_vllm(tmp_path_factory.mktemp("inside"), IMAGES, env=environment))


@pytest.mark.slow
def test_images(images, inside):
    """A model gets the same out of images as in process; each crosses once, by the arena."""
    assert images["vectors"] == inside["vectors"]
    first, second, again = images["vectors"]
    assert first == again
    assert first != second
    assert images["counters"] == [2, 0]


@pytest.mark.slow
def test_an_image_after_an_interrupt(images, inside):
    """An image whose first call was interrupted before the engine had it is sent with the next."""
    assert images["after_interrupt"] == inside["after_interrupt"]
    assert images["after_interrupt"] not in images["vectors"]


@pytest.mark.slow
def test_forgotten_images(images):
    """When the caches are reset, the engine has nothing of an image, which crosses again."""
    (encoded,) = images["encoded"]
    assert min(encoded) > 0
    assert images["encoded_after"] == [[0, 0]]
    assert images["cached_after"] == [[]]
    assert images["vector_after"] == images["vectors"][0]
    assert images["counters_after"] == [3, 0]


@pytest.mark.slow
def test_cached_images_leave_the_arena(images):
    """What vLLM's engine keeps in its cache, gigabytes for hours, is its own: the arena is for what passes through."""
    assert images["cached"] == [["own memory"] * 2]
    assert images["used"] == 0
