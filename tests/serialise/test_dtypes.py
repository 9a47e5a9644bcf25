"""Dtypes on disk: names that come back, bytes that are little-endian, and what other readers make of them."""

import io

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from sharedtree._errors import FormatError
from sharedtree.serialise.arrays import _dtypes
from sharedtree.serialise.arrays._dtypes import clear_unused, dtype_name, dtype_named, name_if_storable, restore, stored
from sharedtree.serialise.arrays._host_bytes import tensor_source
from sharedtree.serialise.container._reading import open_container
from sharedtree.serialise.container._writing import write

from .containers import written

NUMPY = ["bool", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16"]
BIG = [">i2", ">u2", ">f2", ">i4", ">u4", ">f4", ">i8", ">u8", ">f8", ">c8", ">c16", ">M8[s]", ">m8[25us]"]
TIMES = ["M8[ns]", "m8[D]", "M8[25us]", "m8", "M8", "M8[as]"]
LONG = [np.dtype(np.longdouble), np.dtype(np.clongdouble)]
ML = [
    np.dtype(value)
    for name, value in vars(ml_dtypes).items()
    if isinstance(value, type) and issubclass(value, np.generic) and not name.startswith("_")
]
FLOAT0 = np.dtype(jax.dtypes.float0)
ALL = [*map(np.dtype, NUMPY + BIG + TIMES), *LONG, *ML, FLOAT0]


def random_array(dtype, shape):
    """Any bytes that are values of the dtype, with nothing in the bits that it does not use."""
    if dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(size).integers(0, 2 if dtype == np.bool_ else 256, size, dtype=np.uint8)
    clear_unused(data, dtype)
    return data.view(dtype).reshape(shape)


def bits(array):
    """The bytes of an array in memory, in C order."""
    return np.ascontiguousarray(array).tobytes()


def storable(dtype):
    return isinstance(dtype, np.dtype) and name_if_storable(dtype) is not None


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)], ids=str)
def test_every_dtype_comes_back_with_its_bits(dtype, shape):
    array = random_array(dtype, shape)
    container = open_container(written({"x": array}))
    back = restore(container.read_many(["x"])["x"], dtype_named(dtype_name(dtype)), shape)
    assert back.dtype == dtype
    assert back.dtype.byteorder == dtype.byteorder
    assert back.shape == shape
    assert bits(back) == bits(array)


def test_ml_dtypes_are_all_known():
    assert len(ML) >= 10
    assert all(storable(dtype) for dtype in ML)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_names_are_unique(dtype):
    assert [other for other in ALL if dtype_name(other) == dtype_name(dtype)] == [dtype]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("f4", "float32"),
        (">f4", ">float32"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        ("M8[25us]", "datetime64[25us]"),
        (">m8", ">timedelta64"),
        (jax.dtypes.float0, "float0"),
    ],
)
def test_names(dtype, name):
    assert dtype_name(np.dtype(dtype)) == name


@pytest.mark.parametrize("dtype", ["O", "S3", "U3", "V8", "S", [("a", "f4")], ">U2"], ids=str)
def test_what_is_not_storable(dtype):
    assert not storable(np.dtype(dtype))
    with pytest.raises(TypeError, match="no place"):
        dtype_name(np.dtype(dtype))


def test_key_dtypes_and_swapped_ml_dtypes_are_not_storable():
    assert not storable(jax.random.key(0).dtype)
    assert not storable(np.dtype(ml_dtypes.bfloat16).newbyteorder())
    assert not storable(float)


@pytest.mark.parametrize(
    "name", ["", ">", "object", "O", "f4", "V8", ">bfloat16", ">int8", ">bool", "<float32", ">>float32", "float32 ",
             "datetime64[x]", "datetime64[0s]", "timedelta64[99999999999s]", "datetime64[ns]\n", "i4,i4", "float0>"],
)  # fmt: skip
def test_unknown_names_are_refused(name):
    with pytest.raises(FormatError, match="pip install --upgrade"):
        dtype_named(name)


def test_a_dtype_of_another_ml_dtypes_is_named(monkeypatch):
    monkeypatch.delitem(_dtypes._NATIVE, "int4")
    with pytest.raises(ValueError, match=r"`int4`, which the installed ml_dtypes .* lacks"):
        dtype_named("int4")


def test_a_long_double_of_another_machine_is_named():
    other = "binary128" if "x87" in dtype_name(np.dtype(np.longdouble)) else "x87"
    with pytest.raises(ValueError, match="another format"):
        dtype_named(f"longdouble[{other}]")


@pytest.mark.parametrize(
    ("dtype", "text", "item"),
    [
        ("bool", "BOOL", ()), ("u1", "U8", ()), ("i1", "I8", ()), ("u2", "U16", ()), ("i2", "I16", ()),
        ("u4", "U32", ()), ("i4", "I32", ()), ("u8", "U64", ()), ("i8", "I64", ()), ("f2", "F16", ()),
        (ml_dtypes.bfloat16, "BF16", ()), ("f4", "F32", ()), ("f8", "F64", ()), (">f4", "F32", ()),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3", ()), (ml_dtypes.float8_e5m2, "F8_E5M2", ()),
        (ml_dtypes.float8_e4m3, "U8", (1,)), (ml_dtypes.float8_e5m2fnuz, "U8", (1,)), (ml_dtypes.int4, "U8", (1,)),
        ("c8", "U8", (8,)), ("c16", "U8", (16,)), ("M8[s]", "U8", (8,)), (FLOAT0, "U8", (0,)),
    ],
    ids=str,
)  # fmt: skip
def test_how_it_is_stored(dtype, text, item):
    assert stored(np.dtype(dtype), (3, 4)) == (text, (3, 4, *item))
    assert stored(np.dtype(dtype), ()) == (text, item)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_safetensors_reads_all_of_it_little_endian(dtype):
    """The oldest version allowed has no C64 and only two kinds of fp8; its parser is strict about dtypes."""
    array = random_array(dtype, (2, 3))
    ((_, read),) = deserialize(written({"x": array}))
    assert (read["dtype"], tuple(read["shape"])) == stored(dtype, (2, 3))
    expected = array if dtype.byteorder != ">" else array.astype(dtype.newbyteorder("<"))
    assert bytes(read["data"]) == bits(expected)


def test_big_endian_by_hand():
    data = written({"x": np.array([1, 258], ">u2")})
    assert data[-4:] == b"\x01\x00\x02\x01"


def test_restore_aliases_what_it_is_given():
    data = np.zeros(16, np.uint8)
    for dtype in ("f4", ">f4", "c8"):
        view = restore(data, np.dtype(dtype), (16 // np.dtype(dtype).itemsize,))
        assert np.shares_memory(view, data)
        assert view.flags.writeable
    data.flags.writeable = False
    assert np.shares_memory(restore(data, np.dtype("f4"), (4,)), data)
    assert not np.shares_memory(restore(data, np.dtype(">f4"), (4,)), data)


def test_nan_payloads_and_odd_bits_survive():
    array = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    for variant in (array, array.view(np.uint32).astype(">u4").view(">f4")):
        back = restore(open_container(written({"x": variant})).read_many(["x"])["x"], variant.dtype, variant.shape)
        assert bits(back) == bits(variant)


def test_jax_arrays_are_written_from_where_they_are():
    values = jnp.arange(12.0).reshape(3, 4)
    file = io.BytesIO()
    write(file, [tensor_source("x", np.asarray(values))], "{}")
    back = restore(open_container(file.getvalue()).read_many(["x"])["x"], np.dtype("f4"), (3, 4))
    np.testing.assert_array_equal(back, np.arange(12.0).reshape(3, 4))
