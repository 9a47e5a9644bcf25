"""Which walk is in use: the native one, in C, or the one in Python, which gives the same and is several times slower.

The native one is used where it was compiled, unless `SHAREDTREE_NATIVE=0` is set or the interpreter has no lock. What
was compiled from another source than the one that lies beside it, or for another interpreter, is not used, with a
warning.
"""

import hashlib
import importlib
import importlib.util
import os
import pathlib
import struct
import sysconfig
import warnings
from typing import Any

_NAME = f"{__package__}._native"


def _load() -> tuple[Any, str]:
    """The native module, or None, and why."""
    if os.environ.get("SHAREDTREE_NATIVE") == "0":
        return None, "SHAREDTREE_NATIVE=0"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "free-threaded Python"
    found = importlib.util.find_spec(_NAME)
    if found is None or found.origin is None:
        return None, "not compiled"
    source = pathlib.Path(__file__).with_name("_native.c")
    try:
        if not _is_whole(pathlib.Path(found.origin).read_bytes()):
            return None, _refused("the end of its file is missing")
        native: Any = importlib.import_module(_NAME)
        if source.exists() and hashlib.sha256(source.read_bytes()).hexdigest() != native.built_from:
            return None, _refused("it was compiled from another version of its source")
    except Exception as error:  # noqa: BLE001 -- whatever a file of that name does
        return None, _refused(f"{type(error).__name__}: {error}")
    return native, "native"


def _is_whole(library: bytes) -> bool:
    """False for an ELF file that was cut off: the loader maps what is missing, and using that ends the process."""
    if not library.startswith(b"\x7fELF\x02\x01"):
        return True
    if len(library) < 64:
        return False
    # The table of sections is the last thing in the file.
    (start,), (size, count) = struct.unpack_from("<Q", library, 40), struct.unpack_from("<HH", library, 58)
    return start + size * count <= len(library)


def _refused(reason: str) -> str:
    warnings.warn(
        f"The native part of sharedtree cannot be used: {reason}.\n"
        "Everything works without it, but more slowly. Install the package again.",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


native: Any
native, _reason = _load()


def engine() -> str:
    """Which walk is in use, in words."""
    return "native walk" if native is not None else f"walk in Python ({_reason})"


def give_up(reason: str) -> None:
    """Goes back to the walk in Python, before anything was walked."""
    global native, _reason  # noqa: PLW0603 -- only while the package is imported
    native, _reason = None, reason
