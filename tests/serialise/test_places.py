"""Where nothing can be saved or loaded: what is said, and that the fix which is offered works. Forks, too."""

import contextlib
import errno
import os
import re
import sys

import pytest

import sharedtree as st
from sharedtree.serialise.container import _writing
from tests.processes import program

PATH_MAX = 4096  # Linux's, with the zero at the end


def code_in(error):
    """What a message offers as code."""
    return "\n".join(line[4:] for line in str(error).splitlines() if line.startswith("    "))


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """A function that makes a folder whose path has so many bytes, and goes into it."""

    def make(nbytes):
        monkeypatch.chdir(tmp_path)
        here = os.fsencode(tmp_path)
        while len(here) < nbytes:
            left = nbytes - len(here) - 1
            name = "d" * min(200, left if left <= 200 else max(1, min(200, left - 2)))
            os.mkdir(name)
            os.chdir(name)
            here += b"/" + name.encode()
        return os.fsdecode(here)

    return make


def test_the_temporary_file_has_a_longer_path(deep):
    folder = deep(PATH_MAX - 30)
    os.chdir("/")
    target = os.path.join(folder, "model")
    with open(target, "wb"):
        pass  # so long a path can be opened
    with pytest.raises(OSError, match="longer than the system takes") as raised:
        st.save(target, [1])
    assert raised.value.errno == errno.ENAMETOOLONG
    exec(code_in(raised.value), {"os": os, "sharedtree": st, "model": [7]})
    assert st.load("model") == [7]
    assert os.listdir() == ["model"]


def test_a_relative_path_in_a_folder_too_deep(deep):
    with contextlib.suppress(OSError):
        deep(PATH_MAX + 200)
    for value in (1, 2):
        st.save("model", [value])
        assert st.load("model") == [value]
    assert os.listdir() == ["model"]


