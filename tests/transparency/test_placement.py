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


@pytest.mark.parametrize("one_of", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_is_where_vanilla_puts_it(one_of):
    assert len(NAMES) == len(set(NAMES))
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.transparency.many_devices", str(one_of)],
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert list(report) == NAMES[::one_of]
    assert {name: difference for name, difference in report.items() if difference is not None} == {}
