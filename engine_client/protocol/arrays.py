"""How objects that are mostly one block of memory are pickled: ndarray, memoryview, array, torch tensor.

Data flow::

    reduce_x(object) ─▶ (rebuild_x, (data, type, shape, ...)) ─ pickle ─▶ rebuild_x(data, ...) ─▶ view of data

``data`` is a ``PickleBuffer``, which the codec hands to the channel without a copy, or plain bytes below ``SMALL``.
What is contiguous, in C or Fortran order, keeps its type, byte order, shape and order; other layouts arrive compact.

What is rebuilt is a read-only view of the received memory.  Two kinds are not: an ``array`` owns its memory and is a
copy; a tensor is writable, because torch knows no other kind, and so takes the *owner* of the received view, which
starts where the view starts (true of the channel's leases and inline segments).

Neither numpy nor torch is imported before an object of theirs is met.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Final

from engine_client.errors import SerializationError

__all__ = [
    "REBUILD",
    "SLICE",
    "SMALL",
    "attribute",
    "reduce_array",
    "reduce_memoryview",
    "reduce_ndarray",
    "reduce_tensor",
]

SMALL: Final = 4096
"""Below this many bytes a copy costs less than a segment of its own (measured: about 2 us, Linux x86-64)."""
_NUMBERS: Final = "biufc"
"""The kinds of numpy's types that every buffer can have."""
SLICE: Final = 1 << 20
"""Most bytes copied at once: between two slices other threads can run."""


def slices(view: memoryview) -> Iterable[memoryview]:
    """Cut a view of bytes into pieces of at most ``SLICE`` bytes."""
    for start in range(0, len(view), SLICE):
        yield view[start : start + SLICE]


def attribute(module: str, name: str) -> Any:
    """Return what a module calls ``name``; import it, or wait for that, only where it is not there yet."""
    # Python 3.10 takes a lock in ``import_module``, with a callback of its own that an interrupt would be lost in.
    found = getattr(sys.modules.get(module), name, None)
    return getattr(import_module(module), name) if found is None else found


# -- array.array -------------------------------------------------------------------------------------------------------


def reduce_array(value: array[Any]) -> Any:
    """Return how to pickle an ``array.array``."""
    small = len(value) * value.itemsize < SMALL
    return rebuild_array, (value.typecode, value.tobytes() if small else PickleBuffer(value))


def rebuild_array(typecode: str, data: Any) -> array[Any]:
    """Return an array that holds a copy of ``data``."""
    result: array[Any] = array(typecode)
    for piece in slices(memoryview(data)):
        result.frombytes(piece)
    return result


# -- memoryview --------------------------------------------------------------------------------------------------------


def reduce_memoryview(view: Any) -> Any:
    """Return how to pickle a ``memoryview``.

    Raises:
        SerializationError: its format is one that only numpy can rebuild, and numpy is not loaded or refuses it.
    """
    if _is_castable(view):
        data = view.tobytes() if view.nbytes < SMALL or not view.c_contiguous else view
        return rebuild_memoryview, (data if view.nbytes < SMALL else PickleBuffer(data), view.format, view.shape)
    numpy = sys.modules.get("numpy")
    reduced: Any = NotImplemented
    with suppress(ValueError):  # safe because the refusal is reported below, with what it is about
        if numpy is not None:
            reduced = reduce_ndarray(numpy.asarray(view))
    if reduced is NotImplemented:
        raise SerializationError(
            f"a memoryview of format {view.format!r} and shape {view.shape} cannot be sent: "
            "send the object behind it, or a view cast to bytes"
        )
    return rebuild_exotic_memoryview, reduced[1]


def _is_castable(view: Any) -> bool:
    """Tell whether ``memoryview.cast`` can make this format and shape out of bytes."""
    if view.ndim != 1 and 0 in view.shape:
        return False
    try:
        memoryview(bytes(view.itemsize)).cast(view.format)
    except ValueError:
        return False
    return True


def rebuild_memoryview(data: Any, layout: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of ``data`` with this format and shape."""
    view = memoryview(data)
    if len(shape) == 1:
        return view if layout == "B" else view.cast(layout)
    return view.cast(layout, shape)


def rebuild_exotic_memoryview(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    """Return a view of ``data`` with a format that only numpy knows."""
    return memoryview(rebuild_ndarray(data, dtype, shape, order))


# -- numpy.ndarray -----------------------------------------------------------------------------------------------------


def reduce_ndarray(value: Any) -> Any:
    """Return how to pickle an ndarray, or NotImplemented if its elements are objects."""
    dtype, flags = value.dtype, value.flags
    # The name of a plain type is a third of the cost of the type itself.
    plain = dtype.isbuiltin == 1 and dtype.metadata is None
    if plain and dtype.kind in _NUMBERS and flags.c_contiguous and value.nbytes >= SMALL:
        return rebuild_ndarray, (PickleBuffer(value), dtype.str, value.shape, "C")  # what most are, in half of the time
    if dtype.hasobject:
        return NotImplemented
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    if order == "C" and not flags.c_contiguous:
        value = value.copy("C")
    if value.nbytes < SMALL:
        data: Any = value.tobytes(order)
    else:  # bytes, because datetime64 and some structured types refuse to be buffers
        data = PickleBuffer((value if order == "C" else value.T).reshape(-1).view("u1"))
    return rebuild_ndarray, (data, dtype.str if plain else dtype, value.shape, order)


def rebuild_ndarray(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    """Return an ndarray over ``data``; read-only when ``data`` is."""
    return attribute("numpy", "ndarray")(shape, dtype, data, 0, None, order)


# -- torch.Tensor ------------------------------------------------------------------------------------------------------


def reduce_tensor(value: Any) -> Any:
    """Return how to pickle a CPU tensor, or NotImplemented where torch must do it (devices, sparse, quantized)."""
    torch = sys.modules["torch"]
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized or value.__dict__:
        return NotImplemented
    ordered = plain = value.detach().resolve_conj().resolve_neg()
    order: list[int] | None = None
    if not plain.is_contiguous():  # a transposed tensor is sent in the order of its memory, and turned back on arrival
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
        ordered = plain.permute(order)
        if not ordered.is_contiguous():
            order, ordered = None, plain.contiguous()
    try:
        raw = ordered.reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:
        return NotImplemented  # safe because torch's own way needs neither numpy nor a type that numpy knows
    data = raw.tobytes() if raw.nbytes < SMALL else PickleBuffer(raw)
    name = str(value.dtype).rpartition(".")[2]
    return rebuild_tensor, (data, name, tuple(ordered.shape), order, value.requires_grad)


def rebuild_tensor(data: Any, name: str, shape: tuple[int, ...], order: list[int] | None, requires_grad: bool) -> Any:
    """Return a tensor over the memory behind ``data``."""
    dtype = attribute("torch", name)
    torch = sys.modules["torch"]
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(_writable(data), dtype=dtype, count=len(data) // dtype.itemsize).reshape(shape)
    if order is not None:
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    return tensor.requires_grad_() if requires_grad else tensor


def _writable(data: bytes | memoryview) -> Any:
    """Return writable memory that begins with ``data``: its owner if that may be written, else a copy."""
    if isinstance(data, memoryview):
        if not data.readonly:
            return data
        owner: Any = data.obj
        if owner is not None and not memoryview(owner).readonly:
            return owner
    return bytearray(data)


REBUILD: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (rebuild_memoryview, rebuild_exotic_memoryview, rebuild_ndarray, rebuild_tensor)
}
"""What makes an array of its memory, the first argument, and of what else is known of it, by the name that a row has.
All that begin so; what makes an ``array`` begins with its type, and copies anyway."""
