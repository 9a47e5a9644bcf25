"""Every kind of value comes back the same: type, bits, dtype, weak type, sharing."""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import typing

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import tree_util as jtu

import sharedtree as st
from sharedtree._errors import UnserialisableError
from sharedtree.serialise.trust._trust import Trust
from sharedtree.serialise.values._decoding import decode
from sharedtree.serialise.values._encoding import encode
from sharedtree.serialise.values._manifest import parse_manifest

from . import strategies
from .isomorphic import assert_isomorphic
from .strategies import Color, Config, Key, Layer, Mode, Pair, Slotted, make, trees

TRUST = Trust([strategies.__name__, __name__])


def round_trip(tree, trust=TRUST, **options):
    encoded = encode(tree)
    text = json.dumps(encoded.manifest, separators=(",", ":"))
    manifest = parse_manifest(text)
    # What a file would give back: new arrays of the same bytes, of JAX or of NumPy as the entry says.
    arrays = [
        np.array(array) if entry.kind == "numpy" else jnp.asarray(np.array(array))
        for array, entry in zip(encoded.arrays, manifest.arrays, strict=True)
    ]
    for entry, array in zip(manifest.arrays, arrays, strict=True):
        assert entry.shape == array.shape
    return decode(manifest, arrays.__getitem__, trust, **options)


def refusals(tree):
    with pytest.raises(UnserialisableError) as caught:
        encode(tree)
    return caught.value


@given(trees())
@hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck))
def test_random_dags_come_back(tree):
    assert_isomorphic(tree, round_trip(tree))


@given(trees())
@hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck))
def test_encoding_is_deterministic(tree):
    assert json.dumps(encode(tree).manifest) == json.dumps(encode(tree).manifest)


def test_the_oracle_sees_differences():
    w = jnp.ones(2)
    for a, b in [
        ([w, w], [w, jnp.ones(2)]), ([1], [True]), ([0.0], [-0.0]), ((1,), [1]), ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ([jnp.asarray(1.0)], [jnp.ones(())]), ({1}, {1.0}), (Pair(1, 2), (1, 2)), (np.int8(1), np.int16(1)),
        (make(Layer, weight=1), make(Layer, weight=1, child=2)), (Color.RED, Color.BLUE), (range(3), range(4)),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            assert_isomorphic(a, b)


def test_none_is_a_key():
    assert_isomorphic({None: 1, (None,): {None: []}}, round_trip({None: 1, (None,): {None: []}}))


def test_nan_keeps_its_bits():
    payload = np.uint64(0xFFF8DEADBEEF0001).view(np.float64).item()
    (back,) = round_trip((payload,))
    assert np.float64(back).view(np.uint64) == 0xFFF8DEADBEEF0001


def test_tuples_in_which_each_holds_the_one_before_twice_stay_small():
    tree = ()
    for _ in range(200):
        tree = (tree, tree)
    encoded = encode(tree)
    assert len(encoded.manifest["nodes"]) == 201


@pytest.mark.slow
def test_depth_is_no_matter():
    tree = jnp.ones(1)
    for i in range(100_000):
        tree = [tree] if i % 3 else make(Layer, weight=tree)
    back = round_trip(tree)
    depth = 0
    while not isinstance(back, jax.Array):
        back = back[0] if isinstance(back, list) else back.weight
        depth += 1
    assert depth == 100_000


@pytest.mark.parametrize(
    "wrap", [lambda x: functools.partial(len, x), lambda x: collections.deque([x]), lambda x: {1: x}]
)
def test_what_python_could_not_free_is_refused_or_comes_back(wrap):
    tree = 0
    for _ in range(3_000):
        tree = wrap(tree)
    if type(tree) is dict:
        assert list(round_trip(tree)) == [1]
    else:
        assert "nested" in str(refusals(tree))


def test_keys_that_take_for_ever_to_hash_are_refused():
    inner = Key(0)
    for _ in range(40):
        inner = (inner, inner)
    # A dictionary with such a key cannot be made, so the file is made by hand.
    manifest = encode([inner]).manifest
    manifest["nodes"].append(["set", [manifest["nodes"][-1][1][0]]])
    with pytest.raises(st.SharedTreeError, match="nested"):
        parse_manifest(json.dumps(manifest))


def test_cycles():
    tree = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(st.CycleError) as caught:
        encode([tree])
    assert caught.value.paths == ("[0]", "[0]['a'][1]")


def local_class():
    @dataclasses.dataclass
    class Local:
        x: int = 0

    return Local


def test_all_that_cannot_be_written_is_listed_at_once():
    class Unknown:
        pass

    with open(__file__) as file:
        error = refusals(
            {
                "l": lambda x: x,
                "c": [local_class()()],
                "f": file,
                "t": threading.Lock(),
                "u": Unknown(),
                "ok": 1,
                "g": (i for i in ""),
            }
        )
    assert set(error.paths) == {"['l']", "['c'][0]", "['f']", "['t']", "['u']", "['g']"}
    assert len(error.reasons) == 6
    text = str(error)
    for part in ("6 objects", "nothing was written", "`['l']` is a lambda", "module level", "register"):
        assert part in text


def closure():
    y = 1
    return lambda: y


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (closure(), "inside a function"),
        (jax.nn.initializers.glorot_normal(), "inside a function"),
        (np.array([object()]), "dtype"),
        (np.array(["a"]), "dtype"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.ma.masked_array([1.0]), "numpy.asarray"),
        (np.dtype([("a", "f4")]), "dtype"),
        (type("Str", (str,), {})("x"), "subclass of `str`"),
        (collections.Counter("a"), "subclass of `dict`"),
        (ValueError("x"), "ValueError"),
        (json, "module of Python"),
        (list[int], "GenericAlias"),
        (jax.new_ref(jnp.ones(2)), "freeze"),
        (eqx.filter_jit(lambda x: x), "signature|cannot be rebuilt|lambda"),
    ],
)
def test_refusals_say_what_and_how(value, words):
    error = refusals([value])
    assert error.paths[0].startswith("[0]")
    assert re.search(words, str(error)), str(error)


