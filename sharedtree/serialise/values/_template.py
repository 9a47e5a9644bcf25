"""A template compared with what a file holds: names, shapes, dtypes and ties, all differences at once."""

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._comparison import (
    MISSING,
    Matching,
    Pair,
    Paths,
    Ties,
    array_text,
    class_text,
    differences_from,
    is_alone,
    lines_of,
    matched,
)
from ...core._errors import StructureMismatchError
from ...core._node_types import carries_identity, is_namedtuple, require_registered
from ...core._pack_and_unpack import Tags, pack
from ...core._printing import printable, public_name
from ...core._sharing import name_of
from ...core._static_values import Static, copy_of
from ...core._structure import LEAF, FlatDag, Node, Op
from ...libraries._sharedtree_module_kinds import kinds_in
from ...libraries._sharedtree_module_values import PARAMETER, STATE, STATIC, SUBTREE
from ...ties._list_ties import can_be_tied
from ...ties._policy_and_context import rules_here
from ...tree._dag import Dag
from ..arrays._placing import ArrayEntry
from ..trust._buildable_classes import kind_of
from ._instances import rules_of


class Difference(NamedTuple):
    """One thing in which a file and a template differ.

    Attributes:
        path: where. Of one with more than 400 characters, the end.
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
    `ties` says of those among the differences which two paths each is about, and whether the file has one object there.
    """

    template: FlatDag
    fitting: dict[int, Any]
    differences: list[Difference]
    values: list[Difference]
    ties: list[tuple[str, str, bool]]


def compare(held: Any, template: Any, entries: IdentityDict[ArrayEntry]) -> Comparison:
    """Compares what a file holds with a template.

    Args:
        held: the file's tree, which may have a `jax.ShapeDtypeStruct` for each array.
        template: any tree. Of its arrays only shapes, dtypes, weak types and whether they are JAX's or NumPy's matter.
            A `ShapeDtypeStruct` in it stands for both kinds of array, and a traced Python number and an array without
            axes, of a dtype of its kind, stand for each other. What is static in a module is compared strictly,
            where it is plain; elsewhere only its type must be the same.
        entries: that of each `ShapeDtypeStruct` in `held` that describes an array.

    Cost: a few look-ups for each node of the two, and for each child of one.
    """
    # Of a file nobody knows how often a tuple occurs, so there each is one record.
    beside = _Beside(_Side(_walked(held, values=True)), _Side(_walked(template)), entries)
    found = list(differences_from(Pair(beside.file.tree.root, beside.own.tree.root, 0, (False, False)), beside.meet))
    return Comparison(beside.own.tree, beside.fitting, found, beside.values, beside.ties)


class _Side:
    """One of the two trees, with what is asked of a record again and again."""

    def __init__(self, tree: FlatDag) -> None:
        self.tree = tree
        self._parts: dict[int, dict[str, int]] = {}
        self._statics: dict[int, dict[str, Any]] = {}
        self._plain: IdentityDict[Static | None] = IdentityDict()  # see `plain`

    def parts(self, number: int) -> dict[str, int]:
        """What leads to each child of a node, and its number."""
        if number not in self._parts:
            self._parts[number] = self._parts_of(number)
        return self._parts[number]

    def statics(self, number: int) -> dict[str, Any]:
        """The static fields of a module."""
        if number not in self._statics:
            self._statics[number] = self._statics_of(number)
        return self._statics[number]

    def _parts_of(self, number: int) -> dict[str, int]:
        op, children = self.tree.records[number]
        assert type(op) is Node
        try:
            return {jtu.keystr((key,)): child for key, child in zip(op.keys, children, strict=True)}
        except Exception as error:  # noqa: BLE001 -- a number of more digits than Python prints, or a class of a user's
            raise StructureMismatchError(
                f"A {self.text(number)} has a key that cannot be printed ({type(error).__name__}), so that no template "
                "can have the like at the same path. Load the file as it is:\n    model = sharedtree.load(path)"
            ) from None

    def _statics_of(self, number: int) -> dict[str, Any]:
        node = self.tree.node(number)
        assert node is not None
        if node.type.is_plain:
            return {}
        if kind_of(node.type.cls) == "attributes":
            return rules_of(node.type.cls).static_attributes(node.aux.peek())
        return dict(node.aux.peek()[1]) if node.type.fields else {}

    def plain(self, value: Any) -> Static | None:
        """A static value, if it is all in what it is made of, so that one that was loaded can be equal to another."""
        if value not in self._plain:
            self._plain[value] = Static(value) if _is_plain(value) else None
        return self._plain[value]

    def text(self, number: int) -> str:
        """What a record is."""
        return name_of(self.tree.records[number][0])


