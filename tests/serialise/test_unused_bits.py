"""What elements do not use of their bytes: it is no part of a value, and none of it gets into a file or out of one."""

import hashlib
import json

import jax
import ml_dtypes
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.arrays import _dtypes
from sharedtree.serialise.arrays._orbax_forms import to_hand_over
from sharedtree.serialise.values._manifest import parse_manifest

from .drafts import Draft

SMALL = {
    np.dtype(getattr(ml_dtypes, name)): bits for name, bits in _dtypes._SMALL_BITS.items() if hasattr(ml_dtypes, name)
}
LONG = [np.dtype(np.longdouble), np.dtype(np.clongdouble)]
NOT_JAX = {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}  # for some versions, to compute with
DIRTY = [*SMALL, *LONG, *[dtype.newbyteorder() for dtype in LONG]]


def dirty(dtype, garbage):
    """Numbers whose unused bits are garbage, without a change of the numbers; and their bytes without garbage."""
    clean = (np.arange(24) % 2).astype(dtype).reshape(4, 6)
    used = _dtypes.used_bits(dtype)
    assert used is not None
    data = clean.copy().reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)
    mask = used if dtype.isnative or len(used) == 1 else used[::-1]
    data[:] = (data & mask) | (garbage & ~mask)
    return data.reshape(-1).view(dtype).reshape(4, 6), clean


def test_every_dtype_with_unused_bits_is_known():
    for name, dtype in _dtypes._NATIVE.items():
        if dtype not in LONG and "complex" not in name and name not in ("bool", "float0"):
            info = ml_dtypes.iinfo if "int" in name else ml_dtypes.finfo
            used = _dtypes.used_bits(dtype)
            assert (8 * dtype.itemsize if used is None else int(used[0]).bit_length()) == info(dtype).bits, name


@pytest.mark.parametrize("dtype", DIRTY, ids=str)
@pytest.mark.parametrize("shape", [lambda a: a, lambda a: a.T, lambda a: a[1:, ::2], lambda a: a[0, 0].reshape(())])
def test_files_of_equal_numbers_are_equal(dtype, shape):
    digests = set()
    for garbage in (0, 0xFF, 0xA5):
        array, _ = dirty(dtype, garbage)
        digests.add(hashlib.sha256(st.to_bytes([shape(array)])).digest())
        digests.add(hashlib.sha256(st.to_bytes([shape(array)])).digest())
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", DIRTY, ids=str)
def test_saving_does_not_change_the_array(dtype):
    array, _ = dirty(dtype, 0xFF)
    before = array.tobytes()
    st.to_bytes([array, array.T])
    assert array.tobytes() == before


@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_scalars_and_their_files(dtype):
    texts = {st.to_bytes([dirty(dtype, garbage)[0][0, 1]]) for garbage in (0, 0xFF)}
    assert len(texts) == 1
    assert st.from_bytes(texts.pop()) == [1]


@pytest.mark.parametrize("dtype", DIRTY, ids=str)
def test_what_orbax_is_handed_is_clean_too(dtype):
    handed = set()
    for garbage in (0, 0xFF):
        array, _ = dirty(dtype, garbage)
        before = array.tobytes()
        manifest = parse_manifest(json.dumps(Draft(st.to_bytes([array])).manifest))
        handed.add(to_hand_over(manifest.arrays[0], array).tobytes())
        assert array.tobytes() == before
    assert len(handed) == 1


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_a_reader_ignores_them(dtype, mmap, tmp_path):
    array, clean = dirty(dtype, 0xFF)
    draft = Draft(st.to_bytes({"numpy": clean, **({} if dtype.name in NOT_JAX else {"jax": jax.device_put(clean)})}))
    assert len(draft.data) == len(draft.tensors) * clean.nbytes
    draft.data[:] = array.tobytes() * len(draft.tensors)
    path = tmp_path / "dirty.safetensors"
    path.write_bytes(draft.file(with_digests=True))
    back = st.load(path, mmap=mmap)
    for found in back.values():
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), clean.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), clean.astype(np.float32))
