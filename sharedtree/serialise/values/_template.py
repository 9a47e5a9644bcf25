"""A template compared with what a file holds: names, shapes, dtypes and ties, all differences at once."""

import collections
import enum
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from ..._assigned_values import PARAMETER, STATE, SUBTREE
from ..._attribute_kinds import kinds_in
from ..._errors import StructureMismatchError
from ..._node_types import is_namedtuple
from ..._printable import printable
from ..._sharing import name_of
from ..._statics import Static
from ..._structure import LEAF, Node
from ..._ties import ReadTree, can_be_tied, read_tree, read_values_once
from ..trust._classes import kind_of
from ._instances import library_of

_MAX_LISTED = 100


class Difference(NamedTuple):
    """One thing in which a file and a template differ.

    Attributes:
        path: where.
        in_file: what the file has there.
        in_template: what the template has there.
    """

    path: str
    in_file: str
    in_template: str

    def __str__(self) -> str:
        return printable(f"`{self.path}`: the file has {self.in_file}, the template {self.in_template}")


class LoadReport(NamedTuple):
    """What `load(..., like=template, strict=False)` did.

    Attributes:
        loaded: the paths whose arrays came from the file.
        kept: the paths whose arrays are the template's, since the file has none that fits.
        differences: everything in which the two differ, static values outside of modules included.
        unused: the names of the arrays of the file that found no place: the second of two where the template has one
            object, and whatever the template does not have, or has in another form.
    """

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    differences: tuple[Difference, ...]
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} arrays loaded, {len(self.kept)} kept from the template"]
        lines += [f"    kept `{printable(path)}`" for path in self.kept]
        lines += [f"    not used of the file: `{printable(name)}`" for name in self.unused]
        lines += [f"    {difference}" for difference in self.differences]
        return "\n".join(lines)


class Comparison(NamedTuple):
    """A file's tree beside a template.

    Attributes:
        template: the template, taken apart.
        fitting: record of the template → the file's traced leaf at the same place, where shape and dtype are the same.
        differences: everything in which the two differ, but for those.
        values: static values outside of modules that differ.
    """

    template: ReadTree
    fitting: dict[int, Any]
    differences: list[Difference]
    values: list[Difference]


def compare(held: Any, template: Any, kind_of: Callable[[Any], str | None] | None = None) -> Comparison:
    """Compares what a file holds with a template.

    Args:
        held: the file's tree, with a `jax.ShapeDtypeStruct` for each array.
        template: any tree. Of its arrays only shapes, dtypes, weak types and whether they are JAX's or NumPy's matter.
            A `ShapeDtypeStruct` in it stands for both kinds of array. What is static in a module is compared strictly,
            where it is plain; elsewhere only its type must be the same.
        kind_of: what the description of an array in `held` stands for, "jax" or "numpy"; None if for nothing else.

    Cost: one visit for each pair of nodes.
    """
    file, own = read_values_once(held), read_tree(template)
    fitting: dict[int, Any] = {}
    found: list[Difference] = []
    in_file: dict[int, tuple[int, str]] = {}  # record of the file → that of the template that it met first, and where
    in_template: dict[int, tuple[int, str]] = {}
    values: list[Difference] = []
    seen: set[tuple[int, int, bool]] = set()
    stack: list[tuple[int, int, str, bool, bool]] = [(file.structure.root, own.structure.root, "", False, False)]
    while stack:
        left, right, path, is_told, in_module = stack.pop()
        if (left, right, in_module) in seen:
            continue
        seen.add((left, right, in_module))
        (op, children), (other, others) = file.structure.records[left], own.structure.records[right]
        if not is_told and can_be_tied(op) and can_be_tied(other):
            tie = _tie(in_file.setdefault(left, (right, path)), right, path)
            lost = _tie(in_template.setdefault(right, (left, path)), left, path)
            if tie is not None or lost is not None:
                is_told = True  # what is in a module parts with it, and need not be listed
                first = tie or lost
                found.append(Difference(path, *_PARTED[tie is None].format(first).split("|")))
        if type(op) is Node and type(other) is Node and op.type.cls is other.type.cls:
            if not op.type.is_plain:
                in_module = True
                found += _static_differences(path, op, other)
            here = {jtu.keystr((key,)): child for key, child in zip(op.keys, children, strict=True)}
            there = {jtu.keystr((key,)): child for key, child in zip(other.keys, others, strict=True)}
            for step in reversed({**here, **there}):
                if step not in there:
                    found.append(Difference(path + step, name_of(file.structure.records[here[step]][0]), "nothing"))
                elif step not in here:
                    found.append(Difference(path + step, "nothing", name_of(own.structure.records[there[step]][0])))
                else:
                    stack.append((here[step], there[step], path + step, is_told, in_module))
            continue
        if type(op) is Node or type(other) is Node:
            found.append(Difference(path, name_of(op), name_of(other)))
            continue
        one, two = _value(file, left), _value(own, right)
        if _described(one) != _described(two):
            found.append(Difference(path, _described(one), _described(two)))
        elif isinstance(two, jax.Array | np.ndarray) and _kind(one, kind_of) != _kind(two):
            found.append(Difference(path, _KINDS[_kind(one, kind_of)], _KINDS[_kind(two)]))
        elif op is LEAF and other is LEAF:
            fitting.setdefault(right, one)
            if _is_weak(one) != _is_weak(two):
                found.append(Difference(path, *(_WEAK[_is_weak(leaf)] for leaf in (one, two))))
        elif type(op) is Static and type(other) is Static and op != other and _is_plain(one) and _is_plain(two):
            (found if in_module else values).append(Difference(path, *_told_apart(one, two)))
    return Comparison(own, fitting, found, values)


