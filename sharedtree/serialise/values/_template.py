"""Compares a file with a template: names, classes, shapes, dtypes, static values and ties. Reports all differences.

Both trees are packed: each becomes a list of records, one for each node, leaf and static value, and a record is named
by its number. `Node`, `LEAF` and `Static` tell which of these a record is (its `op`). The records are visited in pairs
from the roots, by equal steps. A pair is visited once, so the cost grows with the nodes of the two and not with their
paths.

The comparison itself is `core/_comparison.py`, where the file is on the left and the template on the right.
"""

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
    indented_lines,
    is_one_missing,
    paired_children,
)
from ...core._errors import StructureMismatchError
from ...core._node_types import carries_identity, is_namedtuple, require_registered
from ...core._pack_and_unpack import Tags, pack
from ...core._printing import printable, public_name
from ...core._sharing import op_text
from ...core._static_values import Static, copy_of
from ...core._structure import LEAF, FlatDag, Node, Op
from ...libraries._sharedtree_module_kinds import PARAMETER, STATE, STATIC, SUBTREE, kinds_in
from ...ties._list_ties import can_be_tied
from ...ties._policy_and_context import rules_here
from ...tree._dag import Dag
from ..arrays._placing import ArrayEntry
from ..trust._buildable_classes import kind_of
from ._instances import rules_of


class Difference(NamedTuple):
    """A difference between a file and a template.

    Attributes:
        path: path of the place. Of a path with more than 400 characters, the end.
        in_file: description of the file's object.
        in_template: description of the template's object.
    """

    path: str
    in_file: str
    in_template: str

    def __str__(self) -> str:
        return printable(f"`{self.path}`: the file has {self.in_file}, the template {self.in_template}")


