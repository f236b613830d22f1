"""A stand-in for CuPy on machines without a GPU: NumPy underneath, with CuPy's separations kept.

Device arrays are no NumPy arrays: mixing the two, or converting one into the other but by `asnumpy` and `asarray`, raises
TypeError. Memory comes from pools, is full of 0xFF and has addresses of its own. Copies happen when somebody waits for their
stream, looks at an event of it, or when a kernel runs on it; kernels run at once. `test_cuda.py` checks that what is offered here
exists in CuPy.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
import weakref
from contextlib import contextmanager

import numpy as np

N_DEVICES = 2


# ---- devices, streams, events


class _State:
    device = 0
    stream = None
    allocator = None
    streams: list = []
    log: list = []  # (what happened, stream)


class Device:
    def __init__(self, device=None):
        self.id = _State.device if device is None else device

    def __enter__(self):
        self._before = getattr(self, "_before", [])
        self._before.append(_State.device)
        _State.device = self.id
        return self

    def __exit__(self, *exc):
        _State.device = self._before.pop()

    def synchronize(self):
        for s in [r() for r in _State.streams]:
            if s is not None and s.device == self.id:
                s.synchronize()


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.device, self.non_blocking = _State.device, non_blocking
        self.asked = self.done = 0
        self.work = []
        self.ptr = id(self)
        self._before = []
        _State.streams.append(weakref.ref(self))
        _by_ptr[self.ptr] = self

    def __enter__(self):
        self._before.append(_State.stream)
        _State.stream = self
        return self

    def __exit__(self, *exc):
        _State.stream = self._before.pop()

    def _ask(self, what, effect):
        self.asked += 1
        self.work.append((what, effect))

    def _flush(self, upto=None):
        while self.work and (upto is None or self.done < upto):
            what, effect = self.work.pop(0)
            self.done += 1
            effect()
            _State.log.append((what, self))

    def synchronize(self):
        self._flush()

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        stream, position = event.stream, event.position
        self._ask("wait", (lambda: stream._flush(position)) if stream is not None else lambda: None)


class Event:
    ticks = itertools.count()

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.timed, self.stream, self.position, self.time = not disable_timing, None, 0, None

    def record(self, stream=None):
        stream = stream or _current()
        self.stream = stream

        def reached():
            self.time = next(Event.ticks)

        stream._ask("event", reached)
        self.position = stream.asked

    @property
    def done(self):
        """Time passes between two looks: the stream gets one piece of work further."""
        if self.stream is None or self.stream.done >= self.position:
            return True
        self.stream._flush(self.stream.done + 1)
        return False

    def synchronize(self):
        if self.stream is not None:
            self.stream._flush(self.position)


def get_elapsed_time(start_event, end_event):
    assert start_event.timed and end_event.timed and None not in (start_event.time, end_event.time)
    return float(end_event.time - start_event.time)


_by_ptr = weakref.WeakValueDictionary()
_null = Stream(null=True)


def _current():
    return _State.stream or _null


# ---- memory


class _Memory:
    """Bytes of a device. Their address is real: what is freed too early crashes or shows 0xFF."""

    at = weakref.WeakValueDictionary()  # address -> memory

    def __init__(self, size, pool=None):
        self.bytes = np.full(size + 512, 0xFF, np.uint8)
        self.start = -self.bytes.ctypes.data % 512
        self.size, self.device = size, _State.device
        _Memory.at[self.bytes.ctypes.data + self.start] = self


class UnownedMemory:
    """The same bytes, which it does not keep from being freed; they are 0xFF then."""

    def __init__(self, ptr, size, owner, device_id=-1):
        memory = _Memory.at[ptr]
        assert size <= memory.size and device_id == memory.device
        self.bytes, self.start, self.size, self.device = memory.bytes, memory.start, size, device_id
        weakref.finalize(memory, memory.bytes.fill, 0xFF)


class OutOfMemoryError(MemoryError):
    pass


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.offset = mem, offset

    @property
    def ptr(self):
        return self.mem.bytes.ctypes.data + self.mem.start + self.offset

    def __add__(self, n):
        return MemoryPointer(self.mem, self.offset + n)

    def _span(self, size):
        assert 0 <= self.offset and self.offset + size <= self.mem.size
        return self.mem.bytes[self.mem.start + self.offset :][:size]

    def copy_from_host_async(self, mem, size, stream=None):
        assert isinstance(mem, int)
        (stream or _current())._ask("to device", lambda: ctypes.memmove(self._span(size).ctypes.data, mem, size))

    def copy_to_host_async(self, mem, size, stream=None):
        assert isinstance(mem, int)
        (stream or _current())._ask("to host", lambda: ctypes.memmove(mem, self._span(size).ctypes.data, size))

    def copy_from_device_async(self, src, size, stream=None):
        assert src.mem.device == self.mem.device
        (stream or _current())._ask("within", lambda: self._span(size).__setitem__(slice(None), src._span(size).copy()))

    def memset_async(self, value, size, stream=None):
        (stream or _current())._ask("set", lambda: self._span(size).fill(value))


class MemoryPool:
    def __init__(self):
        self._limit, self._used = 0, 0

    def malloc(self, size):
        if self._limit and self._used + size > self._limit:
            raise OutOfMemoryError(f"{size} bytes")
        memory = _Memory(size)
        self._used += size
        weakref.finalize(memory, self._free, size)
        return MemoryPointer(memory, 0)

    def _free(self, size):
        self._used -= size

    def set_limit(self, size=None, fraction=None):
        self._limit = size or 0

    def get_limit(self):
        return self._limit

    def free_all_blocks(self, stream=None):
        pass

    def used_bytes(self):
        return self._used

    def total_bytes(self):
        return self._used

    def free_bytes(self):
        return 0


_pools = [MemoryPool() for _ in range(N_DEVICES)]  # CuPy's own, one for each device behind one name


def get_default_memory_pool():
    return _pools[_State.device]


class PinnedMemory:
    def __init__(self, size):
        self.bytes = np.full(size, 0xFF, np.uint8)


class PinnedMemoryPointer(np.ndarray):
    """CuPy's has the buffer protocol, which in Python 3.11 only arrays can stand in for."""

    ptr = property(lambda self: self.ctypes.data)

    def __new__(cls, mem, offset):
        return mem.bytes[offset:].view(cls)


