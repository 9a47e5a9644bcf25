"""Where a model can be saved to and loaded from; metadata, progress, and what is found if a file was changed."""

import gzip
import io
import json
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import hypothesis
import hypothesis.strategies as hs
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.container._reading import open_container

from .containers import split

CHUNK_BYTES = 4 * 2**20  # as the format has it

MIXED = {
    "big": np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 12345, dtype=np.uint8),
    "none": np.zeros((0, 3)),
    "medium": np.arange(50_000, dtype="f4"),
    "even": np.arange(1024, dtype="i8").reshape(32, 32),
} | {f"t{i}": np.full(8, i, "f4") for i in range(100)}


GRID = np.arange(50 * 60 * 700, dtype=np.int32).reshape(50, 60, 700)
WHOLE = st.to_bytes(GRID)


def same(loaded):
    return loaded.keys() == MIXED.keys() and all(
        loaded[name].dtype == array.dtype and loaded[name].tobytes() == array.tobytes() for name, array in MIXED.items()
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("reading") / "mixed.safetensors"
    st.save(path, MIXED)
    return path


class Seekable:
    """The least that a file object may be."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)
        self.read, self.seek, self.tell = self.inner.read, self.inner.seek, self.inner.tell

    def seekable(self):
        return True


class Short(Seekable):
    """Reads less than it is asked for."""

    def __init__(self, data):
        super().__init__(data)
        self.readinto = lambda buffer: self.inner.readinto(memoryview(buffer)[:99_999])


class OnlyRead:
    def __init__(self, data):
        self.read = io.BytesIO(data).read


SOURCES = {
    "path": lambda path: path,
    "text": str,
    "buffered file": partial(open, mode="rb"),
    "raw file": partial(open, mode="rb", buffering=0),
    "file for both": partial(open, mode="r+b"),
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "memoryview": lambda path: memoryview(np.frombuffer(path.read_bytes(), "u1")),
    "memory": lambda path: io.BytesIO(path.read_bytes()),
    "no readinto": lambda path: Seekable(path.read_bytes()),
    "little at a time": lambda path: Short(path.read_bytes()),
    "read alone": lambda path: OnlyRead(path.read_bytes()),
    "compressed": lambda path: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(path.read_bytes(), 0))),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_every_kind_of_source(mixed, make):
    for options in ({}, {"verify": False}, {"mmap": True}, {"select": "['medium']"}):
        where = make(mixed)
        loaded = st.load(where, **options)
        if "select" in options:
            np.testing.assert_array_equal(loaded, MIXED["medium"])
        else:
            assert same(loaded), options
        if hasattr(where, "close"):
            assert not where.closed  # it was the caller's
            where.close()


def test_pipes_and_members_of_archives(mixed, tmp_path):
    def save(descriptor):
        with os.fdopen(descriptor, "wb") as file:
            st.save(file, MIXED)

    read, write = os.pipe()
    with ThreadPoolExecutor() as pool, os.fdopen(read, "rb") as file:
        saving = pool.submit(save, write)  # while it is loaded
        assert same(st.load(file))
        saving.result()
        os.mkfifo(tmp_path / "pipe")
        writing = pool.submit((tmp_path / "pipe").write_bytes, mixed.read_bytes())
        assert same(st.load(tmp_path / "pipe"))
        writing.result()
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(mixed, "member")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive, archive.open("member") as file:
        assert same(st.load(file))


def test_files_are_read_from_where_they_are_positioned(mixed, tmp_path):
    other = tmp_path / "with_prefix"
    other.write_bytes(b"prefix!" + mixed.read_bytes())
    for buffering in (0, -1):
        for options in ({}, {"mmap": True}):
            with open(other, "rb", buffering) as file:
                file.seek(7)
                assert same(st.load(file, **options))


slices = hs.builds(
    slice, hs.none() | hs.integers(0, 60), hs.none() | hs.integers(0, 700), hs.none() | hs.integers(1, 50)
)


@hypothesis.given(hs.lists(slices, max_size=3), hs.booleans())
@hypothesis.example([slice(None, None, 2)], True)
@hypothesis.example([slice(None), slice(3, 5)], True)
@hypothesis.example([slice(None), slice(None, None, 3), slice(None, None, 37)], False)
def test_a_selection_with_steps_is_what_numpy_says(selection, verify):
    """Of an array in several chunks; a process reads so what its own devices need."""
    with open_container(WHOLE) as container:
        part = container.read_selection("value", selection, verify=verify)
        for wrong in ([slice(None)] * 4, [slice(None, None, -1)]):
            with pytest.raises(IndexError, match="does not fit"):
                container.read_selection("value", wrong)
    expected = GRID[tuple(selection)]
    np.testing.assert_array_equal(part.view(GRID.dtype).reshape(expected.shape), expected)


def test_compressed_streams_are_read_onwards(mixed):
    """One pass to find the size, one to read: going back in such a stream starts it anew."""

    class Onwards(gzip.GzipFile):
        def __init__(self, data):
            self.went_back, self.threads = 0, set()
            super().__init__(fileobj=io.BytesIO(gzip.compress(data, 0)))

        def seek(self, at, whence=io.SEEK_SET):
            self.threads.add(threading.get_ident())
            self.went_back += whence == io.SEEK_SET and at < self.tell()
            return super().seek(at, whence)

    stream = Onwards(mixed.read_bytes())
    assert same(st.load(stream))
    assert stream.went_back <= 2
    assert stream.threads == {threading.get_ident()}  # two could overtake each other


def test_without_reads_at_an_offset(mixed, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "preadv", raising=False)
    assert same(st.load(mixed))
    assert same(st.load(mixed, mmap=True))


def test_many_threads_open_one_file_object(mixed):
    """What is not moved is not in the way of others."""
    begin = threading.Barrier(4)

    def loop(file):
        begin.wait(60)
        return {(len(st.inspect(file).arrays), file.tell()) for _ in range(15)}

    with open(mixed, "rb") as file, ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(loop, [file] * 4)) == {(len(MIXED), 0)}


def test_no_descriptor_is_left_open(mixed, tmp_path):
    (tmp_path / "bad").write_bytes(b"bad")
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    st.load(mixed)
    with pytest.raises(st.errors.FormatError):
        st.load(tmp_path / "bad")
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert len(after) <= len(before)


def test_places_that_are_none(tmp_path):
    for load_or_look in (st.load, st.inspect):
        with pytest.raises(FileNotFoundError):
            load_or_look(tmp_path / "nothing")
        with pytest.raises(IsADirectoryError):
            load_or_look(tmp_path)
        for where in (3, None, io.StringIO("x"), object()):
            with pytest.raises(TypeError, match=r'open\(path, "rb"\)'):
                load_or_look(where)
    with open(tmp_path / "text", "w") as text:
        for where in (3, None, {"w": 1}, text):
            with pytest.raises(TypeError, match=r'sharedtree.save\("model.safetensors", model\)'):
                st.save(where, {"w": 1})


@pytest.mark.parametrize("progress", [False, 1, 0, "bar", [print]], ids=repr)
def test_progress_that_is_no_function(progress, path):
    st.save(path, [1])
    before = path.read_bytes()
    for call in (
        lambda: st.save(path, [2], progress=progress),
        lambda: st.load(path, progress=progress),
        lambda: st.load(path, mmap=True, progress=progress),
        lambda: st.verify(path, progress=progress),
    ):
        with pytest.raises(TypeError, match=r"`progress` is .*It must be True, for a bar, or a function"):
            call()
    assert path.read_bytes() == before


@pytest.mark.parametrize("metadata", [[("a", "b")], [], "run", 0, {"run"}], ids=repr)
def test_metadata_that_are_no_mapping(metadata, path):
    for call in (lambda: st.save(path, [1], metadata=metadata), lambda: st.to_bytes([1], metadata=metadata)):
        with pytest.raises(TypeError, match=f"`metadata` must be .* not a `{type(metadata).__name__}`"):
            call()
    assert not path.exists()


def test_progress(path, capsys):
    for size in (0, 3, 10 * 2**20):
        tree = [np.zeros(size, np.uint8), np.ones(100)]
        for work in (
            lambda report: st.save(path, tree, progress=report),
            lambda report: st.load(path, progress=report),
            lambda report: st.load(path, progress=report, verify=False),
            lambda report: st.verify(path, progress=report),
        ):
            calls = []
            work(lambda done, total: calls.append((done, total)))
            assert calls[-1] == (size + 800, size + 800)
            assert {total for _, total in calls} == {size + 800}
            assert [done for done, _ in calls] == sorted({done for done, _ in calls})
            assert size < 2**20 or len(calls) > 2
    with pytest.raises(ZeroDivisionError):
        st.load(path, progress=lambda *_: 1 / 0)
    st.save(path, [np.zeros(100)], progress=True)
    st.load(path, progress=True)
    text = capsys.readouterr().err
    assert "saving" in text
    assert "loading" in text


def start_of(data, name):
    """Where the data of a tensor begins in a file."""
    header, body = split(data)
    return len(data) - len(body) + json.loads(header)[name]["data_offsets"][0]


DAMAGE = [
    ("big", 0, 0), ("big", CHUNK_BYTES - 1, 0), ("big", CHUNK_BYTES, 1), ("big", 2 * CHUNK_BYTES + 12344, 2),
    ("medium", 77, 0), ("t7", 31, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "position", "chunk"), DAMAGE)
def test_damage_is_named(mixed, path, name, position, chunk):
    data = bytearray(mixed.read_bytes())
    data[start_of(bytes(data), f"['{name}']") + position] ^= 0x10
    path.write_bytes(data)
    count = -(-MIXED[name].nbytes // CHUNK_BYTES)
    at_once = f"`.'{name}'.` in `.*` is damaged: chunk {chunk} of {count}"
    for options in ({}, {"select": f"['{name}']"}):
        with pytest.raises(st.errors.CorruptFileError, match=at_once) as raised:
            st.load(path, **options)
        assert (raised.value.tensor, raised.value.chunk) == (f"['{name}']", chunk)
        assert raised.value.paths == (f"['{name}']",)
        assert "verify=False" in str(raised.value)
    for look in (st.verify, partial(st.load, mmap=True)):
        with pytest.raises(st.errors.CorruptFileError, match=f"`.'{name}'.`: chunk {chunk}\n") as raised:
            look(path)
        assert raised.value.paths == (f"['{name}']",)
    expected = bytearray(MIXED[name].tobytes())
    expected[position] ^= 0x10
    for options in ({}, {"mmap": True}):
        assert st.load(path, verify=False, **options)[name].tobytes() == bytes(expected)
    np.testing.assert_array_equal(st.load(path, select="['even']"), MIXED["even"])  # only what is read is checked


def test_all_damage_is_listed(mixed):
    data = bytearray(mixed.read_bytes())
    damaged = [array.name for array in st.inspect(mixed).arrays if array.nbytes and array.name != "['medium']"]
    for name in damaged:
        data[start_of(bytes(data), name)] ^= 1
    with pytest.raises(st.errors.CorruptFileError) as raised:
        st.verify(bytes(data))
    assert sorted(raised.value.paths) == sorted(damaged)
