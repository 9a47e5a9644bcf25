"""A template compared with what a file holds: names, shapes, dtypes and ties, all differences at once."""

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._errors import StructureMismatchError
from ...core._graph import Tags, pack
from ...core._handle import Walked
from ...core._node_types import carries_identity, require_registered
from ...core._plain_containers import is_namedtuple
from ...core._printing import printable
from ...core._sharing import name_of
from ...core._static_kinds import copy_of
from ...core._static_values import Static
from ...core._structure import LEAF, Node, Op
from ...libraries._module import kinds_in
from ...libraries._module_values import PARAMETER, STATE, SUBTREE
from ...ties._context import rules_here
from ...ties._listing import can_be_tied
from ...tree._dag import Dag
from ..arrays._placing import ArrayEntry
from ..trust._classes import kind_of
from ._instances import library_of


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
    """A file's tree beside a template: the template; its records that the file has a leaf for; and what differs.

    `values` are what does not make a template unfit: static values outside of modules, and ties of what has no leaves.
    """

    template: Walked
    fitting: dict[int, Any]
    differences: list[Difference]
    values: list[Difference]


def compare(held: Any, template: Any, entries: IdentityDict[ArrayEntry]) -> Comparison:
    """Compares what a file holds with a template.

    Args:
        held: the file's tree, which may have a `jax.ShapeDtypeStruct` for each array.
        template: any tree. Of its arrays only shapes, dtypes, weak types and whether they are JAX's or NumPy's matter.
            A `ShapeDtypeStruct` in it stands for both kinds of array. What is static in a module is compared strictly,
            where it is plain; elsewhere only its type must be the same.
        entries: that of each `ShapeDtypeStruct` in `held` that describes an array.

    Cost: one visit for each pair of nodes.
    """
    # Of a file nobody knows how often a tuple occurs, so there each is one record.
    file, own = _walked(held, values=True), _walked(template)
    records, own_records = file.structure.records, own.structure.records
    result = Comparison(own, {}, [], [])
    fitting, found, values = result[1:]
    in_file: dict[int, tuple[int, str]] = {}  # object of the file → that of the template met first with it, and where
    in_template: dict[int, tuple[int, str]] = {}
    seen: set[tuple[int, int, bool]] = set()
    stack: list[tuple[int, int, str, bool, bool]] = [(file.structure.root, own.structure.root, "", False, False)]
    while stack:
        left, right, path, is_told, in_module = stack.pop()
        if (left, right, in_module) in seen:
            continue
        seen.add((left, right, in_module))
        (op, children), (other, others) = records[left], own_records[right]
        one, two = file.objects[left], own.objects[right]
        name, its_name = _identity(op, left, one), _identity(other, right, two)
        if not is_told and name is not None and its_name is not None and (name < 0) == (its_name < 0):
            met, its_met = in_file.setdefault(name, (its_name, path)), in_template.setdefault(its_name, (name, path))
            texts = ()
            if met[0] != its_name and met[1] != path:
                texts = f"one object with `{met[1]}`", "another one"
            elif its_met[0] != name and its_met[1] != path:
                texts = f"another object than `{its_met[1]}`", "one object with it"
            if texts:
                is_told = True  # what is in a module parts with it, and need not be listed
                (values if type(op) is Static else found).append(Difference(path, *texts))
        if type(op) is Node and type(other) is Node and op.type.cls is other.type.cls:
            if not op.type.is_plain:
                in_module = True
                found += _static_differences(path, op, other)
            here = {jtu.keystr((key,)): child for key, child in zip(op.keys, children, strict=True)}
            there = {jtu.keystr((key,)): child for key, child in zip(other.keys, others, strict=True)}
            for step in reversed({**here, **there}):
                if step in here and step in there:
                    stack.append((here[step], there[step], path + step, is_told, in_module))
                    continue
                in_file_is = name_of(records[here[step]][0]) if step in here else "nothing"
                in_template_is = name_of(own_records[there[step]][0]) if step in there else "nothing"
                found.append(Difference(path + step, in_file_is, in_template_is))
            continue
        if type(op) is Node or type(other) is Node:
            found.append(Difference(path, name_of(op), name_of(other)))
            continue
        facts = list(zip(_facts(one, entries.get(one)), _facts(two), strict=True))
        if isinstance(two, jax.ShapeDtypeStruct):
            del facts[1]  # it stands for both kinds of array
        differing = next((texts for texts in facts if texts[0] != texts[1]), None)
        if differing is not None:
            found.append(Difference(path, *differing))
        if op is LEAF and other is LEAF and (differing is None or differing is facts[-1]):
            fitting.setdefault(right, one)
        elif differing is None and type(op) is type(other) is Static and op != other and _are_plain(one, two):
            (found if in_module else values).append(Difference(path, *_told_apart(one, two)))
    return result


def _walked(tree: Any, *, values: bool = False) -> Walked:
    require_registered(tree)
    tags = Tags()
    return Walked.of(pack(tree, tags, rules_here()._replace(values=values))[1], tags.objects)


