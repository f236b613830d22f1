"""Storage types against the `gguf` package's constants."""

import gguf
import numpy as np
import pytest

from workbench.errors import DTypeError, ShapeError
from workbench.tensors import DTYPES, F16, Q4_K, Q8_0, dtype


def test_ids_and_block_bytes_are_those_of_gguf():
    ours = {t.name.lower(): (t.id, t.block, t.block_bytes) for t in DTYPES.values()}
    theirs = {t.name.lower(): (int(t), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert ours == theirs


@pytest.mark.parametrize("which", ["Q8_0", "q8_0", 8, Q8_0])
def test_a_type_is_found_by_name_id_or_itself(which):
    assert dtype(which) is Q8_0


def test_numpy_types():
    assert dtype(np.float16) is F16
    assert dtype(np.dtype("<i8")).name == "i64"
    assert all(t.numpy.itemsize == t.block_bytes for t in DTYPES.values() if t.numpy is not None)


@pytest.mark.parametrize("which", ["q9_9", 5, np.complex64, None, True, "\x1b[31m", object()])
def test_unknown_types_are_named(which):
    with pytest.raises(DTypeError, match="expected"):
        dtype(which)


def test_rows_are_whole_blocks():
    assert Q4_K.row_bytes(512) == 288 and Q4_K.bits == 4.5
    with pytest.raises(ShapeError, match="512"):
        Q4_K.row_bytes(300)
