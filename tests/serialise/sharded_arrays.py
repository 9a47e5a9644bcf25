"""Sharded arrays: saved without gathering, loaded onto any topology, each part read once.

Collected by pytest in a process that has eight devices, which `test_shards` starts.
"""

import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sharedtree as st
from sharedtree.serialise.arrays import _dtypes
from sharedtree.serialise.container._reading import open_container

from .containers import Counting
from .isomorphic import assert_isomorphic

# Meshes are made when they are asked for, so that importing this file needs no devices.


def grid():
    return Mesh(np.reshape(jax.devices(), (4, 2)), ("x", "y"))


def line():
    return Mesh(jax.devices(), ("x",))


WAYS = {
    "rows": lambda: NamedSharding(line(), P("x")),
    "columns": lambda: NamedSharding(line(), P(None, "x")),
    "grid": lambda: NamedSharding(grid(), P("x", "y")),
    "grid, the other way": lambda: NamedSharding(grid(), P("y", "x")),
    "both axes on one": lambda: NamedSharding(grid(), P(("x", "y"))),
    "both axes, reversed": lambda: NamedSharding(grid(), P(None, ("y", "x"))),
    "replicated": lambda: NamedSharding(line(), P()),
    "partially replicated": lambda: NamedSharding(grid(), P("y")),
    "partially replicated columns": lambda: NamedSharding(grid(), P(None, "x")),
    "one device": lambda: SingleDeviceSharding(jax.devices()[5]),
    "two of the devices": lambda: NamedSharding(Mesh(jax.devices()[3:5], ("x",)), P("x")),
    "three axes": lambda: NamedSharding(
        Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("x", "y", "z")), P(("x", "z"), "y")
    ),
    "devices reversed": lambda: NamedSharding(Mesh(jax.devices()[::-1], ("x",)), P("x")),
    "mesh reversed": lambda: NamedSharding(
        Mesh(np.reshape(jax.devices(), (4, 2))[::-1, ::-1], ("x", "y")), P("x", "y")
    ),
    "in the host's memory": lambda: NamedSharding(grid(), P("x", "y"), memory_kind="pinned_host"),
    "in the host's memory, on one device": lambda: SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host"),
}


def sharding_of(way):
    return WAYS[way]()


def values(shape, dtype="float32"):
    count = int(np.prod(shape))
    return (np.arange(count) % (2 if dtype == "bool" else 7)).astype(jnp.dtype(dtype)).reshape(shape)


def placed(way, array):
    return jax.device_put(jnp.asarray(array), sharding_of(way))


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(every=3)
def test_the_file_is_that_of_the_gathered_array(way):
    hosts = [values((8, 16)), values((8, 16)).T, values((16, 8, 3)), values((0, 8))]
    assert st.to_bytes([placed(way, host) for host in hosts]) == st.to_bytes([jnp.asarray(host) for host in hosts])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_every_dtype(way):
    for dtype in ("float32", "bfloat16", "int8", "float8_e5m2", "int4", "bool", "complex64"):
        host = values((8, 8), dtype)
        data = st.to_bytes([placed(way, host)])
        assert data == st.to_bytes([jnp.asarray(host)])
        (loaded,) = st.from_bytes(data, sharding=sharding_of(way))
        assert loaded.sharding == sharding_of(way)
        np.testing.assert_array_equal(np.asarray(loaded), host)


