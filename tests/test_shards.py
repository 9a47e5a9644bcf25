"""Sharding: shard_map, pmap, placement on eight devices and on two processes, in processes that have these."""

import ast
import os
import pathlib
import socket
import subprocess
import sys
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

from tests import on_eight_devices, two_processes

ROOT = pathlib.Path(__file__).parents[1]
NAMES = [name for name in vars(on_eight_devices) if name.startswith("test_")]


def start(*command, devices):
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Each test that ran on eight devices, with what it said if it failed."""
    path = tmp_path_factory.mktemp("eight") / "report.xml"
    pytest_options = ("-q", "-p", "no:cacheprovider", f"--junit-xml={path}")
    run = start("-m", "pytest", *pytest_options, "tests/on_eight_devices.py", devices=8)
    out, err = run.communicate(timeout=300)
    assert path.exists(), out + err
    found: dict[str, list[str]] = {}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        failures = [each.text or "" for each in case if each.tag in ("failure", "error", "skipped")]
        found.setdefault(case.attrib["name"].partition("[")[0], []).extend(failures)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_eight_devices(report, name):
    assert report[name] == [], "\n".join(report[name])


def test_nothing_else_ran(report):
    assert sorted(report) == sorted(NAMES)


def results_of(count):
    """What processes that train together end with, each as it says."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    commands = [("-W", "error", "-m", "tests.two_processes", address, str(count), str(i)) for i in range(count)]
    runs = [start(*command, devices=1) for command in commands]
    try:
        ends = [run.communicate(timeout=240) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * count, "\n".join(err for _, err in ends)
    return [ast.literal_eval(out.splitlines()[-1]) for out, _ in ends]


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_cpu_collectives_implementation"),
    reason="this JAX has no collectives between processes on CPU",
)
def test_two_processes_train_as_one():
    one, other = results_of(2)
    assert one == other
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    np.testing.assert_allclose(one, two_processes.train(mesh), rtol=1e-4, atol=1e-6)
