"""Containers as bytes: what is written is what the format says and safetensors reads; the malformed is refused."""

import gzip
import io
import itertools
import json
import os
import struct
import threading
import tracemalloc
import zipfile
import zlib

import hypothesis
import hypothesis.strategies as hs
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.serialise.arrays._dtypes import tensor_source
from sharedtree.serialise.container import _writing as _container
from tests.processes import HANGS

from .containers import START, entry, forged, header_text, split

DTYPES = ["bool", "i1", "u2", "f2", "i4", "f4", "u8", "f8"]  # those that safetensors' NumPy reader has

shapes = hs.lists(hs.integers(0, 7), max_size=3).map(tuple)


@hs.composite
def arrays(draw):
    dtype, shape = np.dtype(draw(hs.sampled_from(DTYPES))), draw(shapes)
    size = int(np.prod(shape))
    array = (np.arange(size) % 2 if dtype == np.bool_ else np.arange(size)).astype(dtype).reshape(shape)
    if draw(hs.booleans()):
        array = np.repeat(array, 2, -1)[..., ::2] if shape else array
    return array.T if draw(hs.booleans()) else array


names = hs.text(hs.characters(exclude_categories=["Cs"]), max_size=8)


@hypothesis.given(hs.dictionaries(names, arrays(), max_size=12), hs.booleans())
def test_layout(tree, seekable):
    """What safetensors reads; 64-byte multiples first, all others aligned, no holes, and digests worked out by hand."""
    file = io.BytesIO() if seekable else Pipe()
    st.save(file, tree, metadata={"by": "me", "é": "\x00\n"})
    data = file.getvalue()
    text, body = split(data)
    assert (len(data) - len(body)) % 64 == 0
    header, read = json.loads(text), safetensors.numpy.load(data)
    metadata = header.pop("__metadata__")
    assert (metadata["by"], metadata["é"]) == ("me", "\x00\n")
    held = json.loads(metadata["sharedtree"])["arrays"]
    of = {each["tensor"]: array for each, array in zip(held, jax.tree.leaves(tree), strict=True)}
    assert read.keys() == header.keys() == of.keys()
    at, digests, aligned_run = 0, "", True
    for name, record in header.items():
        array = of[name]
        np.testing.assert_array_equal(read[name], array, strict=True)
        start, stop = record["data_offsets"]
        assert start == at
        assert stop - start == array.nbytes
        assert start % array.dtype.alignment == 0
        of_64 = array.nbytes > 0 and array.nbytes % 64 == 0
        assert aligned_run or not of_64
        aligned_run &= of_64
        assert body[start:stop] == np.ascontiguousarray(array).tobytes()
        digests += f"{zlib.crc32(body[start:stop]):08x}" if array.nbytes else ""
        at = stop
    assert at == len(body)
    assert metadata["sharedtree.digests"] == digests
    raw = bytearray(data[: len(data) - len(body)])
    where = 8 + len(START)
    assert raw[where : where + 8].decode() == metadata["sharedtree.header"]
    raw[where : where + 8] = b"00000000"
    assert metadata["sharedtree.header"] == f"{zlib.crc32(raw):08x}"


def test_order_within_a_class_is_kept_and_complex_is_aligned():
    """Within a class they come as JAX meets them."""
    tree = {
        "b": np.zeros(3, "i1"), "a": np.zeros(5, "c16"), "z": np.zeros(16, "f4"), "y": np.zeros(64, "i1"),
        "c": np.zeros(3, "f4"), "d": np.zeros(1, "f4"), "e": np.zeros(0, "f8"), "f": np.zeros(3, ml_dtypes.bfloat16),
    }  # fmt: skip
    header = json.loads(split(st.to_bytes(tree))[0])
    assert "".join(header) == "__metadata__" + "".join(f"['{name}']" for name in "yzaecdfb")


class Pipe:
    """Takes bytes and cannot go back; takes some of them at a time, and says so unless it is sloppy."""

    def __init__(self, at_once=10**9, is_sloppy=False):
        self.parts = []
        self.at_once = at_once
        self.is_sloppy = is_sloppy

    def write(self, buffer):
        self.parts.append(bytes(buffer[: self.at_once]))
        return None if self.is_sloppy else len(self.parts[-1])

    def getvalue(self):
        return b"".join(self.parts)


