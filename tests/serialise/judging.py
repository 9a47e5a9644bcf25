"""Whether opening a file did harm: what it raised, what came out, what Python was made to do, and in what memory."""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import sharedtree as st
from sharedtree.cli._show_and_draw import SizedLines

from . import strategies
from .forgeries import Case
from .isomorphic import assert_isomorphic

EXTRA_BYTES = 60 * 2**20
"""Less than the 64 MiB of addresses that glibc reserves when another thread, a timer or one of XLA's, allocates for the
first time. With less it does without; with as much, nothing would be left."""
TRUSTED = (strategies.__name__,)

WATCHED = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "marshal.",
           "pickle.", "code.", "mmap.", "tempfile.", "urllib.", "webbrowser.", "signal.", "sys.settrace",
           "sys.setprofile", "function.__new__", "sys.unraisablehook")  # fmt: skip

_events: list[str] = []
_is_watching = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watching and event.startswith(WATCHED):
        _events.append(f"{event}{arguments!r}"[:300])


@contextlib.contextmanager
def watched():
    global _is_watching
    _events.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False


@contextlib.contextmanager
def with_limited_memory(nbytes: int):
    """No more address space than there is now and `nbytes`. Where there is no such limit, none is set."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _memory_error_in(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def operations_with(like: Any) -> list[tuple[str, Callable[[bytes], Any]]]:
    """What a user does with a file; the first returns what it holds."""
    return [
        ("load", lambda data: st.from_bytes(data, trusted=TRUSTED)),
        ("mapped", lambda data: st.from_bytes(data, trusted=TRUSTED, mmap=True)),
        ("unverified", lambda data: st.from_bytes(data, trusted=TRUSTED, verify=False)),
        ("untrusted", st.from_bytes),
        ("audit", lambda data: str(st.audit(data, trusted=TRUSTED))),
        ("verify", st.verify),
        ("inspect", lambda data: str(st.inspect(data))),
        ("select", lambda data: st.from_bytes(data, trusted=TRUSTED, select="[0]")),
        ("like", lambda data: st.from_bytes(data, trusted=TRUSTED, like=like, strict=False)),
        ("show", lambda data: list(SizedLines(st.inspect(data).lines))),
    ]


def judge(
    case: Case, operation: Callable[[bytes], Any], *, gives_model: bool = True, is_checked: bool = True
) -> tuple[str, str | None]:
    """Opens a file.

    Args:
        case: what to open.
        operation: how.
        gives_model: whether the operation returns the whole model.
        is_checked: whether it looks at the digests of all data, so that nothing but the original may come out.

    Returns:
        "refused", "opened" or "failed", and what went wrong if something did.
    """
    result, raised = None, None
    with with_limited_memory(len(case.data) + EXTRA_BYTES), watched():
        try:
            result = operation(case.data)
        except Exception as error:
            raised = error
    if _events:
        return "failed", f"it did what no file may make it do: {_events}"
    if raised is not None:
        if isinstance(raised, st.SharedTreeError) and str(raised) and not _memory_error_in(raised):
            return "refused", None
        return "failed", f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_exception(raised, limit=-4))}"
    if not gives_model:
        return "opened", None
    expected, found, what = None, result, "another model came out"
    if case.original is not None:
        expected = case.original.tree if is_checked else result
    else:
        what = "a model came out that does not survive saving"
        try:
            expected, found = result, st.from_bytes(st.to_bytes(result), trusted=TRUSTED)
        except Exception as error:
            return "failed", f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    if {"nest_deeply", "unfold"} & {*case.ways}:
        return "opened", None  # the oracle would visit what is shared 3^n times
    try:
        assert_isomorphic(expected, found)
    except AssertionError as error:
        if " object at 0x" not in str(error):  # in a set the oracle cannot tell which bare object is which
            return "failed", f"{what}: {error}\n{traceback.format_exc(limit=-3)}"
    except ValueError as error:
        if case.original is not None or "truth value" not in str(error.__cause__):  # an array that was made aux data
            return "failed", f"the oracle failed: {error}\n{traceback.format_exc(limit=-3)}"
    return "opened", None
