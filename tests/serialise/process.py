"""Programs in a new process of Python, which has imported nothing yet."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
HANGS = 3600
"""Seconds that no program takes, on however busy a machine, but one that hangs."""


def run(code, *arguments, cwd=ROOT, options=(), **environment):
    """What a program prints, which has to end well."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-3000:]}"
    return done.stdout
