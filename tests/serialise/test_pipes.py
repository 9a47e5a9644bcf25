"""A pipe can be opened and read only once. Whatever reads files reads one, and says of it what it says of a file."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.serialise.container import _reading
from tests.processes import HANGS, ROOT, program

W = jnp.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of every kind that is read, in a folder."""
    folder = tmp_path_factory.mktemp("files")
    st.save(folder / "ours", {"embed": W, "head": W, "large": np.zeros(5 * 2**20, np.uint8)})
    theirs = {"a": np.arange(4, dtype=np.int32), "b": np.ones((2, 2), np.float32)}
    safetensors.numpy.save_file(theirs, folder / "theirs", {"by": "them"})
    return folder


READS = {
    "load": ("ours", "st.load(path)['embed'].sum()"),
    "load as any": ("ours", "st.load(path, foreign=True)['embed'].sum()"),
    "load mapped": ("ours", "st.load(path, mmap=True)['large'].shape"),
    "load a part": ("ours", "st.load(path, select=\"['embed']\").sum()"),
    "load tensors": ("theirs", "st.load(path, foreign=True, select=lambda name: name == 'b')['b'].sum()"),
    "load tensors mapped": ("theirs", "st.load(path, foreign=True, mmap=True, select=lambda n: n == 'b')['b'].sum()"),
    "inspect": ("ours", "st.inspect(path)"),
    "audit": ("ours", "st.audit(path)"),
    "verify": ("ours", "st.verify(path)"),
}

PROGRAM = program("read_a_pipe")


@pytest.mark.parametrize("name", READS)
def test_a_named_pipe_is_opened_once(name, files, tmp_path, python):
    file, expression = READS[name]
    lines = python(tmp_path, "-c", PROGRAM, str(files / file), expression, "pipe").splitlines()
    of_file, of_pipe = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert of_file == of_pipe


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        *[
            pytest.param(each, marks=pytest.mark.slow)
            for each in (["--values"], ["--arrays"], ["--json"], ["--depth", "1"])
        ],
    ],
)
@pytest.mark.parametrize("file", ["ours", "theirs"])
def test_show_of_a_pipe_is_that_of_the_file(file, arguments, files, command):
    status, expected, _ = command("show", files / file, *arguments)
    assert status == 0
    with open(files / file, "rb") as source, subprocess.Popen(["cat"], stdin=source, stdout=subprocess.PIPE) as cat:
        program = [sys.executable, "-m", "sharedtree", "show", "/dev/stdin", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": cat.stdout, "capture_output": True, "text": True}
        done = subprocess.run(program, env=env, timeout=HANGS, check=False, **pipes)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected.replace(str(files / file), "/dev/stdin")
    if "--json" in arguments:
        assert json.loads(done.stdout)["file_nbytes"] == (files / file).stat().st_size


class Endless:
    """A pipe into which a program writes for ever, and from which no more than so much is read."""

    def __init__(self, start, again, most):
        self.start, self.again, self.most = start, again, most
        self.at = 0

    def read(self, nbytes):
        self.at += nbytes
        assert self.at <= self.most, "waits for the end"
        whole = self.start + self.again * (self.at // len(self.again) + 1)
        return whole[self.at - nbytes : self.at]


LOOKS = {
    "load": st.load,
    "load as any": lambda file: st.load(file, foreign=True),
    "load mapped": lambda file: st.load(file, mmap=True),
    "inspect": st.inspect,
    "audit": st.audit,
    "verify": st.verify,
}
REFUSED = (st.errors.FormatError, st.errors.CorruptFileError)


@pytest.mark.parametrize(
    "again", [b"y\n", b"\0", b"\xff", b"PK\3\4", b"2026-11-27 a line of a log\n", b"<html>"], ids=repr
)
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_no_file_is_refused_before_its_end(look, again):
    with pytest.raises(REFUSED):
        LOOKS[look](Endless(b"", again, 1000))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_what_goes_on_after_its_end(name, look, files):
    start = (files / name).read_bytes()
    with pytest.raises(REFUSED) as raised:
        LOOKS[look](Endless(start, b"y\n", len(start) + 1))
    if name == "ours" or look == "load as any":
        assert "has at least 1 bytes after the end of its data" in str(raised.value)


def test_no_more_of_a_pipe_is_read_than_there_is(files):
    """Whoever writes to it may wait for an answer."""
    reader, writer = os.pipe()
    os.write(writer, b"no file, but nobody closes the pipe: it is waited for what comes")
    with (
        open(reader, "rb", buffering=0) as file,
        pytest.raises(st.errors.FormatError, match="it begins with b'no file,'"),
    ):
        st.load(file)
    os.close(writer)


def test_a_pipe_that_does_not_block():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    data = st.to_bytes([1])
    with open(reader, "rb", buffering=0) as file:
        for start in (b"", data[:100]):
            os.write(writer, start)
            with pytest.raises(BlockingIOError, match="is in non-blocking mode and has no more bytes yet"):
                st.load(file)
        os.set_blocking(reader, True)
        os.write(writer, data)
        os.close(writer)
        assert st.load(file) == [1]


def test_a_file_that_is_cut_short_before_it_is_mapped(tmp_path):
    path = tmp_path / "model"
    st.save(path, {"w": np.arange(3_000_000.0)})

    def cut(done, total):
        if done == total:
            os.truncate(path, 100)

    with pytest.raises(st.errors.CorruptFileError, match="something is cutting it short meanwhile"):
        st.load(path, mmap=True, progress=cut)


def test_arrays_that_do_not_fit_into_memory(files, monkeypatch):
    def refuse(tensors):
        raise MemoryError

    monkeypatch.setattr(_reading, "memory_for", refuse)
    for name, options in (("ours", {}), ("theirs", {"foreign": True})):
        with pytest.raises(MemoryError, match=r"The arrays of `.*` take [\d,]+ bytes, and this machine does not have"):
            st.load(files / name, **options)
        st.load(files / name, mmap=True, **options)


def test_a_file_object_in_the_middle(files):
    """What stands before is not read, and the file object stays open."""
    for name, key in (("ours", "embed"), ("theirs", "b")):
        with open(files.parent / "before", "wb") as target:
            target.write(b"before" + (files / name).read_bytes())
        for mmap in (False, True):
            with open(files.parent / "before", "rb") as file:
                file.seek(6)
                found = st.load(file, foreign=True, mmap=mmap, select=lambda each, key=key: key in each)
                assert found[key].shape in ((2, 3), (2, 2))
                assert not file.closed