BIG = {
    "big": np.arange(5 * 2**20, dtype=np.uint16),
    "t": np.arange(3 * 2**20, dtype="f4").reshape(3, -1).T,
    "small": np.arange(3.0),
}


def save_to(file, tree=BIG):
    st.save(file, tree, metadata={"k": "v"})


def test_every_kind_of_file_gets_the_same_bytes(tmp_path):
    expected = st.to_bytes(BIG, metadata={"k": "v"})
    for pipe in (Pipe(at_once=100_001), Pipe(is_sloppy=True)):
        save_to(pipe)
        assert pipe.getvalue() == expected
    for where in (tmp_path / "path", str(tmp_path / "path")):
        save_to(where)
        assert (tmp_path / "path").read_bytes() == expected
    memory = io.BytesIO(b"before")
    memory.seek(6)
    save_to(memory)
    assert memory.getvalue() == b"before" + expected
    for mode, buffering in itertools.product(["wb", "w+b", "ab", "xb"], [0, -1]):
        path = tmp_path / f"{mode}{buffering}"
        with open(path, mode, buffering) as file:
            save_to(file)
            assert file.tell() == len(expected)
        assert path.read_bytes() == expected, mode
    with gzip.open(tmp_path / "x.gz", "wb", 0) as file:  # says that it can seek, and cannot seek back
        save_to(file)
    assert gzip.decompress((tmp_path / "x.gz").read_bytes()) == expected
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, archive.open("x", "w") as file:
        save_to(file)
    assert zipfile.ZipFile(tmp_path / "x.zip").read("x") == expected
    descriptor = os.open(tmp_path / "redirected", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # as a shell's `>>`
    with open(descriptor, "wb") as file:
        save_to(file)
    assert (tmp_path / "redirected").read_bytes() == expected


def test_an_error_while_writing_ends_the_second_thread():
    class Full(io.FileIO):
        def write(self, buffer):
            if len(buffer) > 2**20:
                raise OSError(28, "full")
            return super().write(buffer)

    before = set(threading.enumerate())  # of which those of other tests may end meanwhile
    with Full(os.devnull, "wb") as file, pytest.raises(OSError, match="full"):
        save_to(file)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("make", [Pipe, io.BytesIO])
def test_no_copy_of_the_arrays(make):
    """Strided and big-endian arrays are copied a few pieces at a time."""

    class Sink(make):
        def write(self, buffer):
            return len(buffer)

    tree = {"a": np.zeros((2048, 8192), "f4")[:, ::2], "b": np.zeros(2**23, ">f4"), "c": np.zeros(2**23, "f4")}
    with open(os.devnull, "wb") as null:
        for file in (Sink(), null):
            tracemalloc.start()
            st.save(file, tree)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 25 * 2**20, peak  # of 96 MiB


def test_what_cannot_be_written():
    bad = ({"sharedtree": "x"}, {"sharedtree.x": "x"}, {"x": "\udc00"}, {"\udc00": "x"}, {"x": 1}, {1: "x"})
    words = ["`sharedtree` is taken", "taken", "surrogate", "surrogate", "strings to strings", "strings to strings"]
    for metadata, match in zip(bad, words, strict=True):
        file = io.BytesIO()
        with pytest.raises(ValueError, match=match):
            st.save(file, [np.zeros(1)], metadata=metadata)
        assert file.getvalue() == b""


def test_a_long_manifest_is_the_last_tensor():
    text = "m" * (17 * 2**20)
    data = st.to_bytes({"w": np.arange(3.0), "text": text})
    header = json.loads(split(data)[0])
    assert header["__metadata__"]["sharedtree"] == "tensor"
    assert list(header)[-1] == "sharedtree.manifest"
    assert json.loads(safetensors.numpy.load(data)["sharedtree.manifest"].tobytes())["format"] == 1
    for options in ({}, {"mmap": True}):
        loaded = st.from_bytes(data, **options)
        assert loaded["text"] == text
        assert loaded["w"].tolist() == [0, 1, 2]
    at = data.rindex(b'"')
    with pytest.raises(st.errors.CorruptFileError, match=r"`sharedtree.manifest` .* is damaged"):
        st.from_bytes(data[: at - 5] + b"?" + data[at - 4 :])


def test_a_manifest_goes_into_a_tensor_when_the_header_would_be_too_long(monkeypatch):
    tree = [np.zeros(1), *["a" * 100] * 1000] + [np.zeros(1) for _ in range(50)]
    monkeypatch.setattr(_container, "MAX_HEADER_BYTES", 50_000)
    data = st.to_bytes(tree)
    assert "sharedtree.manifest" in json.loads(split(data)[0])
    assert st.from_bytes(data)[1] == "a" * 100
    monkeypatch.setattr(_container, "MAX_HEADER_BYTES", 3000)
    with pytest.raises(ValueError, match=r"(?s)header of 51 tensors .* jax.numpy.stack"):
        st.to_bytes(tree)


FOUR = {"a": entry("U8", [3], 0, 3), "b": entry("F32", [0, 2], 3, 3), "c": entry("U8", [], 3, 4)}
BYTES = b"\1\2\3\4"


MANIFEST = {
    "format": 1, "library": "x", "types": [], "nodes": [["array", 0], ["array", 1], ["array", 2], ["tuple", [0, 1, 2]]],
    "arrays": [
        {"tensor": name, "dtype": dtype, "shape": shape, "kind": "numpy"}
        for name, dtype, shape in (("a", "uint8", [3]), ("b", "float32", [0, 2]), ("c", "uint8", []))
    ],
    "root": 3,
}  # fmt: skip


def test_a_forged_file_without_fault_is_read():
    data = forged(header_text(FOUR, BYTES, {"x": "y"}, **{"": json.dumps(MANIFEST)}), BYTES)
    assert st.inspect(data).metadata == {"x": "y"}
    a, b, c = st.from_bytes(data)
    assert (a.tolist(), b.shape, c) == ([1, 2, 3], (0, 2), 4)


def four(tensors=FOUR, metadata=None, **own):
    return forged(header_text(tensors, BYTES, metadata, **own), BYTES)


def edited(old, new, data=BYTES):
    return forged(header_text(FOUR, BYTES).replace(old, new), data)


def changed(**fields):
    return FOUR | {"a": FOUR["a"] | fields}


NEST = 10**5
SPILLED = "sharedtree.manifest"

MALFORMED = {
    "empty": (b"", "not a sharedtree file.*is empty"),
    "short": (b"\1\0\0", "not a sharedtree file.*has 3 bytes"),
    "pickle": (b"\x80\x05\x95" + b"x" * 100, "not a sharedtree file.*not the length"),
    "zip": (b"PK\3\4" + b"\0" * 100, "not the length|not a sharedtree"),
    "too long": (struct.pack("<Q", 100_000_001) + b"{}", "not the length"),
    "longest": (struct.pack("<Q", 2**64 - 1) + b"{}", "not the length"),
    "beyond the file": (struct.pack("<Q", 3) + b"{}", "not the length"),
    "plain": (safetensors.numpy.save({"a": np.zeros(2)}), r"safetensors\.numpy\.load_file\(path\)"),
    "plain, with metadata": (safetensors.numpy.save({"a": np.zeros(2)}, {"x": "y"}), "no model"),
    "rewritten": (safetensors.numpy.save({"a": np.zeros(2)}, {"sharedtree": "{}"}), "another program rewrote"),
    "no JSON": (forged("{"), "not JSON"),
    "no header": (struct.pack("<Q", 0), "not JSON"),
    "no UTF-8": (forged(b'{"\xff": 1}'), "not UTF-8 at byte 2"),
    "a list": (forged("[]"), "not a JSON object"),
    "a constant": (forged('{"a": NaN}'), "NaN is not JSON"),
    "nested lists": (forged('{"a":' + "[" * NEST), "nested too deeply"),
    "nested, ours": (forged(START + b'00000000"},"a":' + b"[" * NEST), "nested too deeply"),
    "nested objects": (forged('{"a":' * NEST), "nested too deeply"),
    "a number of 10,000 digits": (forged('{"a":' + "1" * 10_000 + "}"), "not JSON"),
    "two metadata": (forged(header_text(FOUR, BYTES)[:-1] + ',"__metadata__":{"sharedtree":"{}"}}', BYTES), "twice"),
    "two tensors": (forged(header_text(FOUR, BYTES)[:-1] + ',"a":{}}', BYTES), "'a' is there twice"),
    "two dtypes": (edited("}}", ',"dtype":"U8"}}'), "'dtype' is there twice"),
    "metadata no object": (forged('{"__metadata__": 3}'), "text to text"),
    "metadata no text": (four(metadata={"x": 1}), "text to text"),
    "unknown key": (four(metadata={"sharedtree.x": ""}), "key `sharedtree.x`"),
    "no digests": (four(**{".digests": None}), "0 digits.*2 chunks"),
    "a digest less": (four(**{".digests": "0" * 8}), "8 digits.*2 chunks"),
    "a digest more": (four(**{".digests": "0" * 24}), "24 digits.*2 chunks"),
    "digests no digits": (four(**{".digests": "0" * 15 + "g"}), "digits"),
    "upper-case digits": (four(**{".digests": "0" * 15 + "A"}), "digits"),
    "unaligned": (forged(header_text(FOUR, BYTES) + " ", BYTES, align=1), "multiple of 64"),
    "dtype": (four(changed(dtype="F8_E8M0")), "dtype 'F8_E8M0'"),
    "dtype no text": (four(changed(dtype=["U8"])), r"dtype \['U8'\]"),
    "entry no object": (forged(header_text(FOUR, BYTES)[:-1] + ',"d":3}', BYTES), "`d` has not just"),
    "entry with more": (four(changed(more=1)), "`a` has not just"),
    "shape no list": (four(changed(shape=3)), "shape of the tensor `a`"),
    "shape negative": (four(changed(shape=[-1, -3])), "shape of the tensor `a`"),
    "shape float": (four(changed(shape=[3.0])), "shape of the tensor `a`"),
    "shape bool": (four(changed(shape=[3, True])), "shape of the tensor `a`"),
    "shape long": (four(changed(shape=[3] + [1] * 65)), "up to 65 sizes"),
    "size of 2**62": (four(changed(shape=[2**62])), "makes 4611686018427387904 bytes"),
    "size of 2**64": (four(changed(shape=[2**64])), "shape of the tensor `a`"),
    "product of 2**64": (four(changed(shape=[2**32, 2**32])), "absurd"),
    "product of 2**64 + 3": (four(changed(shape=[2**62, 4, 3])), "absurd"),
    "huge, of size 0": (forged(header_text({"a": entry("F32", [2**62, 0], 0, 0)}, b"")), "absurd"),
    "bytes of 2**63": (forged(header_text({"a": entry("F64", [2**60], 0, 8)}, b"12345678"), b"12345678"), "absurd"),
    "shape and size": (four(changed(shape=[4])), "0 to 3.*makes 4 bytes"),
    "dtype and size": (four(changed(dtype="F32")), "0 to 3.*makes 12 bytes"),
    "offsets three": (edited("[0,3]", "[0,3,3]"), "not two byte counts"),
    "offsets negative": (edited("[0,3]", "[-3,0]"), "not two byte counts"),
    "offsets huge": (edited("[0,3]", f"[{2**80},{2**80 + 3}]"), "not two byte counts"),
    "offsets backwards": (edited("[0,3]", "[3,0]"), "not two byte counts, the smaller first"),
    "overlap": (edited("[3,4]", "[2,3]"), "begins at 2, not at 3.*overlaps"),
    "hole": (edited("[3,4]", "[4,5]", BYTES + b"\5"), "begins at 4.*hole"),
    "hole at the start": (four({"c": entry("U8", [], 3, 4)}), "begins at 3, not at 0"),
    "out of order": (four(dict(reversed(FOUR.items()))), "begins at 3, not at 0"),
    "swapped": (four({"a": entry("U8", [2], 2, 4), "b": entry("U8", [2], 0, 2)}), "begins at 2, not at 0"),
    "dangling": (forged(header_text(FOUR, BYTES), BYTES[:-1]), "cut short.*4 bytes of data, and there are 3"),
    "trailing": (forged(header_text(FOUR, BYTES), BYTES + b"\0"), "1 bytes after the end"),
    "manifest missing": (four(**{"": "tensor"}), "last tensor"),
    "manifest twice": (four({SPILLED: entry("U8", [4], 0, 4)}), "last tensor"),
    "manifest of floats": (four({SPILLED: entry("F32", [], 0, 4)}, **{"": "tensor"}), "last tensor"),
    "manifest not UTF-8": (
        forged(header_text({SPILLED: entry("U8", [1], 0, 1)}, b"\xff", **{"": "tensor"}), b"\xff"), "UTF-8 at byte 0",
    ),
}  # fmt: skip


def test_malformed(tmp_path):
    path = tmp_path / "x.safetensors"
    for name, (data, match) in MALFORMED.items():
        with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError), match=f"(?s){match}") as raised:
            pytest.fail(f"{name}: {st.verify(data)}")
        text = str(raised.value)
        # The tests would stop at the header's digest if it were not right.
        assert "digest" in match or not data[8:].startswith(START) or "digest that was saved" not in text, name
        assert text.count("\n") <= 2
        assert raised.value.__cause__ is None
        path.write_bytes(data)
        with pytest.raises(type(raised.value)):
            st.verify(path)


