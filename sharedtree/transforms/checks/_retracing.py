"""The traces of a wrapped function: how many there were, and the arguments of the last two.

    f(Net(w, 0.1))      # the number in an Equinox module is static
    f(Net(w, 0.2))      # so this traces and compiles `f` again
    f(Net(w, 0.3))      # and again

If a static value is another one on every call, the function is traced on every call. Then we warn, once.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import Arguments
from ...core._class_attributes import dataclass_fields
from ...core._comparison import short_text
from ...core._errors import Definition, RetraceWarning, warn_about
from ...core._locks import Lock
from ...core._node_types import PYTHON_NUMBERS
from ...core._printing import shown
from ...core._static_values import Incomparable, Static
from ...core._structure import FlatDag, Node, Op, Path, Record
from .._argument_names import Names

_MAX_VALUES = 3
"""The number of values of one static leaf without a warning. The next one warns."""


class Trace(NamedTuple):
    """The arguments with which a function was traced.

    Attributes:
        arguments: all arguments but the static ones. Paths begin with their names.
        leaves: record of a traced leaf → its type, in words.
        static: name of a static argument → its value, in words.
    """

    arguments: FlatDag
    leaves: dict[int, str]
    static: dict[str, str]

    @property
    def names(self) -> list[str]:
        """Names of the arguments, without the static ones."""
        op, _ = self.arguments.records[self.arguments.root]
        return [str(key) for key in op.keys] if type(op) is Node else []


class Traces:
    """The traces of one wrapped function.

    Counts how often nothing but a static value had changed, and warns once.

    Attributes:
        count: how many there were.
        last: the last trace.
        before_last: the one before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Trace | None = None
        self.before_last: Trace | None = None
        # Record → its operations in the traces where only static values had changed. Empty after a warning.
        self._seen: dict[int, list[Op]] = {}
        self._warned = False
        self._lock = Lock()

    def add(self, entered: FlatDag, arguments: Arguments, names: Names) -> None:
        """Counts a trace of the function.

        Args:
            entered: the arguments, without the static ones.
            arguments: all arguments.
            names: names of the function and its arguments.
        """
        trace = _trace_of(entered, arguments, names)
        with self._lock:
            self.count += 1
            self.before_last, self.last = old_trace, _ = self.last, trace
            # If shapes or dtypes have changed, too, JAX would have traced it anyway.
            if self._warned or old_trace is None or old_trace.leaves != trace.leaves:
                return
        records = trace.arguments.records
        old_records = old_trace.arguments.records
        # Not under the lock, since comparing may run a user's `==`, which may call the function.
        changed = _changed_statics(old_records, records)
        # If a value comes again, something else was the reason for the trace, such as the shape of an array.
        new = [record for record in changed if records[record][0] not in self._seen.get(record, ())]
        with self._lock:
            for record in new:
                self._seen.setdefault(record, [old_records[record][0]]).append(records[record][0])
            changed_often = [record for record in new if len(self._seen[record]) > _MAX_VALUES]
            self._warned |= bool(changed_often)
            if self._warned:
                self._seen.clear()
        if changed_often:
            _warn(changed_often[0], old_records[changed_often[0]][0], trace, names.definition)


def _trace_of(entered: FlatDag, arguments: Arguments, names: Names) -> Trace:
    leaves = {record: _type_in_words(leaf) for record, leaf in entered.leaves.items()}
    # The names of static arguments: first those by position, then those by keyword.
    positional = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    static = zip([*positional, *arguments.static], map(shown, arguments.statics), strict=True)
    return Trace(FlatDag(entered.records, entered.root), leaves, dict(static))


def _type_in_words(leaf: Any) -> str:
    weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
    return short_text(leaf, lambda leaf: type(leaf).__name__) + weak


# ---- Static values that changed ----


def _changed_statics(old_records: Sequence[Record], records: Sequence[Record]) -> list[int]:
    """Returns the records with other static values. Empty if anything else differs, too."""
    if len(old_records) != len(records):
        return []
    changed: list[int] = []
    for record, ((old, old_children), (new, children)) in enumerate(zip(old_records, records, strict=True)):
        if old_children != children:
            return []
        if old != new:
            if not _have_one_static_place(old, new):
                return []
            changed.append(record)
    return changed


def _have_one_static_place(old: Op, new: Op) -> bool:
    """Returns True for static leaves of one type, and for nodes of one class with different static values.

    Auxiliary data also lists the attributes and children of a node. A difference in these is no value.
    """
    if type(old) is Static and type(new) is Static:
        return type(old.peek()) is type(new.peek())
    if type(old) is not Node or type(new) is not Node or old.type.cls is not new.type.cls or new.type.is_plain:
        return False
    old_value, new_value = _first_difference(old.aux.peek(), new.aux.peek())
    has_one_type = type(old_value) is type(new_value)
    return has_one_type and type(new_value) is not tuple and not _is_of_package(type(new_value))


