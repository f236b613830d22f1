"""Storage types against the `gguf` package and against ggml's rounding rules."""

import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from workbench.errors import DTypeError
from workbench.kernels import blocks
from workbench.kernels.kernel import NUMPY_BUFFER
from workbench.tensors import DTYPES, Context, dtype, ops

UNKNOWN_TO_GGUF = {"q8_1", "q8_K", "q1_0"}
BLOCKS = sorted(n for n, t in DTYPES.items() if t.numpy is None)
DECODED = [n for n in BLOCKS if n not in UNKNOWN_TO_GGUF]
ENCODED = ["bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
floats = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.5, 127.0, -127.0, 1e-30, 1e-8, 3e4])


def kind(name):
    return getattr(GGMLQuantizationType, name.upper())


@pytest.mark.parametrize("name", DECODED)
def test_decoding_equals_gguf(name):
    t = DTYPES[name]
    raw = np.random.default_rng(t.id).integers(0, 256, (3, 70, t.row_bytes(1024)), dtype=np.uint8)
    out = np.full((3, 70, 1024), -1, np.float32)
    with np.errstate(all="ignore"):
        t.decode(raw, out)
        expected = quants.dequantize(raw, kind(name))
    assert np.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(UNKNOWN_TO_GGUF))
def test_types_that_gguf_cannot_decode_are_a_clear_error(name):
    t = DTYPES[name]
    with pytest.raises(DTypeError, match=f"{name}: gguf has no code for it"):
        t.decode(np.zeros((1, t.row_bytes(256)), np.uint8), np.empty((1, 256), np.float32))


@pytest.mark.parametrize("name", ENCODED)
@given(x=arrays(np.float32, (3, 64), elements=floats))
def test_encoding_equals_gguf(name, x):
    raw = np.full((3, DTYPES[name].row_bytes(64)), 0xAA, np.uint8)
    DTYPES[name].encode(x, raw)
    with np.errstate(all="ignore"):
        assert np.array_equal(raw, quants.quantize(x, kind(name)))


def test_encoding_many_rows_and_strided_input():
    x = np.random.default_rng(0).standard_normal((300, 5, 128), dtype=np.float32).transpose(1, 0, 2)
    for name in ENCODED:
        raw = np.empty((5, 300, DTYPES[name].row_bytes(128)), np.uint8)
        DTYPES[name].encode(x, raw)
        assert np.array_equal(raw, quants.quantize(np.ascontiguousarray(x), kind(name))), name


def test_every_f16_pattern():
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    for some in (patterns, patterns[np.isfinite(patterns)]):  # with infinities and NaN: the true cast; without: the quick way
        out = np.empty(some.shape, np.float32)
        blocks.decode(np, some, out)
        assert np.array_equal(out.view(np.uint32), some.astype(np.float32).view(np.uint32))


def test_every_bf16_pattern_survives():
    patterns = np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    wide, back = np.empty((64, 1024), np.float32), np.empty((64, 1024), np.uint16)
    DTYPES["bf16"].decode(patterns, wide)
    DTYPES["bf16"].encode(wide, back)
    nan = np.isnan(wide)
    assert nan.sum() == 2 * 127 and np.array_equal(back[~nan], patterns[~nan])
    assert np.array_equal(back[nan], patterns[nan] | 0x40)  # quiet, sign and payload kept


def test_a_permuted_bf16_tensor_has_the_values_of_its_owner():
    with Context() as ctx:
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        t = ctx.new_tensor("bf16", 4, 3, 2).set(values)
        assert np.array_equal(ops.transpose(t).numpy(), values.transpose(0, 2, 1))


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0", "q4_K", "q5_K", "q6_K", "mxfp4"])
def test_temporaries_do_not_grow_with_the_data(name):
    t = DTYPES[name]
    raw, out = np.random.default_rng(0).integers(0, 120, (512, t.row_bytes(2048)), np.uint8), np.empty((512, 2048), np.float32)
    before = np.setbufsize(NUMPY_BUFFER)  # as whoever runs kernels does
    tracemalloc.start()
    t.decode(raw, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.setbufsize(before)
    assert peak <= 64 * 1024


# ---- rounding of activations


def rounded(name, x):
    copy = x.copy()
    blocks.round_input(np, dtype(name), copy)
    return copy


@given(x=arrays(np.float32, (2, 256), elements=floats))
def test_rounding_is_storing_and_reading_again(x):
    assert np.array_equal(rounded("f16", x), x.astype(np.float16).astype(np.float32))
    raw, back = np.empty(x.shape, np.uint16), np.empty_like(x)
    DTYPES["bf16"].encode(x, raw)
    DTYPES["bf16"].decode(raw, back)
    assert np.array_equal(rounded("bf16", x), back)
    raw = np.empty((2, DTYPES["q8_0"].row_bytes(256)), np.uint8)
    DTYPES["q8_0"].encode(x, raw)
    DTYPES["q8_0"].decode(raw, back)
    scale = np.abs(x).reshape(2, 8, 32).max(-1, keepdims=True).repeat(32, -1).reshape(x.shape) / 127
    difference = np.abs(rounded("q4_0", x) - back)
    assert (difference <= 1.001 * scale).all() and (difference > 1e-3 * scale).mean() < 0.2  # halves may go either way


def test_blocks_of_256_keep_the_largest_value_exactly():
    x = np.random.default_rng(0).standard_normal((4, 512), dtype=np.float32)
    y, groups = rounded("q4_K", x).reshape(8, 256), x.reshape(8, 256)
    largest = np.abs(groups).argmax(1)
    assert np.allclose(y[np.arange(8), largest], groups[np.arange(8), largest], rtol=1e-6)
    assert (np.abs(y - groups).max(1) <= np.abs(groups).max(1) / 127 * 0.5001).all()


def test_f32_weights_round_nothing():
    x = np.random.default_rng(0).standard_normal((2, 64), dtype=np.float32)
    assert not blocks.rounds_input(dtype("f32")) and np.array_equal(rounded("f32", x), x)
