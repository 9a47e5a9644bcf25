"""Arrays of every dtype and layout, saved to a file and loaded again to the bit."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import sharedtree as st
from sharedtree.serialise.arrays import _placing

from .containers import is_of_jax
from .drafts import Draft
from .isomorphic import assert_isomorphic
from .tied import through_file

NUMPY = "bool i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 M8[ns] m8[s] m8[D] M8[25us] m8 M8 M8[as] g G"
BIG = ">i2 >u2 >i4 >u4 >i8 >u8 >f2 >f4 >f8 >c8 >c16 >M8[us] >m8[25us]"
FLOAT0 = np.dtype(jax.dtypes.float0)
SMALL = [
    np.dtype(value)
    for name, value in vars(ml_dtypes).items()
    if isinstance(value, type) and issubclass(value, np.generic) and not name.startswith("_")
]
DTYPES = [*map(np.dtype, f"{NUMPY} {BIG}".split()), *SMALL, FLOAT0]


def bits_used(dtype):
    """Of each element, or of each half of a complex one."""
    if dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        return 80
    if dtype in SMALL and dtype.itemsize == 1:
        return (ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo)(dtype).bits
    return 8 * dtype.itemsize


def array_of(dtype, shape):
    """An array of as many different values as there are, and of small dtypes of every bit pattern."""
    count = int(np.prod(shape, dtype=int))
    if dtype.itemsize == 1:
        size = 2 if dtype == np.bool_ else 2 ** bits_used(dtype)
        if "int" in dtype.name and dtype in SMALL:
            info = ml_dtypes.iinfo(dtype)
            return np.resize(np.arange(info.min, info.max + 1), count).astype(dtype).reshape(shape)
        return np.resize(np.arange(size, dtype=np.uint8), count).view(dtype).reshape(shape)
    if dtype.itemsize == 0 or dtype.kind in "biu":
        return np.resize(np.arange(100), count).astype(dtype).reshape(shape)
    if dtype.kind in "mM":
        return np.resize(np.arange(-5, 5), count).astype("i8").astype(dtype).reshape(shape)
    return np.resize([0, -0.0, 1.5, np.inf, -np.inf, np.nan], count).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sampled(every=5)
def test_numpy_arrays(dtype, path):
    """All shapes in one file, so that some begin where no element of theirs may."""
    arrays = [array_of(dtype, shape) for shape in ((), (0,), (0, 3), (7,), (300,), (2, 3, 5))]
    for options in ({}, {"mmap": True}, {"verify": False}):
        loaded = through_file(path, arrays, **options)
        assert {type(array) for array in loaded} == {np.ndarray}
        assert {(array.dtype, array.dtype.byteorder) for array in loaded} == {(dtype, dtype.byteorder)}
        assert_isomorphic(arrays, loaded)
    assert [array.dtype for array in st.inspect(path).arrays] == [name_of(dtype)] * len(arrays)
    scalars = [dtype, arrays[4][1]] if dtype != FLOAT0 else []
    assert_isomorphic(scalars, through_file(path, scalars))


def name_of(dtype):
    """As the format has it: NumPy's name, with the byte order in front, and how a long double is made."""
    name = {np.longdouble: "longdouble", np.clongdouble: "clongdouble"}.get(dtype.type, dtype.name)
    name += "[x87]" if "longdouble" in name and np.finfo(np.longdouble).nmant == 63 else ""
    return "float0" if dtype == FLOAT0 else ">" * (dtype.byteorder == ">") + name


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.itemsize < 8 and each.isnative], ids=str)
def test_jax_arrays(dtype, path):
    if dtype == FLOAT0 or not is_of_jax(dtype):
        pytest.skip("this JAX does not make arrays of the dtype")
    arrays = [jax.device_put(array_of(dtype, shape)) for shape in ((), (0, 3), (5, 7))]
    for options in ({}, {"mmap": True}):
        loaded = through_file(path, arrays, **options)
        assert all(isinstance(array, jax.Array) for array in loaded)
        assert_isomorphic(arrays, loaded)


