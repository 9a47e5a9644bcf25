"""A save is whole or has not happened: killed at any moment, with a full disk, with two saves at once."""

import contextlib
import errno
import os
import pathlib
import stat
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import safetensors

from sharedtree.serialise.arrays._host_bytes import tensor_source
from sharedtree.serialise.container import _durable, _writing as _container
from sharedtree.serialise.container._durable import replacing
from sharedtree.serialise.container._reading import open_container
from sharedtree.serialise.container._writing import write

ROOT = pathlib.Path(__file__).parents[2]
NUM_KILLS = int(os.environ.get("SHAREDTREE_NUM_KILLS", "30"))

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX file systems")


def save(path, content):
    with replacing(path) as file:
        file.write(content)


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".sharedtree-tmp")]


def test_new_and_old(tmp_path):
    path = tmp_path / "model.safetensors"
    for content in (b"first", b"second, longer", b"3rd"):
        save(path, content)
        assert path.read_bytes() == content
        assert os.listdir(tmp_path) == [path.name]


def test_nothing_is_at_the_target_before_the_end(tmp_path):
    path = tmp_path / "x"
    with replacing(str(path)) as file:
        file.write(b"half")
        assert not path.exists()
        (temporary,) = temporaries(tmp_path)
        assert temporary.startswith(".x.")
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file(error, tmp_path):
    path = tmp_path / "x"
    save(path, b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    assert file.closed


@posix_only
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_is_by_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        save(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


@posix_only
@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640, 0o664, 0o400, 0o444, 0o777, 0o060])
def test_the_mode_of_what_is_replaced_is_kept(mode, umask, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(mode)
    os.symlink("x", tmp_path / "link")
    before = os.umask(umask)
    try:
        for target, content in ((path, b"new"), (tmp_path / "link", b"newer")):
            with replacing(target) as file:
                (temporary,) = temporaries(tmp_path)
                # Nobody but the owner may ever read what is being written, unless they could read the old file.
                assert not stat.S_IMODE((tmp_path / temporary).stat().st_mode) & ~(mode | 0o600)
                file.write(content)
            assert stat.S_IMODE(path.stat().st_mode) == mode
            path.chmod(mode | 0o400)
            assert path.read_bytes() == content
            path.chmod(mode)
    finally:
        os.umask(before)


@posix_only
def test_special_bits_are_not_passed_on(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o6755)
    save(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@posix_only
def test_a_file_system_without_permissions(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o600)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refuse)
    save(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # not wider than it was


@posix_only
def test_links_stay_links(tmp_path):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "x"
    save(target, b"old")
    os.symlink("there/x", tmp_path / "link")
    os.symlink("link", tmp_path / "link2")
    save(tmp_path / "link2", b"new")
    assert target.read_bytes() == b"new"
    assert os.readlink(tmp_path / "link") == "there/x"
    assert os.readlink(tmp_path / "link2") == "link"
    os.symlink("there/fresh", tmp_path / "dangling")
    save(tmp_path / "dangling", b"fresh")
    assert (tmp_path / "there" / "fresh").read_bytes() == b"fresh"


def test_a_folder_as_the_target(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder. Name a file in it:\n.*model\.safetensors"):
        save(tmp_path, b"")
    os.symlink(tmp_path, tmp_path / "link")
    with pytest.raises(IsADirectoryError):
        save(tmp_path / "link", b"")
    assert not temporaries(tmp_path)


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist. Make it:\n    os.makedirs\("):
        save(tmp_path / "missing" / "x", b"")


@posix_only
def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", os.devnull):
        with pytest.raises(OSError, match="device or a pipe"):
            save(target, b"")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a b\n", ".hidden", "x.y.z", "[a-z]*", "\\d+"])
def test_odd_names(name, tmp_path):
    with contextlib.suppress(ZeroDivisionError), replacing(tmp_path / name):
        raise ZeroDivisionError
    save(tmp_path / name, b"1")
    save(tmp_path / name, b"2")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"2"


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


# --- the order of what is forced to the disk -----------------------------------------------------------------------


@posix_only
def test_data_is_forced_before_the_name_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "data")
        fsync(descriptor)

    def watched_replace(a, b):
        events.append("name")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    if sys.platform == "darwin":
        monkeypatch.setattr(_durable, "_force", os.fsync)
    save(tmp_path / "x", b"1")
    assert events == ["data", "name", "folder"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_of_the_disk_leaves_the_old_file(failing, tmp_path, monkeypatch):
    path = tmp_path / "x"
    save(path, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        save(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


@posix_only
@pytest.mark.parametrize(("code", "raises"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_folders_that_cannot_be_forced(code, raises, tmp_path, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no") if raises else contextlib.nullcontext():
        save(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_without_locks(tmp_path, monkeypatch):
    """As on Windows, and on file systems that have none."""
    monkeypatch.setattr(_durable, "fcntl", None)
    save(tmp_path / "x", b"1")
    save(tmp_path / "x", b"2")
    assert os.listdir(tmp_path) == ["x"]


@posix_only
def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    (tmp_path / f".x.{'0' * 16}.sharedtree-tmp").write_bytes(b"somebody may be writing this")

    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    save(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"
    assert len(temporaries(tmp_path)) == 1


# --- stale temporary files ---------------------------------------------------------------------------------------


def test_stale_files_of_this_target_only_are_removed(tmp_path):
    digits = "0123456789abcdef"
    stale = [f".x.{digits}.sharedtree-tmp", f".x.{digits[::-1]}.sharedtree-tmp"]
    others = [f".y.{digits}.sharedtree-tmp", f".x.y.{digits}.sharedtree-tmp", ".x.sharedtree-tmp", f"x.{digits}",
              f".x.{digits[:-1]}g.sharedtree-tmp"]  # fmt: skip
    for name in stale + others:
        (tmp_path / name).write_bytes(b"stale")
    save(tmp_path / "x", b"new")
    assert set(os.listdir(tmp_path)) == {"x", *others}


@posix_only
def test_links_and_folders_that_look_stale_are_harmless(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.symlink(victim, tmp_path / f".x.{'1' * 16}.sharedtree-tmp")
    (tmp_path / f".x.{'2' * 16}.sharedtree-tmp").mkdir()
    os.mkfifo(tmp_path / f".x.{'3' * 16}.sharedtree-tmp")
    save(tmp_path / "x", b"new")
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "x").read_bytes() == b"new"


@posix_only
def test_a_save_in_progress_is_left_alone(tmp_path):
    path = tmp_path / "x"
    with replacing(path) as outer:
        outer.write(b"outer")
        save(path, b"inner")
        assert path.read_bytes() == b"inner"
        assert len(temporaries(tmp_path)) == 1
    assert path.read_bytes() == b"outer"
    assert os.listdir(tmp_path) == ["x"]


@posix_only
def test_a_file_taken_for_stale_before_it_was_locked(tmp_path, monkeypatch):
    """Another save removes the temporary file between its creation and its lock: a second one is made."""
    import fcntl

    flock, taken = fcntl.flock, []

    def watched(descriptor, operation):
        if not taken:
            (name,) = temporaries(tmp_path)
            taken.append(name)
            os.unlink(tmp_path / name)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    save(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"
    assert taken


@posix_only
def test_many_saves_at_once(tmp_path):
    """One of the contents wins whole, and no save fails or takes another's file away."""
    path, errors = tmp_path / "x", []

    def many(i):
        try:
            for _ in range(20):
                save(path, bytes([i]) * 100_000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            content = path.read_bytes()
            assert len(content) == 100_000
            assert len(set(content)) == 1
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["x"]


# --- killed ------------------------------------------------------------------------------------------------------

# Forks a writer for each line that it reads, lets it save again and again for a moment, and kills it.
KILLER = textwrap.dedent(
    """
    import os, random, signal, struct, sys, time, warnings
    import numpy as np
    from sharedtree.serialise.arrays._host_bytes import tensor_source
    from sharedtree.serialise.container._writing import write
    from sharedtree.serialise.container._durable import replacing

    def save(path, fill):
        array = np.full(2_000_003, fill, np.uint8)
        with replacing(path) as file:
            write(file, [tensor_source("w", array)], "{}", {"fill": str(fill)})

    warnings.simplefilter("ignore")  # JAX's about forks; it is imported here and not used
    path, rng = sys.argv[1], random.Random(0)
    save(path, 250)
    heard, told = os.pipe()
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            begin = time.monotonic()
            save(path, (number + 1) % 250)
            os.write(told, struct.pack("d", time.monotonic() - begin))
            while True:
                number += 1
                save(path, number % 250)
        # Once it has saved, and somewhere in the next saves, however long one takes here.
        (seconds,) = struct.unpack("d", os.read(heard, 8))
        time.sleep(rng.uniform(0, 3) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed", flush=True)
    """
)


@pytest.mark.slow
@posix_only
def test_a_killed_process_leaves_a_whole_file(tmp_path):
    """The file is always one that was saved, and safetensors agrees; the next save clears the rest away."""
    path = tmp_path / "model.safetensors"
    seen, most_left = set(), 0
    with subprocess.Popen(
        [sys.executable, "-c", KILLER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(NUM_KILLS):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            most_left = max(most_left, len(temporaries(tmp_path)))
            with safetensors.safe_open(path, framework="np") as file:
                fill = int(file.metadata()["fill"])
                assert (file.get_tensor("w") == fill).all()
            with open_container(path) as container:
                assert container.damage() == []
            seen.add(fill)
        process.stdin.close()
    save(path, b"next")
    assert os.listdir(tmp_path) == [path.name]
    assert most_left == 1  # some were killed in the middle, and no two were left: each save clears up
    assert len(seen) > 1


# --- when Python ends --------------------------------------------------------------------------------------------

ENDING = textwrap.dedent(
    """
    import atexit, sys, threading
    from tests.serialise.test_durable import save_zeros

    def save():
        threading.main_thread().join()
        save_zeros(sys.argv[1] + "2", 10 * 2**20)

    atexit.register(save_zeros, sys.argv[1] + "1", 10 * 2**20)
    threading.Thread(target=save).start()
    """
)


def test_saves_while_python_ends(tmp_path):
    """In a thread that outlives the main one, and in what runs at exit: executors take no more work then."""
    run = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path / "x")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not run.stderr
    for path in (tmp_path / "x1", tmp_path / "x2"):
        with open_container(path) as container:
            assert container.damage() == []


# --- a full disk -------------------------------------------------------------------------------------------------


def save_zeros(path, nbytes):
    array = np.zeros(nbytes, np.uint8)
    with replacing(path) as file:
        write(file, [tensor_source("w", array)], "{}")


LIMITED = textwrap.dedent(
    """
    import errno, resource, signal, sys
    from tests.serialise.test_durable import save_zeros

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    try:
        save_zeros(sys.argv[1], 3 * 2**20)
    except OSError as error:
        print(errno.errorcode[error.errno])
    """
)


@posix_only
def test_a_limit_on_file_sizes_leaves_the_old_file(tmp_path):
    save(tmp_path / "x", b"old")
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "x")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout == "EFBIG\n"
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_old_file(small_disk):
    path = small_disk / "x"
    save_zeros(path, 3 * 2**20)
    old = path.read_bytes()
    with pytest.raises(OSError, match="No space left") as raised:
        save_zeros(path, 6 * 2**20)
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == old
    assert os.listdir(small_disk) == ["x"]
    save_zeros(path, 4 * 2**20)
    assert path.stat().st_size > 4 * 2**20


def test_a_disk_that_is_full_when_the_digests_are_patched(tmp_path, monkeypatch):
    """The last write of all fails; the digests of a file would otherwise be zeros."""
    path = tmp_path / "x"
    save_zeros(path, 100)
    old = path.read_bytes()
    written = []

    def patched(header, digests):
        written.append(digests)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_container, "seal", patched)
    with pytest.raises(OSError, match="No space left"):
        save_zeros(path, 200)
    assert written
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["x"]