def test_tracers_and_donated_arrays_are_refused():
    donated = jnp.ones(3)
    donated.delete()
    assert "donated" in str(refusals([donated]))
    with pytest.raises(UnserialisableError, match="tracer"):
        jax.jit(lambda x: encode([x]))(jnp.ones(2))


def test_fields_that_were_never_set_stay_missing():
    back = round_trip(make(Layer, weight=1))
    assert vars(back) == {"weight": 1}
    assert not hasattr(round_trip(make(Slotted, a=1)), "b")


def test_caches_of_properties_are_left_out_and_other_attributes_kept():
    config = make(Config, rate=1, note=[2])
    assert config.cached is config.cached
    assert vars(round_trip(config)) == {"rate": 1, "note": [2]}


def test_attributes_whose_names_are_no_texts_are_refused():
    config = make(Config, rate=1, note=[2])
    vars(config)[1] = 3
    with pytest.raises(UnserialisableError, match="the attribute `1`, which is no field of its class"):
        encode(config)


T = typing.TypeVar("T")


class GenericModule(eqx.Module, typing.Generic[T]):
    w: typing.Any


@dataclasses.dataclass
class GenericData(typing.Generic[T]):
    w: typing.Any


class GenericMutable(st.Module, typing.Generic[T]):
    def __init__(self, w):
        self.w = w


@pytest.mark.parametrize("cls", [GenericModule, GenericData, GenericMutable])
def test_what_typing_notes_on_instances_of_generic_classes_is_left_out(cls):
    noted, plain = cls[int](1), cls(1)
    assert typing.get_args(noted.__orig_class__) == (int,)
    assert encode(noted).manifest == encode(plain).manifest
    back = round_trip([noted], Trust([cls]))[0]
    assert type(back) is cls
    assert vars(back) == {"w": 1}
    # As the guide says, and as it is with `cls[int](1)`.
    object.__setattr__(back, "__orig_class__", cls[int])
    assert jax.tree.structure(back) == jax.tree.structure(noted)


def test_bound_methods_of_equinox_modules():
    layer = make(Layer, weight=jnp.ones(2), child=None)
    back_layer, back = round_trip((layer, layer.double))
    assert type(back) is type(layer.double)
    assert back.__self__ is back_layer
    assert back(3) == 6
    assert back.__name__ == "double"
    assert jtu.tree_structure(back) == jtu.tree_structure(make(Layer, weight=jnp.ones(2), child=None).double)


def test_state_and_model_share_their_markers():
    model = eqx.nn.BatchNorm(2, "batch", mode="batch")
    state = {index.marker: index.init for index in (model.batch_counter, model.batch_state_index)}
    back, back_state = round_trip((model, state))
    assert list(back_state) == [back.batch_counter.marker, back.batch_state_index.marker]
    named, named_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")
    back, back_state = round_trip((named, named_state))
    x = jnp.ones((3, 2))
    run = lambda m, s: jax.vmap(m, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, s)  # noqa: E731
    assert_isomorphic(run(named, named_state)[0], run(back, back_state)[0])


def test_wrapped_functions_at_module_level_are_named():
    back = round_trip([jitted, jitted])
    assert back[0] is back[1] is jitted


@eqx.filter_jit
def jitted(x):
    return x


def test_partials_of_partials_stay_apart():
    inner = functools.partial(strategies.activate, 1)
    inner.note = [1]
    outer = functools.partial(inner, 2)
    back = round_trip(outer)
    assert type(back.func) is functools.partial
    assert vars(back.func) == {"note": [1]}
    nested = jtu.Partial(jtu.Partial(jnp.add, 1), 2)
    assert round_trip(nested)() == 3


