"""Where loaded arrays are in memory: which share a piece of it, how large it is, and who keeps it alive.

The oracle is what NumPy and the operating system say: whose buffer an array lies in, at which address, and how much
memory the process has.
"""

import gc
import itertools
import sys
import types
import weakref

import hypothesis
import hypothesis.strategies as hs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.arrays import _placing
from sharedtree.serialise.container import _reading
from sharedtree.serialise.container._header import Tensor
from sharedtree.serialise.container._reading import memory_for
from tests.processes import program, run

from .isomorphic import assert_isomorphic

KiB, MiB = 2**10, 2**20
SLAB = 16 * MiB  # as the documentation says

has_huge_pages = pytest.mark.skipif(not hasattr(_reading.mmap, "MADV_HUGEPAGE"), reason="Linux's")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on a CPU does JAX share memory with NumPy")


def arrays(count, nbytes=MiB, kind=np):
    """Arrays of which no two bytes in the same place are equal."""
    return [kind.full(nbytes // 4, i + 1, "f4") for i in range(count)]


def saved(path, tree):
    st.save(path, tree)
    return path


def root(array):
    """The array that owns what another is a view of, or is the view of something that is no array."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


def assert_equal(loaded, expected):
    assert len(loaded) == len(expected)
    for one, other in zip(loaded, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Mappings:
    """Takes the place of the module `mmap`, and remembers what was mapped without keeping it."""

    def __init__(self, monkeypatch):
        self.made, self.advised, mmap = [], [], _reading.mmap

        class Mapping(mmap.mmap):
            def madvise(_, *advice):
                self.advised.append(advice)
                super().madvise(*advice)

        def made(*args, **options):
            mapping = Mapping(*args, **options)
            self.made.append((len(mapping), weakref.ref(mapping)))
            return mapping

        names = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE")
        fake = types.SimpleNamespace(mmap=made, **{name: getattr(mmap, name) for name in names})
        monkeypatch.setattr(_reading, "mmap", fake)

    def sizes(self):
        """Of all that were made, without what is mapped besides to begin at a huge page."""
        return [size - 2 * MiB for size, _ in self.made]

    def living(self):
        gc.collect()
        return [size - 2 * MiB for size, mapping in self.made if mapping() is not None]


sizes = hs.one_of(
    hs.integers(0, 200),
    hs.integers(0, 5 * MiB),
    hs.sampled_from([64 * KiB - 1, 64 * KiB, MiB, 4 * MiB - 1, 4 * MiB, SLAB, SLAB + 1]),
)


@hypothesis.given(hs.lists(sizes, max_size=60))
def test_who_shares_with_whom(sizes):
    tensors = [Tensor(f"t{i}", "U8", (size,), 0, size) for i, size in enumerate(sizes)]
    memory = memory_for(tensors)
    assert list(map(len, (memory[tensor.name] for tensor in tensors))) == sizes
    pieces = {}
    for array in filter(len, memory.values()):  # what has no bytes is nowhere
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
        key = address(root(array))  # `memory` keeps it alive
        pieces.setdefault(key, []).append(array)
    for piece in pieces.values():
        piece.sort(key=address)
        for one, following in itertools.pairwise(piece):
            assert address(one) + len(one) <= address(following), "no two overlap"
        extent = address(piece[-1]) + len(piece[-1]) - address(piece[0])
        assert extent <= sum(len(array) + 63 for array in piece)
        if len(piece) > 1:
            largest = max(map(len, piece))
            assert largest < 4 * MiB
            assert extent <= (MiB if largest < 64 * KiB else SLAB)
            assert (largest < 64 * KiB) == (min(map(len, piece)) < 64 * KiB)
    # Two pieces in a row that are not full hold more than one does, so there are not many.
    shared = [len(array) for array in memory.values() if 64 * KiB <= len(array) < 4 * MiB]
    num_slabs = sum(64 * KiB <= max(map(len, piece)) < 4 * MiB for piece in pieces.values())
    assert num_slabs <= 1 + sum(shared) // (12 * MiB)


@has_huge_pages
@pytest.mark.parametrize("verify", [True, False])
def test_many_arrays_of_middle_size_take_few_mappings(path, monkeypatch, verify):
    """Of 1 MiB, with smaller ones between them, as in layers; and a large one, which has its own."""
    expected = [each for array in arrays(40) for each in (array, array[: 4 * KiB])]
    saved(path, [np.full(5 * MiB, 7, "u1"), *(jnp.asarray(array) for array in expected)])
    mappings = Mappings(monkeypatch)
    large, *loaded = st.load(path, verify=verify)
    assert sorted(mappings.sizes()) == [5 * MiB, 8 * MiB, 16 * MiB, 16 * MiB]
    assert {option for option, _, _ in mappings.advised} == {_reading.mmap.MADV_HUGEPAGE}
    assert [size for _, _, size in mappings.advised] == mappings.sizes()
    first_slab = [array for array in loaded if array.nbytes == MiB][:16]
    assert_equal(loaded, expected)
    assert all(min(map(address, piece)) % (2 * MiB) == 0 for piece in ([large], first_slab)), "at a huge page"
    assert large.size == 5 * MiB
    assert (large == 7).all()
    assert len(root(large)) < 5 * MiB + 2 * MiB + 64


@has_huge_pages
def test_only_what_is_selected_takes_memory_and_a_map_of_the_file_none(path, monkeypatch):
    expected = dict(zip("abcdefgh", arrays(8), strict=True))
    saved(path, {**expected, "jax": arrays(12, kind=jnp)})
    mappings = Mappings(monkeypatch)
    loaded = st.load(path, select=lambda name: "b" in name or "d" in name or "g" in name)
    assert mappings.sizes() == [3 * MiB]
    assert_equal([loaded[name] for name in "bdg"], [expected[name] for name in "bdg"])
    np.testing.assert_array_equal(st.load(path, select="['c']"), expected["c"])
    mapped = st.load(path, mmap=True)
    assert_equal([*mapped.values()][:8], [*expected.values()])
    assert_equal(mapped["jax"], arrays(12))
    assert mappings.sizes() == [3 * MiB]  # one of 1 MiB has no room for a huge page


@pytest.mark.parametrize("lacking", ["the option", "the memory", "the huge pages"])
def test_without_huge_pages(path, monkeypatch, lacking):
    """Elsewhere than on Linux, or if the operating system refuses, NumPy's memory is shared in the same way."""
    saved(path, arrays(20))

    def refuses(*_, **__):
        raise OSError

    if lacking == "the option":
        fake = types.SimpleNamespace()
    else:
        made = types.SimpleNamespace(mmap=lambda _, size, **__: Refusing(size)).mmap
        fake = types.SimpleNamespace(
            mmap=refuses if lacking == "the memory" else made, MAP_PRIVATE=2, MAP_ANONYMOUS=32, MADV_HUGEPAGE=14
        )
    monkeypatch.setattr(_reading, "mmap", fake)
    loaded = st.load(path)
    assert_equal(loaded, arrays(20))
    # `loaded` keeps the memory alive.
    assert sorted({len(root(array)) for array in loaded}) == [4 * MiB + 64, 16 * MiB + 64]
    assert all(address(array) % 64 == 0 for array in loaded)


@on_cpu
def test_arrays_use_the_memory_that_was_read(path, monkeypatch):
    """JAX copies what is not aligned, and anything given to `jnp.asarray`; nothing of that happens here."""
    given, put = {}, jax.device_put

    def watched(xs, *args, **options):
        result = put(xs, *args, **options)
        for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(result), strict=True):
            given[address(y)] = address(x)
        return result

    monkeypatch.setattr(_placing.jax, "device_put", watched)
    dtypes = ("int8", "float32", "bfloat16")
    saved(path, [jnp.ones(size, dtype) for dtype in dtypes for size in (1, 16, 17, 100_000)])
    for array in st.load(path):
        assert given[address(array)] == address(array)
        assert address(array) % 64 == 0


class Refusing(bytearray):
    """Memory of a kernel without huge pages."""

    def madvise(self, *_):
        raise OSError(22, "Invalid argument")


@has_huge_pages
@pytest.mark.parametrize("kind", [np, pytest.param(jnp, marks=on_cpu)], ids=["numpy", "jax"])
def test_an_array_keeps_one_slab_at_most_and_a_small_one_none(path, monkeypatch, kind):
    small = [kind.ones(16 * KiB - 64, "f4"), jnp.float32(3)]
    saved(path, [*arrays(40, kind=kind), kind.full(5 * MiB, 7, "u1"), *small])
    mappings = Mappings(monkeypatch)
    loaded = st.load(path)
    assert sum(mappings.living()) == 45 * MiB
    survivor, survivors = loaded[20], loaded[-2:]
    del loaded
    assert mappings.living() == [SLAB]
    np.testing.assert_array_equal(survivor, arrays(40)[20])
    del survivor
    assert mappings.living() == []
    assert_equal(survivors, small)


@has_huge_pages
@pytest.mark.parametrize("harm", ["an error", "an error, unverified", "a flipped bit", "cut before", "cut meanwhile"])
def test_errors_and_damaged_files_leave_nothing(path, monkeypatch, harm):
    saved(path, arrays(40, kind=jnp if "error" in harm else np))
    data = bytearray(path.read_bytes())
    options = {"verify": "unverified" not in harm}

    def fails(done, total):
        if done > total // 2:
            raise KeyError(done)

    if "error" in harm:
        options["progress"] = fails
    elif harm == "a flipped bit":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "cut before":
        path.write_bytes(data[: len(data) // 2])
    else:
        options["progress"] = lambda *_: path.write_bytes(data[: len(data) // 2])
    mappings = Mappings(monkeypatch)
    with pytest.raises(KeyError if "error" in harm else st.errors.CorruptFileError):
        st.load(path, **options)
    assert len(mappings.made) == (0 if harm == "cut before" else 3)
    assert mappings.living() == []


def test_mapped_arrays_live_longer_than_the_file(path):
    tree = [np.arange(2**22, dtype=np.float32), jnp.arange(2**20), np.arange(3), jnp.asarray(1.0)]
    loaded = st.load(saved(path, tree), mmap=True, verify=False)
    assert_isomorphic(tree, loaded)
    assert not loaded[0].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        loaded[0][0] = 1
    assert st.load(path)[0].flags.writeable
    st.save(path, np.zeros(3))  # replacing the file leaves what was mapped alone
    path.unlink()
    assert_isomorphic(tree, loaded)


@on_cpu
def test_donating_one_leaves_its_neighbours(path):
    expected = arrays(8)
    saved(path, [jnp.asarray(array) for array in expected])
    loaded = st.load(path)
    assert len({address(array) // MiB for array in loaded}) == 8
    assert max(map(address, loaded)) - min(map(address, loaded)) == 7 * MiB, "they share a slab"
    step = jax.jit(lambda array: array * 2 + 7, donate_argnums=0)
    for i in (1, 4, 5):
        result = loaded[i]
        for _ in range(4):
            result = step(result)
        assert loaded[i].is_deleted()
        np.testing.assert_array_equal(result, (expected[i] * 16 + 105))
    rest = (0, 2, 3, 6, 7)
    assert_equal([loaded[i] for i in rest], [expected[i] for i in rest])


PROGRAM = program("memory_of_loading")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_the_rest_is_given_back_processes_share_nothing_and_saving_copies_pieces_only(tmp_path):
    both = saved(tmp_path / "both", {"x": arrays(64), "y": arrays(64, kind=jnp)})
    few = saved(tmp_path / "few", arrays(8))
    run(PROGRAM, both, few)
