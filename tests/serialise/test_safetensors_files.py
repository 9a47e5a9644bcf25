"""Safetensors files of other programs: their tensors by name, and one clear error for each that is none."""

import functools
import io
import itertools
import json
import random
import struct
import zipfile
import zlib

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from tests.processes import program

from .containers import START, Counting, entry, is_of_jax

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "F16": np.float16, "F32": np.float32, "BF16": ml_dtypes.bfloat16, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def file_of(entries, data=b"", padding=0):
    """A file by hand, as `safetensors.torch` writes it but for alignment."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * padding
    return struct.pack("<Q", len(text)) + text + data


load = functools.partial(st.load, foreign=True)


@pytest.fixture
def arrays():
    return {
        "model.embed.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.float16),
        "scalar": np.array(7, np.int32),
        "big": np.arange(3 * 2**20, dtype=np.int32),
    }


@pytest.fixture
def path(tmp_path, arrays):
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    return tmp_path / "theirs.safetensors"


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert isinstance(found[name], jax.Array)
        same = np.asarray(found[name])
        assert (same.dtype, same.shape, same.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flat_dictionary_of_jax_arrays(path, arrays, mmap):
    data = path.read_bytes()
    with path.open("rb") as file:
        for where in (path, file, data, Counting(data)):
            assert_same(load(where, mmap=mmap), arrays)
    assert_same(load(path, mmap=mmap, verify=False), arrays)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name):
    """At any offset: not every program pads the header."""
    dtype, path = np.dtype(DTYPES[name]), tmp_path / "by hand"
    array = np.array([1, 0, 1, 1, 0, 1]).astype(dtype).reshape(2, 3)
    for padding, mmap in itertools.product([0, 1, 7], [False, True]):
        path.write_bytes(file_of({"x": entry(name, [2, 3], 0, array.nbytes)}, array.tobytes(), padding))
        if name == "F8_E8M0" and not is_of_jax(dtype):
            with pytest.raises(st.errors.FormatError, match="JAX"):
                load(path, mmap=mmap)
        else:
            assert_same(load(path, mmap=mmap), {"x": array})


def test_64_bits():
    for name, dtype in {"I64": np.int64, "U64": np.uint64, "F64": np.float64}.items():
        data = file_of({"x": entry(name, [1], 0, 8), "y": entry("U8", [1], 8, 9)}, np.ones(1, dtype).tobytes() + b"2")
        with pytest.raises(st.errors.StructureMismatchError, match="jax_enable_x64"):
            load(data)
        assert load(data, select=lambda key: key == "y")["y"].tolist() == [50]
        with jax.enable_x64(True):
            assert load(data)["x"].dtype == dtype


def test_packed_and_unknown_dtypes():
    entries = {
        "four": entry("F4", [3, 2], 0, 3),
        "six": entry("F6_E2M3", [4], 3, 6),
        "new": entry("Q9_X", [4], 6, 11),
        "plain": entry("U8", [2], 11, 13),
    }
    data = file_of(entries, bytes(11) + b"ab")
    with pytest.raises(st.errors.FormatError, match="neither NumPy nor JAX can load") as raised:
        load(data)
    assert "`four`: F4\n    `six`: F6_E2M3\n    `new`: Q9_X\n" in str(raised.value)
    found = load(data, select=lambda name: name == "plain")
    assert found["plain"].tolist() == [97, 98]
    assert (found["four"].shape, found["four"].dtype) == ((3, 2), ml_dtypes.float4_e2m1fn)
    assert found.keys() == {"four", "six", "plain"}


def test_any_order_and_no_tensors():
    data = file_of({"b": entry("U8", [1], 1, 2), "e": entry("U8", [0], 1, 1), "a": entry("U8", [1], 0, 1)}, b"\1\2")
    assert [(name, array.tolist()) for name, array in load(data).items()] == [("a", [1]), ("e", []), ("b", [2])]
    assert load(file_of({})) == {}
    assert load(file_of({"__metadata__": {"a": "b"}})) == {}
    assert load(file_of({"__metadata__": None, "a": {**entry("U8", [], 0, 1), "more": 1}}, b"\1"))["a"].shape == ()


def test_select_reads_what_is_wanted_only(path, arrays):
    file = Counting(path.read_bytes())
    found = load(file, select=lambda name: name == "mask")
    assert file.num_read < 2_000
    assert found.keys() == arrays.keys()
    assert found["mask"].tolist() == [True, False, True]
    for name in arrays.keys() - {"mask"}:
        assert isinstance(found[name], jax.ShapeDtypeStruct)
        assert (found[name].shape, found[name].dtype) == (arrays[name].shape, arrays[name].dtype)


def test_sharding_and_progress(path, arrays):
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    split = jax.NamedSharding(mesh, jax.P("x"))
    calls = []

    def place(name, struct):
        assert (struct.shape, struct.dtype) == (arrays[name].shape, arrays[name].dtype)
        return split if name == "big" and struct.shape[0] % jax.device_count() == 0 else jax.devices()[-1]

    found = load(path, sharding=place, progress=lambda done, total: calls.append((done, total)))
    assert_same(found, arrays)
    assert found["mask"].devices() == {jax.devices()[-1]}
    assert calls[-1] == (sum(array.nbytes for array in arrays.values()),) * 2


def test_files_of_ours_are_loaded_as_always(tmp_path):
    w = jnp.ones(2)
    path = tmp_path / "ours.safetensors"
    st.save(path, {"a": w, "b": w})
    with path.open("rb") as file:
        for where in (path, path.read_bytes(), file, io.BytesIO(path.read_bytes()), Counting(path.read_bytes())):
            found = load(where, like={"a": w, "b": w}, trusted="mine")
            assert found["a"] is found["b"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(st.errors.CorruptFileError):
        load(path)


def test_a_file_of_ours_that_another_program_wrote_again(tmp_path):
    """Its tree cannot be trusted any more, and its arrays are there."""
    path = tmp_path / "again.safetensors"
    tensors = safetensors.numpy.load(st.to_bytes({"w": jnp.arange(3.0)}))
    safetensors.numpy.save_file(tensors, path, metadata={"sharedtree": "{}"})
    with pytest.raises(st.errors.FormatError, match="another program rewrote the file"):
        st.load(path)
    assert_same(load(path), {"['w']": np.arange(3, dtype=np.float32)})


def test_options_that_need_a_tree(path):
    for name, value in {"like": {}, "trusted": "a", "renames": {"a:B": "c:D"}, "select": "b", "strict": False}.items():
        with pytest.raises(ValueError, match=f"`{name}` needs a tree, but `.*` has none"):
            load(path, **{name: value})


U8 = entry("U8", [4], 0, 4)
MALFORMED = {
    "twice": (b'{"a":%s,"a":%s}' % ((json.dumps(U8).encode(),) * 2), "the key 'a' is there twice"),
    "overlap": ({"a": U8, "b": entry("U8", [2], 2, 4)}, "overlaps another one"),
    "hole": ({"a": entry("U8", [3], 1, 4)}, "there is a hole before it"),
    "too small": ({"a": entry("F32", [4], 0, 4)}, "spans bytes 0 to 4, and its shape makes 16 bytes"),
    "half a byte": ({"a": entry("F4", [7], 0, 4)}, "28 bits"),
    "absurd": ({"a": entry("F32", [2**62, 2**62], 0, 4)}, "is absurd"),
    "absurd and empty": ({"a": entry("F32", [2**62, 2**62, 0], 0, 0), "b": U8}, "is absurd"),
    "past 64 bits": ({"a": entry("U8", [2**63], 0, 2**63)}, "list of up to 64 sizes"),
    "negative": ({"a": entry("U8", [-4], 0, 4)}, "list of up to 64 sizes"),
    "axes": ({"a": entry("U8", [1] * 65, 0, 4)}, "list of up to 64 sizes"),
    "backwards": ({"a": entry("U8", [4], 4, 0)}, "not two byte counts"),
    "three": ({"a": {**U8, "data_offsets": [0, 2, 4]}}, "not two byte counts"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, "not a dtype, a shape and offsets"),
    "no entry": ({"a": [1]}, "not a dtype, a shape and offsets"),
    "dtype": ({"a": {**U8, "dtype": 8}}, "has the dtype 8"),
    "long dtype": ({"a": {**U8, "dtype": ["x" * 10**5]}}, "has the dtype"),
    "long name": ({"x" * 10**5: [1]}, "not a dtype, a shape and offsets"),
    "metadata": ({"__metadata__": {"a": 1}, "a": U8}, "does not map text to text"),
    "list of metadata": ({"__metadata__": [], "a": U8}, "does not map text to text"),
    "not UTF-8": (b'{"\xff":1}', "is not UTF-8"),
    "surrogate": (b'{"\\ud800":1}', "surrogate"),
    "not JSON": (b"{nothing}", "is not JSON"),
    "deep": (b'{"a":' + b"[" * 10**6, "nested too deeply"),
    "behind it": (b"{} {}", "is not JSON"),
}


@pytest.mark.parametrize(("text", "words"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_one_clear_error(text, words):
    with pytest.raises(st.errors.FormatError, match="is not a valid safetensors file") as raised:
        pytest.fail(f"{load(file_of(text, b'abcd'))}")
    assert words in str(raised.value)
    assert len(str(raised.value)) < 1_000


SPACE = ["", " ", "\n", "\t", "\r\n", " \n\t ", " " * 100]


@pytest.mark.parametrize("before", SPACE)
@pytest.mark.parametrize("after", SPACE)
def test_white_space_around_a_header(before, after, tmp_path, command):
    """Whatever the library `safetensors` opens is opened, by all that open files, or they say how it is."""
    path = tmp_path / "theirs"
    path.write_bytes(file_of((before + json.dumps({"a": U8}) + after).encode(), b"\1\2\3\4"))
    assert bytes(dict(safetensors.deserialize(path.read_bytes()))["a"]["data"]) == b"\1\2\3\4"
    for where in (path, path.read_bytes(), Counting(path.read_bytes())):
        assert load(where)["a"].tolist() == [1, 2, 3, 4]
    status, out, _ = command("show", path)
    assert (status, "another program wrote" in out, "a     U8     [4]    4" in out) == (0, True, True)
    for read in (st.load, st.inspect, st.audit, st.verify):
        with pytest.raises(st.errors.FormatError, match=r"has arrays and no model(.|\n)*load\(path, foreign=True\)"):
            read(path)


@pytest.mark.parametrize("space", ["\v", "\f", "\0", "\ufeff", "\u00a0"])
def test_what_is_no_white_space_in_json(space):
    for text in (space + json.dumps({"a": U8}), json.dumps({"a": U8}) + space):
        data = file_of(text.encode(), b"abcd")
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)
        with pytest.raises(st.errors.FormatError):
            load(data)


def test_nobody_is_told_to_do_what_has_just_failed():
    """A header that begins as one of ours, with a digest that fits, and has no manifest: `foreign=True` is no help."""
    start = '{"__metadata__":{"sharedtree.header":"00000000","sharedtree.digests":"00000000"},'
    text = (start + json.dumps({"a": U8})[1:]).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data = bytearray(file_of(text, b"abcd"))
    crc = zlib.crc32(data[: 8 + len(text)])
    at = data.index(b"00000000")
    data[at : at + 8] = b"%08x" % crc
    for options in ({}, {"foreign": True}):
        with pytest.raises(st.errors.FormatError, match="has no manifest") as raised:
            st.load(bytes(data), **options)
        assert "foreign" not in str(raised.value)


def test_an_archive_is_called_one(tmp_path):
    """NumPy's, PyTorch's and Keras's files are archives. An empty one begins otherwise."""
    np.savez(tmp_path / "arrays", a=np.ones(2))
    with zipfile.ZipFile(tmp_path / "empty", "w"):
        pass
    for path in (tmp_path / "arrays.npz", tmp_path / "empty"):
        for read in (st.load, load, st.inspect, st.audit, st.verify):
            with pytest.raises(st.errors.FormatError, match="it is a zip archive"):
                read(path)


