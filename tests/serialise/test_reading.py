"""Data comes out of containers: whole, in parts, mapped, from every kind of source; damage is found and named."""

import gc
import gzip
import io
import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from functools import partial

import hypothesis
import hypothesis.strategies as hs
import jax
import numpy as np
import pytest

from sharedtree._errors import CorruptFileError
from sharedtree.serialise.container import _reading, _sources, _writing
from sharedtree.serialise.container._chunks import CHUNK_BYTES, run_jobs
from sharedtree.serialise.container._header import TensorSource
from sharedtree.serialise.container._reading import aligned, open_container
from sharedtree.serialise.container._writing import write

from .containers import entry, forged, header_text, written

MIXED = {
    "big": np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 12345, dtype=np.uint8),
    "small": np.arange(3.0),
    "scalar": np.array(7, "i4"),
    "none": np.zeros((0, 3)),
    "medium": np.arange(50_000, dtype="f4"),
    "even": np.arange(1024, dtype="i8").reshape(32, 32),
} | {f"t{i}": np.full(8, i, "f4") for i in range(100)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reading") / "mixed.safetensors"
    path.write_bytes(written(MIXED))
    return path


def same(data, array):
    return data.dtype == np.uint8 and data.tobytes() == array.tobytes()


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


@pytest.mark.parametrize("sizes", [(1, 0), (0, 0, 3, 64), (64, 0, 5000, 1), (0, 3 << 20, 0, 1)], ids=str)
def test_tensors_are_read_whole_in_whatever_order_they_are_asked_for(sizes):
    arrays = {f"t{i}": np.full(size, i + 1, np.uint8) for i, size in enumerate(sizes)}
    expected = {name: array.tobytes() for name, array in arrays.items()}
    with open_container(written(arrays)) as container:
        for names in itertools.permutations(arrays):
            assert {name: part.tobytes() for name, part in container.read_many(names).items()} == expected


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path,
        str,
        partial(open, mode="rb"),
        partial(open, mode="rb", buffering=0),
        partial(open, mode="r+b"),
        lambda path: path.read_bytes(),
        lambda path: bytearray(path.read_bytes()),
        lambda path: memoryview(np.frombuffer(path.read_bytes(), "u1")),
        lambda path: io.BytesIO(path.read_bytes()),
        lambda path: Seekable(path.read_bytes()),
        lambda path: Short(path.read_bytes()),
        lambda path: OnlyRead(path.read_bytes()),
        lambda path: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(path.read_bytes(), 1))),
    ],
)
def test_every_kind_of_source(make, verify, path):
    where = make(path)
    with open_container(where) as container:
        data = container.read_many(verify=verify)
        assert list(data) == list(container.tensors)
        assert data.keys() == MIXED.keys()
        for name, array in MIXED.items():
            assert same(data[name], array), name
            assert data[name].ctypes.data % 64 == 0
            assert data[name].flags.writeable
        for name, view in container.mapped().items():
            assert same(view, MIXED[name])
            assert not view.flags.writeable
        assert same(container.read_many(["medium"], verify=verify)["medium"], MIXED["medium"])
        assert same(container.read_selection("medium", [slice(5, 9)], verify=verify), MIXED["medium"][5:9])
        assert container.damage() == []
    if hasattr(where, "close"):
        assert not where.closed  # it was the caller's
        where.close()


def test_a_pipe(path):
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as process:
        assert same(open_container(process.stdout).read_many(["big"])["big"], MIXED["big"])


def test_a_named_pipe(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(path.read_bytes()))
    thread.start()
    with open_container(tmp_path / "pipe") as container:
        assert same(container.read_many(["big"])["big"], MIXED["big"])
    thread.join()


