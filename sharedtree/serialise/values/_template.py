"""Compares a file with a template: names, classes, shapes, dtypes, static values and ties. Reports all differences.

Both trees are packed: each becomes a list of records, and a record is referred to by its number in the list. The
records are visited in pairs from the roots, by equal steps. A pair is visited once, so the cost grows with the nodes of
the two trees and not with their paths. `core/_comparison.py` has the algorithm.

Words:

- A *record* is one node, leaf or static value. Its *op* tells which: a `Node`, `LEAF`, or a `Static`, which wraps a
  static value so that it is compared by its parts.
- A *plain container* is a list, a dict and the like (`is_plain` of a node's type). All other nodes are called modules.
- The *left* side is the file, and the *right* side is the template.
- A *tie* is one object at two paths. It is *one-sided* if the other side has two objects there.
- `MISSING` stands for a child or field that one side lacks.
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
        loaded: paths of arrays from the file.
        kept: paths of arrays from the template, since the file has none that fits.
        differences: all differences between file and template, including static values outside of modules.
        unused: names of arrays in the file without a place in the template: it lacks the path, has another shape or
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
        fitting_leaves: number of a template's record → the leaf of the file at the same path. Only leaves that fit.
        differences: differences that make the template unfit.
        tolerated: other differences: static values outside of modules, and ties of mutable static values.
        tie_differences: one entry for each tie among `differences`.
    """

    template: FlatDag
    fitting_leaves: dict[int, Any]
    differences: list[Difference]
    tolerated: list[Difference]
    tie_differences: list["TieDifference"]


class TieDifference(NamedTuple):
    """Two paths that lead to one object in the file and to two objects in the template, or the reverse.

    Attributes:
        first: the first of the two paths in the tree.
        path: the other path.
        is_tied_in_file: True if they lead to one object in the file.
    """

    first: str
    path: str
    is_tied_in_file: bool


def compare(file_tree: Any, template: Any, entries: IdentityDict[ArrayEntry]) -> Comparison:
    """Compares the tree of a file with a template.

    Two arrays must have the same shape, dtype and weak type, and both must be JAX's or both NumPy's. In the template, a
    `ShapeDtypeStruct` stands for both kinds of array. An array of the file without axes also fits a traced Python
    number of the template, if its dtype is of the number's kind (`float32` and a `float`).

    A static value in a module must equal the one in the template if both have plain parts: see `_has_plain_parts`.
    Outside of modules, and for static values with other parts, only the classes must be the same.

    Args:
        file_tree: the tree, with arrays or a `jax.ShapeDtypeStruct` for each.
        template: any tree.
        entries: `ShapeDtypeStruct` in `file_tree` → the entry of the array described by it.

    Cost: a few look-ups for each node of both trees, and for each child of a node.
    """
    # A file may have a tuple at very many paths. With `values`, the tuple becomes one record, not one for each path.
    comparer = _Comparer(_Side(_pack(file_tree, values=True)), _Side(_pack(template)), entries)
    flags = _Flags(in_module=False, is_tie_reported=False)
    # Path 0 is the empty one.
    roots = Pair(comparer.file.tree.root, comparer.template.tree.root, 0, flags)
    differences = list(differences_from(roots, comparer.compare_pair))
    return Comparison(
        comparer.template.tree, comparer.fitting_leaves, differences, comparer.tolerated, comparer.tie_differences
    )