def _is_of_package(cls: type) -> bool:
    """Returns True for a class of this package, such as the one for the kinds of a `Module`'s attributes."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _first_difference(left: Any, right: Any) -> tuple[Any, Any]:
    """Finds the first difference between two static values, in tuples, dictionaries and dataclasses too."""
    old: Any = left
    new: Any = right
    while True:
        if isinstance(new, dict) and isinstance(old, dict):
            old, new = tuple(old.items()), tuple(new.items())
        elif (
            type(old) is type(new)
            and hasattr(type(new), "__dataclass_fields__")
            and type(new).__eq__ is not object.__eq__
        ):
            names = [field.name for field in dataclass_fields(type(new)) if field.compare]
            old, new = (tuple([getattr(value, name, None) for name in names]) for value in (old, new))
        if type(new) is not tuple or type(old) is not tuple or len(old) != len(new):
            return old, new
        try:
            differing = [(a, b) for a, b in zip(old, new, strict=True) if Static(a) != Static(b)]
        except Incomparable:
            # This is for a warning, so it raises nothing.
            return old, new
        if not differing:
            return old, new
        old, new = differing[0]


# ---- The warning ----


def _warn(record: int, old_op: Op, trace: Trace, definition: Definition) -> None:
    """Warns of a static value that changes on every call.

    Args:
        record: record of the leaf, or of the node whose auxiliary data changes.
        old_op: what this record was in the trace before, as an `Op` (a node, a leaf or a static value).
        trace: the present trace.
        definition: where the function is defined.
    """
    op = trace.arguments.records[record][0]
    path = trace.arguments.first_paths[record]
    fields = _changed_number_fields(old_op, op) if type(old_op) is Node and type(op) is Node else []
    if fields or (type(op) is Static and type(old_op) is Static and _is_number(old_op.peek(), op.peek())):
        message = _message_about_number(path, op, fields, definition)
    else:
        message = _message_about_other_value(path, old_op, op, definition)
    warn_about(definition, message, RetraceWarning)


def _is_number(old: Any, new: Any) -> bool:
    return type(new) in PYTHON_NUMBERS and type(old) is type(new)


def _changed_number_fields(old: Node, new: Node) -> list[str]:
    """Returns the changed static fields of an Equinox module. Empty if anything but numbers changed."""
    if new.type.convention != "equinox" or not isinstance(new.aux.peek(), tuple) or len(new.aux.peek()) != 2:
        return []
    # Static fields are pairs of a name and a value.
    (old_traced, old_fields), (new_traced, new_fields) = old.aux.peek(), new.aux.peek()
    if old_traced != new_traced or len(old_fields) != len(new_fields):
        return []
    differing = [(a, b) for a, b in zip(old_fields, new_fields, strict=True) if Static(a) != Static(b)]
    for (old_name, old_value), (new_name, new_value) in differing:
        if old_name != new_name or not _is_number(old_value, new_value):
            return []
    return [old_name for (old_name, _), _ in differing]


def _message_about_number(path: Path, op: Op, fields: Sequence[str], definition: Definition) -> str:
    """Returns the message about a number: a static leaf at a path, or in the static fields of a module there."""
    text = jtu.keystr(path)
    if type(op) is Static:
        value, root = f" (now {shown(op.peek())})", str(path[0])
        fix = f"    {root} = sharedtree.tree.at(lambda tree: tree{jtu.keystr(path[1:])}, {root}, jnp.asarray({text}))"
    else:
        value, fix = (
            f", in its static field `{fields[0]}`,",
            f"    {fields[0]}: jax.Array  # not: eqx.field(static=True)",
        )
    return (
        f"The number at `{text}`{value} is static and was another one in each of the last traces of {definition}: each "
        "value is traced and compiled anew. Make it an array, which is traced:\n"
        f"{fix}\n"
        "or, if it hardly ever changes from now on, ignore this. `sharedtree.explain` says what else is static."
    )


def _message_about_other_value(path: Path, old_op: Op, op: Op, definition: Definition) -> str:
    """Returns the message about a static value at a path, with a fix suited to its class."""
    old, new = _first_difference(_value_of(old_op), _value_of(op))
    subject = f"The static value at `{jtu.keystr(path)}` (now {shown(new)}"
    subject += f", before {shown(old)})" if shown(old) != shown(new) else ")"
    start = f"{subject} was another one in each of the last traces of {definition}: each is traced and compiled anew. "
    if type(new).__eq__ is not object.__eq__ or isinstance(new, functools.partial):
        return (
            f"{start}If it can have any number of values, pass it as an array, which is traced. If it has a few, "
            "ignore this. `sharedtree.explain` says what else is static."
        )
    if isinstance(new, types.FunctionType):
        return (
            f"{start}Two functions are equal only if they are one. Make it once, before the first call, or name the "
            "function, and bind what differs with `functools.partial`, which is compared by its parts:\n"
            "    act = functools.partial(leaky_relu, negative_slope=0.1)  # not: lambda x: leaky_relu(x, 0.1)"
        )
    return (
        f"{start}Its class has no `==`, so two instances are equal only if they are one. Make it once, before the "
        f"first call, or say in `{type(new).__name__}` when two are equal:\n"
        "    def __eq__(self, other): return type(other) is type(self) and vars(other) == vars(self)\n"
        "    def __hash__(self): return hash(tuple(vars(self).items()))"
    )


def _value_of(op: Op) -> Any:
    static = op.aux if type(op) is Node else op
    assert type(static) is Static
    return static.peek()
