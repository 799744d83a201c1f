"""Real torch tensors through the codec: what arrives, from whose memory, and what is left to torch."""

from __future__ import annotations

import warnings
from array import array

import pytest
import torch
from hypothesis import given, strategies as st

from engine_client import EngineCoreRequest, SamplingParams
from engine_client.protocol import arrays
from engine_client.protocol.codec import dumps, loads
from engine_client.protocol.wire import decode_add, encode_add
from helpers.transport import carry, cross

BIG = 2 * arrays.SMALL

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT,
    "permuted": lambda t: t.permute(2, 0, 1),
    "every second": lambda t: t[:, ::2],
    "a part": lambda t: t[1:, :, 1:],
    "flipped": lambda t: t.flip(0),
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "a row": lambda t: t[2],
    "a scalar": lambda t: t[0, 0, 0],
    "empty": lambda t: t[:, :0],
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
    assert torch.equal(bits(got), bits(sent))


@pytest.mark.parametrize("rows", [4, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_layout_arrive_equal(dtype, rows):
    """Above and below the size that stays in the header."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(rows * 12 * size, dtype=torch.int64) % (2 if dtype == torch.bool else 120)
    base = raw.to(torch.uint8).view(dtype).reshape(rows, 3, 4)
    for change in LAYOUTS.values():
        sent = change(base)
        assert_same_tensor(cross(sent), sent)


@given(st.lists(st.integers(0, 9), max_size=4), st.data())
def test_any_shape_and_order_of_axes_arrives_equal(shape, data):
    """Also scalars and empty tensors; the order in memory is kept where the tensor fills it."""
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    sent = base.permute(data.draw(st.permutations(range(len(shape)))))
    got = cross(sent)
    assert_same_tensor(got, sent)
    if sent.numel() > 1:
        assert got.contiguous().equal(sent.contiguous())


def test_requires_grad_is_kept_and_history_is_not():
    """A leaf arrives as a leaf; a result arrives as a leaf that wants gradients."""
    leaf = torch.ones(3, requires_grad=True)
    assert_same_tensor(cross(leaf), leaf)
    got = cross(leaf * 2)
    assert got.requires_grad
    assert got.is_leaf
    got.sum().backward()
    assert got.grad is not None


def test_a_large_tensor_is_not_copied_on_either_side():
    """Sender and receiver use the memory that is there, and the receiver may write."""
    sent = torch.zeros(BIG, 2).mT
    payload = dumps(sent)
    (buffer,) = payload.buffers
    sent[0, 0] = 1
    assert bytes(buffer[:4]) != bytes(4)
    received = bytearray(buffer)
    got = loads(payload.header, [memoryview(received)])
    got[0, 0] = 0
    assert received[:4] == bytes(4)
    assert got.stride() == sent.stride()


def test_a_tensor_keeps_the_memory_that_it_lies_in():
    """The owner lives as long as any tensor over it."""
    payload = dumps(torch.arange(BIG))
    got = carry(payload)[5:]
    del payload
    assert got[0] == 5


def test_conjugate_and_negative_views_arrive_resolved():
    """Lazy flags of a view are carried out before it is sent."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    for sent in (base.conj(), base.conj().imag):
        assert torch.equal(cross(sent), sent.resolve_conj().resolve_neg())


def test_a_parameter_arrives_as_one():
    """Torch pickles the wrapper, the codec the memory."""
    payload = dumps(torch.nn.Parameter(torch.ones(BIG), requires_grad=False))
    assert len(payload.buffers) == 1
    got = carry(payload)
    assert type(got) is torch.nn.Parameter
    assert not got.requires_grad
    assert got.sum() == BIG


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_other_kinds_of_tensors_are_left_to_torch(make):
    """They arrive as torch pickles them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own pickling uses what it has deprecated
        sent = make()
        got = cross(sent)
    assert (got.layout, got.device, got.dtype, got.shape) == (sent.layout, sent.device, sent.dtype, sent.shape)


def test_attributes_set_on_a_tensor_arrive():
    """Such a tensor is left to torch, which carries them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        sent = torch.ones(3)
        sent.note = "kept"
        assert cross(sent).note == "kept"


def test_tensors_inside_of_values_and_exceptions_arrive():
    """Wherever a tensor stands, also among the arguments of an exception."""
    got = cross({"logits": [torch.ones(BIG)], "error": ValueError(torch.zeros(BIG))})
    assert got["logits"][0].sum() == BIG
    assert got["error"].args[0].shape == (BIG,)
    got["error"].args[0][0] = 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_a_request_arrives_equal(dtype: torch.dtype, layout: str) -> None:
    """Beside what is plain, as it does anywhere."""
    sent = LAYOUTS[layout](torch.arange(4 * 60 * 50).reshape(4, 60, 50).to(dtype))
    request = EngineCoreRequest("r", [1], None, SamplingParams(), None, 0.0, None, None, None, prompt_embeds=sent)
    frame = encode_add(1, request, array("I", [1]))
    if frame.buffers:
        assert b"engine_client" not in bytes(frame.header)
    # As the channel does: each in memory of its own, at whose beginning it begins.
    owned = frame._replace(buffers=[memoryview(bytearray(buffer)) for buffer in frame.buffers])
    assert_same_tensor(decode_add(owned).prompt_embeds, sent)


def test_a_tensor_that_needs_a_gradient_keeps_that_in_a_request() -> None:
    """So does one of two fields that hold the same."""
    sent = torch.zeros(4000, requires_grad=True)
    request = EngineCoreRequest("r", [1], sent, SamplingParams(), None, 0.0, None, None, None, prompt_embeds=sent)
    frame = encode_add(1, request, array("I", [1]))
    (buffer,) = frame.buffers
    arrived = decode_add(frame._replace(buffers=[memoryview(bytearray(buffer))]))
    assert arrived.prompt_embeds.requires_grad
    assert arrived.prompt_embeds is arrived.mm_features
