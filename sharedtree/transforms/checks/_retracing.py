"""The traces of a wrapped function: how many there were, and what the last two were made with.

A number that is static and changes on every call has the function traced on every call. That is said once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import Arguments
from ...core._comparison import described
from ...core._errors import RetraceWarning
from ...core._locks import Lock
from ...core._printing import shown
from ...core._static_values import Static
from ...core._structure import Node, Op, Record
from ...core._traced_leaves_and_identity import PYTHON_NUMBERS
from ...core._trees_taken_apart import Walked
from ...core._warning_source import Definition, warn_about
from .._argument_names import Names

_ENOUGH = 3


class Trace(NamedTuple):
    """The arguments with which a function was traced.

    Attributes:
        arguments: those that are not static; paths begin with their names.
        leaves: the type of each traced leaf, in words.
        static: those that are static, in words, by what they are called.
    """

    arguments: Walked
    leaves: dict[int, str]
    static: dict[str, str]

    @property
    def names(self) -> list[str]:
        """What the arguments are called that are not static."""
        op, _ = self.arguments.records[self.arguments.root]
        return [str(key) for key in op.keys] if type(op) is Node else []


class Traces:
    """The traces of one wrapped function.

    Attributes:
        count: how many there were.
        last: the last one.
        before_last: the one before.

    Also counts how often a static number was all that had changed, and warns once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Trace | None = None
        self.before_last: Trace | None = None
        self._changes: dict[int, int] = {}
        self._warned = False
        self._lock = Lock()

    def add(self, entered: Walked, arguments: Arguments, names: Names) -> None:
        """The function is traced with these arguments."""
        trace = _trace(entered, arguments, names)
        with self._lock:
            self.count += 1
            self.before_last, self.last = before, _ = self.last, trace
            if self._warned or before is None:
                return
        # Not under the lock, since comparing may run a user's `==`, which may call the function.
        changed = _changed_numbers(before.arguments.records, trace.arguments.records)
        with self._lock:
            for number in changed:
                self._changes[number] = self._changes.get(number, 0) + 1
            often = [number for number in changed if self._changes[number] >= _ENOUGH]
            self._warned = bool(often)
        if often:
            _warn(often[0], before.arguments.records[often[0]][0], trace, names.definition)


def _trace(entered: Walked, arguments: Arguments, names: Names) -> Trace:
    leaves = {number: _described(leaf) for number, leaf in entered.leaves.items()}
    static = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    named = zip([*static, *arguments.static], map(shown, arguments.statics), strict=True)
    return Trace(Walked(entered.records, entered.root), leaves, dict(named))


def _described(leaf: Any) -> str:
    weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
    return described(leaf, lambda leaf: type(leaf).__name__) + weak


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
        return type(old.peek()) in PYTHON_NUMBERS and type(old.peek()) is type(new.peek())
    if type(old) is not Node or type(new) is not Node or old.type.cls is not new.type.cls:
        return False
    return bool(_static_fields_that_changed(old, new))


def _static_fields_that_changed(old: Node, new: Node) -> list[str]:
    """Names of an Equinox module's static fields, if they are numbers and all that differs."""
    if new.type.convention != "equinox" or not isinstance(new.aux.peek(), tuple) or len(new.aux.peek()) != 2:
        return []
    (traced, fields), (traced2, fields2) = old.aux.peek(), new.aux.peek()
    if traced != traced2 or len(fields) != len(fields2):
        return []
    differing = [(a, b) for a, b in zip(fields, fields2, strict=True) if Static(a) != Static(b)]
    if any(a[0] != b[0] or type(a[1]) not in PYTHON_NUMBERS or type(a[1]) is not type(b[1]) for a, b in differing):
        return []
    return [a[0] for a, _ in differing]


def _warn(number: int, before: Op, trace: Trace, definition: Definition) -> None:
    path = trace.arguments.first_paths[number]
    text = jtu.keystr(path)
    op = trace.arguments.records[number][0]
    if type(op) is Static:
        value, root = f" (now {shown(op.peek())})", str(path[0])
        fix = f"    {root} = sharedtree.tree.at(lambda tree: tree{jtu.keystr(path[1:])}, {root}, jnp.asarray({text}))"
    else:
        assert type(before) is Node
        assert type(op) is Node
        field = _static_fields_that_changed(before, op)[0]
        value, fix = f", in its static field `{field}`,", f"    {field}: jax.Array  # not: eqx.field(static=True)"
    warn_about(
        definition,
        f"The number at `{text}`{value} is static and has changed on each of the last calls of {definition}, so it was "
        "traced and compiled each time. Make it an array, which is traced:\n"
        f"{fix}\n"
        "or, if it hardly ever changes from now on, ignore this. `sharedtree.explain` says what else is static.",
        RetraceWarning,
    )
