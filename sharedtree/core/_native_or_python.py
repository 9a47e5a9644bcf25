"""Chooses the walk: the native one, in C, or the one in Python, which does the same and is several times slower.

The native one is used if it was compiled, unless `SHAREDTREE_NATIVE=0` is set or the interpreter has no lock.

A native module is not used, with a warning, if it was compiled from another source than the other files belong to, or
for another interpreter. Its source, several C files, lies beside these files; where a wheel was installed, the digest
of the source is in `_native_source.py` instead. The compiled file contains the digest of the source that it was
compiled from, so that a wrong one is recognised without being loaded.
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

# The values of `SHAREDTREE_NATIVE` that turn the native walk off. `hatch_build.py` has the same words.
_OFF = ("0", "false", "no", "off")


def _load() -> tuple[Any, str]:
    """Loads the native module. Returns it, or None, and the reason for `engine` to print."""
    setting = os.environ.get("SHAREDTREE_NATIVE", "")
    if setting.strip().lower() in _OFF:
        return None, f"SHAREDTREE_NATIVE={setting.strip()}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "free-threaded Python"
    try:
        module, fault = _matching_module()
    except Exception as error:  # noqa: BLE001 -- a file of that name may do anything when it is loaded
        module, fault = None, f"{type(error).__name__}: {error}"
    if fault is not None:
        return None, _warn_of(fault)
    return module, "not compiled" if module is None else "native"


def _matching_module() -> tuple[Any, str | None]:
    """Finds the native module and checks that it belongs to this version of the package.

    Returns:
        (the module, None), (None, what is wrong with it), or (None, None) if there is none.
    """
    # Find the compiled file, without loading it.
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return None, _failure_of_build()
    library = pathlib.Path(spec.origin).read_bytes()
    if not _is_whole(library):
        return None, "the end of its file is missing"
    # Compare the digest of the source with the one in the compiled file.
    digest = _digest_of_source()
    if digest is None:
        return None, "neither its source nor `_native_source.py` is there to tell whether it fits"
    # The search in the bytes keeps a wrong module from being loaded. The attribute is the proof.
    if digest.encode() in library:
        module: Any = importlib.import_module(_NAME)
        if module.built_from == digest:
            return module, None
    return None, "it was compiled from another version of its source"


def _failure_of_build() -> str | None:
    """The compiler's error, if a wheel has no native module although there was a compiler where it was built."""
    # In a checkout nothing was promised: the module is missing until somebody compiles it.
    if _source_files():
        return None
    try:
        fault = importlib.import_module(f"{__package__}._native_source").FAULT
    except (ModuleNotFoundError, AttributeError):
        return None
    return f"it was not compiled when this was built: {fault.strip().splitlines()[0]}" if fault.strip() else None


def _digest_of_source() -> str | None:
    """SHA-256 of the C source that belongs to the other files; None if neither it nor its digest is installed.

    It covers the names and contents of all C files. `hatch_build.py` computes the same.
    """
    files = _source_files()
    if files:
        total = hashlib.sha256()
        for file in files:
            total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        return total.hexdigest()
    try:
        return importlib.import_module(f"{__package__}._native_source").DIGEST
    except ModuleNotFoundError:
        return None


def _source_files() -> list[pathlib.Path]:
    """The C files and their header, sorted by name. Empty where a wheel was installed."""
    return sorted(pathlib.Path(__file__).parent.glob("_native*.[ch]"))


def _is_whole(library: bytes) -> bool:
    """False for an ELF file that was cut off: the loader maps what is missing, and using that ends the process."""
    if not library.startswith(b"\x7fELF\x02\x01"):
        return True
    if len(library) < 64:
        return False
    # The table of sections is the last thing in the file.
    (start,), (size, count) = struct.unpack_from("<Q", library, 40), struct.unpack_from("<HH", library, 58)
    return start + size * count <= len(library)


def _warn_of(fault: str) -> str:
    """Warns that the native walk is not used, and returns the reason."""
    warnings.warn(
        f"The native part of sharedtree cannot be used: {fault}.\n"
        "Everything works without it, but more slowly. Install the package again.",
        RuntimeWarning,
        stacklevel=2,
    )
    return fault


native_module: Any
native_module, _reason = _load()


def engine() -> str:
    """Names the walk that is in use, with the reason if it is the one in Python."""
    return "native walk" if native_module is not None else f"walk in Python ({_reason})"


def start(begin: Callable[[], bool]) -> None:
    """Prepares the native walk, or goes back to the one in Python if that fails.

    Args:
        begin: prepares it. Returns False if an earlier import of the package has done so.
    """
    if native_module is None:
        return
    fault = None
    try:
        is_first = begin()
    except Exception as error:  # noqa: BLE001 -- whatever the native walk lacks, the one in Python does not need
        is_first, fault = False, f"{type(error).__name__}: {error}"
    if not is_first:
        give_up("it serves an earlier import of the package" if fault is None else _warn_of(fault))


def give_up(reason: str) -> None:
    """Goes back to the walk in Python. Only before the first tree is walked."""
    global native_module, _reason  # noqa: PLW0603 -- only while the package is imported
    native_module, _reason = None, reason