def alloc_pinned_memory(size):
    return PinnedMemoryPointer(PinnedMemory(size), 0)


@contextmanager
def using_allocator(allocator=None):
    before, _State.allocator = _State.allocator, allocator
    try:
        yield
    finally:
        _State.allocator = before


def _memcpy_peer(dst, dst_device, src, src_device, size, stream):
    _by_ptr[stream]._ask("peer", lambda: ctypes.memmove(dst, src, size))


class CUDARuntimeError(RuntimeError):
    pass


# ---- arrays


class ndarray:
    __array_ufunc__ = None  # NumPy scalars leave operators to us

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memptr = memptr or (_State.allocator or get_default_memory_pool().malloc)(nbytes)
        if any(int(n) % dtype.itemsize for n in (memptr.ptr, *(strides or ()))) and nbytes:
            raise CUDARuntimeError("cudaErrorMisalignedAddress")
        self._memory = memptr.mem
        assert memptr.mem.device == _State.device or nbytes == 0, "an array of another device"
        whole = memptr.mem.bytes[memptr.mem.start : memptr.mem.start + memptr.mem.size]
        self._a = np.ndarray(tuple(shape), dtype, whole, memptr.offset, strides)

    @staticmethod
    def _of(array, memory=None):
        self = object.__new__(ndarray)
        self._a, self._memory = np.asarray(array), memory
        return self

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly.")

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self._a.ctypes.data)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._a, name)
        return _wrapped(found) if callable(found) else found

    def __getitem__(self, index):
        return _out(self._a[_in(index)])

    def __setitem__(self, index, value):
        _current()._flush()
        self._a[_in(index)] = _in(value)

    def __len__(self):
        return len(self._a)

    def __int__(self):
        return int(self._a)

    def __float__(self):
        return float(self._a)

    def __bool__(self):
        return bool(self._a)


