"""Sharded arrays, on eight simulated devices: saved without gathering, loaded onto any topology, each part read once.

Everything here runs in one child process, since the number of devices is fixed when JAX starts.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FLAG = "SHAREDTREE_TEST_EIGHT_DEVICES"


@pytest.mark.skipif(FLAG in os.environ, reason="this is the child process")
def test_with_eight_devices():
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-W",
            "error",
            str(pathlib.Path(__file__)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, FLAG: "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


if FLAG in os.environ:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

    import sharedtree as st
    from sharedtree.serialise.arrays import _host_bytes

    from .containers import Counting
    from .isomorphic import assert_isomorphic

    def mesh(*sizes, names="xyz"):
        return jax.make_mesh(sizes, tuple(names[: len(sizes)]))

    GRID = mesh(4, 2)
    LINE = mesh(8)
    WAYS = {
        "rows": NamedSharding(LINE, P("x")),
        "columns": NamedSharding(LINE, P(None, "x")),
        "grid": NamedSharding(GRID, P("x", "y")),
        "grid, the other way": NamedSharding(GRID, P("y", "x")),
        "both axes on one": NamedSharding(GRID, P(("x", "y"))),
        "both axes, reversed": NamedSharding(GRID, P(None, ("y", "x"))),
        "replicated": NamedSharding(LINE, P()),
        "partially replicated": NamedSharding(GRID, P("y")),
        "partially replicated columns": NamedSharding(GRID, P(None, "x")),
        "one device": SingleDeviceSharding(jax.devices()[5]),
        "two of the devices": NamedSharding(jax.sharding.Mesh(jax.devices()[3:5], ("x",)), P("x")),
        "three axes": NamedSharding(mesh(2, 2, 2), P(("x", "z"), "y")),
    }
    DTYPES = ["float32", "bfloat16", "int8", "float8_e5m2", "int4", "bool", "complex64"]

    def values(shape, dtype="float32"):
        count = int(np.prod(shape))
        return (np.arange(count) % (2 if dtype == "bool" else 7)).astype(jnp.dtype(dtype)).reshape(shape)

    def placed(way, array):
        return jax.device_put(jnp.asarray(array), WAYS[way])

    def test_there_are_eight():
        assert jax.device_count() == 8

    # --- saving ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("shape", [(8, 16), (16, 8, 3), (0, 8)])
    def test_the_file_is_that_of_the_gathered_array(way, shape):
        host = values(shape)
        sharded = {"a": placed(way, host), "b": [jnp.ones(3)], "c": placed(way, host.T if len(shape) == 2 else host)}
        gathered = {"a": jnp.asarray(host), "b": [jnp.ones(3)], "c": jnp.asarray(host.T if len(shape) == 2 else host)}
        assert st.to_bytes(sharded) == st.to_bytes(gathered)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("way", ["columns", "grid", "partially replicated"])
    def test_every_dtype(way, dtype):
        host = values((8, 8), dtype)
        data = st.to_bytes([placed(way, host)])
        assert data == st.to_bytes([jnp.asarray(host)])
        loaded = st.from_bytes(data, sharding=WAYS[way])
        assert loaded[0].sharding == WAYS[way]
        np.testing.assert_array_equal(np.asarray(loaded[0]), host)

    @pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y"), P(None, ("x", "y"))])
    def test_a_large_array_is_never_gathered(spec, monkeypatch):
        array = jax.device_put(jnp.asarray(values((2048, 4096))), NamedSharding(GRID, spec))
        taken = []
        original = _host_bytes._taken

        def watched(*args):
            part = original(*args)
            taken.append(part.nbytes)
            return part

        monkeypatch.setattr(_host_bytes, "_taken", watched)
        data = st.to_bytes([array])
        assert sum(taken) == array.nbytes
        assert max(taken) <= 4 * 2**20
        monkeypatch.undo()
        assert data == st.to_bytes([jnp.asarray(values((2048, 4096)))])
        assert getattr(array, "_npy_value", None) is None  # JAX keeps no copy on the host beside the array

    def test_saving_takes_no_memory_of_the_size_of_an_array(tmp_path):
        import tracemalloc

        array = jax.device_put(jnp.asarray(values((8192, 2048))), NamedSharding(GRID, P("y", "x")))
        st.save(tmp_path / "warm", jax.device_put(jnp.ones((8, 8)), WAYS["grid"]))
        tracemalloc.start()
        try:
            st.save(tmp_path / "model", array)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 32 * 2**20 < array.nbytes

    # --- loading ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("to", WAYS)
    @pytest.mark.parametrize("frm", ["columns", "partially replicated"])
    def test_another_topology(frm, to, tmp_path):
        host = values((16, 8))
        st.save(tmp_path / "model", {"a": placed(frm, host)})
        for options in ({}, {"mmap": True}):
            loaded = st.load(tmp_path / "model", sharding=WAYS[to], **options)["a"]
            assert loaded.sharding == WAYS[to]
            assert loaded.committed
            for shard in loaded.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])

    def test_by_default_it_is_as_for_new_arrays():
        data = st.to_bytes([placed("grid", values((8, 8)))])
        (loaded,) = st.from_bytes(data)
        assert loaded.devices() == jnp.ones(1).devices()
        assert not loaded.committed

    def test_one_device_for_all():
        tree = {
            "a": placed("grid", values((8, 8))),
            "key": jax.random.key(0),
            "weak": jnp.asarray(1.0),
            "n": np.ones(3),
        }
        device = jax.devices()[6]
        loaded = st.from_bytes(st.to_bytes(tree), sharding=device)
        for name in ("a", "key", "weak"):
            assert loaded[name].devices() == {device}, name
            assert loaded[name].committed
        assert loaded["weak"].weak_type
        assert type(loaded["n"]) is np.ndarray

    def test_a_function_decides():
        tree = {
            "a": values((8, 8)),
            "b": jnp.asarray(values((8, 8))),
            "c": jnp.asarray(1.0),
            "d": jax.random.split(jax.random.key(0), 8),
        }
        asked = {}

        def choose(name, struct):
            asked[name] = struct
            return {"['b']": WAYS["grid"], "['d']": WAYS["rows"]}.get(name)

        loaded = st.from_bytes(st.to_bytes(tree), sharding=choose)
        assert set(asked) == {"['b']", "['c']", "['d']"}  # NumPy's stay on the host
        assert asked["['b']"] == jax.ShapeDtypeStruct((8, 8), jnp.float32)
        assert asked["['c']"].weak_type
        assert asked["['d']"].dtype == tree["d"].dtype
        assert asked["['d']"].shape == (8,)
        assert loaded["b"].sharding == WAYS["grid"]
        assert not loaded["c"].committed
        assert loaded["d"].sharding.is_equivalent_to(WAYS["rows"], 1)
        np.testing.assert_array_equal(jax.random.key_data(loaded["d"]), jax.random.key_data(tree["d"]))

    def test_keys_and_weak_scalars():
        keys = jax.device_put(jax.random.split(jax.random.key(3), (8, 2)), WAYS["grid"])
        weak = jax.device_put(jnp.asarray(2.0), WAYS["replicated"])
        vector = jax.device_put(jax.lax.broadcast(jnp.asarray(1), (8,)), WAYS["rows"])
        assert vector.weak_type
        tree = {"keys": keys, "weak": weak, "vector": vector, "again": keys}
        data = st.to_bytes(tree)
        gathered = jax.random.split(jax.random.key(3), (8, 2))
        vector = jax.lax.broadcast(jnp.asarray(1), (8,))
        assert data == st.to_bytes({"keys": gathered, "weak": jnp.asarray(2.0), "vector": vector, "again": gathered})
        for options in (
            {"like": tree},
            {"sharding": lambda name, struct: WAYS["rows"] if struct.shape else WAYS["replicated"]},
        ):
            loaded = st.from_bytes(data, **options)
            assert loaded["keys"] is loaded["again"]
            assert loaded["weak"].weak_type
            assert loaded["vector"].weak_type
            assert len(loaded["keys"].sharding.device_set) == 8
            assert len(loaded["weak"].sharding.device_set) == 8
            assert len(loaded["vector"].sharding.device_set) == 8
            np.testing.assert_array_equal(jax.random.key_data(loaded["keys"]), jax.random.key_data(keys))
            assert loaded["vector"].tolist() == [1] * 8
        assert st.from_bytes(data, like=tree)["keys"].sharding.is_equivalent_to(WAYS["grid"], 2)

    def test_a_template_says_where():
        host = values((16, 8))
        saved = {"a": jnp.asarray(host), "b": jnp.asarray(host), "c": jnp.asarray(host)}
        data = st.to_bytes(saved)
        struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=WAYS["columns"])
        template = {"a": placed("grid", host), "b": struct, "c": jnp.zeros((16, 8))}
        loaded = st.from_bytes(data, like=template)
        assert loaded["a"].sharding == WAYS["grid"]
        assert loaded["b"].sharding == WAYS["columns"]
        assert not loaded["c"].committed
        assert_isomorphic(
            {name: np.asarray(x) for name, x in saved.items()}, {name: np.asarray(x) for name, x in loaded.items()}
        )
        loaded = st.from_bytes(data, like=template, sharding=WAYS["rows"])  # what is said at the call comes first
        assert {x.sharding for x in loaded.values()} == {WAYS["rows"]}

    @pytest.mark.parametrize("way", ["rows", "grid", "replicated", "partially replicated"])
    def test_ties_of_sharded_arrays(way):
        weight = placed(way, values((8, 8)))
        linear = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0)), weight)
        tree = {"embed": weight, "head": linear, "again": linear}
        data = st.to_bytes(tree)
        for options, expected in (({}, None), ({"sharding": WAYS["grid"]}, WAYS["grid"]), ({"like": tree}, WAYS[way])):
            loaded = st.from_bytes(data, **options)
            assert loaded["embed"] is loaded["head"].weight
            assert loaded["head"] is loaded["again"]
            assert expected is None or loaded["embed"].sharding == expected
        part = st.from_bytes(data, select="['head']", sharding=WAYS["columns"])
        assert part.weight.sharding == WAYS["columns"]

    # --- what is read ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "way", ["rows", "columns", "grid", "replicated", "partially replicated", "two of the devices"]
    )
    def test_each_part_is_read_once(way):
        """Replicas come from one read."""
        host = values((64, 65536))
        file = Counting(st.to_bytes({"a": jnp.asarray(host), "b": np.zeros(10**6)}))
        loaded = st.load(file, select="['a']", sharding=WAYS[way], verify=False)
        np.testing.assert_array_equal(np.asarray(loaded), host)
        assert host.nbytes <= file.num_read <= host.nbytes * 1.01 + 20_000

    @pytest.mark.parametrize("way", ["rows", "columns", "grid"])
    def test_verified_parts_do_not_read_the_file_again_and_again(way):
        """Digests are of chunks, and each chunk has something for every column."""
        host = values((64, 65536))
        file = Counting(st.to_bytes({"a": jnp.asarray(host)}))
        loaded = st.load(file, sharding=WAYS[way])
        np.testing.assert_array_equal(np.asarray(loaded["a"]), host)
        assert file.num_read <= 2.01 * host.nbytes + 20_000

    def test_a_part_of_an_array_is_read_alone():
        """What a process needs that has some of the devices only."""
        from sharedtree.serialise.container._reading import open_container

        host = values((64, 65536))
        data = st.to_bytes({"a": jnp.asarray(host)})
        file = Counting(data)
        with open_container(file) as container:
            before = file.num_read
            part = container.read_selection("['a']", (slice(8, 16), slice(None)), verify=False)
        assert file.num_read - before == part.nbytes == host.nbytes // 8
        np.testing.assert_array_equal(part.view(np.float32).reshape(8, -1), host[8:16])

    @pytest.mark.parametrize("way", ["rows", "columns", "grid"])
    def test_damage_in_a_shard_is_found(way):
        data = bytearray(st.to_bytes([jnp.asarray(values((64, 64)))]))
        data[-70] ^= 1
        with pytest.raises(st.CorruptFileError, match=r"\[0\]"):
            st.from_bytes(bytes(data), sharding=WAYS[way])
        st.from_bytes(bytes(data), sharding=WAYS[way], verify=False)

    def test_progress_reaches_the_end():
        calls = []
        data = st.to_bytes({"a": jnp.asarray(values((64, 64))), "b": np.ones(100)})
        st.from_bytes(data, sharding=WAYS["grid"], progress=lambda done, total: calls.append((done, total)))
        assert calls[-1][0] == calls[-1][1] == 64 * 64 * 4 + 800

    # --- errors ----------------------------------------------------------------------------------------------------

    def test_a_sharding_that_does_not_fit():
        data = st.to_bytes({"odd": jnp.ones((7, 3)), "scalar": jnp.float32(1)})
        with pytest.raises((st.StructureMismatchError, ValueError)) as raised:
            st.from_bytes(data, sharding=WAYS["rows"])
        assert "odd" in str(raised.value) or "scalar" in str(raised.value)

    def test_shardings_as_values():
        """A model may hold them; they come back over the devices that are there."""
        tree = {
            "sharding": WAYS["grid"],
            "spec": P("x", None),
            "struct": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=WAYS["rows"]),
        }
        assert_isomorphic(tree, st.from_bytes(st.to_bytes(tree)))