def test_paths_that_are_too_long_altogether(tmp_path):
    for path in (tmp_path / ("n" * 256), tmp_path.joinpath(*["folder"] * 1000)):
        with pytest.raises(OSError, match="than the system takes") as raised:
            st.save(path, [1])
        assert raised.value.errno == errno.ENAMETOOLONG
        assert "makedirs" not in str(raised.value)
        assert not code_in(raised.value)


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    st.save(tmp_path / "model", [1])
    for call in (st.load, st.inspect, lambda path: st.save(path, [1])):
        with pytest.raises(FileNotFoundError, match="begins with `~`") as raised:
            call("~/model")
        assert raised.value.errno == errno.ENOENT
        names = {"os": os}
        exec(code_in(raised.value), names)
        assert names["path"] == str(tmp_path / "model")
        call(names["path"])
    st.save("~model", [2])  # a name like any other
    assert st.load("~model") == [2]
    with pytest.raises(FileNotFoundError) as raised:
        st.load("~nobody_has_this_name/model")
    assert "~`" not in str(raised.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_takes_no_file(number, is_there, tmp_path, monkeypatch):
    """Whoever runs the tests may write everywhere, so the system's answer is made up."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path, real = tmp_path / "folder" / "model", os.open
    path.parent.mkdir()
    if is_there:
        st.save(path, list(range(1000)))

    def refuse(name, *args, **options):
        if str(name).startswith(str(path.parent)) and str(name).endswith(_writing._SUFFIX):
            raise OSError(number, os.strerror(number), name)
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="no file can be made in its folder|cannot be made in its folder") as raised:
        st.save(path, [1])
    assert raised.value.errno == number
    assert raised.value.filename == str(path)
    assert isinstance(raised.value, PermissionError) == (number != errno.EROFS)
    assert _writing._SUFFIX not in str(raised.value)
    exec(code_in(raised.value), {"sharedtree": st, "model": [1], "os": os})
    assert st.load(path if is_there else tmp_path / "model") == [1]


def test_a_file_that_is_mounted_by_itself(tmp_path, monkeypatch):
    """As single files are in containers: it can be written to, and not be replaced."""
    path = tmp_path / "model"
    st.save(path, list(range(1000)))

    def refuse(source, target):
        raise OSError(errno.EBUSY, "Device or resource busy", source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="cannot be replaced: Device or resource busy") as raised:
        st.save(path, [1])
    assert os.listdir(tmp_path) == ["model"]
    exec(code_in(raised.value), {"sharedtree": st, "model": [1]})
    assert st.load(path) == [1]


def test_a_folder_that_may_be_written_to_and_not_read(path, monkeypatch):
    """As one into which everybody drops files. Whoever runs the tests may read everywhere, so the answer is made up."""
    real = os.open

    def refuse(name, flags, *args, **options):
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    for value in (1, 2):
        st.save(path, [value])
        assert st.load(path) == [value]
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_cannot_be_opened_is_found_out_before_anything_is_replaced(path, monkeypatch):
    st.save(path, [1])
    real = os.open

    def refuse(name, flags, *args, **options):
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)
        return real(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        st.save(path, [2])
    assert st.load(path) == [1]
    assert os.listdir(path.parent) == [path.name]


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    for path in (tmp_path / "file" / "model", tmp_path / "file" / "deeper" / "still" / "model"):
        with pytest.raises(NotADirectoryError, match=r"`.*/model` cannot be there: `.*/file` is a file") as raised:
            st.save(path, [1])
        assert raised.value.errno == errno.ENOTDIR
        assert not code_in(raised.value)
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_folder_that_may_not_be_entered(number, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    real = os.stat

    def refuse(name, **options):
        if str(name).startswith(str(tmp_path / "closed")):
            raise OSError(number, os.strerror(number), name)
        return real(name, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(PermissionError, match=r"The folder of `.*` may not be entered") as raised:
        st.save(tmp_path / "closed" / "in it" / "model", [1])
    assert raised.value.errno == number
    exec(code_in(raised.value), {"sharedtree": st, "model": [1], "os": os})
    assert st.load(tmp_path / "model") == [1]


def test_a_folder_that_is_missing_where_none_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileNotFoundError, match=r"does not exist. Save to a folder of your own") as raised:
        st.save(tmp_path / "a" / "b" / "model", [1])
    exec(code_in(raised.value), {"sharedtree": st, "model": [1], "os": os})
    assert st.load(tmp_path / "model") == [1]


@pytest.mark.parametrize("name", ["checkpoints/", "checkpoints//", "checkpoints/.", "checkpoints/x/..", "a/b/"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_path_that_names_a_folder(name, is_there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if is_there:
        os.makedirs("checkpoints/x")
        os.makedirs("a/b")
    with pytest.raises(IsADirectoryError, match=r"folder.* Name a file in it") as raised:
        st.save(name, [1])
    assert raised.value.errno == errno.EISDIR
    assert not any(os.path.isfile(found) for found in ("checkpoints", "a/b"))
    better = eval(code_in(raised.value))
    os.makedirs(os.path.dirname(better), exist_ok=True)
    st.save(better, [1])
    assert st.load(better) == [1]


def test_a_file_with_a_slash_at_its_end(tmp_path):
    st.save(tmp_path / "model", [1])
    with pytest.raises((IsADirectoryError, NotADirectoryError)):
        st.save(f"{tmp_path}/model/", [2])
    assert st.load(tmp_path / "model") == [1]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what has no path there has one that leads nowhere")


@on_linux
def test_a_pipe_that_has_no_path():
    """As `/dev/stdout` is, where a shell has put one, and `>(command)`."""
    reader, writer = os.pipe()
    for folder in ("/dev/fd", "/proc/self/fd"):
        given = f"{folder}/{writer}"
        with pytest.raises(OSError, match=f"`{given}` is a device or a pipe, which cannot be replaced") as raised:
            st.save(given, [1])
        assert (raised.value.errno, raised.value.filename) == (errno.EINVAL, given)
        with eval(code_in(raised.value)) as file:
            st.save(file, [1])
        assert st.from_bytes(os.read(reader, 10_000)) == [1]
    os.close(writer)
    os.close(reader)


@on_linux
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_that_has_no_name_any_more(is_taken, tmp_path):
    with open(tmp_path / "model", "w+b") as file:
        st.save(file, list(range(1000)))
        file.flush()
        os.unlink(tmp_path / "model")
        if is_taken:
            (tmp_path / "model (deleted)").write_bytes(b"another")
        given = f"/dev/fd/{file.fileno()}"
        with pytest.raises(OSError, match="is a file that was deleted") as raised:
            st.save(given, [1])
        assert raised.value.errno == errno.EINVAL
        assert st.load(given) == list(range(1000))
        exec(code_in(raised.value), {"sharedtree": st, "model": [1]})
        assert st.load(given) == [1]
    assert os.listdir(tmp_path) == ["model (deleted)"] * is_taken
    st.save(tmp_path / "model (deleted)", [2])  # a name like any other
    assert st.load(tmp_path / "model (deleted)") == [2]


@on_linux
def test_a_file_by_its_descriptor_has_a_name(tmp_path):
    with open(tmp_path / "model", "wb") as file:
        st.save(f"/dev/fd/{file.fileno()}", [1])
    assert st.load(tmp_path / "model") == [1]


class PathOfBytes:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return os.fsencode(self.path)


def test_a_path_that_is_bytes(tmp_path):
    """What is bytes itself is the content of a file; an object that stands for a path may give them."""
    path = PathOfBytes(tmp_path / "model")
    st.save(path, [1])
    assert st.load(path) == [1]
    st.save(PathOfBytes(tmp_path / "another"), st.load(path))
    assert st.load(tmp_path / "another") == [1]
    with pytest.raises(FileNotFoundError):
        st.load(PathOfBytes(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="begins with `~`"):
        st.load(PathOfBytes("~/model"))


FORKING = program("fork_in_progress")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("how", ["raises", "returns"])
@pytest.mark.parametrize("what", ["save", "stream", "load", "verify"])
def test_a_child_that_progress_forks_leaves_the_work_to_its_parent(how, what, tmp_path, python):
    assert re.fullmatch("well\n", python(tmp_path, "-c", FORKING, how, what))