def _operator(name):
    def method(self, *others):
        _current()._flush()
        result = getattr(self._a, name)(*map(_in, others))
        if name.startswith("__i") and name != "__invert__":
            return self
        return NotImplemented if result is NotImplemented else _out(result)

    return method


for _name in ("add sub mul truediv floordiv mod pow and or xor lshift rshift").split():
    for _kind in ("", "i", "r"):
        setattr(ndarray, f"__{_kind}{_name}__", _operator(f"__{_kind}{_name}__"))
for _name in ("lt le gt ge eq ne neg invert abs").split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


def _in(x):
    """What NumPy computes with for an argument; NumPy arrays are refused."""
    if isinstance(x, ndarray):
        return x._a
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, (tuple, list)):
        return type(x)(map(_in, x))
    return x


def _out(x):
    """What CuPy returns: device arrays, also of no dimensions."""
    if isinstance(x, (np.ndarray, np.generic)):
        return ndarray._of(x)
    return type(x)(map(_out, x)) if isinstance(x, (tuple, list)) else x


def _wrapped(function):
    def call(*args, **kwargs):
        _current()._flush()
        out = kwargs.get("out")
        result = function(*map(_in, args), **{k: _in(v) for k, v in kwargs.items()})
        return out if out is not None else result if isinstance(result, (list, int, float, str)) else _out(result)

    if isinstance(function, np.ufunc):
        call.at = lambda a, *rest: _wrapped(function.at)(a, *rest)
    return call


class ElementwiseKernel:
    """Kernels in C++ have their meaning in Python here, by name."""

    def __init__(self, in_params, out_params, operation, name="kernel"):
        self.run = globals()[name]

    def __call__(self, *args):
        _current()._flush()
        self.run(*map(_in, args))


def workbench_within(index, limit, wrong):
    if ((index < 0) | (index >= limit)).any():
        wrong[0] = 1


def asnumpy(a):
    _current()._flush()
    return a._a.copy()


def asarray(a, dtype=None):
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    return ndarray._of(np.array(a, dtype))


def empty(shape, dtype=float):
    return ndarray(shape if isinstance(shape, tuple) else (shape,), dtype)


def zeros(shape, dtype=float):
    array = empty(shape, dtype)
    array._a[...] = 0
    return array


OWN = {f.__name__: f for f in (ndarray, ElementwiseKernel, asnumpy, asarray, empty, zeros, get_default_memory_pool)}
CUDA = {f.__name__: f for f in (Device, Stream, Event, MemoryPool, MemoryPointer, UnownedMemory, PinnedMemory, PinnedMemoryPointer, alloc_pinned_memory,
                                get_elapsed_time, using_allocator)}  # fmt: skip


def module(n_devices=N_DEVICES):
    """A fresh `cupy`, to be put into `sys.modules`."""
    _State.log.clear()
    _pools[:] = [MemoryPool() for _ in range(N_DEVICES)]
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(OWN)
    cupy.is_available = lambda: n_devices > 0
    cupy.__getattr__ = lambda name: _numpy_name(name)
    cupy.lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=_wrapped(np.lib.stride_tricks.as_strided)))
    cuda = types.SimpleNamespace(**CUDA)
    cuda.memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda.runtime = types.SimpleNamespace(getDeviceCount=lambda: n_devices, memGetInfo=lambda: (2**30, 2**31), memcpyPeerAsync=_memcpy_peer,
                                         CUDARuntimeError=CUDARuntimeError)  # fmt: skip
    cupy.cuda = cuda
    return cupy


def _numpy_name(name):
    found = getattr(np, name)
    return found if isinstance(found, type) or not callable(found) else _wrapped(found)


def log():
    """What streams did so far, in order: (what, stream)."""
    return list(_State.log)


def install(monkeypatch, n_devices=N_DEVICES):
    """Make `import cupy` give a fresh stand-in."""
    fake = module(n_devices)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake
