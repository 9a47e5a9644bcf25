"""Replacing nodes of a DAG: `sharedtree.tree.at`.

The tree and the replacements are walked in one numbering, so an object that occurs in several of them is one record. In
the result each edge of the tree that leads to a target leads to its replacement instead; replacements are taken as
they are, so what one of them holds of the tree is what was there before: `at(lambda m: (m.a, m.b), m, (m.b, m.a))`
swaps. A record of the result is hence a record of the walk, *edited* if it is a node of the tree above a target.

A target may share parts with what is not replaced. Where its replacement has another object in the place of such a
part, and the two could be one, that object takes the part's place everywhere: the tie is kept. Where it cannot be
kept, one warning for each maximal tie says so.
"""

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..core._errors import InconsistentSharingError, SharingMismatchError, definition_of_caller, report_untied
from ..core._hidden_arrays import require_all_seen_in
from ..core._node_types import carries_identity, node_type_of, require_registered
from ..core._pack_and_unpack import Tags, walk
from ..core._printing import listed
from ..core._sharing import Mismatch, RecordPair, pairs
from ..core._static_values import Incomparable, Static
from ..core._structure import LEAF, FlatDag, Node, Op, with_several_edges
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
            stand-ins whose leaves have no values, and must name the same places, so it cannot look at leaves. In a
            stand-in a `None` is a `None`; one that is returned is replaced at its own path only.
        tree: the tree; it is not changed.
        replace: the replacement, or a sequence of as many as `where` returned.
        replace_fn: instead of `replace`: takes what is there and returns the replacement. Called once for each node.
        is_leaf: nodes for which it is true count as leaves. With `lambda x: x is None` each `None` has a stand-in, as
            a leaf has, so a `where` that looks for `None` does not find it.

    Returns:
        A tree of new nodes, apart from the replacements; all other arrays are the same objects.

    Raises:
        InconsistentSharingError: if `replace` has two different replacements for one tied node.
        SharingMismatchError: if `where` returns what is not in the tree, a node and a part of that node, or nothing
            for `replace_fn`; if it depends on leaves; or if it cannot be told which `None` it means.
        TypeError: if `where` is no function, as when it and the tree are in the wrong order.
        ValueError: if not exactly one of `replace` and `replace_fn` is given, or their numbers differ.

    Warns:
        UntiedWarning: if a replaced node shared a part with something else, and the two are two objects now. As
            `Policy(on_untie=)` says, this is an `UntiedError` or nothing.

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
    tags = Tags()
    _, records, root = walk(tree, tags, exact_rules_here(is_leaf))
    require_all_seen_in(records, root)
    walked = FlatDag(records, root, tags.objects)
    targets, is_single = WhereTree(walked).named_by(where, none_fix=_fix_for_none)
    if replace_fn is not _NOT_GIVEN:
        if not targets:
            raise _nothing_to_replace()
        targets = builtins.list(dict.fromkeys(targets))
        new = [replace_fn(tags.objects[target]) for target in targets]
    else:
        new = [replace] if is_single else builtins.list(replace)
    if len(new) != len(targets):
        raise ValueError(f"`where` returned {len(targets)} nodes, but `replace` has {len(new)}.")
    edit = _Edit.of(walked, tags, builtins.list(zip(targets, new, strict=True)))
    edit.require_all_replaced()
    hand_on([tags.objects[target] for target in targets], new)
    _hand_on_tied_values(walked, targets, new)
    lost = edit.keep_ties()
    result = edit.result()
    for tie in lost:
        _say(tie)
    return result


def _fix_for_none(path: str) -> str:
    return f"    model = sharedtree.tree.at(lambda m: m{path}, model, new, is_leaf=lambda x: x is None)"


def _nothing_to_replace() -> SharingMismatchError:
    return SharingMismatchError(
        "`where` returned no node, so there is nothing that `replace_fn` could be called with.\n"
        "Most often it looks for the wrong thing. If a tree may have no such node, ask first:\n"
        "    model = sharedtree.tree.at(where, model, replace_fn=replace_fn) if where(model) else model"
    )


def _hand_on_tied_values(tree: FlatDag, targets: Sequence[int], new: Sequence[Any]) -> None:
    for target, replacement in zip(targets, new, strict=True):
        if any(is_tied_value(tree.objects[number]) for number in tree.below(target).reached):
            note_tied_values(walk(replacement, Tags(), rules_here())[0])


class _LostTie(NamedTuple):
    """An object of the tree that is several in the result: its paths, a node replaced, the arrays that were one."""

    paths: tuple[str, ...]
    replaced: str
    arrays: Sequence[Any]