@pytest.mark.slow
def test_a_large_array_is_never_gathered(monkeypatch, tmp_path):
    host = values((2048, 4096))
    expected = st.to_bytes([jnp.asarray(host)])
    taken = []
    original = _dtypes._copy_part

    def watched(*args):
        part = original(*args)
        taken.append(part.nbytes)
        return part

    monkeypatch.setattr(_dtypes, "_copy_part", watched)
    for spec in (P("x"), P(None, "x"), P("y"), P(None, ("x", "y"))):
        taken.clear()
        array = jax.device_put(jnp.asarray(host), NamedSharding(grid(), spec))
        tracemalloc.start()
        st.save(tmp_path / "model", [array])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < array.nbytes
        assert sum(taken) == array.nbytes
        assert max(taken) <= 4 * 2**20
        assert (tmp_path / "model").read_bytes() == expected
        assert getattr(array, "_npy_value", None) is None  # JAX keeps no copy on the host beside the array


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", WAYS)
def test_another_topology(to, tmp_path):
    host = values((16, 8))
    for frm, options in (("columns", {}), ("partially replicated", {"mmap": True})):
        st.save(tmp_path / "model", {"a": placed(frm, host)})
        loaded = st.load(tmp_path / "model", sharding=sharding_of(to), **options)["a"]
        assert loaded.sharding == sharding_of(to)
        assert loaded.committed
        for shard in loaded.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])
    (loaded,) = st.from_bytes(st.to_bytes([placed(to, host)]))  # by default it is as for new arrays
    assert loaded.devices() == jnp.ones(1).devices()
    assert not loaded.committed


def test_one_device_for_all():
    tree = {"a": placed("grid", values((8, 8))), "key": jax.random.key(0), "weak": jnp.asarray(1.0), "n": np.ones(3)}
    device = jax.devices()[6]
    loaded = st.from_bytes(st.to_bytes(tree), sharding=device)
    for name in ("a", "key", "weak"):
        assert loaded[name].devices() == {device}, name
        assert loaded[name].committed
    assert loaded["weak"].weak_type
    assert type(loaded["n"]) is np.ndarray


def test_a_function_decides():
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"a": values((8, 8)), "b": jnp.asarray(values((8, 8))), "c": jnp.asarray(1.0), "d": keys}
    asked = {}

    def choose(name, struct):
        asked[name] = struct
        return {"['b']": sharding_of("grid"), "['d']": sharding_of("rows")}.get(name)

    loaded = st.from_bytes(st.to_bytes(tree), sharding=choose)
    assert set(asked) == {"['b']", "['c']", "['d']"}  # NumPy's stay on the host
    assert asked["['b']"] == jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert asked["['c']"].weak_type
    assert (asked["['d']"].dtype, asked["['d']"].shape) == (keys.dtype, (8,))
    assert loaded["b"].sharding == sharding_of("grid")
    assert not loaded["c"].committed
    assert loaded["d"].sharding.is_equivalent_to(sharding_of("rows"), 1)
    np.testing.assert_array_equal(jax.random.key_data(loaded["d"]), jax.random.key_data(keys))


@pytest.mark.slow
def test_keys_and_weak_scalars():
    gathered, number = jax.random.split(jax.random.key(3), (8, 2)), jax.lax.broadcast(jnp.asarray(1), (8,))
    keys, vector = jax.device_put(gathered, sharding_of("grid")), jax.device_put(number, sharding_of("rows"))
    assert vector.weak_type
    weak = jax.device_put(jnp.asarray(2.0), sharding_of("replicated"))
    tree = {"keys": keys, "weak": weak, "vector": vector, "again": keys}
    data = st.to_bytes(tree)
    assert data == st.to_bytes({"keys": gathered, "weak": jnp.asarray(2.0), "vector": number, "again": gathered})
    by_shape = lambda name, struct: sharding_of("rows") if struct.shape else sharding_of("replicated")
    for options in ({"like": tree}, {"sharding": by_shape}):
        loaded = st.from_bytes(data, **options)
        assert loaded["keys"] is loaded["again"]
        assert loaded["weak"].weak_type
        assert loaded["vector"].weak_type
        assert {len(each.sharding.device_set) for each in loaded.values()} == {8}
        np.testing.assert_array_equal(jax.random.key_data(loaded["keys"]), jax.random.key_data(keys))
        assert loaded["vector"].tolist() == [1] * 8
    assert st.from_bytes(data, like=tree)["keys"].sharding.is_equivalent_to(sharding_of("grid"), 2)


