"""A save is whole or has not happened: killed at any moment, with a full disk, with two saves at once."""

import contextlib
import errno
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.serialise.container import _writing as _container

from .tied import ROOT, posix_only

NUM_KILLS = int(os.environ.get("SHAREDTREE_NUM_KILLS", "20"))


def save(path, number, meanwhile=lambda: None):
    """Saves an array that says a number. Of the file not all is written when `meanwhile` is called."""
    st.save(path, np.full(100, number, np.uint8), progress=lambda *_: meanwhile())


def load(path):
    """The number that an array in a file says, which must be whole."""
    (number,) = set(st.load(path).tolist())
    return number


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".sharedtree-tmp")]


@pytest.mark.parametrize("failing", ["the user's code", "Ctrl-C", "fsync", "replace", "the last write"])
def test_whatever_fails_leaves_the_old_file(failing, tmp_path, monkeypatch):
    """The last write of all is that of the digests, which would otherwise be zeros."""
    path = tmp_path / "x"
    save(path, 1)
    errors = {"the user's code": ValueError(), "Ctrl-C": KeyboardInterrupt()}
    error, failed = errors.get(failing, OSError(errno.EIO, "the disk is gone")), []

    def fail(*_):
        failed.append(1)
        raise error

    if failing not in errors:
        where = (_container, "seal") if failing == "the last write" else (os, failing)
        monkeypatch.setattr(*where, fail)
    with pytest.raises(type(error)) as caught:
        save(path, 2, meanwhile=fail if failing in errors else lambda: None)
    monkeypatch.undo()
    assert caught.value is error
    assert failed
    assert load(path) == 1
    assert os.listdir(tmp_path) == ["x"]


@contextlib.contextmanager
def masked(umask):
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@posix_only
def test_the_mode_is_by_umask_or_of_what_is_replaced(tmp_path, monkeypatch):
    path, link = tmp_path / "x", tmp_path / "link"
    os.symlink("x", link)

    def look():
        # Nobody but the owner may ever read what is being written, unless they could read the old file.
        (temporary,) = temporaries(tmp_path)
        assert not mode_of(tmp_path / temporary) & ~(mode | 0o600)

    for umask in (0o022, 0o077, 0o002, 0):
        with masked(umask):
            path.unlink(missing_ok=True)
            save(path, 1)
            assert mode_of(path) == 0o666 & ~umask
            for mode in (0o600, 0o644, 0o640, 0o664, 0o400, 0o444, 0o777, 0o060):
                for target, number in ((path, 2), (link, 3)):
                    path.chmod(mode)
                    save(target, number, meanwhile=look)
                    assert mode_of(path) == mode
                    path.chmod(mode | 0o400)
                    assert load(path) == number
    path.chmod(0o6755)  # special bits are not passed on
    save(path, 1)
    assert mode_of(path) == 0o755
    path.chmod(0o600)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refuse)  # as a file system without permissions does
    save(path, 2)
    assert load(path) == 2
    assert mode_of(path) == 0o600  # not wider than it was


@posix_only
def test_links_stay_links(tmp_path):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "x"
    save(target, 1)
    os.symlink("there/x", tmp_path / "link")
    os.symlink("link", tmp_path / "link2")
    save(tmp_path / "link2", 2)
    assert load(target) == 2
    assert os.readlink(tmp_path / "link") == "there/x"
    assert os.readlink(tmp_path / "link2") == "link"
    os.symlink("there/fresh", tmp_path / "dangling")
    save(tmp_path / "dangling", 3)
    assert load(tmp_path / "there" / "fresh") == 3


def test_targets_that_are_none(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder. Name a file in it:\n.*model\.safetensors"):
        save(tmp_path, 1)
    os.symlink(tmp_path, tmp_path / "link")
    with pytest.raises(IsADirectoryError):
        save(tmp_path / "link", 1)
    with pytest.raises(FileNotFoundError, match=r"does not exist. Make it:\n    os.makedirs\("):
        save(tmp_path / "missing" / "x", 1)
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        for target, is_left in ((tmp_path / "pipe", stat.S_ISFIFO), (os.devnull, stat.S_ISCHR)):
            with pytest.raises(OSError, match="device or a pipe"):
                save(target, 1)
            assert is_left(os.stat(target).st_mode)
    assert not temporaries(tmp_path)


def test_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 255, "é" * 127, "a b\n", ".hidden", "x.y.z", "[a-z]*", "\\d+"):
        with pytest.raises(ZeroDivisionError):
            save(tmp_path / name, 1, meanwhile=lambda: 1 / 0)
        save(tmp_path / name, 1)
        save(name, 2)
        assert os.listdir(tmp_path) == [name]
        assert load(name) == 2
        os.unlink(name)


