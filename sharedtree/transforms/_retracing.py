"""A number that is static and changes on every call has the function traced on every call: said once, with the path."""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from .._errors import RetraceWarning
from .._statics import Static
from .._structure import Node, Record, edges
from ._crossing import Entered, Names

_ENOUGH = 3
_NUMBERS = (bool, int, float, complex)


class StaticNumbers:
    """Counts, over the traces of one function, how often each static number was all that had changed."""

    def __init__(self) -> None:
        self._last: Sequence[Record] | None = None
        self._counts: dict[int, int] = {}
        self._warned = False
        self._lock = threading.Lock()

    def traced(self, entered: Entered, names: Names) -> None:
        """The function is traced with these arguments."""
        records = entered.records
        with self._lock:
            last, self._last = self._last, records
            if self._warned or last is None:
                return
            changed = _changed_numbers(last, records)
            for number in changed:
                self._counts[number] = self._counts.get(number, 0) + 1
            often = [number for number in changed if self._counts[number] >= _ENOUGH]
            self._warned = bool(often)
        if often:
            _warn(often[0], entered, names)


def _changed_numbers(last: Sequence[Record], records: Sequence[Record]) -> list[int]:
    """The records whose static numbers differ; none if anything else differs too."""
    if len(last) != len(records):
        return []
    changed: list[int] = []
    for number, ((old, below), (new, below2)) in enumerate(zip(last, records, strict=True)):
        if old == new and below == below2:
            continue
        if below != below2 or not (_is_number_changed(old, new)):
            return []
        changed.append(number)
    return changed


def _is_number_changed(old: Any, new: Any) -> bool:
    if type(old) is Static and type(new) is Static:
        return type(old.peek()) in _NUMBERS and type(old.peek()) is type(new.peek())
    if type(old) is not Node or type(new) is not Node or old.type.cls is not new.type.cls:
        return False
    return bool(_static_field_that_changed(old, new))


def _static_field_that_changed(old: Node, new: Node) -> list[str]:
    """Names of an Equinox module's static fields, if they are numbers and all that differs."""
    if new.type.convention != "equinox" or not isinstance(new.aux.peek(), tuple) or len(new.aux.peek()) != 2:
        return []
    (traced, fields), (traced2, fields2) = old.aux.peek(), new.aux.peek()
    if traced != traced2 or len(fields) != len(fields2):
        return []
    differing = [(a, b) for a, b in zip(fields, fields2, strict=True) if Static(a) != Static(b)]
    if any(a[0] != b[0] or type(a[1]) not in _NUMBERS or type(a[1]) is not type(b[1]) for a, b in differing):
        return []
    return [a[0] for a, _ in differing]


def _warn(number: int, entered: Entered, names: Names) -> None:
    for argument in entered.arguments:
        for found, path in edges(entered.records, [(argument.path, argument.structure.root)]):
            if found == number:
                op = entered.records[number][0]
                text = names.text(argument.position, path)
                value = f" (now {op.peek()!r})" if type(op) is Static else ", a static field of it"
                warnings.warn(
                    f"The number at `{text}`{value} is static and has changed on each of the last calls, so the "
                    "function was traced and compiled each time. Make it an array, which is traced:\n"
                    f"    {text} = jnp.asarray(value)\n"
                    "or, if it hardly ever changes from now on, ignore this.",
                    RetraceWarning,
                    stacklevel=2,
                )
                return
