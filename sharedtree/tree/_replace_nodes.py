"""Replaces nodes of a DAG: `sharedtree.tree.at`. A *target* is a node that the user's `where` function names.

The tree and the replacements are walked with one numbering, so an object that occurs in several of them is one record.
In the result each edge of the tree to a target leads to its replacement. Replacements are not edited themselves: if one
holds a part of the tree, it holds the old part. So `at(lambda m: (m.a, m.b), m, (m.b, m.a))` swaps the two. A record of
the walk can therefore occur in the result in two versions: unchanged in a replacement, and *edited* in the tree, if a
target is below it.

A target can share parts with the rest of the tree. If its replacement has another object in the place of such a part,
and the two could be one object, that object replaces the part everywhere, which keeps the tie. Otherwise the tie is
lost, with one warning for each maximal tie.

    [block, block.w]   at(lambda m: m[0], …, new_block)      [new_block, new_block.w]     the tie is kept
"""

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..core._errors import InconsistentSharingError, SharingMismatchError, definition_of_caller, report_untied
from ..core._hidden_arrays import refuse_hidden_arrays_in_records
from ..core._node_types import carries_identity, node_type_of, require_registered
from ..core._pack_and_unpack import Tags, walk
from ..core._printing import listed
from ..core._sharing import Mismatch, RecordPair, pairs
from ..core._static_values import Incomparable, Static
from ..core._structure import LEAF, FlatDag, Node, Op, records_with_several_edges
from ..ties._leaf_notes import hand_on, is_tied_value, note, note_tied_values
from ..ties._list_ties import are_one_value, can_be_tied
from ..ties._policy_and_context import IsLeaf, current_policy, exact_rules_here, rules_here
from ..ties._where_functions import WhereTree, require_where
from ._partition import rebuilt

T = TypeVar("T")

_NOT_GIVEN: Any = object()


def at(
    where: Callable[[T], Any],
    tree: T,
    replace: Any = _NOT_GIVEN,
    replace_fn: Callable[[Any], Any] = _NOT_GIVEN,
    is_leaf: IsLeaf = None,
) -> T:
    """Replaces nodes or leaves; what is tied is replaced at every path. `equinox.tree_at`, with ties kept.

    What a replacement shares with the tree, with another replacement, or within itself, is shared in the result. If a
    replaced node shared a part with the rest of the tree, the rest gets what the replacement has in that part's place,
    if it has the same class, statics, shape and dtype.

    Args:
        where: takes the tree and returns the node to replace, or a sequence of nodes. It is called on the tree and on
            stand-ins whose leaves have no values. It must return the same places for both, so it cannot look at leaves.
            In a stand-in a `None` is a `None`. A `None` that is returned is replaced at its own path only.
        tree: the tree; it is not changed.
        replace: the replacement, or a sequence of as many as `where` returned.
        replace_fn: instead of `replace`: takes what is there and returns the replacement. Called once for each node.
        is_leaf: a node counts as a leaf if it is true for the node. With `lambda x: x is None` each `None` has a
            stand-in, as a leaf has, so a `where` that looks for `None` does not find it.

    Returns:
        A tree of new nodes, apart from the replacements; all other arrays are the same objects.

    Raises:
        InconsistentSharingError: if `replace` has two different replacements for one tied node.
        SharingMismatchError: if `where` returns an object that is not in the tree, or both a node and a part of it; if
            it returns no node for `replace_fn`; if it depends on leaves; or if it is unclear which `None` it means.
        TypeError: if `where` is no function, for example because `where` and the tree are in the wrong order.
        ValueError: if not exactly one of `replace` and `replace_fn` is given, or their numbers differ.

    Warns:
        UntiedWarning: if a replaced node shared a part with another node, and the part is two objects in the result.
            `Policy(on_untie=)` makes this an `UntiedError`, or turns it off.

    Cost: a walk over the nodes of the tree, and one over those of each replaced node and its replacement.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> new = st.tree.at(lambda m: m["a"], {"a": w, "b": w}, jnp.zeros(2))
        >>> new["a"] is new["b"], new["b"]
        (True, Array([0., 0.], dtype=float32))
    """
    if (replace is _NOT_GIVEN) == (replace_fn is _NOT_GIVEN):
        raise ValueError("Give exactly one of `replace` and `replace_fn`.")
    require_where(where, tree, "    model = sharedtree.tree.at(lambda m: m.head.weight, model, new)")
    require_registered(tree)

    # Walk the tree, and find the targets. The tags number the objects; later walks of replacements go on counting.
    tags = Tags()
    _, records, root = walk(tree, tags, exact_rules_here(is_leaf))
    refuse_hidden_arrays_in_records(records, root)
    walked = FlatDag(records, root, tags.objects)
    targets, is_single = WhereTree(walked).named_by(where, none_fix=_fix_for_none)

    # Get one replacement for each target.
    if replace_fn is not _NOT_GIVEN:
        if not targets:
            raise _nothing_to_replace()
        targets = builtins.list(dict.fromkeys(targets))
        new = [replace_fn(tags.objects[target]) for target in targets]
    else:
        new = [replace] if is_single else builtins.list(replace)
    if len(new) != len(targets):
        raise ValueError(f"`where` returned {len(targets)} nodes, but `replace` has {len(new)}.")

    # Build the result, and report the ties that it lacks.
    edit = _Edit.of(walked, tags, builtins.list(zip(targets, new, strict=True)))
    edit.require_all_replaced()
    # Notes about a replaced leaf, such as that its tie was undone on purpose, hold for the new leaf as well.
    hand_on([tags.objects[target] for target in targets], new)
    _hand_on_tied_values(walked, targets, new)
    lost = edit.keep_ties()
    result = edit.result()
    for tie in lost:
        _report(tie)
    return result