class LoadReport(NamedTuple):
    """Report of `load(..., like=template, strict=False)`.

    Attributes:
        loaded: paths whose arrays came from the file.
        kept: paths whose arrays are the template's, since the file has none that fits.
        differences: all differences of the two, including static values outside of modules.
        unused: names of arrays in the file that have no place in the template: it lacks the path, has another shape or
            dtype there, or has one object where the file has two.
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
    """Result of comparing a file's tree with a template.

    Attributes:
        template: the template, packed.
        fitting: record of the template → the leaf of the file at the same path, if it fits.
        differences: differences that make the template unfit.
        values: other differences: static values outside of modules, and ties of values without leaves.
        ties: one entry for each of `differences` that is about a tie.
    """

    template: FlatDag
    fitting: dict[int, Any]
    differences: list[Difference]
    values: list[Difference]
    ties: list["TieDifference"]


class TieDifference(NamedTuple):
    """Two paths that lead to one object in the file and to two in the template, or the reverse.

    Attributes:
        first: the path that comes first in the tree.
        path: the other path.
        is_tied_in_file: True if they lead to one object in the file.
    """

    first: str
    path: str
    is_tied_in_file: bool


def compare(file_tree: Any, template: Any, entries: IdentityDict[ArrayEntry]) -> Comparison:
    """Compares the tree of a file with a template.

    Two arrays must have the same shape, dtype and weak type, and both must be JAX's or both NumPy's. In the template, a
    `ShapeDtypeStruct` stands for both kinds of array. A traced Python number and an array without axes can stand for
    each other if the dtype is of the number's kind. Static values in modules must be equal where they are plain.
    Elsewhere, and for other static values, only the types must be equal.

    Args:
        file_tree: the tree, with arrays or a `jax.ShapeDtypeStruct` for each.
        template: any tree.
        entries: `ShapeDtypeStruct` in `file_tree` → the entry of the array that it describes.

    Cost: a few look-ups for each node of the two, and for each child of one.
    """
    # A file may have a tuple at very many paths. With `values`, it becomes one record and not one for each path.
    comparer = _Comparer(_Side(_pack(file_tree, values=True)), _Side(_pack(template)), entries)
    roots = Pair(comparer.file.tree.root, comparer.template.tree.root, 0, (False, False))
    differences = list(differences_from(roots, comparer.compare_pair))
    return Comparison(comparer.template.tree, comparer.fitting, differences, comparer.values, comparer.ties)


class _Side:
    """One of the two trees, packed, with caches of the children and static fields of its records."""

    def __init__(self, tree: FlatDag) -> None:
        self.tree = tree
        self._parts: dict[int, dict[str, int]] = {}
        self._statics: dict[int, dict[str, Any]] = {}
        self._plain: IdentityDict[Static | None] = IdentityDict()

    def parts(self, number: int) -> dict[str, int]:
        """Returns the children of a node: step → number of the record."""
        if number not in self._parts:
            self._parts[number] = self._parts_of(number)
        return self._parts[number]

    def statics(self, number: int) -> dict[str, Any]:
        """Returns the static fields of a module: name → value. Empty for plain containers."""
        if number not in self._statics:
            self._statics[number] = self._statics_of(number)
        return self._statics[number]

    def _parts_of(self, number: int) -> dict[str, int]:
        """Makes the dict that `parts` returns. Raises if a key cannot be printed."""
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
        """Makes the dict that `statics` returns."""
        node = self.tree.node(number)
        assert node is not None
        if node.type.is_plain:
            return {}
        if kind_of(node.type.cls) == "attributes":
            return rules_of(node.type.cls).static_attributes(node.aux.peek())
        # For classes with fields, auxiliary data is a pair whose second entry has the static fields with their names.
        return dict(node.aux.peek()[1]) if node.type.fields else {}

    def plain(self, value: Any) -> Static | None:
        """Wraps a static value, to be compared by its parts. Returns None if a loaded copy could not be equal to it."""
        if value not in self._plain:
            self._plain[value] = Static(value) if _is_plain(value) else None
        return self._plain[value]

    def text(self, number: int) -> str:
        """Describes a record in a few words."""
        return op_text(self.tree.records[number][0])


class _Comparer:
    """The comparison of a file with a template, pair by pair of records.

    A `Pair` has a record of the file, one of the template, the number of a path, and two flags for all pairs below:
    whether they are in a module, and whether a difference of ties above them was reported.

    Attributes:
        file, template: the two sides.
        fitting, values, ties: see `Comparison`.
    """

    def __init__(self, file: _Side, template: _Side, entries: IdentityDict[ArrayEntry]) -> None:
        self.file, self.template, self._entries = file, template, entries
        self.fitting: dict[int, Any] = {}
        self.values: list[Difference] = []
        self.ties: list[TieDifference] = []
        self._paths, self._ties = Paths(), Ties()
        counts = len(file.tree.records), len(template.tree.records)
        # One for pairs outside of modules, where fewer static values count, and one for pairs in modules.
        self._matching = Matching(*counts), Matching(*counts)
        self._visited: set[tuple[int, int, bool]] = set()

    def compare_pair(self, pair: Pair) -> Iterator[Difference | Pair]:
        """Yields the differences at a pair of records, and the pairs of their children.

        `differences_from` calls this for the pair of roots, and then for each pair that it yields.
        """
        left, right, path, (in_module, is_tie_reported) = pair
        if (left, right, in_module) in self._visited:
            return
        self._visited.add((left, right, in_module))
        file_op, template_op = self.file.tree.records[left][0], self.template.tree.records[right][0]
        file_object, template_object = self.file.tree.objects[left], self.template.tree.objects[right]

        # Ties: an object that was seen before must have been seen with the same object of the other side.
        file_id, template_id = _identity(file_op, left, file_object), _identity(template_op, right, template_object)
        # Negative numbers are those of mutable static values, which are compared only with each other.
        is_comparable = file_id is not None and template_id is not None and (file_id < 0) == (template_id < 0)
        if not is_tie_reported and is_comparable:
            # Returns the tie of only one side that these two objects show, or None.
            split = self._ties.add_pair(file_id, template_id, path)
            if split is not None:
                # Everything below a module that is tied on one side only is tied on that side only, too. It need not be
                # listed.
                is_tie_reported = True
                first_path = self._paths.text(split.at)
                tied_in_file = f"one object with `{first_path}`", "another one"
                tied_in_template = f"another object than `{first_path}`", "one object with it"
                difference = self._difference(path, *(tied_in_file if split.is_on_left else tied_in_template))
                # A tie of static values makes no template unfit.
                if type(file_op) is Static:
                    self.values.append(difference)
                else:
                    self.ties.append(TieDifference(first_path, self._paths.text(path), split.is_on_left))
                    yield difference

        if type(file_op) is not Node or type(template_op) is not Node or file_op.type.cls is not template_op.type.cls:
            yield from self._compare_leaves(pair, file_object, template_object)
            return
        in_module = in_module or not file_op.type.is_plain
        # The children of two nodes are compared once. `unite` returns False if these two correspond already: they
        # were compared, or each of them was compared with a third node.
        if not self._matching[in_module].unite(left, right):
            return
        file_parts, template_parts = self.file.parts(left), self.template.parts(right)
        num_in_file = len(file_parts) + len(self.file.statics(left))
        num_in_template = len(template_parts) + len(self.template.statics(right))
        # The larger node may have been compared before, with another node of the other side. Then its children are not
        # gone through again: only those of the smaller node are compared, and the rest is one difference.
        common_only = self._matching[in_module].record_comparison(left, right, num_in_file, num_in_template)
        if common_only:
            file_text = f"{self.file.text(left)} with {num_in_file} parts"
            template_text = f"{self.template.text(right)} with {num_in_template} parts"
            yield self._difference(path, file_text, template_text)
        if not file_op.type.is_plain:
            yield from self._compare_statics(pair, file_op, template_op, common_only=common_only)
        inherited = in_module, is_tie_reported
        for step, file_child, template_child in paired_children(file_parts, template_parts, common_only=common_only):
            child_path = self._paths.below(path, step)
            if file_child is not MISSING and template_child is not MISSING:
                yield Pair(file_child, template_child, child_path, inherited)
                continue
            # Only one side has a child at this step.
            sides = (self.file, file_child), (self.template, template_child)
            texts = [NOTHING if child is MISSING else side.text(child) for side, child in sides]
            yield self._difference(child_path, *texts)

    def _compare_leaves(self, pair: Pair, file_object: Any, template_object: Any) -> Iterator[Difference]:
        """Yields the difference of two records that are not two nodes of one class. Adds a leaf that fits to `fitting`.

        They are leaves, static values, or nodes of different classes, also in any combination.
        """
        file_op, template_op = self.file.tree.records[pair.left][0], self.template.tree.records[pair.right][0]
        if type(file_op) is Node or type(template_op) is Node:
            yield self._difference(pair.at, self.file.text(pair.left), self.template.text(pair.right))
            return
        are_leaves = file_op is LEAF and template_op is LEAF
        if are_leaves and _is_number_for_array(number=template_object, array=file_object):
            self.fitting.setdefault(pair.right, file_object)
            return
        file_facts = _leaf_facts(file_object, self._entries.get(file_object))
        facts = list(zip(file_facts, _leaf_facts(template_object), strict=True))
        # In a template, a `ShapeDtypeStruct` stands for both kinds of array, so this fact is not compared.
        if isinstance(template_object, jax.ShapeDtypeStruct):
            del facts[1]
        differing = next((texts for texts in facts if texts[0] != texts[1]), None)
        if differing is not None:
            yield self._difference(pair.at, *differing)
        # The last fact is the weak type. A file's array with another weak type is reported, but fits all the same.
        if are_leaves and (differing is None or differing is facts[-1]):
            self.fitting.setdefault(pair.right, file_object)
        elif (
            differing is None
            and type(file_op) is type(template_op) is Static
            and file_op != template_op
            and self._are_plain(file_object, template_object)
        ):
            difference = self._difference(pair.at, *_distinct_texts(file_object, template_object))
            in_module = pair.inherited[0]
            # Outside of modules, different static values make no template unfit.
            if in_module:
                yield difference
            else:
                self.values.append(difference)

    def _compare_statics(
        self, pair: Pair, file_op: Node, template_op: Node, *, common_only: bool
    ) -> Iterator[Difference]:
        """Yields the differences in the static fields of two modules of one class.

        For classes without fields, compares the auxiliary data.

        Args:
            pair: the records of the two.
            file_op: the file's node.
            template_op: the template's node.
            common_only: True to compare only the fields that both have.
        """
        file_aux, template_aux = file_op.aux.peek(), template_op.aux.peek()
        if file_op.type.cls is Dag and file_op.aux != template_op.aux:
            texts = "a `Dag` with a model", "one with other ties, classes or static values in its model"
            yield self._difference(pair.at, *texts)
            return
        if not file_op.type.fields and kind_of(file_op.type.cls) != "attributes":
            if file_op.aux != template_op.aux and self._are_plain(file_aux, template_aux):
                texts = [f"the auxiliary data {text}" for text in _distinct_texts(file_aux, template_aux)]
                yield self._difference(pair.at, *texts)
            return
        # Instances of `sharedtree.Module` have kinds of attributes: parameter, state, and others.
        kinds_of_sides = kinds_in(file_aux), kinds_in(template_aux)
        kinds = [side_kinds for side_kinds in kinds_of_sides if side_kinds is not None]
        if len(kinds) == 2 and kinds[0] is not kinds[1]:
            for name in min(kinds[0].children, kinds[1].children, key=len):
                kind_names = [side_kinds.by_name.get(name, STATIC) for side_kinds in kinds]
                # Static attributes have no text here. They are compared by their values below.
                texts = [_KIND_NAMES.get(kind, "") for kind in kind_names]
                if texts[0] != texts[1] and all(texts):
                    yield self._difference(self._paths.below(pair.at, f".{name}"), *texts)
        file_statics, template_statics = self.file.statics(pair.left), self.template.statics(pair.right)
        for name, *values in paired_children(file_statics, template_statics, common_only=common_only):
            if is_one_missing(*values):
                texts = [NOTHING if value is MISSING else _static_text(value) for value in values]
            elif self._are_plain(*values) and self.file.plain(values[0]) != self.template.plain(values[1]):
                texts = _distinct_texts(*values)
            else:
                continue
            yield self._difference(self._paths.below(pair.at, f".{name}"), *texts)

    def _are_plain(self, file_value: Any, template_value: Any) -> bool:
        """Returns True if both static values consist of plain parts: see `_is_plain`."""
        return self.file.plain(file_value) is not None and self.template.plain(template_value) is not None

    def _difference(self, path: int, *texts: str) -> Difference:
        return Difference(self._paths.text(path), *texts)


def _pack(tree: Any, *, values: bool = False) -> FlatDag:
    """Packs a tree. With `values`, a value without identity, such as a tuple at many paths, is one record."""
    require_registered(tree)
    tags = Tags()
    return FlatDag.of(pack(tree, tags, rules_here()._replace(values=values))[1], tags.objects)


def rebuild(tree: FlatDag, leaf_of: Callable[[int], Any]) -> Any:
    """Returns a copy of a tree with other leaves.

    What is one object in the tree is one object in the copy. That holds for mutable static values, such as
    `bytearray`s, as well.

    Args:
        tree: the tree, packed.
        leaf_of: number of a leaf's record → the new leaf.
    """
    # Mutable static value of the tree → its copy.
    copies = IdentityDict[Any]()
    table: list[Any] = []
    for (op, children), original in zip(tree.records, tree.objects, strict=True):
        if op is LEAF:
            table.append(leaf_of(len(table)))
            continue
        static = op.aux if type(op) is Node else op
        assert type(static) is Static
        value = static.thaw()
        # Only a mutable value is copied by each `thaw`. The structure froze it once for each path, so several thawed
        # copies would be several objects. The one original is copied instead, once.
        if value is not static.thaw():
            value = copy_of(op.type.take_apart(original)[1] if type(op) is Node else original, copies)
        table.append(op.type.put_together(value, [table[i] for i in children]) if type(op) is Node else value)
    return table[tree.root]


def _identity(op: Op, number: int, obj: Any) -> int | None:
    """Returns a number that is the same at all paths of an object. None for values, which cannot be tied.

    Usually it is the number of the record. But a mutable static value has a record for each path, so its number is made
    of its id. It is negative, so that it is no record's.

    Args:
        op: what the record is.
        number: number of the record.
        obj: the object of the record.
    """
    if can_be_tied(op):
        return number if op is not LEAF or carries_identity(obj) else None
    # The `FlatDag` keeps the object alive, so its id is not used again.
    return ~id(obj) if type(obj) in (bytearray, set) else None


_DTYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


def _is_number_for_array(number: Any, array: Any) -> bool:
    """Returns True if `number` is a Python number, and `array` a scalar array of a dtype of its kind.

    A counter, such as `TrainState.step`, begins as a number, and is an array after the first transform.
    """
    kind = _DTYPES.get(type(number))
    is_array = isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return kind is not None and is_array and array.shape == () and jnp.issubdtype(array.dtype, kind)


def _leaf_facts(leaf: Any, entry: ArrayEntry | None = None) -> tuple[str, str, str]:
    """Returns three texts to compare: dtype and shape, whether JAX's or NumPy's, and weak type.

    For a leaf that is no array, the first text is its class, and the others are empty.

    Args:
        leaf: a leaf or a static value.
        entry: the array in the file that `leaf`, a `ShapeDtypeStruct`, describes. None for other leaves.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "a function" if callable(leaf) else class_text(leaf), "", ""
    kind = "a JAX array" if isinstance(leaf, jax.Array) or (entry and entry.kind == "jax") else "a NumPy array"
    if isinstance(leaf, jax.ShapeDtypeStruct) and entry is None:
        kind = "a `ShapeDtypeStruct`"
    weak = "a weakly typed array" if getattr(leaf, "weak_type", False) else "an array that is not weakly typed"
    return array_text(leaf), kind, weak


