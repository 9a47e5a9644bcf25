"""What is saved is loaded, or is refused when it is saved: nothing is lost on the way, and nothing is made up."""

import collections
import copy
import functools
import gzip
import io
import itertools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import tree_util as jtu

import sharedtree as st
from sharedtree.serialise.arrays._dtypes import buffers

from .containers import file_of
from .drafts import Draft
from .isomorphic import assert_isomorphic
from .vanilla import Wrapper


class Schedule:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * step


SCHEDULE = Schedule(0.1)


def double(x):
    """Twice as much."""
    return 2 * x


def triple(x: float) -> float:
    """Three times as much."""
    return 3 * x


KEYS = (jtu.GetAttrKey("encoder"), jtu.GetAttrKey("decoder"))


class Coders:
    def __init__(self, first, second, keys=KEYS):
        self.both, self.keys = (first, second), keys


jtu.register_pytree_with_keys(
    Coders,
    lambda coders: (tuple(zip(coders.keys, coders.both, strict=True)), None),
    lambda _, both: Coders(*both),
    lambda coders: (coders.both, None),
)


def through_a_file(tree, **options):
    return st.from_bytes(st.to_bytes(tree), trusted="tests", **options)


# --- keys that are equal to nothing --------------------------------------------------------------------------------


def test_keys_that_are_equal_to_nothing():
    for make in (
        lambda: float("nan"), lambda: complex("nan"), lambda: complex(0.0, float("nan")), lambda: np.float32("nan"),
        lambda: np.float64("nan"), lambda: np.longdouble("nan"), lambda: np.complex64("nan"),
        lambda: ml_dtypes.bfloat16("nan"), lambda: np.datetime64("NaT", "s"), lambda: np.timedelta64("NaT", "s"),
        lambda: (float("nan"), 1), lambda: ((np.float32("nan"),), "deep"),
    ):  # fmt: skip
        for holder in ({make(): 1}, {make()}, frozenset([make()]), {(1, frozenset([make()])): 2}):
            with pytest.raises(st.errors.UnserialisableError, match="NaN as a key") as caught:
                st.to_bytes([holder])
            assert caught.value.paths == ("[0]",) or caught.value.paths[0].startswith("[0]<key")
        (loaded,) = through_a_file([{1: make()}])  # as a value it is like any other
        assert repr(loaded[1]) == repr(make())
    nan = ["float", "nan:7ff8000000000000"]
    for nodes in ([["set", [nan]]], [["tuple", [nan]], ["dict", [0], ["a"]]]):
        with pytest.raises(st.errors.FormatError, match="NaN as a key"):
            st.from_bytes(file_of(nodes))


def test_default_factories():
    for factory in (functools.partial(dict), [].copy, Schedule(1)):
        words = "factory|which cannot be rebuilt|does not lead back"
        with pytest.raises(st.errors.UnserialisableError, match=words) as caught:
            st.to_bytes({"counts": collections.defaultdict(factory)})
        assert "counts" in caught.value.paths[0]
    for factory in (None, list, double):
        loaded = through_a_file(collections.defaultdict(factory, {"a": 1}))
        assert loaded.default_factory is factory
        assert loaded == {"a": 1}


# --- what a name does not hold -------------------------------------------------------------------------------------


def test_a_callable_object_is_more_than_its_name():
    with pytest.raises(st.errors.UnserialisableError, match="Schedule") as caught:
        st.to_bytes({"rate": SCHEDULE})
    assert caught.value.paths == ("['rate']",)


def test_a_wrapper_with_a_name_of_its_own_beside_one_without():
    both = [eqx.module_update_wrapper(Wrapper(function)) for function in (double, triple)]
    object.__setattr__(both[1], "__doc__", "My own.")
    object.__setattr__(both[1], "__qualname__", "mine")
    object.__setattr__(both[0], "__qualname__", "double.<locals>.wrapped")
    for wanted in (both, both[::-1], both[1:], both[:1]):
        assert b"__annotations__" not in st.to_bytes(wanted)
        assert [vars(each) for each in through_a_file(wanted)] == [vars(each) for each in wanted]


