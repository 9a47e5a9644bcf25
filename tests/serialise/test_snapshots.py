"""Saved is what was hashed, whoever writes into an array meanwhile: a torn array loads.

Another thread is played by what saves itself: before each digest and before each write, the array gets another value.
So a digest that is of the array's own memory is of other bytes than are written.
"""

import io
import mmap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.arrays._dtypes import buffers
from sharedtree.serialise.container import _writing

CHUNK_BYTES = 4 * 2**20
NBYTES = {"small": 40_000, "medium": 500_000, "large": 2 * CHUNK_BYTES + 12_345}


def read_only(array):
    array.flags.writeable = False
    return array


def owned(nbytes, _):
    array = np.zeros(nbytes, np.uint8)
    return array, array


def read_only_view(nbytes, _):
    memory = np.zeros(nbytes, np.uint8)
    return memory, read_only(memory[:])


def read_only_afterwards(nbytes, _):
    """The owner of the memory is read-only, and a view of it that was taken before is not."""
    array = np.zeros(nbytes, np.uint8)
    return array[:], read_only(array)


def view_of_a_bytearray(nbytes, _):
    memory = bytearray(nbytes)
    return np.frombuffer(memory, np.uint8), np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


def mapped_file(nbytes, folder):
    (folder / "mapped").write_bytes(bytes(nbytes))
    return np.memmap(folder / "mapped", np.uint8, "r+"), np.memmap(folder / "mapped", np.uint8, "r")


def loaded_file(nbytes, folder):
    """An array of `load(mmap=True)`, into whose file another program writes."""
    st.save(folder / "loaded", np.full(nbytes, 7, np.uint8))
    start = (folder / "loaded").read_bytes().index(b"\7" * 64)
    memory = np.memmap(folder / "loaded", np.uint8, "r+", start, nbytes)
    return memory, st.load(folder / "loaded", mmap=True)