STORED = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def test_how_they_are_stored():
    """By what the oldest version of safetensors allowed reads, and little-endian; others as bytes."""
    for dtype in DTYPES:
        array = array_of(dtype, (3, 4))
        ((_, read),) = safetensors.deserialize(st.to_bytes([array]))
        name = STORED.get(dtype.name)
        assert read["dtype"] == (name or "U8"), dtype
        assert tuple(read["shape"]) == ((3, 4) if name else (3, 4, dtype.itemsize)), dtype
        if bits_used(dtype) == 8 * dtype.itemsize:
            assert bytes(read["data"]) == array.astype(dtype.newbyteorder("<")).tobytes(), dtype
    assert st.to_bytes(np.array([1, 258], ">u2"))[-4:] == b"\x01\x00\x02\x01"


def test_nan_payloads_and_odd_bits_survive():
    array = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    for each in (array, array.view(np.uint32).astype(">u4").view(">f4")):
        assert st.from_bytes(st.to_bytes(each)).tobytes() == each.tobytes()


def test_dtypes_that_have_no_place():
    for dtype in ("O", "S3", "U3", "V8", [("a", "f4")], ">U2", np.dtype(ml_dtypes.bfloat16).newbyteorder()):
        with pytest.raises(st.errors.UnserialisableError, match="dtype"):
            st.to_bytes([np.zeros(2, dtype)])
    draft = Draft(st.to_bytes([np.zeros(16, np.uint8)]))
    for name, words in (("longdouble[other]", "another format"), ("float77", "pip install --upgrade")):
        draft.manifest["arrays"][0] |= {"dtype": name, "shape": [1]}
        with pytest.raises(st.errors.FormatError, match=words):
            st.from_bytes(draft.file(with_digests=True))


# --- bits that are not used -------------------------------------------------------------------------------------------

UNUSED = [dtype for dtype in DTYPES if bits_used(dtype) < 8 * dtype.itemsize]


def dirty(dtype, garbage):
    """Numbers whose unused bits are garbage, without a change of the numbers; and their bytes without garbage."""
    clean = (np.arange(24) % 2).astype(dtype).reshape(4, 6)
    data = clean.copy().reshape(-1).view(np.uint8).reshape(-1, 16 if dtype.itemsize > 1 else 1)
    if dtype.itemsize == 1:
        data |= garbage << bits_used(dtype) & 0xFF
    elif bits_used(np.dtype(np.longdouble)) == 80:
        data[:, 10:] = garbage
    return data.reshape(-1).view(dtype).reshape(4, 6), clean


class Manager:
    """Notes what Orbax would be given."""

    def should_save(self, step):
        return True

    def save(self, step, args):
        self.args = args


@pytest.mark.parametrize("dtype", UNUSED, ids=str)
def test_bits_that_are_not_used_are_no_part_of_a_value(dtype, path):
    """None of it gets into a file or out of one; saving does not change the array."""
    views = [lambda a: a, lambda a: a.T, lambda a: a[1:, ::2], lambda a: a[0, 0].reshape(()), lambda a: a[0, 1]]
    for view in views:
        texts = set()
        for garbage in (0, 0xFF, 0xA5):
            array, _ = dirty(dtype, garbage)
            before = array.tobytes()
            manager = Manager()
            st.orbax.save(manager, 0, [array, view(array)])
            handed = [np.asarray(each).tobytes() for each in manager.args["arrays"].item.values()]
            texts.add((st.to_bytes([view(array)]), *handed))
            assert array.tobytes() == before
        assert len(texts) == 1
    if dtype not in SMALL:
        return
    array, clean = dirty(dtype, 0xFF)
    can_compute = "float6" not in dtype.name and "int1" not in dtype.name  # some versions of JAX cannot with these
    draft = Draft(st.to_bytes([clean, *([jax.device_put(clean)] if can_compute and is_of_jax(dtype) else [])]))
    draft.data[:] = array.tobytes() * len(draft.tensors)
    path.write_bytes(draft.file(with_digests=True))
    for options in ({}, {"mmap": True}):
        for found in st.load(path, **options):
            assert np.asarray(found).tobytes() == clean.tobytes()


# --- what JAX makes of them -------------------------------------------------------------------------------------------


