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


def run(code, *arguments, cwd=ROOT, options=(), **environment):
    """What a program prints, which has to end well."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-3000:]}"
    return done.stdout


FORKING = """
import json, os, runpy, sys, types
import equinox, jax, sharedtree

def run(folder, arguments):
    os.chdir(folder)
    sys.argv = arguments[1:] if arguments[0] in ("-c", "-m") else arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.path[0] = folder
        return runpy._run_module_as_main(arguments[1])
    if arguments[0] == "-c":
        code = arguments[1]
    else:
        main.__file__ = os.path.abspath(arguments[0])
        sys.path[0] = os.path.dirname(main.__file__)
        code = open(main.__file__).read()
    exec(compile(code, getattr(main, "__file__", "<string>"), "exec"), main.__dict__)

for line in sys.stdin:
    folder, arguments, *outputs = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            run(folder, arguments)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that runs others as Python does, each in a fork of itself: none has to import JAX and the library."""


@contextlib.contextmanager
def forking(outputs):
    """A function that runs programs, as `python` is called, and returns their status, what they print and their errors.

    They begin with the library imported, and no backend of JAX's. What is printed goes through files of a folder.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKING], env=env, **pipes) as server:

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
