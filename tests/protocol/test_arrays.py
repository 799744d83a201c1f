"""Arrays, views and tensors: what arrives, from whose memory, and with how many copies."""

from __future__ import annotations

import array
import ctypes
import pickle
import sys
import types
import warnings

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst

from engine_client.errors import SerializationError
from engine_client.protocol import arrays
from engine_client.protocol.codec import dumps, loads
from helpers.transport import carry, cross

BIG = 2 * arrays.SMALL

DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    ">i2",
    ">f8",
    ">c16",
    "S3",
    "S0",
    "U5",
    ">U2",
    "U0",
    "V7",
    "V0",
    "M8[ns]",
    "M8[D]",
    ">M8[us]",
    "m8[s]",
    np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", "M8[s]")]),
    np.dtype([("a", "u1"), ("b", ">f8")], align=True),
    np.dtype({"names": ["x"], "formats": ["i2"], "offsets": [6], "itemsize": 12}),
]
LAYOUTS = {
    "c": lambda a: a,
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[::-1],
    "every second": lambda a: a[::2],
    "last axis cut": lambda a: a[..., 1:],
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "zero-dimensional": lambda a: a.reshape(-1)[:1].reshape(()),
    "empty": lambda a: a[:0],
    "empty in the middle": lambda a: a.reshape(*a.shape, 1)[..., :0, :],
    "read-only": lambda a: _frozen(a.copy()),
}


def _frozen(value: np.ndarray) -> np.ndarray:
    value.flags.writeable = False
    return value


def assert_same_array(got: np.ndarray, sent: np.ndarray) -> None:
    assert type(got) is np.ndarray
    assert got.dtype == sent.dtype
    assert got.dtype.byteorder == sent.dtype.byteorder
    assert got.shape == sent.shape
    if sent.dtype.fields:  # bytes of padding are anybody's
        assert repr(got.tolist()) == repr(sent.tolist())
    else:
        assert got.tobytes() == sent.tobytes()
    assert not got.flags.writeable
    if sent.nbytes and (sent.flags.c_contiguous or sent.flags.f_contiguous):
        assert got.flags.c_contiguous == sent.flags.c_contiguous
        assert got.flags.f_contiguous == sent.flags.f_contiguous


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ndarrays_of_every_type_and_layout_arrive_equal(dtype, size):
    """Type, byte order, shape, order and bytes are kept, above and below the size that stays in the header."""
    dtype = np.dtype(dtype)
    rows = 3 if size == "small" else BIG // (6 * max(dtype.itemsize, 1))
    if dtype.kind == "U":
        base = np.array(list("abcdefgh"), dtype).repeat(2 * rows)[: 12 * rows].reshape(rows, 3, 4)
    elif dtype.itemsize:
        base = np.frombuffer(bytes(range(48)) * rows * dtype.itemsize, "u1")[: rows * 12 * dtype.itemsize]
        base = base.view(dtype).reshape(rows, 3, 4)
    else:
        base = np.zeros((rows, 3, 4), dtype)
    for change in LAYOUTS.values():
        sent = change(base)
        assert_same_array(cross(sent), sent)


@given(
    npst.arrays(
        st.one_of(npst.scalar_dtypes(), npst.datetime64_dtypes(), npst.array_dtypes()),
        npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12),
    ),
    st.data(),
)
def test_any_view_of_any_array_arrives_equal(base, data):
    """Random shapes, axes orders and strides."""
    sent = base.transpose(data.draw(st.permutations(range(base.ndim))))
    steps = [slice(None, None, data.draw(st.sampled_from([1, 2, -1, -3]))) for _ in range(sent.ndim)]
    sent = sent[(..., *steps)]
    got = cross([sent, sent])
    assert got[0] is got[1]
    assert_same_array(got[0], sent)


def test_a_large_contiguous_array_is_not_copied_on_either_side():
    """The buffer that is sent is the array's memory; the array that arrives is the received memory."""
    for sent in (np.arange(BIG), np.asfortranarray(np.arange(2 * BIG).reshape(BIG, 2)), np.zeros(BIG, "M8[ns]")):
        payload = dumps(sent)
        (buffer,) = payload.buffers
        assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, sent.nbytes)
        assert np.shares_memory(np.asarray(buffer), sent)
        assert len(payload.header) < 200
        received = bytearray(buffer)
        got = loads(payload.header, [memoryview(received)])
        assert np.shares_memory(np.asarray(received), got)


