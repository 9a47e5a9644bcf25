"""Arrays of every dtype and layout, saved to a file and loaded again to the bit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharedtree as st

from .isomorphic import assert_isomorphic
from .tied import through_file

NUMPY_DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", ">i2", ">i4", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16", "M8[ns]", "m8[s]", ">M8[us]",
    "M8", "longdouble",
]  # fmt: skip
ALL_OF_ML_DTYPES = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int1", "uint1", "int2",
    "uint2", "int4", "uint4",
]  # fmt: skip
ML_DTYPES = [name for name in ALL_OF_ML_DTYPES if hasattr(ml_dtypes, name)]


def bits_of(dtype, shape):
    """An array of as many different values as there are, and for floats of every bit pattern of a byte."""
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "biu" or "int" in dtype.name:
        low = {"int1": -1, "int2": -2, "int4": -8}.get(dtype.name, 0)
        high = {"bool": 2, "int1": 1, "uint1": 2, "int2": 2, "uint2": 4, "int4": 8, "uint4": 16}.get(dtype.name, 100)
        return np.resize(np.arange(low, high), count).astype(dtype).reshape(shape)
    if dtype.itemsize == 1:
        size = {"float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64}.get(dtype.name, 256)
        return np.resize(np.arange(size, dtype=np.uint8), count).view(dtype).reshape(shape)
    if dtype.kind in "mM":
        return np.resize(np.arange(-5, 5), count).astype("i8").astype(dtype).reshape(shape)
    values = np.array([0, -0.0, 1.5, np.inf, -np.inf, np.nan])
    return np.resize(values, count).astype(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (300,), (2, 3, 5)])
@pytest.mark.parametrize("name", NUMPY_DTYPES + ML_DTYPES)
def test_numpy_arrays(name, shape, path):
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)
    array = bits_of(dtype, shape)
    for options in ({}, {"mmap": True}, {"verify": False}):
        loaded = through_file(path, array, **options)
        assert type(loaded) is np.ndarray
        assert loaded.dtype == dtype
        assert loaded.shape == shape
        assert_isomorphic(array, loaded)


JAX_NAMES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"]


@pytest.mark.parametrize("name", JAX_NAMES + [name for name in ML_DTYPES if name not in ("int1", "uint1")])
def test_jax_arrays(name, path):
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)
    for shape in ((), (0, 3), (5, 7)):
        try:
            array = jnp.asarray(bits_of(dtype, shape))
        except (TypeError, jax.errors.JaxRuntimeError):
            pytest.skip("this JAX does not make arrays of the dtype")
        for options in ({}, {"mmap": True}):
            loaded = through_file(path, array, **options)
            assert isinstance(loaded, jax.Array)
            assert_isomorphic(array, loaded)


def test_64_bits():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        tree = [jnp.arange(3, dtype=name) for name in ("int64", "uint64", "float64", "complex128")]
        tree.append(jnp.asarray(1.5))
        data = st.to_bytes(tree)
        assert_isomorphic(tree, st.from_bytes(data))
    with pytest.raises(
        st.StructureMismatchError, match=r"64-bit numbers(.|\n)*float64\[3\](.|\n)*jax_enable_x64"
    ) as raised:
        st.from_bytes(data)
    assert raised.value.paths == ("[0]", "[1]", "[2]", "[3]", "[4]")
    numpy = st.from_bytes(st.to_bytes([np.arange(3.0)]))
    assert numpy[0].dtype == np.float64  # NumPy's stay as they are


def test_memory_layouts(path):
    base = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    tree = {
        "transposed": base.T,
        "strided": base[::2, ::-1, 1::3],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.float32(3), (4, 5)),
        "views": [base[0], base[0]],
        "read-only": base.copy(),
        "0-d of a view": base[1, 2, 3, ...],
        "big-endian, strided": base.astype(">f4")[:, 1:3],
    }
    tree["read-only"].flags.writeable = False
    loaded = through_file(path, tree)
    assert_isomorphic(tree, loaded)
    assert loaded["views"][0] is not loaded["views"][1]  # two views of one buffer are no tie
    assert all(array.flags.writeable and array.flags.c_contiguous for array in jax.tree.leaves(loaded))


def test_weak_types(path):
    tree = [jnp.asarray(1.0), jnp.asarray(2), jnp.asarray(1j), jnp.float32(1), jax.lax.full_like(jnp.asarray(1.0), 2.0)]
    loaded = through_file(path, tree)
    assert [x.weak_type for x in loaded] == [x.weak_type for x in tree]
    assert (loaded[0] + jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    traced = jax.jit(lambda x: x)
    traced(tree)
    traced(loaded)
    assert traced._cache_size() == 1


class Lookup(eqx.Module):
    table: jax.Array
    tied: jax.Array
    steps: jax.Array
    again: jax.Array


def test_gradients_of_integers(path):
    """JAX hands out float0 as NumPy's arrays or, by version, as those of a subclass; either way they hold no bytes."""
    table, steps = jnp.arange(6.0).reshape(3, 2), jnp.arange(3)
    model = Lookup(table, table, steps, steps)
    tree = {
        "grad": st.grad(lambda m: m.tied[m.steps].sum() + m.table[m.again].sum(), allow_int=True)(model),
        "number": jax.grad(lambda count: 1.0 * count, allow_int=True)(3),
        "jit": jax.jit(jax.grad(lambda x: 1.0 * x.sum(), allow_int=True))(steps),
        "vjp": jax.vjp(lambda x, y: x.sum() * y, steps, 2.0)[1](1.0),
        "empty": jax.grad(lambda x: 1.0 * x.sum(), allow_int=True)(jnp.zeros((0, 2), int)),
        "put": jax.device_put(np.zeros((2, 2), jax.dtypes.float0)),
        "plain": np.zeros(4, jax.dtypes.float0),
    }
    assert tree["grad"].steps.dtype == jax.dtypes.float0
    assert st.same_sharing(tree["grad"], model)
    for options in ({}, {"mmap": True}, {"like": tree}):
        loaded = through_file(path, tree, trusted=Lookup, **options)
        assert st.same_sharing(tree, loaded)
        for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded), strict=True):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            assert isinstance(two, jax.Array) != (two.dtype == jax.dtypes.float0)
            assert isinstance(two, jax.Array) or type(two) is np.ndarray
    traces = []
    traced = jax.jit(lambda x: traces.append(jax.tree.structure(x)))
    traced(tree)
    traced(loaded)
    assert len(traces) == 1
    assert st.to_bytes(loaded) == st.to_bytes(tree)


def test_other_arrays_without_bytes_are_refused():
    for array in (np.ma.zeros(3, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0).view(np.recarray)):
        with pytest.raises(st.UnserialisableError, match="a special kind of NumPy array"):
            st.to_bytes([array])
