"""A checkpoint is whole, whatever happens meanwhile: the process is killed, the disk fills up, two save at once."""

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

ROOT = pathlib.Path(__file__).parents[2]
NUM_KILLS = int(os.environ.get("SHAREDTREE_NUM_KILLS", "20"))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")


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
    assert loaded["weight"] is loaded["tied"][0]
    assert loaded["small"][0] is loaded["small"][1]
    assert (loaded["weight"] == number).all()
    assert (np.asarray(loaded["small"][0]) == number).all()
    assert (loaded["odd"] == number).all()
    return number


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".sharedtree-tmp")]


WRITER = textwrap.dedent(
    """
    import sys
    import sharedtree as st
    from tests.serialise.test_killed import model

    path, first, step, size = sys.argv[1], *map(int, sys.argv[2:])
    number = first
    st.save(path, model(number, size))
    print("ready", flush=True)
    while True:
        number = (number + step) % 120
        st.save(path, model(number, size))
        print(number, flush=True)
    """
)


class Writer:
    """A process that saves one model after another to a path, until it is killed."""

    def __init__(self, path, first, step=1, size=300_000):
        arguments = [str(path), str(first), str(step), str(size)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def kill(self):
        """Kills it, and returns the numbers that it has saved."""
        self.process.send_signal(signal.SIGKILL)
        numbers = [int(line) for line in self.process.stdout.read().splitlines() if line.isdigit()]
        self.process.stdout.close()
        assert self.process.wait() == -signal.SIGKILL
        return numbers


FORKER = textwrap.dedent(
    """
    import os, sys, time, warnings
    import sharedtree as st
    from tests.serialise.test_killed import model

    warnings.simplefilter("ignore")  # JAX's about forks: the children make no new arrays of JAX and compute nothing
    path = sys.argv[1]
    models = [model(number) for number in range(100)]
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
    """
)


def test_killed_at_any_moment(tmp_path):
    """What is there is a whole model, whenever the process that saves one after the other is killed."""
    path = tmp_path / "model.safetensors"
    rng = random.Random(0)
    seen, left = set(), 0
    with subprocess.Popen(
        [sys.executable, "-c", FORKER, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for kill in range(NUM_KILLS):
            process.stdin.write(f"{kill}\n")
            process.stdin.flush()
            # Once it has saved, and somewhere in the next saves, however long one takes here.
            child, seconds = process.stdout.readline().split()
            time.sleep(rng.uniform(0, 3) * float(seconds))
            os.kill(int(child), signal.SIGKILL)
            assert process.stdout.readline() == "dead\n"
            seen.add(number_of(path))
            left += bool(temporaries(tmp_path))
            assert len(temporaries(tmp_path)) <= 1
        process.stdin.close()
    assert len(seen) > 1
    assert left  # some were killed in the middle of a save
    st.save(path, model(1))
    assert os.listdir(tmp_path) == [path.name]
    assert number_of(path) == 1


def test_killed_while_saving_for_the_first_time(tmp_path):
    path = tmp_path / "model.safetensors"
    code = f"""
import os, signal, sharedtree as st
from tests.serialise.test_killed import model
st.save({str(path)!r}, model(3), progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(temporaries(tmp_path)) == 1
    st.save(path, model(4))
    assert number_of(path) == 4
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.slow
def test_two_writers(tmp_path):
    """Each reader sees a model that one of them saved, whole; and no temporary file of the living is taken away."""
    path = tmp_path / "model.safetensors"
    first, second = Writer(path, 0, 2), Writer(path, 1, 2)
    seen = set()
    begin = time.monotonic()
    while time.monotonic() < begin + 2 or (seen != {0, 1} and time.monotonic() < begin + 60):
        seen.add(number_of(path) % 2)
    assert first.process.poll() is None
    assert second.process.poll() is None
    numbers = first.kill(), second.kill()
    assert {n % 2 for n in numbers[0]} == {0}
    assert {n % 2 for n in numbers[1]} == {1}
    assert seen == {0, 1}
    st.save(path, model(5))
    assert os.listdir(tmp_path) == [path.name]


# --- full disks ----------------------------------------------------------------------------------------------------


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


def test_a_full_disk(small_disk):
    """At each of many fillings of the disk, saving works or leaves the old model, and nothing beside it."""
    path, filling = small_disk / "model.safetensors", small_disk / "filling"
    st.save(path, model(1))  # 2.4 MB
    failed = 0
    for free in (0, 1, 4095, 4096, 100_000, 2_000_000, 2_399_999, 2_400_000, 2_404_096, 2_410_000, 5_000_000):
        filling.unlink(missing_ok=True)
        if number_of(path) != 1:
            st.save(path, model(1))
        status = os.statvfs(small_disk)
        filling.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free)))
        try:
            st.save(path, model(2))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 -- that it is raised depends on the case
            failed += 1
            assert number_of(path) == 1
        else:
            assert number_of(path) == 2
        assert set(os.listdir(small_disk)) == {path.name, filling.name}
    assert 0 < failed < 11


LIMITED = textwrap.dedent(
    """
    import errno, resource, signal, sys
    import sharedtree as st
    from tests.serialise.test_killed import model

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    try:
        st.save(sys.argv[1], model(2))
    except OSError as error:
        print(errno.errorcode[error.errno])
    """
)


@pytest.mark.parametrize("limit", [1000, 2_400_000])
def test_a_limit_on_the_size_of_files(limit, tmp_path):
    path = tmp_path / "model.safetensors"
    st.save(path, model(1))
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(limit)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout == "EFBIG\n", run.stderr
    assert number_of(path) == 1
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root can write to any folder")
    path = tmp_path / "model.safetensors"
    st.save(path, model(1))
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            st.save(path, model(2))
    finally:
        tmp_path.chmod(0o755)
    assert number_of(path) == 1
