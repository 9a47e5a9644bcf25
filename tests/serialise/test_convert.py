"""Files of Equinox and flax to trees with ties; both libraries write what is read."""

import io
import os
import pickle
import struct
import sys
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st

from .isomorphic import assert_isomorphic


class Net(eqx.Module):
    embed: eqx.nn.Linear
    head: eqx.nn.Linear
    norm: Any
    factor: Any
    table: np.ndarray
    name: str

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.embed, self.head = eqx.nn.Linear(3, 3, key=one), eqx.nn.Linear(3, 3, key=two)
        self.norm = jnp.arange(4.0, dtype=jnp.bfloat16)
        self.factor = 1.5
        self.table = np.arange(6, dtype=np.float32).reshape(2, 3)
        self.name = "net"


def tied(key: int = 0) -> Net:
    return st.tie(Net(jax.random.key(key)), lambda net: (net.embed.weight, net.head.weight))


def leaves_file(tree: Any) -> bytes:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    return file.getvalue()


def assert_same(one: Any, two: Any) -> None:
    """Each leaf by itself: one of the two may lack the ties."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert_isomorphic(a, b)


def test_what_equinox_wrote():
    net, other = tied(), tied(1)
    loaded = st.convert(leaves_file(net), like=other).tree
    assert_same(loaded, eqx.tree_deserialise_leaves(io.BytesIO(leaves_file(net)), other))
    assert loaded.embed.weight is loaded.head.weight
    template = st.retie(eqx.filter_eval_shape(Net, jax.random.key(0)), like=net)
    shaped = st.convert(leaves_file(net), like=template).tree
    assert shaped.embed.weight is shaped.head.weight
    np.testing.assert_array_equal(shaped.norm, net.norm)
    model = [net.embed, {"again": net.embed}]
    loaded = st.convert(leaves_file(model), like=model).tree
    assert loaded[0] is loaded[1]["again"]


def test_what_was_read_is_not_the_memory_of_the_source():
    """Whatever its alignment, by which JAX may take memory over."""
    tree = {"jax": jnp.arange(64.0), "numpy": np.arange(64.0)}
    data = leaves_file(tree)
    for offset in (0, 8, 16, 64):
        memory = np.zeros(offset + len(data), np.uint8)
        source = memory[offset:]
        source[:] = np.frombuffer(data, np.uint8)
        loaded = st.convert(memoryview(source), like=tree).tree
        memory[:] = 0
        assert_same(loaded, tree)
        assert loaded["numpy"].flags.writeable


def test_numbers_of_every_kind():
    tree = [True, 3, 2.5, 1j, np.float32(0.5), np.int8(-3), jnp.zeros((0, 2)), np.zeros(3, ">f4"), "text", None, len]
    tree += [jnp.ones(2, jnp.float8_e4m3fn), jnp.array(2, jnp.bfloat16), np.arange(6.0).reshape(2, 3).T]
    like = [*tree[:11], *[each * 0 for each in tree[11:]]]
    assert_same(st.convert(leaves_file(tree), like=like).tree, tree)


def test_what_is_written(tmp_path):
    net, plain = tied(), tmp_path / "net.safetensors"
    st.convert(leaves_file(net), plain, like=net)
    again = st.load(plain, trusted=Net)
    assert_same(again, net)
    assert st.same_sharing(again, net)
    with open(plain, "rb") as file:
        assert_same(st.convert(file, like=net).tree, net)
    for ending in ("eqx", "msgpack"):
        with pytest.raises(ValueError, match="only read"):
            st.convert(plain, tmp_path / f"net.{ending}", trusted=Net)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_ties_by_equality():
    net = tied()
    data, untied = leaves_file(net), st.untie(net)
    apart = st.convert(data, like=untied)
    assert apart.tied == ()
    assert apart.tree.embed.weight is not apart.tree.head.weight
    found = st.convert(data, like=untied, ties="equal")
    assert found.tied == ((".embed.weight", ".head.weight"),)
    assert found.tree.embed.weight is found.tree.head.weight
    assert "`.embed.weight` is `.head.weight`" in str(found)
    # One value throughout is no tie, nor are equal numbers of other dtypes, shapes and libraries.
    tree = {"a": jnp.zeros(3), "b": jnp.zeros(3), "c": jnp.arange(3.0), "d": jnp.arange(3), "e": jnp.ones(())}
    tree |= {"f": jnp.ones(()), "g": jnp.arange(3.0)[None], "h": np.arange(3.0, dtype=np.float32)}
    assert st.convert(leaves_file(tree), like=tree, ties="equal").tied == ()


def test_all_that_does_not_fit_is_listed():
    tree = [jnp.zeros(3), jnp.zeros((2, 2)), 1.5, jnp.zeros(3, jnp.int32)]
    like = [jnp.zeros(4), jnp.zeros((2, 2)), 2, jnp.zeros(3), jnp.zeros(7)]
    with pytest.raises(st.errors.StructureMismatchError) as caught:
        st.convert(leaves_file(tree), like=like)
    assert caught.value.paths == ("[0]", "[2]", "[3]", "[4]")
    for data, fitting, words in ((leaves_file(tree), tree[:2], "after the last leaf"), (b"", tree, "nothing")):
        with pytest.raises(st.errors.StructureMismatchError, match=words):
            st.convert(data, like=fitting)
    assert st.convert(b"", like=["text", None]).tree == ["text", None]
    net = st.untie(tied())
    changed = eqx.tree_at(lambda net: net.head.weight, net, net.head.weight + 1)  # another copy of what is tied
    with pytest.raises(st.errors.StructureMismatchError, match=r"\.embed\.weight") as caught:
        st.convert(leaves_file(changed), like=tied())
    assert caught.value.paths == (".head.weight",)
    assert_same(st.convert(leaves_file(changed), like=net).tree, changed)


def test_keys_have_no_form():
    with pytest.raises(st.errors.StructureMismatchError, match="no form"):
        st.convert(leaves_file({"w": jnp.ones(2)}), like={"key": jax.random.key(0), "w": jnp.ones(2)})


def test_cut_short():
    data, net = leaves_file(tied()), tied()
    for length in (8, 11, 60, 127, 128, 129, len(data) // 2, len(data) - 1):
        with pytest.raises((st.errors.CorruptFileError, st.errors.StructureMismatchError)):
            st.convert(data[:length], like=net)
    for length in (1, 5):  # what begins with less than the magic is no file of Equinox's at all
        with pytest.raises(st.SharedTreeError):
            st.convert(data[:length])


def record(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    length = struct.pack("<H", len(header)) if version == b"\x01\x00" else struct.pack("<I", len(header))
    return b"\x93NUMPY" + version + length + header + data


FORGED = {
    "pickled": record(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps([len])),
    "pickled within": record(b"{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", bytes(99)),
    "no dictionary": record(b"1 + 1"),
    "what Python warns of": record(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), '\\\x1b': 1}"),
    "what Python quotes": record(b"'\x1b[2J"),
    "a call": record(b"__import__('os').system('true')"),
    "unknown dtype": record(b"{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,)}"),
    "negative size": record(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
    "no size": record(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1.5,)}"),
    "more keys": record(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}"),
    "deep": record(b"(" * 5_000),
    "not ascii": record(b"\xff\xfe{}"),
    "version": record(b"{}", version=b"\x09\x00"),
    "subarray": record(b"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': ()}", bytes(8)),
    "no bytes": record(b"{'descr': '|S0', 'fortran_order': False, 'shape': ()}"),
    "nothing at all": record(b"{'descr': '|V0', 'fortran_order': False, 'shape': (1,)}"),
    "of Python 2": record(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1L,)}", bytes(4)),
    "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + bytes(99),
}


def test_forged_files_of_equinox(recwarn):
    for name, forged in FORGED.items():
        for like in (jnp.ones(1), 1.5, jax.ShapeDtypeStruct((1,), np.float32)):
            with pytest.raises(st.errors.FormatError, match="tree_serialise_leaves") as raised:
                pytest.fail(f"{name}: {st.convert(forged, like=[like])}")
            assert "\x1b" not in "".join(traceback.format_exception(raised.value, chain=True)), name
    assert not recwarn.list


def test_no_memory_is_taken_for_what_is_not_there():
    for shape in (b"(2**40,)", b"(1099511627776,)", b"(1099511627776, 1099511627776)"):
        forged = record(b"{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + b"}")
        with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
            st.convert(forged, like=[jnp.ones(1)])


BYTES = [jnp.int8, jnp.uint8, jnp.bool]
NAMELESS = {"bfloat16": [jnp.float16, jnp.int16], "float8_e4m3fn": BYTES, "int4": BYTES}


def test_what_numpy_has_no_name_for_is_nothing_else():
    for written, others in NAMELESS.items():
        data = leaves_file([jnp.ones(2, written)])
        for dtype in others:
            with pytest.raises(st.errors.StructureMismatchError):
                st.convert(data, like=[jax.ShapeDtypeStruct((2,), dtype)])
        assert_same(st.convert(data, like=[jnp.zeros(2, written)]).tree, [jnp.ones(2, written)])
    bytes_of_bfloat16 = st.convert(leaves_file([jnp.ones(2, "bfloat16")]), like=[np.zeros(2, "V2")]).tree[0]
    assert bytes_of_bfloat16.tobytes() == np.ones(2, "bfloat16").tobytes()
    data = leaves_file([np.zeros(2, "V4")])
    for dtype in (np.float32, np.int32, [("a", np.float32)]):
        with pytest.raises(st.errors.StructureMismatchError):
            st.convert(data, like=[np.zeros(2, dtype)])
    assert st.convert(data, like=[np.zeros(2, "V4")]).tree[0].dtype == "V4"


def test_bits_that_no_value_has():
    data = record(b"{'descr': '|V1', 'fortran_order': False, 'shape': (2,)}", b"\xf1\x82")
    assert st.convert(data, like=[np.zeros(2, jnp.int4)]).tree[0].tobytes() == b"\x01\x02"
    data = record(b"{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}", b"\x01\x02")
    for like in (jnp.zeros(2, bool), np.zeros(2, bool)):
        with pytest.raises(st.errors.FormatError, match=r"\['a'\].*booleans"):
            st.convert(data, like={"a": like})
    with pytest.raises(st.errors.FormatError, match="booleans"):
        st.convert(record(b"{'descr': '|b1', 'fortran_order': False, 'shape': ()}", b"\x02"), like=[True])


def test_64_bits_are_not_shortened():
    dtypes = (np.int64, np.uint64, np.float64, np.complex128)
    tree = {str(i): np.ones(1, dtype) for i, dtype in enumerate(dtypes)}
    like = {name: jax.ShapeDtypeStruct((1,), array.dtype) for name, array in tree.items()}
    data = [leaves_file(tree)]
    if has_flax():
        data.append(pytest.importorskip("flax.serialization").to_bytes(tree))
    for each in data:
        with pytest.raises(st.errors.StructureMismatchError, match="jax_enable_x64") as caught:
            st.convert(each, like=like)
        assert caught.value.paths == ("['0']", "['1']", "['2']", "['3']")
        assert_same(st.convert(each, like=tree).tree, tree)
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            loaded = st.convert(each, like=like).tree
            assert [array.dtype for array in loaded.values()] == list(dtypes)


def test_wrong_arguments(tmp_path):
    data, plain = leaves_file([jnp.ones(2)]), safetensors.numpy.save({"a": np.ones(2)}, {"format": "pt"})
    for source, arguments, options, error, words in (
        (data, (), {}, ValueError, "like="),
        (b"", (), {}, st.errors.CorruptFileError, "empty"),
        (data, (tmp_path / "model.eqx",), {"like": [jnp.ones(2)]}, ValueError, "tree_serialise_leaves"),
        (data, (), {"like": [jnp.ones(2)], "ties": "guess"}, ValueError, "ties"),
        (tmp_path / "nothing.eqx", (), {"like": [jnp.ones(2)]}, FileNotFoundError, "nothing.eqx"),
        (plain, (), {}, st.errors.FormatError, "not one that sharedtree wrote"),
    ):
        with pytest.raises(error, match=words):
            st.convert(source, *arguments, **options)
    assert os.listdir(tmp_path) == []


def has_flax() -> bool:
    try:
        pytest.importorskip("flax", minversion="0.12.1")
    except pytest.skip.Exception:
        return False
    return True


@pytest.fixture
def flax() -> Any:
    return pytest.importorskip("flax.serialization") if has_flax() else pytest.skip("needs Flax 0.12.1")


def parameters() -> dict[str, Any]:
    embed = jnp.arange(6.0).reshape(2, 3)
    return {
        "params": {"embed": embed, "head": {"kernel": embed, "bias": jnp.zeros(3)}},
        "statistics": {"mean": jnp.ones(3, jnp.bfloat16), "count": jnp.array(3, jnp.int32)},
        "layers": [jnp.ones(1), (np.arange(3), 2.5)],
        "step": 7, "name": "net", "raw": b"bytes", "nothing": None, "flag": True, "complex": 1 + 2j,
    }  # fmt: skip


def test_what_flax_wrote(flax):
    tree = parameters()
    data = flax.to_bytes(tree)
    loaded = st.convert(data, like=tree).tree
    assert loaded["params"]["embed"] is loaded["params"]["head"]["kernel"]
    assert_same(loaded, tree)
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree)
    assert_same(st.convert(data, like=template).tree, tree)
    plain = st.convert(data).tree
    assert plain.keys() == tree.keys()
    assert type(plain["params"]["embed"]) is np.ndarray
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(plain) if isinstance(leaf, np.ndarray))
    np.testing.assert_array_equal(plain["statistics"]["mean"], tree["statistics"]["mean"])
    found = st.convert(data, ties="equal")
    assert found.tied == (("['params']['embed']", "['params']['head']['kernel']"),)
    assert found.tree["params"]["embed"] is found.tree["params"]["head"]["kernel"]


def test_the_state_of_a_training(flax):
    optax = pytest.importorskip("optax")
    train_state = pytest.importorskip("flax.training.train_state")
    params = parameters()["params"]

    def make(scale):
        scaled = st.tree.map(lambda x: x * scale, params)
        return train_state.TrainState.create(apply_fn=len, params=scaled, tx=optax.adam(1e-3))

    state = make(2.0).apply_gradients(grads=params)
    loaded = st.convert(flax.to_bytes(state), like=st.untie(make(1.0).replace(tx=state.tx))).tree
    assert_same(jax.tree.leaves(loaded.params), jax.tree.leaves(state.params))
    assert_same(jax.tree.leaves(loaded.opt_state), jax.tree.leaves(state.opt_state))
    assert int(loaded.step) == 1


def test_arrays_in_pieces(flax, monkeypatch):
    tree = {"w": jnp.arange(1000.0).reshape(10, 100)}
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", 256)  # as with more than 1 GiB
    data = flax.to_bytes(tree)
    assert b"__msgpack_chunked_array__" in data
    assert_same(st.convert(data, like=tree).tree, tree)


def test_what_is_told_of_long_names_grows_with_the_file(flax):
    def told(depth):
        held, like = {}, {}
        for _ in range(depth):
            held, like = {"k" * 100: held, "x": 1}, {"k" * 100: like, "x": "a"}
        with pytest.raises(st.errors.StructureMismatchError) as caught:
            st.convert(flax.to_bytes(held), like=like)
        assert len(caught.value.paths) == depth
        return len(str(caught.value))

    assert told(80) <= 5 * told(20)


def test_all_that_does_not_fit_flax_is_listed(flax):
    like, tree = parameters(), {**parameters(), "more": 1, "step": "seven"}
    tree["params"] = {"embed": jnp.ones((2, 4)), "head": {"kernel": jnp.ones((2, 3))}}
    with pytest.raises(st.errors.StructureMismatchError) as caught:
        st.convert(flax.to_bytes(tree), like=like)
    assert caught.value.paths == ("['more']", "['params']['embed']", "['params']['head']['bias']", "['step']")
    tree = parameters()
    tree["params"]["head"]["kernel"] = tree["params"]["embed"] + 1
    with pytest.raises(st.errors.StructureMismatchError, match="other values"):
        st.convert(flax.to_bytes(tree), like=like)


def deep() -> Any:
    """Too deep for functions that recurse in Python, whatever the limit of the process is."""
    tree: Any = jnp.ones(1)
    for _ in range(sys.getrecursionlimit()):
        tree = {"a": tree}
    return tree


def test_what_flax_cannot_take_apart(flax):
    for tree in ({1: jnp.ones(1), "1": jnp.ones(1)}, deep()):
        with pytest.raises(st.errors.StructureMismatchError, match="flax cannot"):
            st.convert(flax.to_bytes({"1": jnp.ones(1)}), like=tree)


def test_memory_for_long_names(python, flax, tmp_path):
    """A path for each item would take a hundred times as much as the file, and for a larger one more."""
    code = """
        import tracemalloc
        from flax.serialization import to_bytes
        import sharedtree as st

        n = 400
        tree = {"k" * (100 * n): {str(i): 0 for i in range(n)}}
        data = to_bytes(tree)
        for is_measured in (False, True):
            for like in (None, tree):
                tracemalloc.start()
                st.convert(data, like=like)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert not is_measured or peak < 20 * len(data), peak
    """
    python(tmp_path, "-c", code)


def test_forged_values_of_flax(flax):
    msgpack = pytest.importorskip("msgpack")
    for forged in ({1: 2}, {"a": {b"b": 1}}, {"a": [msgpack.ExtType(99, b"")]}):
        with pytest.raises(st.errors.FormatError, match="flax does not write"):
            st.convert(msgpack.packb(forged), ties="equal")
    bools = msgpack.ExtType(1, msgpack.packb(((2,), "bool", b"\x01\x02")))
    with pytest.raises(st.errors.FormatError, match="booleans"):
        st.convert(msgpack.packb({"a": bools}), like={"a": jnp.zeros(2, bool)})
    for array in (
        *[((2**40,), "float32", b"1234"), ((1,), "object", bytes(8)), ((1,), "O", bytes(8))],
        *[((1,), "nonsense", b""), ("a", "float32", b""), ((2,), "float32", b"1")],
    ):
        with pytest.raises(st.SharedTreeError):
            st.convert(msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(array))}))
    pieces = {"__msgpack_chunked_array__": True, "shape": {"0": 2**40}, "chunks": {}}
    with pytest.raises(st.errors.FormatError):
        st.convert(msgpack.packb({"w": pieces}))
    for state in ([np.zeros(2)], np.zeros(2)):
        loaded = st.convert(flax.msgpack_serialize(state)).tree
        assert jax.tree.leaves(loaded)[0].flags.writeable


def test_damaged_files_of_flax(flax):
    data = flax.to_bytes(parameters())
    for length in range(1, len(data), 17):
        with pytest.raises((st.errors.CorruptFileError, st.errors.FormatError)):
            st.convert(data[:length])
    with pytest.raises(st.errors.CorruptFileError):
        st.convert(data[:-1])
    with pytest.raises(st.errors.FormatError):
        st.convert(data + b"x")
    for forged in (pickle.dumps({"a": [1]}), b"\xc1", b"\xc7\x01\x63a", bytes([0x91]) * 2_000, b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(st.SharedTreeError):
            st.convert(forged)
