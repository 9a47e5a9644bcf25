"""Which walk is in use: the native one, in C, or the one in Python, which gives the same and is several times slower.

The native one is used where it was compiled, unless `SHAREDTREE_NATIVE=0` is set or the interpreter has no lock. What
was compiled from another source than the other files belong to, or for another interpreter, is not used, with a
warning. That source lies beside them, or, where a wheel was installed, its digest in `_native_source.py`. What was
compiled has the digest of its own source in it, so a wrong one need not be loaded to be told.
"""

import hashlib
import importlib
import importlib.util
import os
import pathlib
import struct
import sysconfig
import warnings
from collections.abc import Callable
from typing import Any

_NAME = f"{__package__}._native"

# Of `SHAREDTREE_NATIVE`. The same words as in `hatch_build.py`.
_OFF = ("0", "false", "no", "off")


def _load() -> tuple[Any, str]:
    """The native module, or None, and why."""
    asked = os.environ.get("SHAREDTREE_NATIVE", "")
    if asked.strip().lower() in _OFF:
        return None, f"SHAREDTREE_NATIVE={asked.strip()}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "free-threaded Python"
    try:
        native, fault = _fitting()
    except Exception as error:  # noqa: BLE001 -- whatever a file of that name does
        native, fault = None, f"{type(error).__name__}: {error}"
    if fault is not None:
        return None, _refused(fault)
    return native, "not compiled" if native is None else "native"


def _fitting() -> tuple[Any, str | None]:
    """The native module, or None, and what is wrong with it."""
    found = importlib.util.find_spec(_NAME)
    if found is None or found.origin is None:
        return None, _failure_of_build()
    library = pathlib.Path(found.origin).read_bytes()
    if not _is_whole(library):
        return None, "the end of its file is missing"
    digest = _digest_of_source()
    if digest is None:
        return None, "neither its source nor `_native_source.py` is there to tell whether it fits"
    if digest.encode() in library:
        native: Any = importlib.import_module(_NAME)
        if native.built_from == digest:
            return native, None
    return None, "it was compiled from another version of its source"


def _failure_of_build() -> str | None:
    """Why a wheel has no native part although there was a compiler where it was built."""
    if pathlib.Path(__file__).with_name("_native.c").exists():
        return None
    try:
        fault = importlib.import_module(f"{__package__}._native_source").FAULT
    except (ModuleNotFoundError, AttributeError):
        return None
    return f"it was not compiled when this was built: {fault.strip().splitlines()[0]}" if fault.strip() else None


def _digest_of_source() -> str | None:
    source = pathlib.Path(__file__).with_name("_native.c")
    if source.exists():
        return hashlib.sha256(source.read_bytes()).hexdigest()
    try:
        return importlib.import_module(f"{__package__}._native_source").DIGEST
    except ModuleNotFoundError:
        return None


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


def start(begin: Callable[[], bool]) -> None:
    """Lets the native walk begin, or goes back to the one in Python.

    Args:
        begin: tells it what it has to know; False if it knows that already.
    """
    if native is None:
        return
    fault = None
    try:
        is_first = begin()
    except Exception as error:  # noqa: BLE001 -- whatever it lacks, the walk in Python does not
        is_first, fault = False, f"{type(error).__name__}: {error}"
    if not is_first:
        give_up("it serves an earlier import of the package" if fault is None else _refused(fault))
