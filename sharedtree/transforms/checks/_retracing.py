"""The traces of a wrapped function: how many there were, and the arguments of the last two.

    f(Net(w, 0.1))      # the number in an Equinox module is static
    f(Net(w, 0.2))      # so this traces and compiles `f` again
    f(Net(w, 0.3))      # and again

If a static value is different on every call, the function is traced on every call. Then we warn, once.

A *record* is the number of an object in a flat DAG, here of the flattened arguments. The *operation* of a record says
what the object is: a `Node` with its class and auxiliary data, a `Static` with its value, or a traced leaf.
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
"""The number of values of one static leaf that cause no warning. The next value causes one."""


class Trace(NamedTuple):
    """The arguments with which a function was traced.

    Attributes:
        arguments: all arguments but the static ones. Each path begins with the name of an argument.
        leaves: record of a traced leaf → its dtype and shape, in words.
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
    """The traces of one wrapped function: their number, and the last two of them.

    `add` warns if a static value was the reason for several traces. It does so once for each function.

    Attributes:
        count: the number of traces.
        last: the last trace. None if there is none.
        before_last: the trace before the last one. None if there is none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Trace | None = None
        self.before_last: Trace | None = None
        # Record of a static value that caused a trace → the operations that it had, each once. Empty after a warning.
        self._seen: dict[int, list[Op]] = {}
        self._warned = False
        self._lock = Lock()

    def add(self, entered: FlatDag, arguments: Arguments, names: Names) -> None:
        """Counts a trace of the function. Warns if a static value has now caused more than three traces.

        Args:
            entered: the flattened arguments, without the static ones.
            arguments: all arguments.
            names: names of the function and its arguments.
        """
        trace = _trace_of(entered, arguments, names)
        with self._lock:
            self.count += 1
            self.before_last, self.last = old_trace, _ = self.last, trace
            # If shapes or dtypes have changed as well, JAX would have traced the function anyway.
            if self._warned or old_trace is None or old_trace.leaves != trace.leaves:
                return
        records = trace.arguments.records
        old_records = old_trace.arguments.records
        # Not under the lock: a comparison may run a user's `==`, and that may call the function and wait for the lock.
        changed = _changed_statics(old_records, records)
        # A value that was seen before has a trace in JAX's cache. So another change was the reason for this trace.
        new = [record for record in changed if records[record][0] not in self._seen.get(record, ())]
        with self._lock:
            for record in new:
                # The list begins with the value in the trace before.
                self._seen.setdefault(record, [old_records[record][0]]).append(records[record][0])
            changed_often = [record for record in new if len(self._seen[record]) > _MAX_VALUES]
            self._warned |= bool(changed_often)
            if self._warned:
                self._seen.clear()
        if changed_often:
            _warn(changed_often[0], old_records[changed_often[0]][0], trace, names.definition)


def _trace_of(entered: FlatDag, arguments: Arguments, names: Names) -> Trace:
    """Describes the arguments of a trace. Keeps no array alive.

    Args:
        entered: the flattened arguments, without the static ones.
        arguments: all arguments.
        names: names of the function and its arguments.
    """
    leaves = {record: _type_in_words(leaf) for record, leaf in entered.leaves.items()}
    # The names of the static arguments in the order of `statics`: first those by position, which have no name in
    # `arguments.names`, then those by keyword.
    positional = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    static = zip([*positional, *arguments.static], map(shown, arguments.statics), strict=True)
    return Trace(FlatDag(entered.records, entered.root), leaves, dict(static))


def _type_in_words(leaf: Any) -> str:
    """Describes the type by which JAX caches a trace: dtype and shape, or the class of a Python number."""
    weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
    return short_text(leaf, lambda leaf: type(leaf).__name__) + weak


# ---- Static values that changed ----


def _changed_statics(old_records: Sequence[Record], records: Sequence[Record]) -> list[int]:
    """Finds the records whose static values changed from one trace to the next.

    Args:
        old_records: the table of the earlier trace: the operation of each record, with its children.
        records: the table of the later trace.

    Returns:
        The records. Empty if the tables differ in anything but static values.
    """
    if len(old_records) != len(records):
        return []
    changed: list[int] = []
    for record, ((old, old_children), (new, children)) in enumerate(zip(old_records, records, strict=True)):
        if old_children != children:
            return []
        if old != new:
            # A difference that is no value: the structure changed.
            if not _differ_in_static_value(old, new):
                return []
            changed.append(record)
    return changed


def _differ_in_static_value(old: Op, new: Op) -> bool:
    """Returns True if two operations differ in a static value alone: that of a static leaf, or one in a node.

    Of two nodes, the first values count in which their auxiliary data differ. Both values must be of one class: `1` and
    `1.0` count as a change of the structure. Auxiliary data also list the names of a node's attributes and children. If
    these lists differ in length, returns False.
    """
    if type(old) is Static and type(new) is Static:
        return type(old.peek()) is type(new.peek())
    if type(old) is not Node or type(new) is not Node or old.type.cls is not new.type.cls or new.type.is_plain:
        return False
    old_value, new_value = _first_difference(old.aux.peek(), new.aux.peek())
    # Two tuples of different lengths may be the names of a node's attributes: then the structure changed. The same
    # holds for an object of one of this package's own classes: it may say of which kind an attribute is.
    has_one_type = type(old_value) is type(new_value)
    return has_one_type and type(new_value) is not tuple and not _is_of_package(type(new_value))


def _is_of_package(cls: type) -> bool:
    """Returns True for a class of this package, such as the one for the kinds of a `Module`'s attributes."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _first_difference(left: Any, right: Any) -> tuple[Any, Any]:
    """Finds the innermost parts in which two static values first differ.

    Goes into tuples, dictionaries and dataclasses, as long as both values have equally many parts.

    Returns:
        The part of the left value, and the part of the right value. If two parts on the way down cannot be compared,
        the search ends at the values that hold them.
    """
    old: Any = left
    new: Any = right
    # Each round goes one level down.
    while True:
        # Make tuples of dictionaries, and of dataclasses that are compared by their fields.
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
            # An `==` raised an error or returned an array. A warning is no reason to raise, so the search ends here.
            return old, new
        if not differing:
            return old, new
        old, new = differing[0]