def test_what_was_cut_short_or_appended_to(path):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    with pytest.raises(st.errors.CorruptFileError, match=f"has {end - 4:,} bytes, and its header .* end at {end:,}"):
        load(data[: end - 4])
    for length in (len(data) - 1, 500, 60):
        with pytest.raises(st.errors.CorruptFileError, match="was cut short"):
            load(data[:length])
    with pytest.raises(st.errors.CorruptFileError, match="1 bytes after the end of its data"):
        load(data + b"x")
    for other in (b"", b"text", b"some text that is none of these"):
        with pytest.raises(st.errors.FormatError, match="not a sharedtree file, nor any other safetensors file"):
            load(other)


def test_nothing_is_allocated_by_the_files_word(python, tmp_path):
    size = 2**40
    path = tmp_path / "forged.safetensors"
    path.write_bytes(file_of({"a": entry("F32", [size], 0, 4 * size)}, b"abcd"))
    # In a process of its own, for what is traced is what all threads allocate.
    code = program("cut_short")
    python(tmp_path, "-c", code, str(path))


def test_booleans_are_0_or_1():
    for mmap in (False, True):
        with pytest.raises(st.errors.FormatError, match="booleans has bytes other than 0 and 1"):
            load(file_of({"a": entry("BOOL", [2], 0, 2)}, b"\1\2"), mmap=mmap)
        loaded = load(file_of({"a": entry("BOOL", [3], 0, 3)}, b"\1\2\0"), mmap=mmap, verify=False)["a"]
        assert np.asarray(loaded).view(np.uint8).tolist() == [1, 1, 0]