_LOADING = (
    "Load it as it is, or load what fits and see the rest reported:",
    "    model = sharedtree.load(path)",
    "    model, report = sharedtree.load(path, like=template, strict=False)",
)


def require_no_differences(differences: Sequence[Difference], label: str, fix: Sequence[str] = _LOADING) -> None:
    """Raises `StructureMismatchError` that lists them all, and ends with the lines of a fix."""
    if not differences:
        return
    lines = [f"    {difference}" for difference in differences[:_MAX_LISTED]]
    if len(differences) > _MAX_LISTED:
        lines.append(f"    and {len(differences) - _MAX_LISTED} more")
    raise StructureMismatchError(
        "\n".join([f"`{label}` does not hold what the template asks for:", *lines, *fix]),
        [difference.path for difference in differences],
    )


_PARTED = ("one object with `{0}`|another one", "another object than `{0}`|one object with it")


def _tie(first: tuple[int, str], other: int, path: str) -> str | None:
    """Where a record was met first, if that was with another one."""
    return first[1] if first[0] != other and first[1] != path else None


def _value(tree: ReadTree, number: int) -> Any:
    """A leaf, traced or not: an array that JAX cannot trace is one in a template, but not its description in a file."""
    op = tree.structure.records[number][0]
    return op.peek() if type(op) is Static else tree.leaf_of.get(number)


def _static_differences(path: str, op: Node, other: Node) -> list[Difference]:
    """How the static fields of two modules of one class differ, or, of other classes, their auxiliary data."""
    is_tree = kind_of(op.type.cls) == "attributes"
    if not op.type.fields and not is_tree:
        one, two = op.aux.peek(), other.aux.peek()
        if op.aux == other.aux or not (_is_plain(one) and _is_plain(two)):
            return []
        return [Difference(path, *(f"the auxiliary data {text}" for text in _told_apart(one, two)))]
    aux = [each.aux.peek() for each in (op, other)]
    fields = [library_of(op.type.cls).static_attributes(each) if is_tree else dict(each[1]) for each in aux]
    found = _kind_differences(path, *aux)
    for name in {**fields[0], **fields[1]}:
        one, two = (each.get(name, _ABSENT) for each in fields)
        if one is _ABSENT or two is _ABSENT:
            found.append(
                Difference(f"{path}.{name}", *("nothing" if v is _ABSENT else _in_words(v) for v in (one, two)))
            )
        elif _is_plain(one) and _is_plain(two) and Static(one) != Static(two):
            found.append(Difference(f"{path}.{name}", *_told_apart(one, two)))
    return found


def _kind_differences(path: str, one: Any, two: Any) -> list[Difference]:
    """Where two `sharedtree.Module`s have an attribute that is traced in both, but not of one kind."""
    kinds = [kinds_in(aux) for aux in (one, two)]
    if kinds[0] is None or kinds[1] is None or kinds[0] is kinds[1]:
        return []
    first, second = [{name: each.by_name[name] for name in each.children} for each in kinds if each is not None]
    both = [name for name in first if name in second and first[name] != second[name]]
    return [Difference(f"{path}.{name}", _KIND_NAMES[first[name]], _KIND_NAMES[second[name]]) for name in both]


_KIND_NAMES = {PARAMETER: "a parameter", STATE: "state", SUBTREE: "neither a parameter nor state"}
_ABSENT: Any = object()


def _is_plain(value: Any) -> bool:
    """Whether a static value is all in what it is made of, so that one that was loaded can be equal to it.

    Not so arrays, which are read only later, and objects that are equal only to themselves, such as markers.
    """
    seen: set[int] = set()  # ids; the objects are alive in `value`, or in the class of one of its parts
    stack = [value]
    while stack:
        each = stack.pop()
        if id(each) in seen:  # alive: see `seen`
            continue
        seen.add(id(each))  # alive: see `seen`
        cls = type(each)
        if cls in (list, tuple, set, frozenset) or is_namedtuple(cls):
            stack.extend(each)
        elif cls in (dict, collections.OrderedDict):
            stack.extend((*each, *each.values()))
        elif cls is functools.partial:
            stack.extend((each.func, *each.args, *each.keywords.values()))
        elif cls is types.MethodType:
            stack.append(each.__self__)
        elif cls not in _PLAIN and not isinstance(each, _NAMED) and (not callable(each) or kind_of(cls) is not None):
            return False
    return True


def _told_apart(one: Any, two: Any) -> tuple[str, str]:
    texts = _in_words(one), _in_words(two)
    return texts if texts[0] != texts[1] else (texts[0], "another one")


def _in_words(value: Any) -> str:
    """A static value in a few words. What is no plain value is told by its type, for printing it may take for ever."""
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        text = repr(value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    name = getattr(value, "__qualname__", None) if isinstance(value, type | types.FunctionType) else None
    return f"`{name}`" if isinstance(name, str) else f"a `{type(value).__name__}`"


_MAX_SHOWN = 80
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)})
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.generic, np.dtype)  # or all in their value


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


_WEAK = {True: "a weakly typed array", False: "an array that is not weakly typed"}


def _described(leaf: Any) -> str:
    if isinstance(leaf, _ARRAYS):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "a function" if callable(leaf) else f"a `{type(leaf).__name__}`"


def _kind(array: Any, kind_of: Callable[[Any], str | None] | None = None) -> str | None:
    if isinstance(array, jax.ShapeDtypeStruct):
        return kind_of(array) if kind_of is not None else None
    return "jax" if isinstance(array, jax.Array) else "numpy"


_KINDS = {"jax": "a JAX array", "numpy": "a NumPy array", None: "a `ShapeDtypeStruct`"}
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