# --- templates with other ties -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "other"),
    [
        (jnp.arange(3.0), jnp.zeros(3)),
        (np.arange(3.0), np.zeros(3)),
        (jnp.asarray(2.0), jnp.asarray(0.0)),
        (jax.random.key(3), jax.random.key(0)),
    ],
)
def test_a_template_without_the_tie_stays_without_it(leaf, other):
    data = st.to_bytes({"a": leaf, "b": leaf, "c": [leaf]})
    like = {"a": copy.copy(other), "b": copy.copy(other), "c": [copy.copy(other)]}
    loaded, report = st.from_bytes(data, like=like, strict=False)
    assert_isomorphic({"a": leaf, "b": copy.copy(leaf), "c": [copy.copy(leaf)]}, loaded)
    assert report.loaded == ("['a']", "['b']", "['c'][0]")
    assert report.unused == ()


def test_a_method_fits_a_template_that_holds_one():
    saved, template = (eqx.filter_vmap(eqx.nn.Linear(2, 2, key=jax.random.key(seed)).__call__) for seed in range(2))
    assert type(saved._fun) is types.MethodType
    loaded = st.from_bytes(st.to_bytes({"f": saved}), like={"f": template})["f"]
    assert loaded._fun.__self__.weight.tolist() == saved._fun.__self__.weight.tolist()


def test_an_array_of_the_file_that_finds_no_place_is_reported():
    data = st.to_bytes({"a": jnp.zeros(2), "b": jnp.ones(2), "only": np.ones(3)})
    w = jnp.full(2, 7.0)
    loaded, report = st.from_bytes(data, like={"a": w, "b": w}, strict=False)
    assert loaded["a"] is loaded["b"]
    assert loaded["a"].tolist() == [0.0, 0.0]
    assert report.unused == ("['b']", "['only']")
    assert "not used of the file: `['only']`" in str(report)
    # Equal numbers are no ties.
    loaded, report = st.from_bytes(st.to_bytes([7, 7, 2.5]), like=[0, 0, 0.0], strict=False)
    assert loaded == [7, 7, 2.5]
    assert report.unused == ()