# ---- The warning ----


def _warn(record: int, old_op: Op, trace: Trace, definition: Definition) -> None:
    """Warns of a static value that changes on every call.

    Args:
        record: record of the static leaf, or of the node whose auxiliary data changes.
        old_op: operation of this record in the trace before.
        trace: the present trace.
        definition: where the function is defined.
    """
    op = trace.arguments.records[record][0]
    path = trace.arguments.first_paths[record]
    # The advice for a number is to make it an array.
    fields = _changed_number_fields(old_op, op) if type(old_op) is Node and type(op) is Node else []
    if fields or (type(op) is Static and type(old_op) is Static and _is_number(old_op.peek(), op.peek())):
        message = _message_about_number(path, op, fields, definition)
    else:
        message = _message_about_other_value(path, old_op, op, definition)
    warn_about(definition, message, RetraceWarning)


def _is_number(old: Any, new: Any) -> bool:
    """Returns True for two Python numbers of one class."""
    return type(new) in PYTHON_NUMBERS and type(old) is type(new)


def _changed_number_fields(old: Node, new: Node) -> list[str]:
    """Returns the names of the changed static fields of an Equinox module.

    Empty if another change than that of a number is among them, or if the node is no Equinox module.
    """
    # Equinox's auxiliary data is a pair: the names of the traced fields, and the static fields.
    if new.type.convention != "equinox" or not isinstance(new.aux.peek(), tuple) or len(new.aux.peek()) != 2:
        return []
    # Each static field is a pair of its name and its value.
    (old_traced, old_fields), (new_traced, new_fields) = old.aux.peek(), new.aux.peek()
    if old_traced != new_traced or len(old_fields) != len(new_fields):
        return []
    differing = [(a, b) for a, b in zip(old_fields, new_fields, strict=True) if Static(a) != Static(b)]
    for (old_name, old_value), (new_name, new_value) in differing:
        if old_name != new_name or not _is_number(old_value, new_value):
            return []
    return [old_name for (old_name, _), _ in differing]


def _message_about_number(path: Path, op: Op, fields: Sequence[str], definition: Definition) -> str:
    """Returns the message about a number.

    Args:
        path: path of the number, or of the module with the number in a static field.
        op: operation of the number or the module.
        fields: the changed static fields of the module. Empty for a number that is a static leaf.
        definition: where the function is defined.
    """
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
        f"The static number at `{text}`{value} was different in each of the last traces of {definition}, so each "
        "value is traced and compiled anew. Make it an array, which is traced:\n"
        f"{fix}\n"
        "If it rarely changes from now on, ignore this. `sharedtree.explain` lists the other static values."
    )


def _message_about_other_value(path: Path, old_op: Op, op: Op, definition: Definition) -> str:
    """Returns the message about a static value that is no number, with a fix for its class.

    Args:
        path: path of the value, or of the node with the value in its auxiliary data.
        old_op: operation at this path in the trace before.
        op: operation at this path in the present trace.
        definition: where the function is defined.
    """
    old, new = _first_difference(_value_of(old_op), _value_of(op))
    text, name = jtu.keystr(path), type(new).__name__
    # The class has an `==`, so equal values share a trace. Partials have none, but `Static` compares their parts.
    if type(new).__eq__ is not object.__eq__ or isinstance(new, functools.partial):
        before = f", before {shown(old)}" if shown(old) != shown(new) else ""
        return (
            f"The static value at `{text}` (now {shown(new)}{before}) was different in each of the last traces of "
            f"{definition}, so each value is traced and compiled anew. If it can have any number of values, "
            "pass it as an array, which is traced. If it has a few, ignore this. `sharedtree.explain` lists the other "
            "static values."
        )
    if isinstance(new, types.FunctionType):
        return (
            f"The static value at `{text}` was another function object in each of the last traces of {definition}, so "
            "each is traced and compiled anew. Two functions are equal only if they are the same object. Make it once, "
            "before the first call, or use a named function and bind the values that differ with `functools.partial`, "
            "which is compared by its parts:\n"
            "    act = functools.partial(leaky_relu, negative_slope=0.1)  # not: lambda x: leaky_relu(x, 0.1)"
        )
    return (
        f"The static value at `{text}` was another `{name}` object in each of the last traces of {definition}, so each "
        "is traced and compiled anew. Its class has no `==`, so two are equal only if they are the same object. Make "
        f"it once, before the first call, or define in `{name}` when two are equal:\n"
        "    def __eq__(self, other): return type(other) is type(self) and vars(other) == vars(self)\n"
        "    def __hash__(self): return hash(tuple(vars(self).items()))"
    )


def _value_of(op: Op) -> Any:
    """Returns the value of a static leaf, or the auxiliary data of a node."""
    static = op.aux if type(op) is Node else op
    assert type(static) is Static
    return static.peek()