def test_a_member_of_an_archive(path, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(path, "member")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive, archive.open("member") as file:
        assert same(open_container(file).read_many(["big"])["big"], MIXED["big"])


def test_files_are_read_from_where_they_are_positioned(path, tmp_path):
    other = tmp_path / "with_prefix"
    other.write_bytes(b"prefix!" + path.read_bytes())
    for buffering in (0, -1):
        with open(other, "rb", buffering) as file:
            file.seek(7)
            container = open_container(file)
            assert same(container.read_many(["big"])["big"], MIXED["big"])
            assert same(container.mapped()["big"], MIXED["big"])


@pytest.mark.parametrize("where", [3, None, io.StringIO(), object()])
def test_what_is_no_source(where):
    with pytest.raises(TypeError, match='open\\(path, "rb"\\)'):
        open_container(where)


def test_paths_that_cannot_be_opened(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_container(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_container(tmp_path)


def test_no_descriptor_is_left_open(path, tmp_path):
    (tmp_path / "bad").write_bytes(b"bad")
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with open_container(path) as container:
        container.read_many()
    with pytest.raises(ValueError):
        open_container(tmp_path / "bad")
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert len(after) <= len(before)


def test_maps_outlive_the_container_and_the_file(path, tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    with open_container(copy) as container:
        view = container.mapped()["big"]
    del container
    copy.unlink()
    gc.collect()
    assert same(view, MIXED["big"])


def test_a_map_is_aligned_for_what_can_be(path):
    with open_container(path) as container:
        views = container.mapped()
    assert views["even"].ctypes.data % 64 == 0
    assert views["small"].ctypes.data % 8 == 0
    assert views["medium"].ctypes.data % 64 == 0


def test_jax_uses_the_memory_as_it_is(path):
    with open_container(path) as container:
        data = container.read_many(["even"])["even"].view("i4")
    array = jax.device_put(data, jax.devices("cpu")[0], may_alias=True)
    assert array.unsafe_buffer_pointer() == data.ctypes.data


def test_duplicate_names_are_read_once(path):
    with open_container(path) as container:
        assert list(container.read_many(["t1", "small", "t1"])) == ["small", "t1"]


@pytest.mark.parametrize("verify", [True, False])
def test_reading_takes_no_more_than_the_data(path, verify, monkeypatch):
    monkeypatch.delattr(_reading.mmap, "MADV_HUGEPAGE", raising=False)  # so that all of it is NumPy's, which is traced
    total = sum(array.nbytes for array in MIXED.values())
    with open_container(path) as container:
        container.read_many()
        tracemalloc.start()
        data = container.read_many(verify=verify)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(data) == len(MIXED)
    assert peak < total + 2**20


def test_progress(path):
    seen = []
    with open_container(path) as container:
        container.read_many(progress=lambda *step: seen.append(step))
        total = sum(array.nbytes for array in MIXED.values())
        assert seen[-1] == (total, total)
        assert len(seen) >= 4
        with pytest.raises(ZeroDivisionError):
            container.read_many(progress=lambda *_: 1 / 0)


# --- damage ------------------------------------------------------------------------------------------------------


def broken_at(name, position):
    """A container of MIXED in which one byte of one tensor is another."""
    data = bytearray(written(MIXED))
    container = open_container(bytes(data))
    start = len(data) - max(t.stop for t in container.tensors.values()) + container.tensors[name].start
    data[start + position] ^= 0x10
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "position", "chunk"),
    [
        ("big", 0, 0), ("big", CHUNK_BYTES - 1, 0), ("big", CHUNK_BYTES, 1), ("big", 2 * CHUNK_BYTES + 12344, 2),
        ("medium", 77, 0), ("t7", 31, 0), ("scalar", 0, 0),
    ],
)  # fmt: skip
def test_damage_is_named(name, position, chunk, tmp_path):
    data = broken_at(name, position)
    container = open_container(data)
    for read in (container.read_many, lambda: container.read_many([name])[name]):
        with pytest.raises(CorruptFileError, match=f"`{name}` in `<bytes>` is damaged: chunk {chunk} of ") as raised:
            read()
        assert (raised.value.tensor, raised.value.chunk, raised.value.paths) == (name, chunk, (name,))
        assert "verify=False" in str(raised.value)
    assert container.damage() == [(name, chunk)]
    expected = bytearray(MIXED[name].tobytes())
    expected[position] ^= 0x10
    assert container.read_many([name], verify=False)[name].tobytes() == bytes(expected)
    assert container.damage([other for other in MIXED if other != name]) == []


def test_all_damage_is_listed_in_order():
    data = bytearray(written(MIXED))
    container = open_container(bytes(data))
    base = len(data) - max(t.stop for t in container.tensors.values())
    expected = []
    for tensor in container.tensors.values():
        for chunk in range(-(-tensor.nbytes // CHUNK_BYTES)):
            if (tensor.name, chunk) != ("big", 1):
                data[base + tensor.start + chunk * CHUNK_BYTES] ^= 1
                expected.append((tensor.name, chunk))
    assert open_container(bytes(data)).damage() == expected


def test_a_file_that_is_cut_short_while_it_is_read(path, tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    with open_container(copy) as container:
        os.truncate(copy, 2**20)
        with pytest.raises(CorruptFileError, match="cutting it short"):
            container.read_many()


def test_swapped_digests_are_found():
    tensors = {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 2, 4)}
    text = header_text(tensors, b"abcd")
    digests = text.split('digests":"')[1][:16]
    swapped = text.replace(digests, digests[8:] + digests[:8])
    container = open_container(forged(swapped, b"abcd"))
    assert container.damage() == [("a", 0), ("b", 0)]


# --- parts -------------------------------------------------------------------------------------------------------


def slices(size):
    return hs.builds(
        slice,
        hs.none() | hs.integers(-size - 1, size + 1),
        hs.none() | hs.integers(-size - 1, size + 1),
        hs.none() | hs.integers(1, max(1, size)),
    )


@hs.composite
def parts(draw):
    shape = draw(hs.lists(hs.sampled_from([0, 1, 1, 2, 3, 5, 17, 40]), max_size=4).map(tuple))
    return shape, draw(hs.tuples(*map(slices, shape[: draw(hs.integers(0, len(shape)))])))


@pytest.mark.parametrize("limits", [(16 * 2**10, 4 * 2**20), (64, 100), (0, 1), (10**9, 1)])
@hypothesis.given(parts(), hs.sampled_from(["u1", "f4", "c16"]), hs.booleans())
@hypothesis.settings(max_examples=30)
def test_a_part_is_what_numpy_makes_of_it(limits, part, dtype, verify):
    shape, selection = part
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    container = open_container(written({"x": array, "before": np.arange(7)}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_SHORT_GAP", "_SPAN"), limits, strict=True):
            patch.setattr(_sources, name, value)
        data = container.read_selection("x", selection, verify=verify)
    expected = array[selection]
    assert data.tobytes() == expected.tobytes()
    assert data.ctypes.data % 64 == 0 or not data.size


LARGE = np.random.default_rng(1).integers(0, 2**32, (3000, 1100), dtype=np.uint32)  # 12.6 MiB, four chunks


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "selection",
    [
        np.s_[:], np.s_[1000:2000], np.s_[::2], np.s_[:, 3:5], np.s_[:, ::550], np.s_[10:2990, 100:1000],
        np.s_[2999:, 1099:], np.s_[::1500, ::7], np.s_[5:5],
    ],
    ids=str,
)  # fmt: skip
def test_parts_of_many_chunks(selection, verify):
    selection = selection if isinstance(selection, tuple) else (selection,)
    container = open_container(written({"x": LARGE}))
    assert container.read_selection("x", selection, verify=verify).tobytes() == LARGE[selection].tobytes()


@pytest.mark.parametrize("selection", [[slice(None)] * 3, [slice(None, None, -1)], [slice(None, None, 0)]])
def test_selections_that_do_not_fit(selection):
    with pytest.raises((IndexError, ValueError), match="does not fit|zero"):
        open_container(written({"x": LARGE[:2]})).read_selection("x", selection)


def test_a_part_of_a_damaged_tensor():
    data = bytearray(written({"x": LARGE}))
    data[-LARGE.nbytes + CHUNK_BYTES + 5] ^= 1  # in chunk 1, which holds rows 954 to 1906
    container = open_container(bytes(data))
    assert container.read_selection("x", [slice(0, 953)]).tobytes() == LARGE[:953].tobytes()
    assert container.read_selection("x", [slice(2000, None)]).tobytes() == LARGE[2000:].tobytes()
    for selection in ([slice(940, 960)], [slice(1000, 1001), slice(3, 4)], [slice(None), slice(0, 1)]):
        with pytest.raises(CorruptFileError, match="chunk 1 of 4"):
            container.read_selection("x", selection)
        assert container.read_selection("x", selection, verify=False).nbytes


def test_a_part_reads_little(monkeypatch):
    """Rows of a large tensor cost their own bytes, columns those of the rows, and both few reads."""
    container = open_container(written({"x": LARGE}))
    reads = []
    inner = container._source.read_into
    monkeypatch.setattr(container._source, "read_into", lambda at, b: (reads.append(len(b)), inner(at, b)))
    container.read_selection("x", [slice(7, 1007)], verify=False)
    assert reads == [1000 * 4400]
    reads.clear()
    container.read_selection("x", [slice(0, 1000), slice(5, 6)], verify=False)
    assert len(reads) <= 3
    assert sum(reads) <= 1000 * 4400
    reads.clear()
    container.read_selection("x", [slice(0, 10)], verify=True)
    assert reads == [CHUNK_BYTES]


# --- threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_jobs_all_run(num_threads):
    done = []
    run_jobs((lambda i=i: done.append(i) for i in range(1000)), num_threads)
    assert sorted(done) == list(range(1000))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_first_error_stops_the_jobs(num_threads):
    done = []

    def job(i):
        if i == 10:
            raise KeyError(i)
        done.append(i)

    before = set(threading.enumerate())  # of which those of other tests may end meanwhile
    with pytest.raises(KeyError):
        run_jobs((lambda i=i: job(i) for i in range(10**6)), num_threads)
    assert len(done) < 10**5
    assert set(threading.enumerate()) <= before


def test_the_second_thread_keeps_order_and_reports_errors(monkeypatch):
    order = []
    buffers = [bytes(2**16)] * 100
    source = TensorSource("x", "U8", (len(buffers) * 2**16,), 1, lambda: buffers)
    monkeypatch.setattr(_writing, "_hash", lambda digests, first, at, buffer: order.append(at))
    write(io.BytesIO(), [source], "{}")
    assert order == list(range(0, len(buffers) * 2**16, 2**16))
    monkeypatch.setattr(_writing, "_hash", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(io.BytesIO(), [source], "{}")


def test_many_threads_open_one_file_object(path):
    """What is not moved is not in the way of others."""
    with open(path, "rb") as file:
        found = in_threads(lambda: open_container(file).close() or file.tell(), 4, 50)
    assert found == {0}


def in_threads(work, num_threads, times):
    """What some threads get that do the same many times at once."""
    found = set()
    begin = threading.Barrier(num_threads)

    def loop():
        begin.wait(60)
        for _ in range(times):
            try:
                found.add(work())
            except Exception as error:  # told by the caller
                found.add(repr(error))

    threads = [threading.Thread(target=loop) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_many_threads_read_one_container(path):
    with open_container(path) as container:
        results = [None] * 8

        def read(i):
            results[i] = container.read_many()

        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(result[name], array) for result in results for name, array in MIXED.items())


def test_it_imports_no_more_than_it_needs():
    code = "import sys, sharedtree.serialise.container._reading; print('safetensors' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_aligned_memory_of_no_bytes():
    assert aligned(0).size == 0
    assert aligned(1).ctypes.data % 64 == 0


def test_compressed_streams_are_read_onwards(path):
    """One pass to find the size, one to read: going back in such a stream starts it anew."""

    class Onwards(gzip.GzipFile):
        goes_back = ()
        threads = frozenset()

        def seek(self, at, whence=io.SEEK_SET):
            self.threads |= {threading.get_ident()}
            if whence == io.SEEK_SET and at < self.tell():
                self.goes_back += (at,)
            return super().seek(at, whence)

    stream = Onwards(fileobj=io.BytesIO(gzip.compress(path.read_bytes(), 1)))
    container = open_container(stream)
    stream.goes_back = ()
    assert same(container.read_many()["big"], MIXED["big"])
    assert stream.goes_back == ()
    assert stream.threads == {threading.get_ident()}  # two could overtake each other


def test_without_reads_at_an_offset(path, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "preadv", raising=False)
    with open_container(path) as container:
        assert all(same(data, MIXED[name]) for name, data in container.read_many().items())
        assert same(container.mapped()["big"], MIXED["big"])
    with pytest.raises(ValueError, match="closed"):
        container.read_many(["big"])["big"]