def test_64_bits():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        tree = [jnp.arange(3, dtype=name) for name in ("int64", "uint64", "float64", "complex128")]
        tree.append(jnp.asarray(1.5))
        data = st.to_bytes(tree)
        assert_isomorphic(tree, st.from_bytes(data))
    with pytest.raises(
        st.errors.StructureMismatchError, match=r"64-bit numbers(.|\n)*float64\[3\](.|\n)*jax_enable_x64"
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


TRACED = {
    "jit": lambda load: jax.jit(lambda x: [load(), x][0])(1.0),
    "eval_shape": jax.eval_shape,
    "vmap": lambda load: jax.vmap(lambda x: load(), out_axes=None)(jnp.ones(3)),
    "grad": lambda load: jax.grad(lambda x: (x, load()), has_aux=True)(1.0)[1],
    "st.jit": lambda load: st.jit(lambda: load())(),
}


@pytest.mark.parametrize("trace", TRACED)
@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"sharding": jax.devices()[0]}], ids=str)
def test_weak_types_under_a_trace(trace, options, path):
    """As arrays of other types are loaded."""
    tree = [jnp.asarray(1.5), jnp.asarray(2), jnp.asarray(1j), jax.lax.full_like(jnp.asarray(1.0), 2.0, shape=(3,))]
    tree = [*tree, jnp.arange(3), jax.random.key(0), jnp.ones(2, bool)]
    st.save(path, tree)
    loaded = TRACED[trace](lambda: st.load(path, **options))
    assert [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in loaded] == [
        (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in tree
    ]
    if trace != "eval_shape":
        for one, two in zip(loaded[:-2], tree[:-2], strict=True):
            np.testing.assert_array_equal(one, two)
    assert not isinstance(st.load(path)[0], jax.core.Tracer)


def test_what_is_found_out_under_a_trace_holds_outside():
    _placing._class_of_float0.cache_clear()
    _placing._is_dtype_of_jax.cache_clear()
    jax.eval_shape(lambda: _placing._class_of_float0() and None)
    assert not issubclass(_placing._class_of_float0(), jax.core.Tracer)
    outside = {name: _placing._is_dtype_of_jax.__wrapped__(name) for name in ("float32", "float64", "int2", "int4")}
    for name, expected in outside.items():
        jax.eval_shape(lambda name=name: _placing._is_dtype_of_jax(name) and None)
        assert _placing._is_dtype_of_jax(name) == expected


def test_what_is_offered_for_a_masked_array_keeps_the_mask():
    array = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    with pytest.raises(st.errors.UnserialisableError, match="special kind of NumPy array") as raised:
        st.to_bytes([array])
    code = re.search(r"Save its data and its mask: `(.*)`", str(raised.value))[1]
    data, mask = st.from_bytes(st.to_bytes(eval(code, {"numpy": np, "array": array})))
    assert (data.tolist(), mask.tolist()) == ([1, 2, 3], [False, True, False])


WRONG_SELECTIONS = [["['w']"], ("['w']",), {"['w']"}, 0, 1.5, b"['w']", False, {"['w']": True}]


@pytest.mark.parametrize("select", WRONG_SELECTIONS, ids=str)
def test_a_selection_that_is_no_selection(select, path, tmp_path):
    """It would select all, as if it were not there."""
    st.save(path, {"w": jnp.ones(3), "b": jnp.ones(2)})
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "theirs")
    for load in (
        lambda: st.load(path, select=select),
        lambda: st.load(path, select=select, foreign=True),
        lambda: st.load(path, select=select, like={"w": jnp.ones(3), "b": jnp.ones(2)}),
        lambda: st.from_bytes(path.read_bytes(), select=select),
        lambda: st.load(tmp_path / "theirs", select=select, foreign=True),
    ):
        with pytest.raises(TypeError, match=f"`select` must be .* not a `{type(select).__name__}`"):
            load()


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
    }
    assert tree["grad"].steps.dtype == jax.dtypes.float0
    for options in ({}, {"mmap": True}, {"like": tree}):
        loaded = through_file(path, tree, trusted=Lookup, **options)
        assert st.same_sharing(tree, loaded)
        for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded), strict=True):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            assert isinstance(two, jax.Array) or (type(two) is np.ndarray and two.dtype == jax.dtypes.float0)
    traces = []
    traced = jax.jit(lambda x: traces.append(1))
    traced(tree)
    traced(loaded)
    assert len(traces) == 1
    assert st.to_bytes(loaded) == st.to_bytes(tree)
    for array in (np.ma.zeros(3, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0).view(np.recarray)):
        with pytest.raises(st.errors.UnserialisableError, match="a special kind of NumPy array"):
            st.to_bytes([array])
