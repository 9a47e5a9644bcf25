"""Programs in a new process of Python, which has imported nothing yet, or only what takes long."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
HANGS = 3600
"""Seconds that no program takes, on however busy a machine, but one that hangs."""


def program(name):
    """The text of a program in `tests/programs/`, which is run in a process of its own."""
    return (ROOT / "tests" / "programs" / f"{name}.py").read_text()


def run(code, *arguments, cwd=ROOT, options=(), **environment):
    """What a program prints, which has to end well."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-3000:]}"
    return done.stdout


@contextlib.contextmanager
def forking(outputs):
    """Yields a function that runs a program, as `python` is called, and returns its status, output and errors.

    Each program runs in a fork of one process, so that none has to import JAX and the library. It begins with these
    imported, and with no backend of JAX. What it prints goes through files of a folder.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", program("fork_server")], env=env, **pipes) as server:

        def ran(folder, *arguments):
            paths = [outputs / name for name in ("out", "err")]
            print(json.dumps([str(folder), arguments, *map(str, paths)]), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            texts = [path.read_text() for path in paths]
            for path in paths:
                path.unlink()
            return status, *texts

        yield ran
        server.stdin.close()


def start_process(*command, devices):
    """A process of Python in the root of the project, which sees so many devices. Whoever starts it waits for it."""
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def last_lines(runs):
    """What processes that wait for one another print last, if all end well."""
    try:
        ends = [run.communicate(timeout=HANGS) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(err for _, err in ends)
    return [out.splitlines()[-1] for out, _ in ends]