def _fix_for_none(path: str) -> str:
    """Returns code that replaces the `None` at a path, for an error that says that `where` is unclear."""
    return f"    model = sharedtree.tree.at(lambda m: m{path}, model, new, is_leaf=lambda x: x is None)"


def _nothing_to_replace() -> SharingMismatchError:
    """Makes the error for a `where` that returned no node, where `replace_fn` was to be called."""
    return SharingMismatchError(
        "`where` returned no node, so `replace_fn` has nothing to replace.\n"
        "Probably `where` is wrong. If a tree may have no such node, check that first:\n"
        "    model = sharedtree.tree.at(where, model, replace_fn=replace_fn) if where(model) else model"
    )


def _hand_on_tied_values(tree: FlatDag, targets: Sequence[int], new: Sequence[Any]) -> None:
    """Notes the leaves of a replacement as tied outside modules, if a leaf of the replaced node has this note.

    Transforms take arrays outside modules for values, and warn if they lose the tie of a noted array.

    Args:
        tree: the tree, with its objects.
        targets: numbers of the replaced nodes.
        new: the replacement of each target.
    """
    for target, replacement in zip(targets, new, strict=True):
        if any(is_tied_value(tree.objects[number]) for number in tree.below(target).reached):
            note_tied_values(walk(replacement, Tags(), rules_here())[0])


_OF_ANOTHER_KIND = (
    "an object of another class, shape or dtype, or with other static values, there. It cannot stand at the other paths"
)
_SEVERAL = "several objects, or the old one and a new one, in its place"


class _LostTie(NamedTuple):
    """An object of the tree that is several objects in the result.

    Attributes:
        paths: its paths in the tree.
        replaced: path of a replaced node that held it.
        arrays: the arrays in it, and those in their places in the result.
        reason: what the replacement has there instead of one object for all paths, in words.
    """

    paths: tuple[str, ...]
    replaced: str
    arrays: Sequence[Any]
    reason: str


