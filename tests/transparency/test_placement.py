"""Committedness and shardings on eight devices, compared in a process that has them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.transparency.many_devices import cases

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [name for name, _, _ in cases()]


@pytest.fixture(scope="module")
def report():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.transparency.many_devices", ""],
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_everything_is_where_vanilla_puts_it(report, name):
    assert report[name] is None, report[name]


def test_every_case_ran(report):
    assert list(report) == NAMES
    assert len(NAMES) == len(set(NAMES))