def test_what_a_file_says_is_printable():
    name = "\x1b[2J\u202e"
    for entries in ({name: {**U8, "shape": [5]}}, {name: {**U8, "dtype": name}}, {name: 1}):
        with pytest.raises(st.errors.FormatError) as raised:
            load(file_of(entries, b"abcd"))
        assert all(char.isprintable() or char == "\n" for char in str(raised.value))


@hypothesis.given(hypothesis.strategies.integers(0, 2**32))
def test_damaged_headers_agree_with_safetensors(seed):
    """What it refuses is refused here, too, and what is read is what it reads."""
    rng = random.Random(seed)
    arrays = {name: np.arange(size, dtype=np.uint8) for name, size in (("a", 4), ("b", 0), ("c", 3))}
    data = bytearray(safetensors.numpy.save(arrays, metadata={"k": "v"}))
    length = int.from_bytes(data[:8], "little")
    for _ in range(rng.randint(1, 2)):
        data[rng.randrange(9, 8 + length)] = rng.choice(b'0123456789",:[]{} abdegnotpyU8I')
    data = bytes(data)
    try:
        found = load(data)
    except st.SharedTreeError:
        return
    expected = safetensors.deserialize(data)
    assert found.keys() == dict(expected).keys()
    for name, tensor in expected:
        assert np.asarray(found[name]).tobytes() == bytes(tensor["data"])
        assert list(found[name].shape) == tensor["shape"]


def test_a_damaged_file_of_ours_is_not_that_of_another_program():
    """Each flipped bit of the fixed beginning is an error: as a foreign file it would be loaded without its digests."""
    data = st.to_bytes({"w": np.arange(16, dtype=np.float32)})
    for bit in range(8 * 8, 8 * (8 + len(START) + 8)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
            pytest.fail(repr(load(bytes(damaged))))
    damaged = data.replace(b"sharedtree.header", b"sharedtree.heeder")
    with pytest.raises(st.errors.FormatError, match="not a valid sharedtree file: its metadata has digests"):
        load(damaged)