def test_a_template_says_where():
    host = values((16, 8))
    data = st.to_bytes({name: jnp.asarray(host) for name in "abc"})
    struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding_of("columns"))
    template = {"a": placed("grid", host), "b": struct, "c": jnp.zeros((16, 8))}
    loaded = st.from_bytes(data, like=template)
    assert loaded["a"].sharding == sharding_of("grid")
    assert loaded["b"].sharding == sharding_of("columns")
    assert not loaded["c"].committed
    for array in loaded.values():
        np.testing.assert_array_equal(np.asarray(array), host)
    loaded = st.from_bytes(data, like=template, sharding=sharding_of("rows"))  # what is said at the call comes first
    assert {x.sharding for x in loaded.values()} == {sharding_of("rows")}


@pytest.mark.parametrize("way", ["rows", "grid", "replicated", "partially replicated"])
@pytest.mark.sampled(every=3)
def test_ties_of_sharded_arrays(way):
    weight = placed(way, values((8, 8)))
    linear = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0)), weight)
    tree = {"embed": weight, "head": linear, "again": linear}
    data = st.to_bytes(tree)
    for options, expected in (
        ({}, None),
        ({"sharding": sharding_of("grid")}, sharding_of("grid")),
        ({"like": tree}, sharding_of(way)),
    ):
        loaded = st.from_bytes(data, **options)
        assert loaded["embed"] is loaded["head"].weight
        assert loaded["head"] is loaded["again"]
        assert expected is None or loaded["embed"].sharding == expected
    part = st.from_bytes(data, select="['head']", sharding=sharding_of("columns"))
    assert part.weight.sharding == sharding_of("columns")


# --- what is read -----------------------------------------------------------------------------------------------------


def test_each_part_is_read_once():
    """Replicas come from one read. Digests are of chunks, and each chunk has something for every column."""
    host = values((64, 65536))
    data = st.to_bytes({"a": jnp.asarray(host), "b": np.zeros(10**6)})
    for way in ("rows", "columns", "grid", "replicated", "partially replicated", "two of the devices"):
        for verify, most in ((False, 1.01), (True, 2.01)):
            file = Counting(data)
            loaded = st.load(file, select="['a']", sharding=sharding_of(way), verify=verify)
            np.testing.assert_array_equal(np.asarray(loaded), host)
            assert host.nbytes <= file.num_read <= host.nbytes * most + 20_000, way


def test_a_part_of_an_array_is_read_alone():
    """What a process needs that has some of the devices only."""
    host = values((64, 65536))
    file = Counting(st.to_bytes({"a": jnp.asarray(host)}))
    with open_container(file) as container:
        before = file.num_read
        part = container.read_selection("['a']", (slice(8, 16), slice(None)), verify=False)
    assert file.num_read - before == part.nbytes == host.nbytes // 8
    np.testing.assert_array_equal(part.view(np.float32).reshape(8, -1), host[8:16])


def test_damage_in_a_shard_is_found_and_progress_reaches_the_end():
    data = bytearray(st.to_bytes([jnp.asarray(values((64, 64))), np.ones(100)]))
    data[-900] ^= 1
    calls = []
    for way in ("rows", "columns", "grid"):
        with pytest.raises(st.errors.CorruptFileError, match=r"\[0\]"):
            st.from_bytes(bytes(data), sharding=sharding_of(way))
        report = lambda done, total: calls.append((done, total))
        st.from_bytes(bytes(data), sharding=sharding_of(way), verify=False, progress=report)
        assert calls[-1] == (64 * 64 * 4 + 800, 64 * 64 * 4 + 800)


# --- errors, and shardings as values ----------------------------------------------------------------------------------


def test_a_sharding_that_does_not_fit():
    data = st.to_bytes({"odd": jnp.ones((7, 3)), "scalar": jnp.float32(1)})
    with pytest.raises(st.errors.StructureMismatchError, match="odd|scalar"):
        st.from_bytes(data, sharding=sharding_of("rows"))


def test_shardings_as_values():
    """A model may hold those over meshes; they come back over the devices that are there. Single devices it may not."""
    ways = {way: sharding_of(way) for way in WAYS if "one device" not in way}
    structs = [jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=way) for way in ways.values()]
    assert_isomorphic([ways, P("x", None), structs], st.from_bytes(st.to_bytes([ways, P("x", None), structs])))
