"""The traces of a wrapped function: how many there were, and what the last two were made with.

A static value that is another one on every call has the function traced on every call, which is said once.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import Arguments
from ...core._class_attributes import dataclass_fields
from ...core._comparison import described
from ...core._errors import RetraceWarning
from ...core._flat_dags import FlatDag
from ...core._locks import Lock
from ...core._printing import shown
from ...core._static_kinds import Incomparable
from ...core._static_values import Static
from ...core._structure import Node, Op, Path, Record
from ...core._traced_leaves_and_identity import PYTHON_NUMBERS
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

    arguments: FlatDag
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

    Also counts how often a static value was all that had changed, and warns once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Trace | None = None
        self.before_last: Trace | None = None
        self._seen: dict[int, list[Op]] = {}
        self._warned = False
        self._lock = Lock()

    def add(self, entered: FlatDag, arguments: Arguments, names: Names) -> None:
        """The function is traced with these arguments."""
        trace = _trace(entered, arguments, names)
        with self._lock:
            self.count += 1
            self.before_last, self.last = before, _ = self.last, trace
            # Where shapes or dtypes have changed, too, JAX would have traced it anyway.
            if self._warned or before is None or before.leaves != trace.leaves:
                return
        records = trace.arguments.records
        # Not under the lock, since comparing may run a user's `==`, which may call the function.
        changed = _changed_statics(before.arguments.records, records)
        # A value that comes again was traced again for another reason, such as the shape of an array.
        new = [number for number in changed if records[number][0] not in self._seen.get(number, ())]
        with self._lock:
            for number in new:
                self._seen.setdefault(number, [before.arguments.records[number][0]]).append(records[number][0])
            often = [number for number in new if len(self._seen[number]) > _ENOUGH]
            self._warned |= bool(often)
            if self._warned:
                self._seen.clear()
        if often:
            _warn(often[0], before.arguments.records[often[0]][0], trace, names.definition)


def _trace(entered: FlatDag, arguments: Arguments, names: Names) -> Trace:
    leaves = {number: _described(leaf) for number, leaf in entered.leaves.items()}
    static = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    named = zip([*static, *arguments.static], map(shown, arguments.statics), strict=True)
    return Trace(FlatDag(entered.records, entered.root), leaves, dict(named))


def _described(leaf: Any) -> str:
    weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
    return described(leaf, lambda leaf: type(leaf).__name__) + weak


def _changed_statics(last: Sequence[Record], records: Sequence[Record]) -> list[int]:
    """The records whose static values differ; none if anything else differs too."""
    if len(last) != len(records):
        return []
    changed: list[int] = []
    for number, ((old, children_before), (new, children)) in enumerate(zip(last, records, strict=True)):
        if children_before != children:
            return []
        if old != new:
            if not _are_static_in_one_place(old, new):
                return []
            changed.append(number)
    return changed


def _are_static_in_one_place(old: Op, new: Op) -> bool:
    """Whether two operations are static leaves of one type, or nodes of one class that differ in a static value.

    Auxiliary data also says which attributes and children there are. Where that differs, it is no value.
    """
    if type(old) is Static and type(new) is Static:
        return type(old.peek()) is type(new.peek())
    if type(old) is not Node or type(new) is not Node or old.type.cls is not new.type.cls or new.type.is_plain:
        return False
    one, other = _first_difference(old.aux.peek(), new.aux.peek())
    return type(one) is type(other) and type(other) is not tuple and not _is_of_package(type(other))


def _is_of_package(cls: type) -> bool:
    """Whether a class is one of ours, as the one that says of which kinds a `Module`'s attributes are."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_number(old: Any, new: Any) -> bool:
    return type(new) in PYTHON_NUMBERS and type(old) is type(new)


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
    op = trace.arguments.records[number][0]
    path = trace.arguments.first_paths[number]
    fields = _static_fields_that_changed(before, op) if type(before) is Node and type(op) is Node else []
    if fields or (type(op) is Static and type(before) is Static and _is_number(before.peek(), op.peek())):
        message = _about_a_number(path, op, fields, definition)
    else:
        message = _about_another_value(path, before, op, definition)
    warn_about(definition, message, RetraceWarning)


def _about_a_number(path: Path, op: Op, fields: Sequence[str], definition: Definition) -> str:
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


def _about_another_value(path: Path, before: Op, op: Op, definition: Definition) -> str:
    old, new = _first_difference(_value_of(before), _value_of(op))
    what = f"The static value at `{jtu.keystr(path)}` (now {shown(new)}"
    what += f", before {shown(old)})" if shown(old) != shown(new) else ")"
    begin = f"{what} was another one in each of the last traces of {definition}: each is traced and compiled anew. "
    if type(new).__eq__ is not object.__eq__ or isinstance(new, functools.partial):
        return (
            f"{begin}If it can have any number of values, pass it as an array, which is traced. If it has a few, "
            "ignore this. `sharedtree.explain` says what else is static."
        )
    if isinstance(new, types.FunctionType):
        return (
            f"{begin}Two functions are equal only if they are one. Make it once, before the first call, or name the "
            "function, and bind what differs with `functools.partial`, which is compared by its parts:\n"
            "    act = functools.partial(leaky_relu, negative_slope=0.1)  # not: lambda x: leaky_relu(x, 0.1)"
        )
    return (
        f"{begin}Its class has no `==`, so two instances are equal only if they are one. Make it once, before the "
        f"first call, or say in `{type(new).__name__}` when two are equal:\n"
        "    def __eq__(self, other): return type(other) is type(self) and vars(other) == vars(self)\n"
        "    def __hash__(self): return hash(tuple(vars(self).items()))"
    )


def _value_of(op: Op) -> Any:
    static = op.aux if type(op) is Node else op
    assert type(static) is Static
    return static.peek()


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """The first part in which two static values differ, as far as tuples, dictionaries and dataclasses lead to it."""
    old: Any = one
    new: Any = other
    while True:
        if isinstance(new, dict) and isinstance(old, dict):
            old, new = tuple(old.items()), tuple(new.items())
        elif (
            type(old) is type(new)
            and hasattr(type(new), "__dataclass_fields__")
            and type(new).__eq__ is not object.__eq__
        ):
            names = [field.name for field in dataclass_fields(type(new)) if field.compare]
            old, new = (tuple([getattr(each, name, None) for name in names]) for each in (old, new))
        if type(new) is not tuple or type(old) is not tuple or len(old) != len(new):
            return old, new
        try:
            differing = [(a, b) for a, b in zip(old, new, strict=True) if Static(a) != Static(b)]
        except Incomparable:  # whoever only warns raises nothing
            return old, new
        if not differing:
            return old, new
        old, new = differing[0]