def test_numpy_or_jax_is_a_difference():
    one, two = (np.ones(2, np.float32), "a NumPy array"), (jnp.ones(2), "a JAX array")
    for (held, in_file), (wanted, in_template) in ((one, two), (two, one)):
        data = st.to_bytes({"w": held})
        with pytest.raises(
            st.errors.StructureMismatchError, match=f"the file has {in_file}, the template {in_template}"
        ):
            st.from_bytes(data, like={"w": wanted})
        loaded, report = st.from_bytes(data, like={"w": wanted}, strict=False)
        assert loaded["w"] is wanted
        assert (report.kept, report.unused) == (("['w']",), ("['w']",))
        for like in (jax.ShapeDtypeStruct((2,), jnp.float32), held):
            assert type(st.from_bytes(data, like={"w": like})["w"]) is type(held)
    # A description is neither.
    data = st.to_bytes({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(st.errors.StructureMismatchError, match="`ShapeDtypeStruct`, the template a JAX array"):
        st.from_bytes(data, like={"w": jnp.ones(2)})


# --- paths below registered classes --------------------------------------------------------------------------------


def test_a_part_below_a_registered_class_has_the_path_that_jax_prints():
    tree = {"m": Coders(jnp.ones(2), [jnp.zeros(3)])}
    data = st.to_bytes(tree)
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = jtu.keystr(path)
        assert name in [array.name for array in st.inspect(data).arrays]
        assert np.array_equal(st.from_bytes(data, trusted="tests", select=name), leaf)
    assert ".decoder" in str(st.inspect(data))


@pytest.mark.parametrize(
    "keys",
    [
        (jtu.GetAttrKey("same"), jtu.GetAttrKey("same")),
        (jtu.DictKey("x" * 500), jtu.DictKey("y")),
        (jtu.DictKey("\ud800"), jtu.SequenceKey(1)),
        (jtu.DictKey(object()), jtu.SequenceKey(1)),
        ("no key entry", "another"),
    ],
)
def test_keys_that_make_no_path_become_positions(keys):
    data = st.to_bytes(Coders(jnp.ones(2), jnp.zeros(3), keys))
    assert st.from_bytes(data, trusted="tests", select="[1]").shape == (3,)


# --- booleans ------------------------------------------------------------------------------------------------------


def test_booleans_of_other_bytes_are_refused(path):
    for make, byte in itertools.product([np.array, jnp.array], [2, 255]):
        draft = Draft(st.to_bytes({"mask": make([True, False, True])}))
        draft.data[1] = byte
        path.write_bytes(draft.file(with_digests=True))
        for options in ({}, {"mmap": True}):
            with pytest.raises(st.errors.FormatError, match=r"`\['mask'\]` of booleans has bytes other than 0 and 1"):
                st.load(path, **options)
        for options in ({}, {"mmap": True}, {"sharding": jax.devices()[0]}, {"sharding": ROWS}):
            for tree in (st.load(path, verify=False, **options), st.from_bytes(path.read_bytes(), verify=False)):
                assert bytes_of(tree["mask"]) == b"\1\1\1"


ROWS = jax.NamedSharding(jax.make_mesh((1,), ("rows",)), jax.P("rows"))


def bytes_of(array):
    return np.asarray(array).view(np.uint8).tobytes()


def bits_of(shape, order="C"):
    """A mask as image libraries make them, and the same as NumPy makes it."""
    mask = np.resize(np.array([0, 255, 1, 2, 0, 128, 254], np.uint8), shape)
    return np.asarray(mask, order=order).view(bool), mask != 0


SHAPES = [(), (3,), (0, 2), (7, 11), (300, 400), (5, 2**20)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [np.asarray, np.transpose, np.flip, jax.device_put, nnx.Variable])
@pytest.mark.sampled(every=5)
def test_booleans_of_any_byte_are_saved_as_0_and_1(make, shape, path):
    mask, expected = bits_of(shape)
    mask.flags.writeable = make is not np.flip
    before = mask.view(np.uint8).tobytes()
    tree, expected = {"mask": make(mask), "beside": np.arange(3)}, make(expected)
    st.save(path, tree)
    assert st.verify(path)
    file = io.BytesIO()
    with gzip.open(file, "wb", 1) as stream:  # which cannot be patched
        st.save(stream, tree)
    for data in (path.read_bytes(), st.to_bytes(tree), gzip.decompress(file.getvalue())):
        for options in ({}, {"mmap": True}):
            loaded = st.from_bytes(data, trusted="flax", **options)["mask"]
            assert type(loaded) is type(tree["mask"])
            assert bytes_of(loaded[...]) == bytes_of(np.asarray(expected[...]))
    assert mask.view(np.uint8).tobytes() == before


def test_booleans_of_bytes_are_not_copied():
    for mask in (np.frombuffer(bytes(2**20), bool), jnp.zeros(2**20, bool)):
        memory = np.asarray(mask)
        assert all(np.shares_memory(np.frombuffer(buffer, np.uint8), memory) for buffer in buffers(mask))


def test_a_boolean_that_a_disk_has_changed(path):
    """The fix that is offered for a digest that does not fit."""
    for tree in ({"mask": np.ones(8, bool)}, {"mask": jnp.ones(8, bool)}):
        data = bytearray(st.to_bytes(tree))
        data[-1] ^= 2
        path.write_bytes(data)
        with pytest.raises(st.errors.CorruptFileError, match="verify=False"):
            st.load(path)
        assert bytes_of(st.load(path, verify=False)["mask"]) == b"\1" * 8


# --- arguments -----------------------------------------------------------------------------------------------------


def test_a_function_renamed_to_the_function_itself():
    data = st.to_bytes([double])
    assert st.from_bytes(data, renames={f"{__name__}:double": triple}) == [triple]
    assert st.from_bytes(data, trusted="tests", renames={"not.there:Typo.weight": None}) == [double]


@pytest.mark.parametrize(
    ("renames", "error"),
    [
        ({"no name": "a:B"}, ValueError),
        ({"mod.Old": "mod:New"}, ValueError),
        ({3: "a:B"}, ValueError),
        ({"mod:Old": 3}, TypeError),
        ([("mod:Old", "mod:New")], TypeError),
    ],
)
def test_renames_that_can_mean_nothing(renames, error):
    with pytest.raises(error, match="`renames`"):
        st.from_bytes(st.to_bytes([1]), renames=renames)


def test_a_class_is_not_renamed_to_a_function():
    with pytest.raises(TypeError, match="is no class"):
        st.from_bytes(st.to_bytes(Wrapper(1)), renames={"tests.serialise.vanilla:Wrapper": double})


def test_a_sharding_that_is_none():
    for sharding in ("cpu", 0, lambda *_: "cpu"):
        with pytest.raises(TypeError, match=r"sharding=jax.devices\(\)\[0\]"):
            st.from_bytes(st.to_bytes(jnp.ones(2)), sharding=sharding)