def test_small_arrays_stay_in_the_header():
    """Below 4 KiB a segment would cost more than the copy."""
    assert dumps(np.zeros(arrays.SMALL - 1, "u1")).buffers == []
    assert len(dumps(np.zeros(arrays.SMALL, "u1")).buffers) == 1


def test_arrays_that_are_more_than_memory_are_left_to_numpy():
    """Object arrays, subclasses and scalars arrive as numpy pickles them."""
    objects = cross(np.array([1, "two", None], dtype=object))
    assert objects.tolist() == [1, "two", None]
    masked = cross(np.ma.masked_array(np.arange(BIG), np.arange(BIG) % 2))
    assert masked.mask.sum() == BIG // 2
    record = cross(np.rec.fromarrays([[1, 2], [3.0, 4.0]], names="a,b"))
    assert record.a.tolist() == [1, 2]
    scalar = cross(np.float32(1.5))
    assert type(scalar) is np.float32


def test_metadata_of_a_type_is_not_lost_with_its_name():
    """Only types whose name says everything go by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy itself warns that it may drop metadata
        sent = np.zeros(3, np.dtype("i4", metadata={"unit": "m"}))
        assert cross(sent).dtype == sent.dtype


# -- memoryview --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", "?cbBhHiIlLqQfdnNP")
@pytest.mark.parametrize("count", [0, 1, 7, BIG])
def test_memoryviews_keep_format_and_shape(letter, count):
    """Every native format, one-dimensional, empty and large."""
    size = memoryview(bytes(16)).cast(letter).itemsize
    sent = memoryview(bytes(i % 2 for i in range(count * size))).cast(letter)
    got = cross(sent)
    assert type(got) is memoryview
    assert (got.format, got.shape, got.readonly) == (letter, (count,), True)
    assert got == sent


@pytest.mark.parametrize("shape", [(), (1,), (6, 4), (2, 3, 4), (40, 60, 20)])
def test_memoryviews_of_several_dimensions_arrive_with_them(shape):
    """Shape () is a scalar in a buffer."""
    size = int(np.prod(shape))
    sent = memoryview(array.array("i", range(size))).cast("B").cast("i", shape)
    got = cross(sent)
    assert (got.format, got.shape) == ("i", shape)
    assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("step", [2, -1, -3])
@pytest.mark.parametrize("count", [10, BIG])
def test_strided_memoryviews_arrive_compact(step, count):
    """A view with gaps, or backwards, arrives equal and contiguous."""
    sent = memoryview(array.array("h", range(count)))[::step]
    got = cross(sent)
    assert got == sent
    assert got.contiguous


@pytest.mark.parametrize(
    "sent",
    [
        memoryview(np.arange(BIG, dtype=">i4")),
        memoryview(np.asfortranarray(np.arange(BIG * 2, dtype=">i4").reshape(BIG, 2))),
        memoryview(np.zeros((0, 5), "i4")),
        memoryview(np.zeros((3, 0, 5), "f4")),
        memoryview(np.zeros(4, [("a", "i4"), ("b", "f8")])),
        memoryview((ctypes.c_int * 5)(1, 2, 3, 4, 5)),
        memoryview(ctypes.c_double(2.5)),
    ],
    ids=lambda view: f"{view.format}{view.shape}",
)
def test_memoryviews_of_exotic_formats_go_by_way_of_numpy(sent):
    """Formats and empty shapes that cast() cannot make are rebuilt by numpy, which is loaded where they come from."""
    got = cross(sent)
    assert type(got) is memoryview
    assert got.shape == sent.shape
    assert got.tobytes() == sent.tobytes()
    assert got.readonly
    if not isinstance(sent.obj, np.ndarray):
        assert np.asarray(got).dtype == np.asarray(sent).dtype
    else:
        assert got.format == sent.format


def test_a_memoryview_that_cannot_be_rebuilt_is_refused_by_name(monkeypatch):
    """Without numpy, or where numpy does not know the format, the error names format and shape."""
    with pytest.raises(SerializationError, match="format '&<i'"):
        dumps(memoryview((ctypes.POINTER(ctypes.c_int) * 2)()))
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(SerializationError, match=r"format '<i' and shape \(2,\)"):
        dumps(memoryview((ctypes.c_int * 2)()))


def test_a_memoryview_of_objects_is_refused():
    """A buffer of pointers means nothing elsewhere."""
    with pytest.raises(SerializationError, match="format 'O'"):
        dumps(memoryview(np.array([1, None], dtype=object)))


def test_a_large_memoryview_is_not_copied():
    """Sender and receiver use the memory that is there."""
    owner = bytearray(BIG)
    (buffer,) = dumps(memoryview(owner)).buffers
    owner[0] = 1
    assert buffer[0] == 1
    payload = dumps(memoryview(owner).cast("i"))
    received = bytearray(BIG)
    got = loads(payload.header, [memoryview(received)])
    received[0] = 1
    assert got[0] == 1


# -- array.array -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
@pytest.mark.parametrize("count", [0, 3, BIG])
def test_arrays_arrive_as_writable_copies(code, count):
    """Type code and values are kept, and what arrives can grow."""
    sent = array.array(code, [i % 100 for i in range(count)])
    payload = dumps(sent)
    assert len(payload.buffers) == (count * sent.itemsize >= arrays.SMALL)
    got = carry(payload)
    assert (type(got), got.typecode) == (array.array, code)
    assert got == sent
    got.append(1)


def test_long_arrays_are_copied_in_slices(monkeypatch):
    """Between two slices other threads can run; the result is the same."""
    monkeypatch.setattr(arrays, "SLICE", 1 << 10)
    sent = array.array("q", range(BIG))
    assert cross(sent) == sent


def test_subclasses_of_array_are_left_to_pickle():
    """Only the exact class is known to be nothing but its memory."""
    sent = ArraySubclass("i", [1, 2])
    sent.note = "kept"
    got = cross(sent)
    assert (type(got), got.tolist(), got.note) == (ArraySubclass, [1, 2], "kept")


class ArraySubclass(array.array):
    note = ""


def test_out_of_band_buffers_of_other_classes_travel_too():
    """Any object that offers a PickleBuffer to pickle gets its memory sent beside the header."""
    payload = dumps(Offering(bytearray(b"ab" * BIG)))
    assert len(payload.buffers) == 1
    assert bytes(carry(payload).data) == b"ab" * BIG


class Offering:
    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Offering, (pickle.PickleBuffer(self.data),)


# -- torch, as far as it can be shown without it; tests/with_torch has the rest ----------------------------------------


class FakeTensor:
    """A torch tensor on top of numpy: what the reducer uses of it, and no more."""

    def __init__(self, data, *, requires_grad=False, device="cpu", quantized=False):
        self._data = data
        self._grad = requires_grad
        self._device = device
        self._quantized = quantized

    __slots__ = ("__dict__", "_data", "_device", "_grad", "_quantized")

    requires_grad = property(lambda self: self._grad)
    is_quantized = property(lambda self: self._quantized)
    device = property(lambda self: types.SimpleNamespace(type=self._device))
    layout = "strided"
    dtype = property(lambda self: f"torch.{self._data.dtype}")
    shape = property(lambda self: self._data.shape)

    def _same(self, *_):
        return self

    detach = resolve_conj = resolve_neg = _same

    def dim(self):
        return self._data.ndim

    def stride(self, axis):
        return self._data.strides[axis]

    def permute(self, axes):
        return FakeTensor(self._data.transpose(axes))

    def is_contiguous(self):
        return self._data.flags.c_contiguous

    def contiguous(self):
        return FakeTensor(self._data.copy("C"))

    def reshape(self, *shape):
        return FakeTensor(self._data.reshape(*shape))

    def view(self, dtype):
        return FakeTensor(self._data.view(dtype))

    def numpy(self):
        return self._data

    def requires_grad_(self):
        self._grad = True
        return self

    def __reduce__(self):
        return str, ("torch's own way",)


FakeTensor.__module__ = "torch"
FakeTensor.__qualname__ = FakeTensor.__name__ = "Tensor"


@pytest.fixture
def fake_torch(monkeypatch):
    from engine_client.protocol import codec

    def frombuffer(buffer, *, dtype, count):
        assert not memoryview(buffer).readonly
        return FakeTensor(np.frombuffer(buffer, dtype, count))

    torch = types.ModuleType("torch")
    torch.Tensor = FakeTensor
    torch.strided = "strided"
    torch.uint8 = np.uint8
    torch.float32 = np.dtype("f4")
    torch.frombuffer = frombuffer
    torch.empty = lambda shape, dtype: FakeTensor(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "torch", torch)
    yield torch
    codec._REDUCERS.pop(FakeTensor, None)  # noqa: SLF001  # forget the class of a library that is gone again


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (30, 40, 2)])
def test_tensors_arrive_writable(fake_torch, shape):
    """Also scalars and empty ones; requires_grad is kept."""
    sent = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    got = cross(FakeTensor(sent, requires_grad=True))
    assert type(got) is FakeTensor
    assert got.requires_grad
    assert got.shape == shape
    assert got.numpy().tolist() == sent.tolist()
    got.numpy()[...] = 0


def test_a_large_tensor_takes_the_owner_of_the_received_view(fake_torch):
    """It is not copied: what the receiver's memory shows, the tensor shows."""
    payload = dumps(FakeTensor(np.zeros(BIG, "f4")))
    received = bytearray(BIG * 4)
    got = loads(payload.header, [memoryview(received)])
    received[:4] = np.float32(7).tobytes()
    assert got.numpy()[0] == 7


