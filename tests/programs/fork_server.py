"""Runs each program that it reads of in a fork of itself, as `python` would."""

import json
import os
import pathlib
import runpy
import sys
import types

# What takes long to import, so that each fork has it.
import equinox
import jax

import sharedtree


def run(folder, arguments):
    os.chdir(folder)
    sys.argv = arguments[1:] if arguments[0] in ("-c", "-m") else arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.path[0] = folder
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0] == "-c":
        code = arguments[1]
    else:
        main.__file__ = os.path.abspath(arguments[0])
        sys.path[0] = os.path.dirname(main.__file__)
        code = pathlib.Path(main.__file__).read_text()
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