def of_two_axes(nbytes, _):
    array = np.zeros((nbytes // 5, 5), np.uint8)
    return array, array


def transposed(nbytes, _):
    array = np.zeros((5, nbytes // 5), np.uint8)
    return array, array.T


MEMORY = [
    owned, read_only_view, read_only_afterwards, view_of_a_bytearray, mapped_file, loaded_file, of_two_axes, transposed,
]  # fmt: skip


def to_path(folder, tree):
    st.save(folder / "model", tree)
    return (folder / "model").read_bytes()


def to_file(folder, tree):
    with open(folder / "model", "wb", 0) as file:
        st.save(file, tree)
    return (folder / "model").read_bytes()


def to_end_of_file(folder, tree):
    """A file opened for appending cannot be patched: its header is written first."""
    with open(folder / "model", "ab") as file:
        st.save(file, tree)
    return (folder / "model").read_bytes()


def to_bytes(_, tree):
    return st.to_bytes(tree)


def to_object(_, tree):
    """Any object with `write`, which may keep what it is given: as an upload does that is going on."""

    class Kept:
        def __init__(self):
            self.parts = []

        def write(self, data):
            self.parts.append(data)
            return len(data)

    file = Kept()
    st.save(file, tree)
    return b"".join(file.parts)


WAYS = [to_path, to_file, to_end_of_file, to_bytes, to_object]


@pytest.fixture
def changing(monkeypatch):
    """A function that has an array changed from then on, before each digest and before each write."""
    lock, values = threading.Lock(), iter(range(10**6))
    digest, write = _writing.crc32, _writing._write_all

    def begin(memory):
        def change():
            memory[...] = next(values) % 251

        def digest_of_another(*args):
            with lock:
                change()
                return digest(*args)

        def write_another(*args):
            with lock:
                change()
                write(*args)

        monkeypatch.setattr(_writing, "crc32", digest_of_another)
        monkeypatch.setattr(_writing, "_write_all", write_another)

    return begin


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("size", NBYTES)
@pytest.mark.parametrize("make", MEMORY)
@pytest.mark.parametrize("save", WAYS)
def test_what_is_changed_while_it_is_saved_loads(save, make, size, tmp_path, changing):
    memory, array = make(NBYTES[size], tmp_path)
    changing(memory)
    data = save(tmp_path, {"changing": array, "beside": jnp.arange(100_000.0)})
    loaded = st.load(data)
    assert loaded["changing"].shape == array.shape
    assert loaded["beside"].tolist() == list(range(100_000))
    st.verify(data)


@pytest.mark.parametrize("save", WAYS)
def test_what_is_not_changed_is_saved_as_it_is(save, tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"{name}{i}": rng.integers(0, 256, n, np.uint8) for i in range(3) for name, n in NBYTES.items()}
    tree |= {"of JAX": jnp.arange(300_000), "empty": np.zeros((0, 3)), "one": np.float64(1)}
    loaded = st.load(save(tmp_path, tree))
    assert all(
        loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array) for name, array in tree.items()
    )


def test_only_what_may_change_is_copied(tmp_path):
    """Arrays of JAX and of `bytes` are written from where they are."""
    size = NBYTES["large"]
    with open(tmp_path / "anything", "w+b") as file:
        file.truncate(size)
        mapped = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    of_jax = jnp.zeros(size, jnp.uint8)
    constant = np.frombuffer(bytes(size), np.uint8)
    for array, is_copied in (
        (constant, False),
        (constant[3:].reshape(-1, 2)[1:], False),
        (of_jax, False),
        (np.asarray(of_jax), False),
        (mapped, True),
        (np.zeros(size, np.uint8), True),
        (read_only(np.zeros(size, np.uint8)), True),
    ):
        pieces = [np.frombuffer(piece, np.uint8) for piece in buffers(array)]
        assert max(map(len, pieces)) <= CHUNK_BYTES
        are_shared = [np.shares_memory(piece, np.asarray(array)) for piece in pieces]
        assert are_shared == [not is_copied] * len(pieces)


def test_what_is_kept_of_a_stream_is_little(tmp_path, changing):
    """What cannot be patched is hashed first. What may change is kept for that on the disk, not in memory."""
    assert _writing.MAX_KEPT_IN_MEMORY < 2**27
    array = np.zeros(3 * CHUNK_BYTES, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_writing, "MAX_KEPT_IN_MEMORY", CHUNK_BYTES)
        changing(array)
        buffer = to_object(tmp_path, [array, array[1:], jnp.ones(3)])
    assert st.verify(buffer).num_arrays == 3


def test_a_memory_file_is_written_where_it_stands(changing):
    array, file = np.zeros(NBYTES["large"], np.uint8), io.BytesIO()
    changing(array)
    file.write(b"before")
    st.save(file, array)
    file.seek(6)
    st.verify(file)


@pytest.mark.parametrize("way", [to_path, to_end_of_file])
def test_what_is_donated_while_it_is_saved_is_said(way, tmp_path, monkeypatch):
    """Not that an array of no name was deleted; and what was there before is still there."""
    arrays = [jnp.zeros((512, 512)), jnp.ones((512, 512))]
    write = _writing._write_all
    donate = jax.jit(lambda array: array + 1, donate_argnums=0)

    def written(*args):
        write(*args)
        if not arrays[1].is_deleted():
            donate(arrays[1])

    to_path(tmp_path, [7])
    monkeypatch.setattr(_writing, "_write_all", written)
    with pytest.raises(st.errors.UnserialisableError, match=r"`\[1\]` was donated or deleted while") as raised:
        way(tmp_path, arrays)
    assert raised.value.paths == ("[1]",)
    if way is to_path:
        assert st.load(tmp_path / "model") == [7]


def test_a_part_of_what_is_sharded_is_donated(monkeypatch):
    """Its pieces are taken one by one, so that it may be gone after the first."""
    from sharedtree.serialise.arrays import _dtypes

    array = jnp.zeros((3, 2**20))
    monkeypatch.setattr(_dtypes, "_is_here", lambda array: False)
    monkeypatch.setattr(type(array), "is_fully_replicated", False)
    pieces = iter(_dtypes.tensor_source("weight", array).buffers())
    next(pieces)
    array.delete()
    with pytest.raises(st.errors.UnserialisableError, match="`weight` was donated or deleted while"):
        list(pieces)
