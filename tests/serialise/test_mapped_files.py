"""A file that is mapped into memory is written to in place: what is saved, and what is in memory, is what was there."""

import contextlib
import errno
import gc
import gzip
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.container import _mapped_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a file that is mapped is not written to")

N = 300_000
EXPECTED = {"jax": np.arange(N, dtype=np.float32), "numpy": np.arange(N) * 3, "small": np.arange(20.0)}


def opened_by_path(path):
    return open(path, "r+b")


def opened_without_a_buffer(path):
    return open(path, "r+b", buffering=0)


def opened_by_another_name(path):
    os.link(path, path.parent / "another")
    return open(path.parent / "another", "r+b")


def opened_by_a_link(path):
    (path.parent / "link").symlink_to(path)
    return open(path.parent / "link", "r+b")


def opened_by_descriptor(path):
    return os.fdopen(os.open(path, os.O_RDWR), "wb")


OPENED = [
    opened_by_path, opened_without_a_buffer, opened_by_another_name, opened_by_a_link, opened_by_descriptor,
]  # fmt: skip


def saved(path):
    st.save(path, {**EXPECTED, "jax": jnp.asarray(EXPECTED["jax"])})
    return path


def grown(model):
    model["a note"] = "x" * 500


def with_a_first_array(model):
    model["a"] = jnp.full(2_000, -1.0)


def shrunk(model):
    del model["numpy"]


def without_the_first(model):
    del model["jax"]


CHANGES = [grown, with_a_first_array, shrunk, without_the_first]


def assert_expected(model):
    for name in EXPECTED.keys() & model.keys():
        np.testing.assert_array_equal(model[name], EXPECTED[name])


@pytest.mark.parametrize("open_file", OPENED)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(every=3)
def test_a_model_that_is_mapped_from_the_file_it_is_written_to(open_file, change, path):
    model = st.load(saved(path), mmap=True)
    change(model)
    with open_file(path) as file:
        st.save(file, model)
        file.truncate()
    assert st.verify(path)
    loaded = st.load(path)
    assert loaded.keys() == model.keys()
    assert_expected(loaded)
    assert_expected(model)
    assert not model["small"].flags.writeable
    os.unlink(path)
    gc.collect()
    assert_expected(model)


def test_another_model_that_is_mapped_from_the_file(path):
    part = st.load(saved(path), mmap=True, verify=False)["jax"]
    with open(path, "r+b") as file:
        st.save(file, [np.zeros(N)])
        file.truncate(100)  # which would end the process that looks at its mapping
    np.testing.assert_array_equal(part, EXPECTED["jax"])


def test_a_mapping_becomes_memory_only_once(path, monkeypatch):
    model, calls, turn = st.load(saved(path), mmap=True), [], _mapped_files._turn_into_memory
    monkeypatch.setattr(_mapped_files, "_turn_into_memory", lambda mapping: (calls.append(1), turn(mapping)))
    for _ in range(2):
        with open(path, "r+b") as file:
            st.save(file, model)
            file.truncate()
    assert len(calls) == 1
    assert_expected(st.load(path))


@pytest.mark.slow
def test_what_writes_through_another_object(path):
    """A compressed stream has the descriptor of the file below it."""
    model = st.load(saved(path), mmap=True)
    with open(path, "r+b") as below:
        with gzip.open(below, "wb") as file:
            st.save(file, model)
        below.truncate()
    assert_expected(model)
    with gzip.open(path) as file:
        assert_expected(st.load(file))


def test_a_file_elsewhere_or_at_its_end_stays_mapped(path, monkeypatch):
    monkeypatch.setattr(_mapped_files, "_turn_into_memory", lambda mapping: pytest.fail("nothing is overwritten"))
    model = st.load(saved(path), mmap=True)
    with open(path.parent / "elsewhere", "wb") as file:
        st.save(file, model)
    st.save(path.parent / "by path", model)
    with open(path, "ab") as file:
        st.save(file, model)
    assert_expected(st.load(path.parent / "elsewhere"))
    assert_expected(model)


def test_a_new_file_in_the_place_of_the_mapped_one(path):
    model = st.load(saved(path), mmap=True)
    model["a note"] = "x"
    for _ in range(2):
        st.save(path, model)
        assert_expected(st.load(path))
    assert_expected(model)


@pytest.mark.parametrize("put", [np.asarray, np.flip, jax.device_put])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_arrays_that_numpy_has_mapped(put, mode, path):
    np.arange(1_000_000, dtype=np.float32).tofile(path)
    before = path.read_bytes()
    tree = {"a": np.ones(10), "mapped": put(np.memmap(path, np.float32, mode))}
    with open(path, "r+b") as file, pytest.raises(OSError, match=r"the array .*mapped.* is mapped from it") as raised:
        st.save(file, tree)
    assert raised.value.errno == errno.EBUSY
    assert path.read_bytes() == before
    with open(path, "r+b") as file:
        names = {"sharedtree": st, "model": tree, "file": file}
        exec("\n".join(line[4:] for line in str(raised.value).splitlines() if line.startswith("    ")), names)
    np.testing.assert_array_equal(st.load(path)["mapped"], put(np.frombuffer(before, np.float32)))


def test_where_no_mapping_can_become_memory(path, monkeypatch):
    def refuse(mapping):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(_mapped_files, "_turn_into_memory", refuse)
    model = st.load(saved(path), mmap=True)
    before = path.read_bytes()
    with open(path, "r+b") as file:
        for tree in (model, [1]):
            with pytest.raises(OSError, match=r"mapped from it, by `load\(mmap=True\)`") as raised:
                st.save(file, tree)
            assert raised.value.errno == errno.EBUSY
        assert path.read_bytes() == before
        copied = st.copy(model)
        del model, tree, raised
        st.save(file, copied)
        file.truncate()
    assert_expected(st.load(path))


def test_a_file_that_was_emptied_before_it_is_written_to(path):
    """Whoever looked at the arrays would end the process."""
    model = st.load(saved(path), mmap=True)
    with open(path, "wb") as file:
        with pytest.raises(OSError, match="the array .*jax.* and 2 more was mapped from it, and the file has been cut"):
            st.save(file, model)
        st.save(file, {"new": np.ones(3)})
    assert st.load(path)["new"].tolist() == [1, 1, 1]


def test_what_is_no_file_of_the_system_is_not_asked(path):
    class Written:
        """As much of a file as is needed."""

        def __init__(self):
            self.parts = []

        def write(self, data):
            self.parts.append(bytes(data))

        def fileno(self):
            return "none"

    model, file = st.load(saved(path), mmap=True), Written()
    st.save(file, model)
    assert_expected(st.from_bytes(b"".join(file.parts)))
    with contextlib.closing(open(os.devnull, "wb")) as file:
        st.save(file, model)