class _Edit(NamedTuple):
    """A tree, and what is to be replaced in it.

    Attributes:
        tree: its own records, with the objects of all.
        all: the tree with the records of the replacements after its own, in one numbering.
        instead: record of the tree → record that takes its place.
        targets: those that `where` returned.
    """

    tree: FlatDag
    all: FlatDag
    instead: dict[int, int]
    targets: Sequence[int]

    @classmethod
    def of(cls, tree: FlatDag, tags: Tags, new: Sequence[tuple[int, Any]]) -> "_Edit":
        table = [*tree.records]
        both = FlatDag(table, tree.root, tags.objects)
        instead: dict[int, int] = {}
        whole = exact_rules_here(lambda obj: node_type_of(obj) is None)  # leaves of replacements are taken as they are
        for position, (target, replacement) in enumerate(new):
            _, more, number = walk(replacement, tags, whole, f"replace[{position}]")
            table += more
            before = instead.setdefault(target, number)
            if before != number and not are_one_value(both, before, number):
                raise _two_replacements(tree, target)
        return cls(tree, both, instead, builtins.list(instead))

    def require_all_replaced(self) -> None:
        outside = self._reached([self.tree.root], enter=lambda number: number not in self.instead)
        for target in self.targets:
            if target not in outside:
                paths = self.tree.all_paths
                inner = paths[target][0]
                outer = next(paths[t][0] for t in self.targets if t != target and target in self._reached([t]))
                raise SharingMismatchError(
                    f"`where` returned the node at `{outer}` and, inside it, the one at `{inner}`. Since the first is "
                    "replaced, there is no place for what should replace the second.\n"
                    "Replace the one after the other:\n"
                    f"    model = sharedtree.tree.at(lambda m: m{inner}, model, inner)\n"
                    f"    model = sharedtree.tree.at(lambda m: m{outer}, model, outer)",
                    (outer, inner),
                )

    def keep_ties(self) -> list[_LostTie]:
        """Ties replacements to the rest of the tree where what they replace was tied; returns what cannot be kept."""
        holders: dict[int, list[int]] = {}  # tied part → the targets that hold it
        tied = _tied(self.tree)
        below = {t: self._reached([t]) - {t} if tied else set[int]() for t in self.targets}
        for target, parts in below.items():
            for part in parts & tied:
                holders.setdefault(part, []).append(target)
        if not holders:
            return []
        outside = self._reached([self.tree.root], enter=lambda number: number not in self.instead)
        held = {t: self._reached([self.instead[t]]) for t in self.targets}
        partners = {t: self._partners(t) for t in self.targets if below[t] & tied}
        in_replacements = set[int]().union(*held.values())
        lost: dict[int, tuple[int, list[Any]]] = {}  # part → a target that holds it, and the arrays that were one
        for part in sorted(holders, reverse=True):
            fates: set[int] = {part} if part in outside else set()
            copies: set[int] = set()
            for target in holders[part]:
                found = {part} if part in held[target] else partners[target].get(part, set())
                fates |= found
                if not found:
                    copies |= self._like(part, held[target])
            others = fates - {part}
            if part in outside and len(others) == 1 and not copies and part not in in_replacements:
                (other,) = others
                if self._can_be_one(part, other):
                    self.instead[part] = other
                    continue
            arrays = [array for number in others | copies for array in self._arrays(number)]
            if len(fates | copies) > 1 and arrays:
                lost[part] = holders[part][0], [*self._arrays(part), *arrays]
        return self._described(lost)

    def _described(self, lost: dict[int, tuple[int, list[Any]]]) -> list[_LostTie]:
        if not lost:
            return []
        parents: dict[int, set[int]] = {}
        for number, (_, children) in enumerate(self.tree.records):
            for child in children:
                parents.setdefault(child, set()).add(number)
        paths = self.tree.all_paths
        return [
            _LostTie(tuple(paths[part]), paths[target][0], arrays)
            for part, (target, arrays) in lost.items()
            if not parents[part] <= lost.keys()
        ]

    def result(self) -> Any:
        size = len(self.tree.records)
        is_above = [False] * size
        for number, (_, children) in enumerate(self.tree.records):
            is_above[number] = any(child in self.instead or is_above[child] for child in children)
        # A replacement stays the object that it is, unless it holds a node of the tree, all of which are made anew.
        is_kept = [False] * len(self.all.records)
        for number, (op, children) in enumerate(self.all.records):
            is_kept[number] = op is LEAF or (number >= size and all(is_kept[child] for child in children))

        def expand(name: tuple[int, bool]) -> tuple[Op, Sequence[tuple[int, bool]]]:
            number, is_edited = name
            op, children = self.all.records[number]
            if is_kept[number]:
                return LEAF, ()
            return op, [edited(child) if is_edited else (child, False) for child in children]

        def edited(number: int) -> tuple[int, bool]:
            return (self.instead[number], False) if number in self.instead else (number, is_above[number])

        return rebuilt(edited(self.tree.root), expand, lambda name: self.all.objects[name[0]])

    def _reached(self, start: Iterable[int], enter: Callable[[int], bool] = lambda _: True) -> set[int]:
        seen: set[int] = set()
        stack = [*start]
        while stack:
            number = stack.pop()
            if number not in seen:
                seen.add(number)
                if enter(number):
                    stack.extend(self.all.records[number][1])
        return seen

    def _partners(self, target: int) -> dict[int, set[int]]:
        """What the replacement of a target has in the places of the target's parts."""
        found: dict[int, set[int]] = {}
        for pair in pairs(self.all.below(target), self.all.below(self.instead[target]), lambda *_: True):
            assert isinstance(pair, RecordPair)
            found.setdefault(pair.left, set()).add(pair.right)
        return found

    def _arrays(self, number: int) -> list[Any]:
        leaves = [self.all.objects[n] for n in self._reached([number]) if self.all.records[n][0] is LEAF]
        return [leaf for leaf in leaves if carries_identity(leaf)]

    def _like(self, part: int, candidates: set[int]) -> set[int]:
        """Arrays in a replacement of another shape that could be copies of those in a part."""
        kinds = {(leaf.shape, leaf.dtype) for leaf in self._arrays(part)}
        arrays = [n for n in candidates if self.all.records[n][0] is LEAF and carries_identity(self.all.objects[n])]
        return {n for n in arrays if (self.all.objects[n].shape, self.all.objects[n].dtype) in kinds}

    def _can_be_one(self, part: int, other: int) -> bool:
        def alike(i: int, j: int) -> bool:
            x, y = self.all.objects[i], self.all.objects[j]
            if carries_identity(x) and carries_identity(y):
                return x.shape == y.shape and x.dtype == y.dtype
            try:
                return not carries_identity(x) and not carries_identity(y) and Static(x) == Static(y)
            except Incomparable:
                return False

        for pair in pairs(self.all.below(part), self.all.below(other), alike):
            if isinstance(pair, Mismatch):
                return False
            op = self.all.records[pair.left][0]
            if type(op) is Node and op != self.all.records[pair.right][0]:
                return False
        return True