def test_a_tensor_over_memory_that_may_not_be_written_is_a_copy(fake_torch):
    """Received memory that is read-only at its owner is copied, since torch knows no read-only tensors."""
    payload = dumps(FakeTensor(np.ones(BIG, "f4")))
    received = bytes(payload.buffers[0])
    got = loads(payload.header, [memoryview(received)])
    got.numpy()[0] = 7
    assert received == np.ones(BIG, "f4").tobytes()


def test_writable_memory_is_used_as_it_is():
    """A view that may be written needs no owner."""
    view = memoryview(bytearray(8))
    assert arrays._writable(view) is view  # noqa: SLF001
    ownerless = memoryview(ctypes.create_string_buffer(8))
    assert arrays._writable(ownerless.toreadonly()) is ownerless.obj  # noqa: SLF001


@pytest.mark.parametrize("layout", ["transposed", "reversed axes", "cut"])
def test_tensors_keep_the_order_of_their_memory_where_they_fill_it(fake_torch, layout):
    """A transposed tensor is sent without a copy and arrives transposed; one with gaps arrives compact."""
    base = np.arange(24 * 200, dtype="f4").reshape(200, 4, 6)
    sent = {"transposed": base.transpose(2, 0, 1), "reversed axes": base.T, "cut": base[:, 1:, ::2]}[layout]
    payload = dumps(FakeTensor(sent))
    assert np.shares_memory(np.asarray(payload.buffers[0]), base) == (layout != "cut")
    got = carry(payload).numpy()
    assert got.tolist() == sent.tolist()
    if layout != "cut":
        assert got.strides == sent.strides


def test_tensors_that_are_more_than_cpu_memory_are_left_to_torch(fake_torch, monkeypatch):
    """Other devices, layouts and quantized tensors, attributes set by a user, subclasses; also without numpy."""
    plain = np.zeros(3, "f4")
    with_attribute = FakeTensor(plain)
    with_attribute.note = "x"
    subclass = type("Tensor", (FakeTensor,), {})
    others = [
        FakeTensor(plain, device="cuda"),
        FakeTensor(plain, quantized=True),
        with_attribute,
        subclass(plain),
    ]
    for tensor in others:
        assert cross(tensor) == "torch's own way"

    def no_numpy(self):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(FakeTensor, "numpy", no_numpy)
    assert cross(FakeTensor(plain)) == "torch's own way"
