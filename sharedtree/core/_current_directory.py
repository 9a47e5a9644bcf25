"""Takes the current directory off the path of `python -m sharedtree`, before anything is imported that it could hold.

`python -m` puts that directory first. Who looks at a file with the command line stands beside it, and an `equinox.py`
that came with the file would be run. Python imports a package before its `__main__`, so the package imports this first
of all, and nothing here is imported but the standard library. Programs that import the package keep their path. The
console script `sharedtree` has no such entry.
"""

import os
import sys


def _is_command_line() -> bool:
    """Whether Python was started with `-m sharedtree`, and has not found the module yet."""
    arguments = getattr(sys, "argv", [])
    if arguments[:1] != ["-m"]:
        return False
    # What came before the arguments: the name of the module, also as the end of an option such as `-Bmsharedtree`.
    started = sys.orig_argv[-len(arguments)] if len(arguments) < len(sys.orig_argv) else ""
    module = started.partition("m")[2] if started.startswith("-") else started
    package = __name__.partition(".")[0]
    return module in (package, f"{package}.__main__")


def _current_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted, and then it is not on the path
        return None


if _is_command_line() and not sys.flags.safe_path and sys.path[:1] == [_current_directory()]:
    del sys.path[0]
