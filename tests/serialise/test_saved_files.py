"""Where a model can be saved to and loaded from; metadata, progress, and what is found if a file was changed."""

import io
import os
import stat
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st

from .isomorphic import assert_isomorphic
from .tied import Tied, posix_only


def test_the_same_bytes_everywhere(path, getkey):
    model = Tied(getkey())
    data = st.to_bytes(model)
    st.save(path, model)
    assert path.read_bytes() == data
    st.save(str(path), model)
    assert path.read_bytes() == data
    memory = io.BytesIO(b"before")
    memory.seek(6)
    st.save(memory, model)
    assert memory.getvalue() == b"before" + data
    memory.seek(6)
    with open(path, "r+b") as buffered, open(path, "rb", buffering=0) as raw:
        for where in (
            path,
            str(path),
            os.fsencode(path).decode(),
            memory,
            buffered,
            raw,
            data,
            bytearray(data),
            memoryview(data),
        ):
            assert_isomorphic(model, st.load(where, trusted=Tied))
    assert not memory.closed


def test_a_pipe(getkey):
    model = Tied(getkey())
    read, write = os.pipe()
    received = []

    def receive():
        with os.fdopen(read, "rb") as file:
            received.append(st.load(file, trusted=Tied))

    thread = threading.Thread(target=receive)
    thread.start()
    with os.fdopen(write, "wb") as file:
        st.save(file, model)
    thread.join()
    assert_isomorphic(model, received[0])


def test_metadata(path):
    st.save(path, [1], metadata={"run": "7", "note": "ä\n\"'", "": ""})
    assert st.inspect(path).metadata == {"run": "7", "note": "ä\n\"'", "": ""}
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["run"] == "7"
    before = path.read_bytes()
    for bad in ({"sharedtree": "x"}, {"sharedtree.more": "x"}, {"a": 1}, {1: "a"}):
        with pytest.raises(ValueError, match="metadata"):
            st.save(path, [2], metadata=bad)
    assert path.read_bytes() == before


@posix_only
def test_the_mode_is_by_umask_and_links_stay(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "real" / "model.safetensors")
    before = os.umask(0o027)
    try:
        st.save(link, [jnp.ones(3)])
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert stat.S_IMODE((tmp_path / "real" / "model.safetensors").stat().st_mode) == 0o640
    assert st.load(link)[0].shape == (3,)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        st.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="makedirs"):
        st.save(tmp_path / "no" / "folder", 1)
    with pytest.raises(IsADirectoryError):
        st.save(tmp_path, 1)
    with pytest.raises(TypeError, match="binary"):
        st.load(io.StringIO("x"))


@pytest.mark.parametrize("size", [0, 3, 10 * 2**20])
def test_progress(size, path):
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


def test_a_progress_bar(path, capsys):
    st.save(path, [np.zeros(100)], progress=True)
    st.load(path, progress=True)
    text = capsys.readouterr().err
    assert "saving" in text
    assert "loading" in text


def test_progress_that_raises_leaves_the_old_file(path):
    st.save(path, "old")
    with pytest.raises(ZeroDivisionError):
        st.save(path, np.zeros(10), progress=lambda done, total: 1 / 0)
    assert st.load(path) == "old"
    assert os.listdir(path.parent) == [path.name]


# --- files that were changed ----------------------------------------------------------------------------------------


def damaged(path, tree, *, at_end=True):
    st.save(path, tree)
    data = bytearray(path.read_bytes())
    data[-1 if at_end else 60] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_in_the_data(mmap, path):
    tree = {"a": np.arange(8, dtype=np.uint64), "b": np.arange(3, dtype=np.uint8)}
    damaged(path, tree)
    with pytest.raises(st.CorruptFileError, match="`.'b'.`") as raised:
        st.load(path, mmap=mmap)
    assert "verify=False" in str(raised.value)
    loaded = st.load(path, mmap=mmap, verify=False)
    np.testing.assert_array_equal(loaded["a"], tree["a"])
    assert loaded["b"].tolist() == [0, 1, 3]
    with pytest.raises(st.CorruptFileError):
        st.verify(path)
    assert st.load(path, mmap=mmap, select="['a']").tolist() == list(range(8))  # only what is read is checked


def test_all_damage_is_listed(path):
    tree = {name: np.full(64, i, np.uint8) for i, name in enumerate("abcd")}
    st.save(path, tree)
    data = bytearray(path.read_bytes())
    for tensor in (0, 2):
        data[len(data) - 4 * 64 + 64 * tensor] ^= 255
    path.write_bytes(data)
    with pytest.raises(st.CorruptFileError) as raised:
        st.verify(path)
    text = str(raised.value)
    assert "['a']" in text
    assert "['c']" in text
    assert "['b']" not in text
    assert set(raised.value.paths) == {"['a']", "['c']"}


def test_a_flipped_bit_in_the_header(path):
    damaged(path, [1], at_end=False)
    for read in (st.load, st.verify, st.audit, st.inspect):
        with pytest.raises((st.CorruptFileError, st.FormatError)):
            read(path)


def test_other_files(path):
    path.write_bytes(b"")
    with pytest.raises(st.FormatError, match="is empty"):
        st.load(path)
    path.write_bytes(b"PK\x03\x04 not this one" * 10)
    with pytest.raises(st.FormatError, match="not a sharedtree file"):
        st.load(path)
    safetensors.numpy.save_file({"a": np.ones(2)}, path)
    with pytest.raises(st.FormatError, match=r"safetensors\.numpy\.load_file"):
        st.load(path)
