"""The size of files, and the memory that saving and loading take."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from .isomorphic import assert_isomorphic
from .tied import Tied, through_file


def test_the_size_of_a_file(path):
    """Each array is written once, and little besides."""
    model = Tied(width=64)
    big = {"a": np.zeros(2**24, np.uint8), "b": np.ones((1000, 77), np.float32), "model": model}
    big["again"] = [big["a"], model]
    unique = {id(x): x.nbytes for x in jax.tree.leaves(big) if eqx.is_array(x)}  # alive in `big`
    st.save(path, big)
    assert path.stat().st_size <= sum(unique.values()) * 1.001 + 2**16


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


def test_mapped_arrays_live_longer_than_the_file(path):
    tree = {
        "n": np.arange(2**22, dtype=np.float32),
        "j": jnp.arange(2**20),
        "small": np.arange(3),
        "weak": jnp.asarray(1.0),
    }
    st.save(path, tree)
    loaded = st.load(path, mmap=True, verify=False)
    assert_isomorphic(tree, loaded)
    assert not loaded["n"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        loaded["n"][0] = 1
    assert st.load(path)["n"].flags.writeable
    st.save(path, {"n": np.zeros(3)})  # replacing the file leaves what was mapped alone
    path.unlink()
    assert_isomorphic(tree, loaded)