def test_two_views_of_one_buffer_are_two_arrays():
    base = np.arange(4.0)
    a, b = round_trip([base[:2], base[:2]])
    assert a is not b


OddlyNamed = dataclasses.make_dataclass("OddlyNamed", ["__metadata__"], namespace={"__module__": __name__})


def test_tensor_names_are_paths():
    w = jnp.ones(2)
    layer = make(Layer, weight=w, child={"b": jnp.ones(1), "a": [w, jnp.zeros(0)]}, activation=np.ones(1))
    expected = {jtu.keystr(p).removeprefix("."): v for p, v in jtu.tree_leaves_with_path(layer)}
    encoded = encode(layer)
    assert encoded.names == ["weight", "child['a'][1]", "child['b']", "activation"]
    assert all(expected[name] is a for name, a in zip(encoded.names[:3], encoded.arrays[:3], strict=True))
    assert encode(w).names == ["value"]
    assert encode(make(Config, sharedtree=w)).names == [".sharedtree"]
    assert encode(make(OddlyNamed, __metadata__=w)).names == [".__metadata__"]


def test_equal_names_are_made_unique():
    encoded = encode({frozenset([1]): jnp.ones(1), "a" * 100: jnp.ones(2), "b" * 100: jnp.ones(3)})
    assert len(set(encoded.names)) == 3


def test_paths_of_the_other_family_of_systems_come_back_pure():
    other = "WindowsPath" if isinstance(pathlib.Path(), pathlib.PosixPath) else "PosixPath"
    manifest = encode([pathlib.Path("a")]).manifest
    manifest["nodes"][0][1] = other
    (back,) = decode(parse_manifest(json.dumps(manifest)), lambda i: None)
    assert type(back).__name__ == f"Pure{other}"


def test_meshes_need_devices():
    mesh = jax.make_mesh((1,), ("x",))
    manifest = encode([mesh]).manifest
    assert round_trip([mesh])[0] == mesh
    manifest["nodes"][0][1:4] = [[4096], ["x"], [["int", format(i, "x")] for i in range(4096)]]
    with pytest.raises(st.SharedTreeError, match="jax_num_cpu_devices"):
        decode(parse_manifest(json.dumps(manifest)), lambda i: None)


def test_specs_with_unreduced_axes():
    spec = jax.sharding.PartitionSpec("x", unreduced={"y"})
    (back,) = round_trip([spec])
    assert back == spec
    assert back.unreduced == {"y"}
    alone = jax.sharding.PartitionSpec(unreduced={"y"})
    assert round_trip([alone]) == [alone]


MANY_DEVICES = """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
    from tests.serialise.test_values import round_trip
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[::-1])
    sharding = NamedSharding(mesh, PartitionSpec(("x", "y"), None))
    other = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    abstract = jax.ShapeDtypeStruct((8, 1), "float32", sharding=sharding)
    tree = [mesh, sharding, sharding.mesh, other, jax.devices()[5], SingleDeviceSharding(jax.devices()[3]), abstract]
    back = round_trip(tree)
    assert back == tree, back
    assert back[4] is jax.devices()[5]
    assert back[6].sharding == sharding
"""


@pytest.mark.slow
def test_meshes_over_many_devices():
    root = str(pathlib.Path(__file__).parents[2])
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(MANY_DEVICES)], check=True, cwd=root, env=environment)


def test_registered_by_register_node():
    back = round_trip(Held([jnp.ones(2)]), Trust(Held))
    assert type(back) is Held
    assert_isomorphic(back.inside, [jnp.ones(2)])


class Held:
    def __init__(self, inside):
        self.inside = inside


st.register_node(Held, lambda h: ((h.inside,), None), lambda aux, xs: Held(*xs))


def test_combined_flags_are_the_members_that_python_gives():
    assert round_trip(Mode.TRAIN | Mode.LOG) is Mode.TRAIN | Mode.LOG


@pytest.mark.parametrize("dtype", strategies.NUMPY_ONLY + strategies.DTYPES + strategies.ML_DTYPES)
def test_dtypes(dtype):
    array = np.arange(3).astype(dtype)
    assert_isomorphic([array, dtype, array[0]], round_trip([array, dtype, array[0]]))


def test_abstract_arrays_keep_what_makes_them_special():
    encoded = encode([jnp.asarray(1.0), jax.random.key(0)])
    manifest = parse_manifest(json.dumps(encoded.manifest))
    abstract = [jax.ShapeDtypeStruct(entry.shape, entry.dtype) for entry in manifest.arrays]
    weak, key = decode(manifest, abstract.__getitem__)
    assert weak.weak_type
    assert (key.shape, key.dtype) == ((), jax.random.key(0).dtype)
