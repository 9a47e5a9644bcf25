"""Removes the current directory from `sys.path` under `python -m sharedtree`, before a file in it can shadow a library.

`python -m` puts the current directory first on the path. Without this module, a user who inspects a downloaded file in
its folder would run an `equinox.py` that came with the file. Python imports a package before its `__main__`. So the
package imports this module before all others, and this module imports nothing but the standard library.

Programs that import the package keep their path. For the console script `sharedtree` nothing needs to be done: Python
does not put the current directory on the path.
"""

import os
import sys


def _is_command_line() -> bool:
    """Returns True if Python was started with `-m sharedtree`, and is still looking for the module to run.

    False for the console script `sharedtree`.

    For example, while `python -B -m sharedtree inspect x.safetensors` imports this file:

        sys.orig_argv    ["python", "-B", "-m", "sharedtree", "inspect", "x.safetensors"]
        sys.argv         ["-m", "inspect", "x.safetensors"]
    """
    arguments = getattr(sys, "argv", [])
    # Until it has found the module, Python has "-m" in the place of the program's name.
    if arguments[:1] != ["-m"]:
        return False
    # Both lists end with the arguments for the program. Before them, `sys.argv` has "-m", and `sys.orig_argv` has the
    # word with the module's name. So both stand at the same place, counted from the end. The word may be an option with
    # the name at its end: "-Bmsharedtree". No option letter before the name is an "m" but the one for `-m`.
    word = sys.orig_argv[-len(arguments)] if len(arguments) < len(sys.orig_argv) else ""
    module = word.partition("m")[2] if word.startswith("-") else word
    package = __name__.partition(".")[0]
    return module in (package, f"{package}.__main__")


def _current_directory() -> str | None:
    """Returns the current directory. None if it was deleted: then Python has not put it on the path."""
    try:
        return os.getcwd()
    except OSError:
        return None


# `python -P` (`safe_path`) does not put the current directory on the path.
if _is_command_line() and not sys.flags.safe_path and sys.path[:1] == [_current_directory()]:
    del sys.path[0]
