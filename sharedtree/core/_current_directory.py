"""Removes the current directory from `sys.path` under `python -m sharedtree`, before it can shadow a library.

`python -m` puts the current directory first on the path. If a user inspects a downloaded file in the folder where it
lies, an `equinox.py` that came with the file would be run. Python imports a package before its `__main__`, so the
package imports this module first, and this module imports nothing but the standard library. Programs that import the
package keep their path. For the console script `sharedtree`, Python does not put the current directory on the path.
"""

import os
import sys


def _is_command_line() -> bool:
    """Returns True if Python was started with `-m sharedtree`, and is still looking for the module."""
    arguments = getattr(sys, "argv", [])
    # Until it has found the module, Python has "-m" in the place of the program's name.
    if arguments[:1] != ["-m"]:
        return False
    # `sys.orig_argv` is the whole command line. `arguments` is its end, with "-m" in the place of the word that has the
    # module's name. This may be an option with the name at its end: `-Bmsharedtree`.
    word = sys.orig_argv[-len(arguments)] if len(arguments) < len(sys.orig_argv) else ""
    module = word.partition("m")[2] if word.startswith("-") else word
    package = __name__.partition(".")[0]
    return module in (package, f"{package}.__main__")


def _current_directory() -> str | None:
    """Returns the current directory; None if it was deleted. Python then has not put it on the path."""
    try:
        return os.getcwd()
    except OSError:
        return None


if _is_command_line() and not sys.flags.safe_path and sys.path[:1] == [_current_directory()]:
    del sys.path[0]