def _tied(tree: FlatDag) -> set[int]:
    """The records to which several edges lead."""
    several = with_several_edges(tree.records, tree.root)
    ops = {number: tree.records[number][0] for number in several if can_be_tied(tree.records[number][0])}
    return {number for number, op in ops.items() if op is not LEAF or carries_identity(tree.objects[number])}


def _two_replacements(tree: FlatDag, target: int) -> InconsistentSharingError:
    paths = tree.all_paths[target]
    if len(paths) == 1:
        return InconsistentSharingError(
            f"`where` returned the node at `{paths[0]}` twice, with two different replacements. It has one place, so "
            "it has one replacement:\n"
            f"    model = sharedtree.tree.at(lambda m: m{paths[0]}, model, new)",
            paths,
            ["replaced"],
        )
    names = ", ".join(f"`{path}`" for path in paths)
    return InconsistentSharingError(
        f"`where` returned one node twice, with two different replacements. It is tied: its paths are {names}.\n"
        "What is tied is replaced at every path. Give one replacement:\n"
        f"    model = sharedtree.tree.at(lambda m: m{paths[0]}, model, new)\n"
        "or part the paths first, and replace then:\n"
        f"    model = sharedtree.untie(model, lambda m: m{paths[-1]})",
        paths,
        ["replaced"] * len(paths),
    )


def _say(tie: _LostTie) -> None:
    policy = current_policy()
    report_untied(
        policy.on_untie,
        definition_of_caller(),
        f"{listed(tie.paths)} were one object, but what replaces `{tie.replaced}` has another one there, which cannot "
        "take its place everywhere: it differs in class, statics, shape or dtype, or there are several.",
        "Give replacements that hold what was there, or one new object of the same kind. If the tie is meant to go, "
        f"say so before:\n    model = sharedtree.untie(model, lambda m: m{tie.replaced})",
        tie.paths,
    )
    # A transform that returns the result need not report it again.
    note(tie.arrays if policy.on_untie == "warn" else ())