class _Edit(NamedTuple):
    """A tree, and the replacements of some of its nodes.

    Attributes:
        tree: the records of the tree.
        all: the records of the tree, followed by those of the replacements. One numbering and one list of objects
            serve both.
        replacement_of: record of the tree → record that replaces it.
        targets: the records that `where` named.
    """

    tree: FlatDag
    all: FlatDag
    replacement_of: dict[int, int]
    targets: Sequence[int]

    @classmethod
    def of(cls, tree: FlatDag, tags: Tags, replacements: Sequence[tuple[int, Any]]) -> "_Edit":
        """Walks the replacements, and returns the edit that puts each in the place of its target.

        Args:
            tree: the walked tree.
            tags: the tags of the walk. The objects of the replacements are added.
            replacements: pairs of a target and its replacement.

        Raises:
            InconsistentSharingError: if one target has two different replacements.
        """
        records = [*tree.records]
        everything = FlatDag(records, tree.root, tags.objects)
        replacement_of: dict[int, int] = {}
        # In a replacement, static values count as leaves, too, so that the result has the very objects.
        rules = exact_rules_here(lambda obj: node_type_of(obj) is None)
        for position, (target, replacement) in enumerate(replacements):
            _, new_records, number = walk(replacement, tags, rules, f"replace[{position}]")
            records += new_records
            first_number = replacement_of.setdefault(target, number)
            if first_number != number and not are_one_value(everything, first_number, number):
                raise _two_replacements(tree, target)
        return cls(tree, everything, replacement_of, builtins.list(replacement_of))

    def require_all_replaced(self) -> None:
        """Raises an error if all paths to a target lead through another target, so that its replacement has no place.

        Raises:
            SharingMismatchError: with both paths.
        """
        # Records on paths that lead through no target, and the targets at the ends of such paths.
        remaining = self._reached([self.tree.root], enter=lambda number: number not in self.replacement_of)
        for target in self.targets:
            if target not in remaining:
                paths = self.tree.paths_of_edges
                inner = paths[target][0]
                outer = next(paths[t][0] for t in self.targets if t != target and target in self._reached([t]))
                raise SharingMismatchError(
                    f"`where` returned the node at `{outer}` and, inside it, the one at `{inner}`. Since the first is "
                    "replaced, the second has no place any more.\n"
                    "Replace the one after the other:\n"
                    f"    model = sharedtree.tree.at(lambda m: m{inner}, model, inner)\n"
                    f"    model = sharedtree.tree.at(lambda m: m{outer}, model, outer)",
                    (outer, inner),
                )

    def keep_ties(self) -> list[_LostTie]:
        """Adds replacements for parts of targets that are tied to the rest of the tree, so that the ties are kept.

        Returns:
            The maximal ties that cannot be kept.
        """
        # Find the tied parts of targets. Tied part → the targets that hold it.
        holders: dict[int, list[int]] = {}
        tied = _tied(self.tree)
        parts_of = {t: self._reached([t]) - {t} if tied else set[int]() for t in self.targets}
        for target, parts in parts_of.items():
            for part in parts & tied:
                holders.setdefault(part, []).append(target)
        if not holders:
            return []

        # Find the parts of the tree that remain, and the parts of the replacements.
        remaining = self._reached([self.tree.root], enter=lambda number: number not in self.replacement_of)
        new_parts_of = {t: self._reached([self.replacement_of[t]]) for t in self.targets}
        counterparts = {t: self._counterparts(t) for t in self.targets if parts_of[t] & tied}
        in_replacements = set[int]().union(*new_parts_of.values())

        # Decide for each tied part. `lost`: part → a target that holds it, the arrays that were one, and the reason.
        lost: dict[int, tuple[int, list[Any], str]] = {}
        # Parents have higher numbers than their children, so they come first.
        for part in sorted(holders, reverse=True):
            # The objects that the part becomes: itself, if it remains, and the objects in its place in replacements.
            successors: set[int] = {part} if part in remaining else set()
            # If a replacement has another shape, nothing in it is in the place of the part. Then all its arrays of the
            # same shape and dtype count, since any of them may be a copy of the part.
            copies: set[int] = set()
            for target in holders[part]:
                is_still_held = part in new_parts_of[target]
                counterparts_of_part = {part} if is_still_held else counterparts[target].get(part, set())
                successors |= counterparts_of_part
                if not counterparts_of_part:
                    copies |= self._possible_copies(part, new_parts_of[target])
            new_objects = successors - {part}
            # If there is one new object, and the old one remains in the rest of the tree but in no replacement, the new
            # one can replace it there.
            if part in remaining and len(new_objects) == 1 and not copies and part not in in_replacements:
                (new_object,) = new_objects
                if self._can_be_one(part, new_object):
                    self.replacement_of[part] = new_object
                    continue
            arrays = [array for number in new_objects | copies for array in self._arrays(number)]
            if len(successors | copies) > 1 and arrays:
                is_of_another_kind = len(new_objects) == 1 and not copies and part not in in_replacements
                reason = _OF_ANOTHER_KIND if is_of_another_kind else _SEVERAL
                lost[part] = holders[part][0], [*self._arrays(part), *arrays], reason
        return self._maximal_ties(lost)

    def _maximal_ties(self, lost: dict[int, tuple[int, list[Any], str]]) -> list[_LostTie]:
        """Describes the maximal lost ties. A lost tie is not maximal if the ties of all its parents are lost as well.

        Args:
            lost: part → a target that holds it, the arrays that were one, and the reason.
        """
        if not lost:
            return []
        parents: dict[int, set[int]] = {}
        for number, (_, children) in enumerate(self.tree.records):
            for child in children:
                parents.setdefault(child, set()).add(number)
        paths = self.tree.paths_of_edges
        maximal: list[_LostTie] = []
        for part, (target, arrays, reason) in lost.items():
            if not parents[part] <= lost.keys():
                maximal.append(_LostTie(tuple(paths[part]), paths[target][0], arrays, reason))
        return maximal

    def result(self) -> Any:
        """Builds the edited tree."""
        num_tree_records = len(self.tree.records)
        # True for the records that have an edited version.
        has_target_below = [False] * num_tree_records
        for number, (_, children) in enumerate(self.tree.records):
            has_target_below[number] = any(
                child in self.replacement_of or has_target_below[child] for child in children
            )
        # All nodes of the tree are made anew. A node of a replacement stays the same object, unless it holds a node of
        # the tree. `is_kept` is True for the records whose objects go into the result.
        is_kept = [False] * len(self.all.records)
        for number, (op, children) in enumerate(self.all.records):
            is_in_replacement = number >= num_tree_records
            is_kept[number] = op is LEAF or (is_in_replacement and all(is_kept[child] for child in children))

        def expand(version: _Version) -> tuple[Op, Sequence[_Version]]:
            """Returns the operation of a node of the result, and its children. A kept object counts as a leaf."""
            op, children = self.all.records[version.number]
            if is_kept[version.number]:
                return LEAF, ()
            if version.is_edited:
                return op, [edited(child) for child in children]
            return op, [_Version(child, is_edited=False) for child in children]

        def edited(number: int) -> _Version:
            """Returns the version of a record in the edited tree: its replacement, if it has one."""
            if number in self.replacement_of:
                return _Version(self.replacement_of[number], is_edited=False)
            return _Version(number, is_edited=has_target_below[number])

        return rebuilt(edited(self.tree.root), expand, lambda version: self.all.objects[version.number])

    def _reached(self, roots: Iterable[int], enter: Callable[[int], bool] = lambda _: True) -> set[int]:
        """Returns the numbers of the roots and of all records below them.

        Args:
            roots: numbers of records.
            enter: (number of a node) → False to leave out the records below it, unless another path leads to them.
        """
        visited: set[int] = set()
        stack = [*roots]
        while stack:
            number = stack.pop()
            if number not in visited:
                visited.add(number)
                if enter(number):
                    stack.extend(self.all.records[number][1])
        return visited

    def _counterparts(self, target: int) -> dict[int, set[int]]:
        """Maps the target and each part of it to the parts of its replacement at the same paths from the top."""
        counterparts: dict[int, set[int]] = {}
        # `agree` accepts every difference, so `pairs` yields no `Mismatch`. It goes no deeper where the two differ in
        # shape.
        new = self.all.below(self.replacement_of[target])
        for pair in pairs(self.all.below(target), new, agree=lambda *_: True):
            assert isinstance(pair, RecordPair)
            counterparts.setdefault(pair.left, set()).add(pair.right)
        return counterparts

    def _arrays(self, number: int) -> list[Any]:
        """Returns the arrays below a record, or the array itself."""
        leaves = [self.all.objects[n] for n in self._reached([number]) if self.all.records[n][0] is LEAF]
        return [leaf for leaf in leaves if carries_identity(leaf)]

    def _possible_copies(self, part: int, candidates: set[int]) -> set[int]:
        """Selects the candidates that have the shape and dtype of an array in a part, so that they may be its copies.

        Args:
            part: number of the part.
            candidates: numbers of the records in a replacement that has nothing in the place of the part.
        """
        kinds = {(leaf.shape, leaf.dtype) for leaf in self._arrays(part)}
        arrays = [n for n in candidates if self.all.records[n][0] is LEAF and carries_identity(self.all.objects[n])]
        return {n for n in arrays if (self.all.objects[n].shape, self.all.objects[n].dtype) in kinds}

    def _can_be_one(self, part: int, successor: int) -> bool:
        """Returns True if two records and all below agree in class, static data, shape and dtype.

        The values of arrays may differ.
        """

        def agree(i: int, j: int) -> bool:
            """Returns True for two arrays of one shape and dtype, and for two equal values."""
            x, y = self.all.objects[i], self.all.objects[j]
            if carries_identity(x) and carries_identity(y):
                return x.shape == y.shape and x.dtype == y.dtype
            try:
                return not carries_identity(x) and not carries_identity(y) and Static(x) == Static(y)
            except Incomparable:
                return False

        for pair in pairs(self.all.below(part), self.all.below(successor), agree):
            if isinstance(pair, Mismatch):
                return False
            op = self.all.records[pair.left][0]
            if type(op) is Node and op != self.all.records[pair.right][0]:
                return False
        return True