class _Beside:
    """A file beside a template.

    Attributes:
        fitting: record of the template → the leaf that the file has for it.
        values, ties: see `Comparison`.
    """

    def __init__(self, file: _Side, own: _Side, entries: IdentityDict[ArrayEntry]) -> None:
        self.file, self.own, self._entries = file, own, entries
        self.fitting: dict[int, Any] = {}
        self.values: list[Difference] = []
        self.ties: list[tuple[str, str, bool]] = []
        self._paths, self._ties = Paths(), Ties()
        counts = len(file.tree.records), len(own.tree.records)
        self._matching = Matching(*counts), Matching(*counts)  # outside of modules, and in them
        self._met: set[tuple[int, int, bool]] = set()

    def meet(self, pair: Pair) -> Iterator[Difference | Pair]:
        """What differs at a pair of records, and the pairs below."""
        left, right, at, (in_module, is_told) = pair
        if (left, right, in_module) in self._met:
            return
        self._met.add((left, right, in_module))
        op, other = self.file.tree.records[left][0], self.own.tree.records[right][0]
        one, two = self.file.tree.objects[left], self.own.tree.objects[right]
        name, its_name = _identity(op, left, one), _identity(other, right, two)
        if not is_told and name is not None and its_name is not None and (name < 0) == (its_name < 0):
            apart = self._ties.apart(name, its_name, at)
            if apart is not None:
                is_told = True  # what is in a module parts with it, and need not be listed
                path = self._paths.text(apart[0])
                is_one_here = f"one object with `{path}`", "another one"
                is_one_there = f"another object than `{path}`", "one object with it"
                found = self._differs(at, *(is_one_here if apart[1] else is_one_there))
                if type(op) is Static:
                    self.values.append(found)
                else:
                    self.ties.append((path, self._paths.text(at), apart[1]))
                    yield found
        if type(op) is not Node or type(other) is not Node or op.type.cls is not other.type.cls:
            yield from self._leaves(pair, one, two)
            return
        in_module = in_module or not op.type.is_plain
        if not self._matching[in_module].unite(left, right):
            return
        here, there = self.file.parts(left), self.own.parts(right)
        num_here, num_there = len(here) + len(self.file.statics(left)), len(there) + len(self.own.statics(right))
        is_short = self._matching[in_module].is_short(left, right, num_here, num_there)
        if is_short:
            texts = f"{self.file.text(left)} with {num_here} parts", f"{self.own.text(right)} with {num_there} parts"
            yield self._differs(at, *texts)
        if not op.type.is_plain:
            yield from self._statics(pair, op, other, is_short=is_short)
        told = in_module, is_told
        for step, child, its in matched(here, there, is_short=is_short):
            below = self._paths.below(at, step)
            if child is not MISSING and its is not MISSING:
                yield Pair(child, its, below, told)
                continue
            found = (self.file, child), (self.own, its)
            yield self._differs(below, *(NOTHING if n is MISSING else side.text(n) for side, n in found))

    def _leaves(self, pair: Pair, one: Any, two: Any) -> Iterator[Difference]:
        """What differs where at least one side has a leaf or a static value, or nodes are of two classes."""
        op, other = self.file.tree.records[pair.left][0], self.own.tree.records[pair.right][0]
        if type(op) is Node or type(other) is Node:
            yield self._differs(pair.at, self.file.text(pair.left), self.own.text(pair.right))
            return
        if op is LEAF and other is LEAF and _is_number_as_array(number=two, array=one):
            self.fitting.setdefault(pair.right, one)
            return
        facts = list(zip(_facts(one, self._entries.get(one)), _facts(two), strict=True))
        if isinstance(two, jax.ShapeDtypeStruct):
            del facts[1]  # it stands for both kinds of array
        differing = next((texts for texts in facts if texts[0] != texts[1]), None)
        if differing is not None:
            yield self._differs(pair.at, *differing)
        if op is LEAF and other is LEAF and (differing is None or differing is facts[-1]):
            self.fitting.setdefault(pair.right, one)
        elif differing is None and type(op) is type(other) is Static and op != other and self._are_plain(one, two):
            found = self._differs(pair.at, *_told_apart(one, two))
            if pair.inherited[0]:
                yield found
            else:
                self.values.append(found)

    def _statics(self, pair: Pair, op: Node, other: Node, *, is_short: bool) -> Iterator[Difference]:
        """How the static fields of two modules of one class differ, or, of other classes, their auxiliary data."""
        one, two = op.aux.peek(), other.aux.peek()
        if op.type.cls is Dag and op.aux != other.aux:
            texts = "a `Dag` with a model", "one with other ties, classes or static values in its model"
            yield self._differs(pair.at, *texts)
            return
        if not op.type.fields and kind_of(op.type.cls) != "attributes":
            if op.aux != other.aux and self._are_plain(one, two):
                yield self._differs(pair.at, *(f"the auxiliary data {text}" for text in _told_apart(one, two)))
            return
        kinds = [found for found in (kinds_in(one), kinds_in(two)) if found is not None]
        if len(kinds) == 2 and kinds[0] is not kinds[1]:  # of two `sharedtree.Module`s
            for name in min(kinds[0].children, kinds[1].children, key=len):
                texts = [_KIND_NAMES.get(each.by_name.get(name, STATIC), "") for each in kinds]
                if texts[0] != texts[1] and all(texts):
                    yield self._differs(self._paths.below(pair.at, f".{name}"), *texts)
        for name, *values in matched(self.file.statics(pair.left), self.own.statics(pair.right), is_short=is_short):
            if is_alone(*values):
                texts = [NOTHING if value is MISSING else _in_words(value) for value in values]
            elif self._are_plain(*values) and self.file.plain(values[0]) != self.own.plain(values[1]):
                texts = _told_apart(*values)
            else:
                continue
            yield self._differs(self._paths.below(pair.at, f".{name}"), *texts)

    def _are_plain(self, one: Any, two: Any) -> bool:
        return self.file.plain(one) is not None and self.own.plain(two) is not None

    def _differs(self, at: int, *texts: str) -> Difference:
        return Difference(self._paths.text(at), *texts)