class _Side:
    """One of the two trees, packed, with caches of the children and static fields of its records."""

    def __init__(self, tree: FlatDag) -> None:
        self.tree = tree
        self._children: dict[int, dict[str, int]] = {}
        self._static_fields: dict[int, dict[str, Any]] = {}
        self._comparable_statics: IdentityDict[Static | None] = IdentityDict()

    def children(self, number: int) -> dict[str, int]:
        """Returns the children of a node: step in a path, such as `.weight` → number of the child's record.

        Raises:
            StructureMismatchError: if a step cannot be printed.
        """
        if number not in self._children:
            self._children[number] = self._find_children(number)
        return self._children[number]

    def static_fields(self, number: int) -> dict[str, Any]:
        """Returns the static fields of a module: name → value. Returns an empty dict for plain containers."""
        if number not in self._static_fields:
            self._static_fields[number] = self._find_static_fields(number)
        return self._static_fields[number]

    def _find_children(self, number: int) -> dict[str, int]:
        """Finds the children of a node: step in a path → number of the child's record. `children` caches them.

        Raises:
            StructureMismatchError: if a step cannot be printed.
        """
        op, children = self.tree.records[number]
        assert type(op) is Node
        # Children of both sides are paired by the printed steps. Without such a step, no child can be found.
        try:
            return {jtu.keystr((key,)): child for key, child in zip(op.keys, children, strict=True)}
        except Exception as error:  # noqa: BLE001 -- a number of more digits than Python prints, or a class of a user's
            raise StructureMismatchError(
                f"A {self.text(number)} has a key that cannot be printed ({type(error).__name__}), so no template can "
                "have an object at the same path. Load the file as it is:\n"
                "    model = sharedtree.load(path)"
            ) from None

    def _find_static_fields(self, number: int) -> dict[str, Any]:
        """Finds the static fields of a module: name → value. `static_fields` caches them.

        Returns:
            An empty dict for plain containers and for classes without fields.
        """
        node = self.tree.node(number)
        assert node is not None
        if node.type.is_plain:
            return {}
        # `peek` returns the stored object itself, without a copy.
        if kind_of(node.type.cls) == "attributes":
            return rules_of(node.type.cls).static_attributes(node.aux.peek())
        # For classes with fields, auxiliary data is a pair whose second entry has the static fields with their names.
        return dict(node.aux.peek()[1]) if node.type.fields else {}

    def comparable_static(self, value: Any) -> Static | None:
        """Returns a static value, wrapped so that `==` compares its parts.

        Returns:
            None if a loaded copy could not be equal to the value: see `_has_plain_parts`.
        """
        if value not in self._comparable_statics:
            self._comparable_statics[value] = Static(value) if _has_plain_parts(value) else None
        return self._comparable_statics[value]

    def text(self, number: int) -> str:
        """Returns a description of a record in a few words, such as "a `Linear`" or "a traced leaf"."""
        return op_text(self.tree.records[number][0])


class _Flags(NamedTuple):
    """Data that a pair hands down to the pairs of its children (`Pair.inherited`).

    Attributes:
        in_module: True if the two records are below a module.
        is_tie_reported: True if a one-sided tie was reported of objects above the two records.
    """

    in_module: bool
    is_tie_reported: bool