class _Version(NamedTuple):
    """A record in the result.

    Attributes:
        number: number of the record.
        is_edited: True if the targets below the record are replaced. False if it has its old parts.
    """

    number: int
    is_edited: bool


def _tied(tree: FlatDag) -> set[int]:
    """Returns the numbers of the tied records: those that carry identity, and to which several edges lead."""
    numbers = records_with_several_edges(tree.records, tree.root)
    ops = {number: tree.records[number][0] for number in numbers if can_be_tied(tree.records[number][0])}
    return {number for number, op in ops.items() if op is not LEAF or carries_identity(tree.objects[number])}


def _two_replacements(tree: FlatDag, target: int) -> InconsistentSharingError:
    """Makes the error for a target with two different replacements. It may be tied, or named twice at one path."""
    paths = tree.paths_of_edges[target]
    if len(paths) == 1:
        return InconsistentSharingError(
            f"`where` returned the node at `{paths[0]}` twice, with two different replacements. Give one "
            "replacement:\n"
            f"    model = sharedtree.tree.at(lambda m: m{paths[0]}, model, new)",
            paths,
            ["replaced"],
        )
    names = ", ".join(f"`{path}`" for path in paths)
    return InconsistentSharingError(
        f"`where` returned one node twice, with two different replacements. It is tied: its paths are {names}.\n"
        "A tied node is replaced at all of its paths. Give one replacement:\n"
        f"    model = sharedtree.tree.at(lambda m: m{paths[0]}, model, new)\n"
        "or untie it before the replacement:\n"
        f"    model = sharedtree.untie(model, lambda m: m{paths[-1]})",
        paths,
        ["replaced"] * len(paths),
    )


def _report(tie: _LostTie) -> None:
    """Warns about a lost tie. Raises `UntiedError` under `Policy(on_untie="error")`."""
    policy = current_policy()
    report_untied(
        policy.on_untie,
        definition_of_caller(),
        f"{listed(tie.paths)} were one object, but the replacement of `{tie.replaced}` has {tie.reason}.",
        "Give a replacement that holds the old object, or one new object of the same kind. If they should be separate, "
        "untie them before the call:\n"
        f"    model = sharedtree.untie(model, lambda m: m{tie.replaced})",
        tie.paths,
    )
    # A transform that returns the result need not report it again.
    note(tie.arrays if policy.on_untie == "warn" else ())