def _walked(tree: Any, *, values: bool = False) -> FlatDag:
    require_registered(tree)
    tags = Tags()
    return FlatDag.of(pack(tree, tags, rules_here()._replace(values=values))[1], tags.objects)


def rebuilt(tree: FlatDag, leaf_of: Callable[[int], Any]) -> Any:
    """A tree with other leaves, given by record. What is one object in it stays one.

    So do values without leaves that can be changed, such as `bytearray`s: a structure has one for each path.
    """
    copies = IdentityDict[Any]()
    table: list[Any] = []
    for (op, children), original in zip(tree.records, tree.objects, strict=True):
        if op is LEAF:
            table.append(leaf_of(len(table)))
            continue
        static = op.aux if type(op) is Node else op
        assert type(static) is Static
        value = static.thaw()
        if value is not static.thaw():  # it can be changed, and is copied each time
            value = copy_of(op.type.take_apart(original)[1] if type(op) is Node else original, copies)
        table.append(op.type.put_together(value, [table[i] for i in children]) if type(op) is Node else value)
    return table[tree.root]


def _identity(op: Op, number: int, obj: Any) -> int | None:
    """The same wherever an object is met: its record, or if it has one for each path, less than 0. None for values."""
    if can_be_tied(op):
        return number if op is not LEAF or carries_identity(obj) else None
    return ~id(obj) if type(obj) in (bytearray, set) else None  # alive in the `FlatDag`


_DTYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


def _is_number_as_array(number: Any, array: Any) -> bool:
    """Whether two leaves are a Python number and an array that may stand for one.

    A counter, such as `TrainState.step`, begins as a number, and is an array once it was in a transform.
    """
    kind = _DTYPES.get(type(number))
    is_array = isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return kind is not None and is_array and array.shape == () and jnp.issubdtype(array.dtype, kind)


def _facts(leaf: Any, entry: ArrayEntry | None = None) -> tuple[str, str, str]:
    """What is compared of a leaf: what it is; of arrays, whose, and whether it is weakly typed."""
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "a function" if callable(leaf) else class_text(leaf), "", ""
    kind = "a JAX array" if isinstance(leaf, jax.Array) or (entry and entry.kind == "jax") else "a NumPy array"
    if isinstance(leaf, jax.ShapeDtypeStruct) and entry is None:
        kind = "a `ShapeDtypeStruct`"
    weak = "a weakly typed array" if getattr(leaf, "weak_type", False) else "an array that is not weakly typed"
    return array_text(leaf), kind, weak


def require_no_differences(differences: Sequence[Difference], label: str, fix: Callable[[], Sequence[str]]) -> None:
    """Raises `StructureMismatchError` that lists them all, and ends with the lines of a fix."""
    if not differences:
        return
    lines = lines_of(differences[:MOST_LISTED], len(differences))
    raise StructureMismatchError(
        "\n".join([f"`{label}` does not hold what the template asks for:", *lines, *fix()]),
        [difference.path for difference in differences],
    )


_KIND_NAMES = {PARAMETER: "a parameter", STATE: "state", SUBTREE: "neither a parameter nor state"}


def _is_plain(value: Any) -> bool:
    """Whether a static value is all in what it is made of, so that one that was loaded can be equal to another.

    Not so arrays, which are read only later, and objects that are equal only to themselves, such as markers.
    """
    seen: set[int] = set()  # ids; the objects are alive in `value`, or in the class of a part of one
    stack = [value]
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


NOTHING = "nothing"
MOST_LISTED = 100


def _told_apart(one: Any, two: Any) -> tuple[str, str]:
    texts = _in_words(one), _in_words(two)
    return texts if texts[0] != texts[1] else (texts[0], "another one")


def _in_words(value: Any) -> str:
    """A static value in a few words. What is no plain value is told by its type, for printing it may take for ever."""
    if type(value) is int and value.bit_length() > 4 * _MAX_SHOWN:  # Python prints no more than some digits
        value = f"{value:#x}"
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        text = repr(value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    name = public_name(value)
    if name is None and isinstance(value, type | types.FunctionType):
        name = getattr(value, "__qualname__", None)
    return f"`{name}`" if isinstance(name, str) else class_text(value)


_MAX_SHOWN = 80
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)})
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.generic, np.dtype)  # or all in their value