def rebuilt(tree: Walked, leaf_of: Callable[[int], Any]) -> Any:
    """A tree with other leaves, given by record. What is one object in it stays one.

    So do values without leaves that can be changed, such as `bytearray`s: a structure has one for each path.
    """
    copies: dict[int, Any] = {}  # id → copy; what was copied is alive in `tree` or in `kept`
    table: list[Any] = []
    kept: list[Any] = []
    for (op, children), original in zip(tree.structure.records, tree.objects, strict=True):
        if op is LEAF:
            table.append(leaf_of(len(table)))
            continue
        static = op.aux if type(op) is Node else op
        assert type(static) is Static
        value = static.thaw()
        if value is not static.thaw():  # it can be changed, and is copied each time
            kept.append(op.type.take_apart(original)[1] if type(op) is Node else original)
            value = copy_of(kept[-1], copies)
        table.append(op.type.put_together(value, [table[i] for i in children]) if type(op) is Node else value)
    return table[tree.structure.root]


def _identity(op: Op, number: int, obj: Any) -> int | None:
    """The same wherever an object is met: its record, or if it has one for each path, less than 0. None for values."""
    if can_be_tied(op):
        return number if op is not LEAF or carries_identity(obj) else None
    return ~id(obj) if type(obj) in (bytearray, set) else None  # alive in the `Walked`


def _facts(leaf: Any, entry: ArrayEntry | None = None) -> tuple[str, str, str]:
    """What is compared of a leaf: what it is; of arrays, whose, and whether it is weakly typed."""
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "a function" if callable(leaf) else f"a `{type(leaf).__name__}`", "", ""
    kind = "a JAX array" if isinstance(leaf, jax.Array) or (entry and entry.kind == "jax") else "a NumPy array"
    if isinstance(leaf, jax.ShapeDtypeStruct) and entry is None:
        kind = "a `ShapeDtypeStruct`"
    weak = "a weakly typed array" if getattr(leaf, "weak_type", False) else "an array that is not weakly typed"
    return f"{leaf.dtype}{list(leaf.shape)}", kind, weak


def require_no_differences(differences: Sequence[Difference], label: str, fix: Sequence[str] = ()) -> None:
    """Raises `StructureMismatchError` that lists them all, and ends with the lines of a fix."""
    if not differences:
        return
    lines = [f"    {difference}" for difference in differences[:100]]
    if len(differences) > 100:
        lines.append(f"    and {len(differences) - 100} more")
    fix = fix or (
        "Load it as it is, or load what fits and see the rest reported:",
        "    model = sharedtree.load(path)",
        "    model, report = sharedtree.load(path, like=template, strict=False)",
    )
    raise StructureMismatchError(
        "\n".join([f"`{label}` does not hold what the template asks for:", *lines, *fix]),
        [difference.path for difference in differences],
    )


def _static_differences(path: str, op: Node, other: Node) -> Iterator[Difference]:
    """How the static fields of two modules of one class differ, or, of other classes, their auxiliary data."""
    one, two = op.aux.peek(), other.aux.peek()
    is_tree = kind_of(op.type.cls) == "attributes"
    if op.type.cls is Dag and op.aux != other.aux:
        yield Difference(path, "a `Dag` with a model", "one with other ties, classes or static values in its model")
        return
    if not op.type.fields and not is_tree:
        if op.aux != other.aux and _are_plain(one, two):
            yield Difference(path, *(f"the auxiliary data {text}" for text in _told_apart(one, two)))
        return
    kinds = kinds_in(one), kinds_in(two)
    if kinds[0] is not None and kinds[1] is not None and kinds[0] is not kinds[1]:  # of two `sharedtree.Module`s
        first, second = [{name: each.by_name[name] for name in each.children} for each in kinds if each is not None]
        for name in first:
            if name in second and first[name] != second[name]:
                yield Difference(f"{path}.{name}", _KIND_NAMES[first[name]], _KIND_NAMES[second[name]])
    fields = [library_of(op.type.cls).static_attributes(aux) if is_tree else dict(aux[1]) for aux in (one, two)]
    for name in {**fields[0], **fields[1]}:
        if name not in fields[0] or name not in fields[1]:
            texts = [_in_words(each[name]) if name in each else "nothing" for each in fields]
            yield Difference(f"{path}.{name}", *texts)
        elif _are_plain(fields[0][name], fields[1][name]) and Static(fields[0][name]) != Static(fields[1][name]):
            yield Difference(f"{path}.{name}", *_told_apart(fields[0][name], fields[1][name]))


def paths_of_dags(tree: Walked) -> list[str]:
    """Where there is a `Dag` in a tree, each by its first path."""
    dags = [i for i, (op, _) in enumerate(tree.structure.records) if type(op) is Node and op.type.cls is Dag]
    return [tree.text(number) for number in dags]


_KIND_NAMES = {PARAMETER: "a parameter", STATE: "state", SUBTREE: "neither a parameter nor state"}


def _are_plain(*values: Any) -> bool:
    """Whether static values are all in what they are made of, so that one that was loaded can be equal to another.

    Not so arrays, which are read only later, and objects that are equal only to themselves, such as markers.
    """
    seen: set[int] = set()  # ids; the objects are alive in `values`, or in the class of a part of one
    stack = list(values)
    while stack:
        each = stack.pop()
        cls = type(each)
        if id(each) in seen:  # alive: see `seen`
            continue
        seen.add(id(each))  # alive: see `seen`
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
