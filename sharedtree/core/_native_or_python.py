"""Chooses the walk: the native one, in C, or the one in Python, which does the same and is several times slower.

The native walk is used if it was compiled, unless `SHAREDTREE_NATIVE=0` is set or the interpreter has no global lock.

A compiled module may not fit: it was compiled for another interpreter, or from C files of another version than the
Python files. Then it is not used, and there is a warning. To find this out without loading the module, digests are
compared. The compiled file contains the digest of the C files from which it was compiled. In a checkout the C files of
this version lie beside this file. An installed wheel has their digest instead, in `_native_source.py`.
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
    """Loads the native module. Warns if there is one that cannot be used, or if its compilation failed.

    Returns:
        The module and the text "native". If there is no usable module: None and the reason, for `engine`.
    """
    setting = os.environ.get("SHAREDTREE_NATIVE", "")
    if setting.strip().lower() in _OFF:
        return None, f"SHAREDTREE_NATIVE={setting.strip()}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "free-threaded Python"
    try:
        module, fault = _load_matching_module()
    except Exception as error:  # noqa: BLE001 -- a file of that name may do anything when it is loaded
        module, fault = None, f"{type(error).__name__}: {error}"
    if fault is not None:
        return None, _warn_of(fault)
    return (None, "not compiled") if module is None else (module, "native")


def _load_matching_module() -> tuple[Any, str | None]:
    """Finds the native module, checks that it belongs to this version of the package, and loads it.

    Returns:
        A pair:

        - (module, None): the module fits.
        - (None, text): it does not fit, or there is none because the compiler failed. The text is the reason.
        - (None, None): there is none, and nothing has failed.
    """
    # Find the compiled file, without loading it.
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return None, _failure_of_build()
    content = pathlib.Path(spec.origin).read_bytes()
    if not _is_whole(content):
        return None, "the end of its file is missing"
    # Compare the digest of the source with the one in the compiled file.
    digest = _digest_of_source()
    if digest is None:
        return None, "neither its source nor `_native_source.py` is there to tell whether it fits"
    # Only a file that contains the digest is loaded. A file of another version might contain it by accident, in the
    # middle of something else. So after loading, the attribute `built_from` decides.
    if digest.encode() in content:
        module: Any = importlib.import_module(_NAME)
        if module.built_from == digest:
            return module, None
    return None, "it was compiled from another version of its source"


def _failure_of_build() -> str | None:
    """Tells why an installed wheel has no native module.

    Returns:
        A text with the compiler's error, if the compiler failed when the wheel was built. None in a checkout, and for a
        wheel built without a compiler.
    """
    # With source files, this is a checkout, where the module is missing until somebody compiles it.
    if _source_files():
        return None
    # `FAULT` is empty if there was no compiler, or if the module was compiled.
    try:
        fault = importlib.import_module(f"{__package__}._native_source").FAULT
    except (ModuleNotFoundError, AttributeError):
        return None
    # `fault` is the output of the compiler. Its first line is enough here.
    return f"it was not compiled when this was built: {fault.strip().splitlines()[0]}" if fault.strip() else None


def _digest_of_source() -> str | None:
    """Returns the digest of the C files of this version. None if neither the files nor their digest are installed.

    The digest is a SHA-256 of the names and contents of all C files. `hatch_build.py` computes the same.
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
    """Lists the C files and their header, sorted by name. Empty where a wheel was installed."""
    return sorted(pathlib.Path(__file__).parent.glob("_native*.[ch]"))


def _is_whole(content: bytes) -> bool:
    """Returns False for an ELF file with its end missing, True for any other file.

    An interrupted copy leaves such a file. A process crashes if it loads the file and uses the missing part.

    Args:
        content: the bytes of the file.
    """
    # A 64-bit, little-endian ELF file begins with these bytes. Other files are not checked.
    if not content.startswith(b"\x7fELF\x02\x01"):
        return True
    # The header has 64 bytes.
    if len(content) < 64:
        return False
    # The table of sections is the last thing in the file. The header has its start at byte 40, and at byte 58 the size
    # of an entry and the number of entries.
    (start,) = struct.unpack_from("<Q", content, 40)
    entry_size, num_entries = struct.unpack_from("<HH", content, 58)
    return start + entry_size * num_entries <= len(content)


def _warn_of(fault: str) -> str:
    """Warns that the native walk is not used because of `fault`, and returns `fault`."""
    warnings.warn(
        f"The native part of sharedtree cannot be used: {fault}.\n"
        "Everything works without it, but more slowly. Install the package again.",
        RuntimeWarning,
        stacklevel=2,
    )
    return fault


# `native_module` is None if the walk in Python is used. `_reason` says why; with the native walk it is "native".
native_module: Any
native_module, _reason = _load()


def engine() -> str:
    """Returns the name of the walk in use: "native walk", or "walk in Python" with the reason in brackets."""
    return "native walk" if native_module is not None else f"walk in Python ({_reason})"


def start(prepare: Callable[[], bool]) -> None:
    """Prepares the native walk. If that fails, goes back to the walk in Python.

    Args:
        prepare: prepares the native module for this import of the package. Returns False if the module already serves
            an earlier import. It can serve one alone.
    """
    if native_module is None:
        return
    fault = None
    try:
        is_first = prepare()
    except Exception as error:  # noqa: BLE001 -- whatever the native walk lacks, the one in Python does not need
        is_first, fault = False, f"{type(error).__name__}: {error}"
    # Either the preparation has failed, which gives a warning, or the module serves an earlier import.
    if not is_first:
        use_python("it serves an earlier import of the package" if fault is None else _warn_of(fault))


def use_python(reason: str) -> None:
    """Goes back to the walk in Python. Only to be called before the first tree is walked."""
    global native_module, _reason  # noqa: PLW0603 -- only while the package is imported
    native_module, _reason = None, reason