class _Comparer:
    """The comparison of a file with a template, pair by pair of records.

    A `Pair` has the number of a file's record (`left`), the number of a template's record (`right`), their path as a
    number that `Paths` gave it (`at`), and `_Flags` (`inherited`).

    Attributes:
        file, template: the two sides.
        fitting_leaves, tolerated, tie_differences: see `Comparison`. `compare_pair` adds to them.
    """

    def __init__(self, file: _Side, template: _Side, entries: IdentityDict[ArrayEntry]) -> None:
        self.file, self.template, self._entries = file, template, entries
        self.fitting_leaves: dict[int, Any] = {}
        self.tolerated: list[Difference] = []
        self.tie_differences: list[TieDifference] = []
        self._paths, self._tie_finder = Paths(), Ties()
        # Static values that differ make the template unfit in modules only. So two nodes that were compared outside of
        # modules are compared again if they are also in a module, and there is one `Matching` for either case.
        counts = len(file.tree.records), len(template.tree.records)
        self._matching_outside, self._matching_in_modules = Matching(*counts), Matching(*counts)
        # Pairs that were compared: numbers of both records, and whether they were in a module.
        self._visited: set[tuple[int, int, bool]] = set()

    def compare_pair(self, pair: Pair) -> Iterator[Difference | Pair]:
        """Yields the differences at a pair of records, and the pairs of their children.

        `differences_from` calls this for the pair of roots, and then for each pair that this generator yields. Also
        adds to `fitting_leaves`, `tolerated` and `tie_differences`.
        """
        file_number, template_number, path, (in_module, is_tie_reported) = pair
        if (file_number, template_number, in_module) in self._visited:
            return
        self._visited.add((file_number, template_number, in_module))
        file_op, template_op = self.file.tree.records[file_number][0], self.template.tree.records[template_number][0]
        file_object, template_object = self.file.tree.objects[file_number], self.template.tree.objects[template_number]

        # 1. Ties: an object that was seen before must have been seen beside the same object of the other side.
        file_key = _tie_key(file_op, file_number, file_object)
        template_key = _tie_key(template_op, template_number, template_object)
        # Keys of mutable static values are negative. They are compared only with each other.
        is_comparable = file_key is not None and template_key is not None and (file_key < 0) == (template_key < 0)
        if not is_tie_reported and is_comparable:
            # `add_pair` returns None, or the tie that these two objects reveal: one of them was seen before, but beside
            # another object than now. It has the path at that time (`at`) and the side of the tie (`is_on_left`).
            one_sided_tie = self._tie_finder.add_pair(file_key, template_key, path)
            if one_sided_tie is not None:
                # If only one side ties a module, then only that side ties the objects in it. They are not listed.
                is_tie_reported = True
                first_path = self._paths.text(one_sided_tie.at)
                tied_in_file = f"the same object as `{first_path}`", "another object"
                tied_in_template = f"a different object than `{first_path}`", "the same object"
                difference = self._difference(path, *(tied_in_file if one_sided_tie.is_on_left else tied_in_template))
                # A tie of static values, such as two `bytearray`s, makes no template unfit.
                if type(file_op) is Static:
                    self.tolerated.append(difference)
                else:
                    self.tie_differences.append(
                        TieDifference(first_path, self._paths.text(path), one_sided_tie.is_on_left)
                    )
                    yield difference

        # 2. Two records that are not two nodes of one class have no children to compare.
        if type(file_op) is not Node or type(template_op) is not Node or file_op.type.cls is not template_op.type.cls:
            yield from self._compare_leaves(pair, file_object, template_object)
            return
        # 3. Static fields and children of two nodes of one class.
        in_module = in_module or not file_op.type.is_plain
        matching = self._matching_in_modules if in_module else self._matching_outside
        # `unite` returns False if earlier comparisons make this one needless. If the nodes a and x, b and x, and b and
        # y were compared, then a and y need no comparison.
        if not matching.unite(file_number, template_number):
            return
        file_children, template_children = self.file.children(file_number), self.template.children(template_number)
        num_in_file = len(file_children) + len(self.file.static_fields(file_number))
        num_in_template = len(template_children) + len(self.template.static_fields(template_number))
        # True if the larger node was compared before, with another node of the other side. Then its children are not
        # gone through again: only those of the smaller node are compared, and all others make one difference.
        only_common = matching.record_comparison(file_number, template_number, num_in_file, num_in_template)
        if only_common:
            file_text = f"{self.file.text(file_number)} with {num_in_file} parts"
            template_text = f"{self.template.text(template_number)} with {num_in_template} parts"
            yield self._difference(path, file_text, template_text)
        if not file_op.type.is_plain:
            yield from self._compare_static_fields(pair, file_op, template_op, only_common=only_common)
        flags = _Flags(in_module, is_tie_reported)
        for step, file_child, template_child in paired_children(
            file_children, template_children, common_only=only_common
        ):
            child_path = self._paths.below(path, step)
            if file_child is not MISSING and template_child is not MISSING:
                yield Pair(file_child, template_child, child_path, flags)
                continue
            # Only one side has a child at this step.
            sides = (self.file, file_child), (self.template, template_child)
            texts = [NOTHING if child is MISSING else side.text(child) for side, child in sides]
            yield self._difference(child_path, *texts)

    def _compare_leaves(self, pair: Pair, file_object: Any, template_object: Any) -> Iterator[Difference]:
        """Yields at most one difference of two records, unless they are two nodes of one class.

        Each of the two may be a leaf, a static value or a node. If both are leaves and fit, adds the file's leaf to
        `fitting_leaves`. A difference of static values outside of modules is not yielded, but added to `tolerated`.
        """
        file_op, template_op = self.file.tree.records[pair.left][0], self.template.tree.records[pair.right][0]
        if type(file_op) is Node or type(template_op) is Node:
            yield self._difference(pair.at, self.file.text(pair.left), self.template.text(pair.right))
            return
        are_leaves = file_op is LEAF and template_op is LEAF
        if are_leaves and _is_number_for_array(number=template_object, array=file_object):
            self.fitting_leaves.setdefault(pair.right, file_object)
            return
        # Pairs of texts to compare, for example [("float32[3]", "float32[4]"), ("a JAX array", "a NumPy array"), ...].
        file_facts = _leaf_facts(file_object, self._entries.get(file_object))
        facts = list(zip(file_facts, _leaf_facts(template_object), strict=True))
        # In a template, a `ShapeDtypeStruct` stands for arrays of JAX and of NumPy. So the second fact, which tells
        # these apart, is not compared.
        if isinstance(template_object, jax.ShapeDtypeStruct):
            del facts[1]
        differing = next((texts for texts in facts if texts[0] != texts[1]), None)
        if differing is not None:
            yield self._difference(pair.at, *differing)
        # The last fact is the weak type. A file's array with another weak type is a difference, but fits all the same.
        if are_leaves and (differing is None or differing is facts[-1]):
            self.fitting_leaves.setdefault(pair.right, file_object)
        # Two static values of one class that are not equal.
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
                self.tolerated.append(difference)

    def _compare_static_fields(
        self, pair: Pair, file_op: Node, template_op: Node, *, only_common: bool
    ) -> Iterator[Difference]:
        """Yields the differences in the static fields of two modules of one class.

        If the class has no fields, yields the difference of their auxiliary data.

        Args:
            pair: the numbers of the two modules' records.
            file_op: the file's node.
            template_op: the template's node.
            only_common: True to compare only the fields of both.
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
        # Instances of `sharedtree.Module` have a kind for each attribute, such as `PARAMETER`. `kinds_in` returns None
        # for those of other classes. The kinds of an instance have `by_name` (name → kind) and `children` (the names of
        # all attributes that are not static).
        kinds_of_sides = kinds_in(file_aux), kinds_in(template_aux)
        kinds = [side_kinds for side_kinds in kinds_of_sides if side_kinds is not None]
        if len(kinds) == 2 and kinds[0] is not kinds[1]:
            # A difference needs an attribute that is in both lists, so the shorter one is enough.
            for name in min(kinds[0].children, kinds[1].children, key=len):
                kind_names = [side_kinds.by_name.get(name, STATIC) for side_kinds in kinds]
                # A static attribute has the empty text. It is compared by its value below.
                texts = [_TEXTS_OF_KINDS.get(kind, "") for kind in kind_names]
                if texts[0] != texts[1] and all(texts):
                    yield self._difference(self._paths.below(pair.at, f".{name}"), *texts)
        file_statics, template_statics = self.file.static_fields(pair.left), self.template.static_fields(pair.right)
        for name, *values in paired_children(file_statics, template_statics, common_only=only_common):
            # `is_one_missing`: one of the two is `MISSING`.
            if is_one_missing(*values):
                texts = [NOTHING if value is MISSING else _static_text(value) for value in values]
            elif self._are_plain(*values) and self.file.comparable_static(values[0]) != self.template.comparable_static(
                values[1]
            ):
                texts = _distinct_texts(*values)
            else:
                continue
            yield self._difference(self._paths.below(pair.at, f".{name}"), *texts)

    def _are_plain(self, file_value: Any, template_value: Any) -> bool:
        """Returns True if both static values consist of plain parts: see `_has_plain_parts`."""
        return (
            self.file.comparable_static(file_value) is not None
            and self.template.comparable_static(template_value) is not None
        )

    def _difference(self, path: int, *texts: str) -> Difference:
        """Returns the difference at a path, from the texts for the file's and the template's object."""
        return Difference(self._paths.text(path), *texts)


def _pack(tree: Any, *, values: bool = False) -> FlatDag:
    """Packs a tree.

    Args:
        tree: the tree.
        values: True to make one record of a value without identity at several paths, such as one tuple. Otherwise it
            has a record for each path.
    """
    require_registered(tree)
    # `pack` fills `tags` with the object of each record.
    tags = Tags()
    return FlatDag.of(pack(tree, tags, rules_here()._replace(values=values))[1], tags.objects)


def rebuild(tree: FlatDag, new_leaf_of: Callable[[int], Any]) -> Any:
    """Returns a copy of a tree with other leaves.

    One object in the tree is one object in the copy. The same holds for mutable static values, such as
    `bytearray`s, as well.

    Args:
        tree: the tree, packed.
        new_leaf_of: number of a leaf's record → the new leaf.
    """
    # Mutable static value of the tree → its copy.
    copies = IdentityDict[Any]()
    # The new object of each record so far. Children stand before their parents.
    table: list[Any] = []
    for (op, children), original in zip(tree.records, tree.objects, strict=True):
        if op is LEAF:
            table.append(new_leaf_of(len(table)))
            continue
        static = op.aux if type(op) is Node else op
        assert type(static) is Static
        value = static.thaw()
        # `thaw` returns the stored value itself, or a new copy if the value is mutable. A mutable value has a `Static`
        # for each path, so its thawed copies would be several objects. The one original is copied instead, once.
        if value is not static.thaw():
            # `take_apart` returns children and auxiliary data.
            value = copy_of(op.type.take_apart(original)[1] if type(op) is Node else original, copies)
        table.append(op.type.put_together(value, [table[i] for i in children]) if type(op) is Node else value)
    return table[tree.root]


def _tie_key(op: Op, number: int, obj: Any) -> int | None:
    """Returns the key by which `Ties` tells objects apart: the same number at all paths of one object.

    The key is the number of the record. Only a mutable static value has a record for each path: its key is made of its
    id, and is negative, so that it differs from all numbers of records.

    Returns:
        None for a value without identity, which cannot be tied.

    Args:
        op: the op of the record.
        number: number of the record.
        obj: the object of the record.
    """
    if can_be_tied(op):
        return number if op is not LEAF or carries_identity(obj) else None
    # The `FlatDag` keeps the object alive, so no other object gets its id.
    return ~id(obj) if type(obj) in (bytearray, set) else None


# Class of a Python number → NumPy's class of the dtypes of its kind.
_DTYPES_OF_NUMBERS = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


def _is_number_for_array(number: Any, array: Any) -> bool:
    """Returns True if `number` is a Python number, and `array` an array without axes of a dtype of the number's kind.

    A counter, such as `TrainState.step`, begins as a number, and is an array after the first transform.
    """
    kind = _DTYPES_OF_NUMBERS.get(type(number))
    is_array = isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return kind is not None and is_array and array.shape == () and jnp.issubdtype(array.dtype, kind)


def _leaf_facts(leaf: Any, entry: ArrayEntry | None = None) -> tuple[str, str, str]:
    """Returns three texts about a leaf, to be compared: dtype and shape, whether it is JAX's or NumPy's, and weak type.

    For example ("float32[3]", "a JAX array", "a weakly typed array"). For a leaf that is no array, the first text is
    its class, and the others are empty.

    Args:
        leaf: a leaf or a static value.
        entry: if `leaf` is a `ShapeDtypeStruct` for an array of the file, the entry of this array. Otherwise None.
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
        differences: the differences. The error lists the first `MOST_LISTED`.
        label: name of the file.
        fix: returns the last lines of the error. Called only if there are differences.
    """
    if not differences:
        return
    lines = indented_lines(differences[:MOST_LISTED], len(differences))
    raise StructureMismatchError(
        "\n".join([f"`{label}` does not fit the template:", *lines, *fix()]),
        [difference.path for difference in differences],
    )


# Kind of an attribute of a `sharedtree.Module` → its text in differences. `STATIC` has none.
_TEXTS_OF_KINDS = {PARAMETER: "a parameter", STATE: "state", SUBTREE: "neither a parameter nor state"}


def _has_plain_parts(value: Any) -> bool:
    """Returns True if a static value consists of plain parts, so that a loaded copy can be equal to it.

    Plain are numbers, texts, None, enums, dtypes, classes and functions, and collections of these. Arrays are not
    plain, because they are read after the comparison. Objects that equal only themselves, such as markers, are not
    plain either.
    """
    # Ids of the parts so far. None is used again meanwhile: `value`, or the class of a part, keeps every part alive.
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
        # Of callable objects, those whose classes have a kind are instances with parts, and no functions.
        elif (
            cls not in _PLAIN_CLASSES
            and not isinstance(part, _CLASSES_BY_NAME)
            and (not callable(part) or kind_of(cls) is not None)
        ):
            return False
    return True


NOTHING = "nothing"
"""Description of an object or field that one side lacks."""

MOST_LISTED = 100
"""Most differences that an error lists."""


def _distinct_texts(file_value: Any, template_value: Any) -> tuple[str, str]:
    """Returns descriptions of two different static values. If both would be the same, the second is "another one"."""
    texts = _static_text(file_value), _static_text(template_value)
    return texts if texts[0] != texts[1] else (texts[0], "another one")


def _static_text(value: Any) -> str:
    """Returns a description of a static value in a few words.

    It is the `repr` of a number, text or enum, and the name of a function or class. Of any other value it is the class,
    because a value with parts may print for ever.
    """
    # Python refuses to print an int of more than 4,300 decimal digits, so a long one is printed in hexadecimal. A digit
    # has 4 bits.
    if type(value) is int and value.bit_length() > 4 * _MAX_SHOWN:
        value = f"{value:#x}"
    if type(value) in _PLAIN_CLASSES or isinstance(value, enum.Enum):
        text = repr(value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    name = public_name(value)
    if name is None and isinstance(value, type | types.FunctionType):
        name = getattr(value, "__qualname__", None)
    return f"`{name}`" if isinstance(name, str) else class_text(value)


# Most characters of a `repr` that are shown.
_MAX_SHOWN = 80
_PLAIN_CLASSES = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)})
# Classes, also as bases, of values that files write by name, or that equal all values with the same contents.
_CLASSES_BY_NAME = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, np.generic, np.dtype)