@posix_only
def test_data_is_forced_before_the_name_and_the_folder_after(tmp_path, monkeypatch):
    events, replace = [], os.replace

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else "data")
        if is_folder and code:
            raise OSError(code, "no")

    def watched_replace(a, b):
        events.append("name")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    if sys.platform == "darwin":
        monkeypatch.setattr(_container, "force_to_disk", fsync)
    # Some file systems have no way to force a folder; a disk that fails is another thing.
    for code in (0, errno.EINVAL, errno.EIO):
        events.clear()
        with pytest.raises(OSError, match="no") if code == errno.EIO else contextlib.nullcontext():
            save(tmp_path / "x", 1)
        assert events == ["data", "name", "folder"]
        assert load(tmp_path / "x") == 1


@pytest.mark.parametrize("lacking", ["the module", pytest.param("the file system's", marks=posix_only)])
def test_without_locks(lacking, tmp_path, monkeypatch):
    """As on Windows, and on file systems that have none: somebody may be writing what looks stale."""

    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    if lacking == "the module":
        monkeypatch.setattr(_container, "fcntl", None)
    else:
        monkeypatch.setattr(_container.fcntl, "flock", flock)
        (tmp_path / f".x.{'0' * 16}.sharedtree-tmp").write_bytes(b"somebody may be writing this")
    before = temporaries(tmp_path)
    for number in (1, 2):
        save(tmp_path / "x", number)
        assert load(tmp_path / "x") == number
        assert {*os.listdir(tmp_path)} == {"x", *before}


@posix_only
def test_stale_files_of_this_target_only_are_removed(tmp_path):
    digits = "0123456789abcdef"
    stale = [f".x.{digits}.sharedtree-tmp", f".x.{digits[::-1]}.sharedtree-tmp"]
    others = [f".y.{digits}.sharedtree-tmp", f".x.y.{digits}.sharedtree-tmp", ".x.sharedtree-tmp", f"x.{digits}",
              f".x.{digits[:-1]}g.sharedtree-tmp"]  # fmt: skip
    for name in stale + others:
        (tmp_path / name).write_bytes(b"stale")
    # Links, folders and pipes that look stale are harmless.
    (tmp_path / "victim").write_bytes(b"precious")
    looking_stale = [tmp_path / f".x.{digit * 16}.sharedtree-tmp" for digit in "123"]
    os.symlink(tmp_path / "victim", looking_stale[0])
    looking_stale[1].mkdir()
    os.mkfifo(looking_stale[2])
    save(tmp_path / "x", 2)
    assert load(tmp_path / "x") == 2
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert {*os.listdir(tmp_path)} - {each.name for each in looking_stale} == {"x", "victim", *others}


@posix_only
def test_a_save_in_progress_is_left_alone(tmp_path):
    path = tmp_path / "x"

    def save_another():
        save(path, 2)
        assert load(path) == 2
        assert len(temporaries(tmp_path)) == 1

    save(path, 1, meanwhile=save_another)
    assert load(path) == 1
    assert os.listdir(tmp_path) == ["x"]


@posix_only
def test_a_file_taken_for_stale_before_it_was_locked(tmp_path, monkeypatch):
    """Another save removes the temporary file between its creation and its lock: a second one is made."""
    flock, taken = _container.fcntl.flock, []

    def watched(descriptor, operation):
        if not taken:
            taken.extend(temporaries(tmp_path))
            os.unlink(tmp_path / taken[0])
        flock(descriptor, operation)

    monkeypatch.setattr(_container.fcntl, "flock", watched)
    save(tmp_path / "x", 1)
    assert load(tmp_path / "x") == 1
    assert taken


def model(number, size=300_000):
    """A model all of which says its number, with a tie, in more than one chunk and in arrays of all sizes."""
    weight = np.full(size, number, np.int64)
    return {
        "number": number,
        "weight": weight,
        "tied": [weight],
        "small": [jnp.full(3, number)] * 2,
        "odd": np.full(7, number, np.int8),
    }