def test_a_header_of_100_mb_is_the_longest():
    with pytest.raises(st.errors.FormatError, match="not the length"):
        st.verify(struct.pack("<Q", 100_000_001) + b"{}" + b" " * 100_000_000)


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {0, 1, 2}, range(100)], ids=str)
def test_a_system_that_allows_no_more_threads(monkeypatch, failing, tmp_path):
    """Nothing is lost, and nothing is hashed twice. Some of the attempts to start a thread fail."""
    tree = {"a": np.arange(2**21), "b": np.arange(2**21) + 1, "c": np.ones(2**20)}
    attempts, start = itertools.count(), threading.Thread.start

    def start_or_fail(thread):
        if next(attempts) in failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    before = set(threading.enumerate())  # of which those of other tests may end meanwhile
    st.save(tmp_path / "tree", tree)
    assert next(attempts) > 0
    attempts = itertools.count()
    loaded = st.load(tmp_path / "tree")
    assert next(attempts) > 0
    for name, array in tree.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert set(threading.enumerate()) <= before


def test_arrays_in_memory_do_not_wait_for_their_digests(tmp_path, monkeypatch):
    """All is written, and forced to the disk, before the first digest is there; copies are another matter."""
    go_on, done, sizes = threading.Event(), [], []
    hashed = _container._hash

    def slowly(*args):
        assert go_on.wait(HANGS)
        done.append(args[2])
        hashed(*args)

    def force(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        assert not done
        go_on.set()

    monkeypatch.setattr(_container, "_hash", slowly)
    # 8 chunks, of which 3 would wait; of memory that nobody can write to, for other memory is copied.
    array = np.frombuffer(np.arange(2**23, dtype=np.float32).tobytes(), np.float32)
    with open(tmp_path / "x", "w+b", buffering=0) as file:
        size = _container.write(file, [tensor_source("a", array), tensor_source("b", array)], "{}", force=force)
    assert sizes == [size]
    assert len(done) == 16
    digests = _header_metadata(tmp_path / "x")["sharedtree.digests"]
    chunks = [array[i : i + 2**20] for i in range(0, len(array), 2**20)]
    assert digests == 2 * "".join(f"{zlib.crc32(chunk):08x}" for chunk in chunks)
    # Nothing is behind when small arrays are written, and then nothing is forced twice.
    with open(tmp_path / "y", "w+b", buffering=0) as file:
        _container.write(file, [tensor_source("a", array[:100])], "{}", force=force)
    assert len(sizes) == 1


def _header_metadata(path):
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
