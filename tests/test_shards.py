"""Sharding: shard_map, pmap, placement on eight devices and on two processes, in processes that have these."""

import ast
import socket

import jax
import numpy as np
import pytest

from tests import two_processes
from tests.processes import HANGS, last_lines, start_process

ON_EIGHT = ("tests/on_eight_devices.py", "tests/serialise/sharded_arrays.py", "tests/transparency/many_devices.py")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(which):
    """All of them in one process: most of what each takes is to start Python and JAX."""
    run = start_process("-m", "pytest", "-p", "no:cacheprovider", "-m", which, *ON_EIGHT, devices=8)
    out, err = run.communicate(timeout=HANGS)
    assert run.returncode == 0, out[-6000:] + err[-2000:]
    assert "skipped" not in out
    for name in ON_EIGHT if which == "not slow" else ON_EIGHT[1:]:
        assert f"{name} ." in out, name


def results_of(count):
    """What processes that train together end with, each as it says."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    commands = [("-W", "error", "-m", "tests.two_processes", address, str(count), str(i)) for i in range(count)]
    return [ast.literal_eval(line) for line in last_lines([start_process(*command, devices=1) for command in commands])]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(jax.config, "jax_cpu_collectives_implementation"),
    reason="this JAX has no collectives between processes on CPU",
)
def test_two_processes_train_as_one():
    one, other = results_of(2)
    assert one == other
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    np.testing.assert_allclose(one, two_processes.train(mesh), rtol=1e-4, atol=1e-6)