def number_of(path):
    """The number of the model in a file, which must be whole and one model."""
    st.verify(path)
    loaded = st.load(path)
    number = loaded["number"]
    assert (safetensors.numpy.load_file(path)["['tied'][0]"] == number).all()
    assert loaded["weight"] is loaded["tied"][0]
    assert loaded["small"][0] is loaded["small"][1]
    assert (loaded["weight"] == number).all()
    assert (np.asarray(loaded["small"][0]) == number).all()
    assert (loaded["odd"] == number).all()
    return number


PROGRAM = textwrap.dedent(
    """
    import atexit, os, signal, sys, threading, time, warnings
    import numpy as np
    import sharedtree as st
    from tests.serialise.test_durable import model

    warnings.simplefilter("ignore")  # JAX's about forks: the children make no new arrays of JAX and compute nothing
    path = sys.argv[1]
    models = [model(number) for number in range(100)]
    child = os.fork()
    if child == 0:  # dies while it saves to a path where nothing is
        st.save(path + "2", models[0], progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    writers = []
    for number in (1, 2):  # write to one path at a time
        writers.append(os.fork())
        if writers[-1] == 0:
            for _ in range(5):
                st.save(path + "3", models[number])
            os._exit(0)
    print([os.waitpid(writer, 0)[1] for writer in writers], flush=True)
    st.save(path, models[0])
    for line in sys.stdin:  # the number to begin with
        child = os.fork()
        if child == 0:
            number = int(line) + 1
            begin = time.monotonic()
            st.save(path, models[number])
            print(os.getpid(), time.monotonic() - begin, flush=True)
            while True:
                number = (number + 1) % 100
                st.save(path, models[number])
        os.waitpid(child, 0)
        print("dead", flush=True)

    def save(path):
        st.save(path, np.zeros(10 * 2**20, np.uint8))

    def save_at_last():
        threading.main_thread().join()
        save(path + "5")

    atexit.register(save, path + "4")
    threading.Thread(target=save_at_last).start()
    """
)


@pytest.mark.slow
@posix_only
def test_processes_that_write_at_once_are_killed_and_end(tmp_path):
    """What is there is a whole model, whenever the process that saves one after the other is killed.

    While Python ends, a thread that outlives the main one and what runs at exit save, too: executors take no more work
    then.
    """
    path = tmp_path / "model.safetensors"
    died, both, at_exit, at_last = (tmp_path / f"{path.name}{i}" for i in (2, 3, 4, 5))
    rng = random.Random(0)
    seen, left = set(), 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "[0, 0]\n"
        assert number_of(both) in (1, 2)
        for kill in range(NUM_KILLS):
            process.stdin.write(f"{kill}\n")
            process.stdin.flush()
            # Once it has saved, and somewhere in the next saves, however long one takes here.
            child, seconds = process.stdout.readline().split()
            time.sleep(rng.uniform(0, 3) * float(seconds))
            os.kill(int(child), signal.SIGKILL)
            assert process.stdout.readline() == "dead\n"
            seen.add(number_of(path))
            others = [name for name in temporaries(tmp_path) if name.startswith(f".{path.name}.")]
            left += bool(others)
            assert len(others) <= 1  # each save clears up
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert len(seen) > 1
    assert left  # some were killed in the middle of a save
    for each in (at_exit, at_last):
        assert st.verify(each).nbytes == 10 * 2**20
    assert not died.exists()
    assert any(name.startswith(f".{died.name}.") for name in temporaries(tmp_path))
    for each in (path, died):
        st.save(each, model(1))
        assert number_of(each) == 1
    assert {*os.listdir(tmp_path)} == {each.name for each in (path, died, both, at_exit, at_last)}


@posix_only
def test_a_disk_that_is_full_at_any_moment(tmp_path):
    """As with a limit on the size of files, of which Python ignores the signal, so that it is an error."""
    import resource

    path = tmp_path / "model.safetensors"
    limits = (0, 1, 1000, 4096, 100_000, 2_399_999, 2_400_000, 2_410_000, 5_000_000)
    before, failed = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    for limit in limits:
        st.save(path, model(1))  # 2.4 MB
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            st.save(path, model(2))
        except OSError as error:
            assert error.errno == errno.EFBIG  # noqa: PT017 -- that it is raised depends on the case
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert number_of(path) == (1 if failed == limits.index(limit) + 1 else 2)
        assert os.listdir(tmp_path) == [path.name]
    assert 0 < failed < len(limits)