def require_no_differences(differences: Sequence[Difference], label: str, fix: Callable[[], Sequence[str]]) -> None:
    """Raises `StructureMismatchError` if there are differences.

    Args:
        differences: the differences. The error lists the first 100.
        label: name of the file.
        fix: returns the last lines of the error. Called only if there are differences.
    """
    if not differences:
        return
    lines = indented_lines(differences[:MOST_LISTED], len(differences))
    raise StructureMismatchError(
        "\n".join([f"`{label}` does not hold what the template asks for:", *lines, *fix()]),
        [difference.path for difference in differences],
    )


_KIND_NAMES = {PARAMETER: "a parameter", STATE: "state", SUBTREE: "neither a parameter nor state"}


def _is_plain(value: Any) -> bool:
    """Returns True if a static value consists of plain parts, so that a loaded copy can be equal to it.

    Arrays are not plain, because they are read after the comparison. Objects that equal only themselves, such as
    markers, are not plain either.
    """
    # The ids of parts. `value`, or the class of one of its parts, keeps every part alive.
    visited: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        cls = type(part)
        if id(part) in visited:  # alive: see `visited`
            continue
        visited.add(id(part))  # alive: see `visited`
        if cls in (list, tuple, set, frozenset) or is_namedtuple(cls):
            stack.extend(part)
        elif cls in (dict, collections.OrderedDict):
            stack.extend((*part, *part.values()))
        elif cls is functools.partial:
            stack.extend((part.func, *part.args, *part.keywords.values()))
        elif cls is types.MethodType:
            stack.append(part.__self__)
        elif cls not in _PLAIN and not isinstance(part, _NAMED) and (not callable(part) or kind_of(cls) is not None):
            return False
    return True


NOTHING = "nothing"
MOST_LISTED = 100


def _distinct_texts(file_value: Any, template_value: Any) -> tuple[str, str]:
    """Describes two different static values. If both have one description, the second is `another one`."""
    texts = _static_text(file_value), _static_text(template_value)
    return texts if texts[0] != texts[1] else (texts[0], "another one")


def _static_text(value: Any) -> str:
    """Describes a static value in a few words: plain ones by their `repr`, and functions and classes by name.

    Other values are described by their class, because a value with parts may print for ever.
    """
    # Python refuses to print an int of more than 4,300 decimal digits.
    if type(value) is int and value.bit_length() > 4 * _MAX_SHOWN:
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
# Classes of values that files write by name, or that equal all values with the same contents.
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.generic, np.dtype)
