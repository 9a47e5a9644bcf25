"""The size of files, and the memory that saving and loading take."""

import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from .isomorphic import assert_isomorphic
from .tied import ROOT, through_file


def test_the_size_of_a_file(path):
    from sharedtree._demo._model import LanguageModel, Sizes

    model = LanguageModel(Sizes(), key=jax.random.key(0))
    unique = {id(x): x.nbytes for x in jax.tree.leaves(model) if eqx.is_array(x)}  # alive in `model`
    st.save(path, model)
    assert path.stat().st_size <= sum(unique.values()) * 1.001 + 2**16
    big = {"a": np.zeros(2**26, np.uint8), "b": np.ones((1000, 77), np.float32)}
    big["c"] = big["a"]
    st.save(path, big)
    assert path.stat().st_size <= (2**26 + big["b"].nbytes) * 1.001 + 2**16
    loaded = st.load(path)
    assert loaded["a"] is loaded["c"]


MEMORY = textwrap.dedent(
    """
    import os, resource, sys, threading
    os.environ["MALLOC_ARENA_MAX"] = "2"
    import jax, jax.numpy as jnp, numpy as np
    import sharedtree as st

    def rss():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    class Peak:
        def __enter__(self):
            self.before = self.highest = rss()
            self.done = threading.Event()
            def watch():
                while not self.done.wait(0.0005):
                    self.highest = max(self.highest, rss())
            self.thread = threading.Thread(target=watch)
            self.thread.start()
            return self
        def __exit__(self, *_):
            self.highest = max(self.highest, rss())
            self.done.set()
            self.thread.join()
            self.extra = self.highest - self.before

    MiB = 2**20
    path = sys.argv[1]
    st.save(path, [jnp.ones(10), np.ones(10)])
    st.load(path)
    tree = {
        "jax": jnp.zeros(24 * MiB, jnp.uint8) + jnp.uint8(1),
        "numpy": np.ones(24 * MiB, np.uint8),
        "transposed": np.ones((4096, 6144), np.uint8).T,
        "big-endian": np.ones(6 * MiB, ">f4"),
    }
    jax.block_until_ready(tree)
    with Peak() as save:
        st.save(path, tree)
    with Peak() as load:
        loaded = st.load(path)
    del loaded
    with Peak() as mapped:
        loaded = st.load(path, mmap=True, verify=False, select=lambda name: "endian" not in name)
    print(save.extra / MiB, load.extra / MiB, mapped.extra / MiB)
    """
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(path):
    """Saving copies nothing but pieces; loading holds each array once, and nothing besides; mapping holds nothing."""
    run = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    save, load, mapped = map(float, run.stdout.split())
    assert save <= 1.2 * 24
    assert load <= 4 * 24 + 24
    assert mapped <= 12


def test_saving_a_large_array_takes_no_memory_of_its_size(path):
    """Far below the bar: only pieces of what is not contiguous are copied."""
    import tracemalloc

    tree = [np.ones((2048, 8192), np.float32).T, np.ones(2**24, np.uint8)]
    st.save(path, tree[1][:10])
    tracemalloc.start()
    try:
        st.save(path, tree)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20  # a few pieces of 4 MiB; the array has 64


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on a CPU does JAX share memory with NumPy")
def test_arrays_use_the_memory_that_was_read(path, monkeypatch):
    """JAX copies what is not aligned, and anything given to `jnp.asarray`; nothing of that happens here."""
    from sharedtree.serialise.arrays import _placing

    given, put = {}, jax.device_put

    def watched(xs, *args, **options):
        result = put(xs, *args, **options)
        for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(result), strict=True):
            given[address(y)] = address(x)
        return result

    monkeypatch.setattr(_placing.jax, "device_put", watched)
    tree = {
        f"{dtype} {size}": jnp.ones(size, dtype)
        for dtype in ("int8", "float32", "bfloat16")
        for size in (1, 16, 17, 100_000)
    }
    loaded = through_file(path, tree)
    monkeypatch.undo()
    for name, array in loaded.items():
        assert given[address(array)] == address(array), name
        assert address(array) % 64 == 0
    loaded = through_file(path, tree, mmap=True)
    assert_isomorphic(tree, loaded)


def test_loaded_arrays_live_longer_than_the_file(path):
    for options in ({}, {"mmap": True}):
        loaded = through_file(path, [np.arange(1000), jnp.arange(1000)], **options)
        path.unlink()
        np.testing.assert_array_equal(loaded[0], np.arange(1000))
        np.testing.assert_array_equal(loaded[1], np.arange(1000))


def test_mapping(path):
    tree = {
        "n": np.arange(2**22, dtype=np.float32),
        "j": jnp.arange(2**20),
        "small": np.arange(3),
        "scalar": jnp.asarray(1.0),
    }
    st.save(path, tree)
    loaded = st.load(path, mmap=True, verify=False)  # that no memory is used is tested above
    assert_isomorphic(tree, loaded)
    assert not loaded["n"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        loaded["n"][0] = 1
    assert st.load(path)["n"].flags.writeable
    st.save(path, {"n": np.zeros(3)})  # replacing the file leaves what was mapped alone
    np.testing.assert_array_equal(loaded["n"], tree["n"])
