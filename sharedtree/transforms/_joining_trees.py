"""Joins two trees where one must fit the other: a carry that goes in and out, branches, rules, callbacks, programs.

JAX wants one structure on both sides. A tie of modules on one side must be a tie on the other. Arrays and mutable
containers alias by accident (a state that begins as `State(zeros, zeros)`), so of their ties only those hold that both
sides have: the *join* of their sharing. What goes in is split accordingly, once, and the function is traced again. A
tie that only the result has needs no second trace: the leaf goes out twice. A static number that comes out as an array,
or as another number, becomes a traced leaf, as in vanilla JAX. Where what goes in cannot be packed again, as with a
compiled program, the join has to be *exact*.

    goes in           comes out         the join
    State(z, z)       State(a, b)       State(·, ·), two leaves: z goes in twice
    State(y, z)       State(a, a)       State(·, ·): a comes out twice
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·): 0 goes in as a leaf
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import ArgumentNames, Arguments
from ..core._errors import SharingMismatchError
from ..core._node_types import PYTHON_NUMBERS
from ..core._sharing import Mismatch, name_of, pairs
from ..core._static_values import Static, shown_beside
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Structure, canonical, intern


class Sides(NamedTuple):
    """Names of the two sides, for errors.

    Attributes:
        transform: name of the transform that joins them.
        before: the first side, as `when an iteration begins` or `in the result of the first branch`.
        after: the second side.
        are_peers: True if neither comes before the other. Then a tie that either side lacks has one and the same fix.
        program: the compiled program and the function it was made from, as `f` was compiled, where there is one.
        again: code that compiles another program.
    """

    transform: str
    before: str
    after: str
    are_peers: bool = False
    program: str = ""
    again: str = ""

    @property
    def first_words(self) -> str:
        """The beginning of each error."""
        if self.program:
            return f"{self.program} for other arguments, and a program cannot be traced again: they differ"
        return f"`{self.transform}` joins two trees that differ"

    def fix(self, usual: str) -> str:
        """The end of each error: the usual fix, or how to compile again."""
        return f"Make another one for these arguments:\n    program = {self.again}" if self.program else usual


class RecordsAtPath(NamedTuple):
    """Records of two trees at one path: what goes in there, and what comes out. -1 where there is none."""

    before: int
    after: int


class Join(NamedTuple):
    """The records that two trees of one shape have at the same paths, and where the trees differ.

    Attributes:
        pairs: the distinct pairs of records at one path, in flatten order.
        is_cut: True if an object that goes in comes out as two.
        promoted: records going in that hold a static number and have to become traced leaves.
    """

    pairs: Sequence[RecordsAtPath]
    is_cut: bool
    promoted: frozenset[int]

    @property
    def fits(self) -> bool:
        """True if what goes in can stay as it is packed."""
        return not self.is_cut and not self.promoted


def join(before: FlatDag, after: FlatDag, sides: Sides, above: Path = (), *, exact: bool = False) -> Join:
    """Compares what goes in with what comes out.

    Cost: linear in the distinct pairs of records.

    Args:
        before: what goes in. Its leaves, where it has objects, tell which are references.
        after: what comes out.
        sides: names of the two, for errors.
        above: path to both trees, for errors.
        exact: True if what goes in cannot be packed again, so that it may lose no tie and no static number may change.

    Raises:
        SharingMismatchError: if classes or static values differ, or a tie of modules or references.
    """
    _require_same_arguments(before, after, sides)

    def can_pair(i: int, j: int) -> bool:
        op, op_after = before.records[i][0], after.records[j][0]
        return (op is LEAF or type(op) is Static) and (op_after is LEAF or type(op_after) is Static)

    joined: list[RecordsAtPath] = []
    promoted: set[int] = set()
    # For each record of one side: the records of the other side at its paths, each with one of these paths.
    partners_after: dict[int, list[tuple[int, Path]]] = {}
    partners_before: dict[int, list[tuple[int, Path]]] = {}
    for pair in pairs(before, after, can_pair):
        path = (*above, *pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, sides)
        i, j = pair.left, pair.right
        op, op_after = before.records[i][0], after.records[j][0]
        if op != op_after:
            _require_numbers(path, op, op_after, sides, exact=exact)
            if type(op) is Static:
                promoted.add(i)
        joined.append(RecordsAtPath(i, j))
        partners_after.setdefault(i, []).append((j, path))
        partners_before.setdefault(j, []).append((i, path))
    # Ties that go in and do not come out.
    is_cut = False
    for i, partners in partners_after.items():
        if len(partners) > 1:
            if exact or (before.holds_leaf[i] and _must_keep_ties(before, i)):
                _raise_other_ties(partners, before, i, sides, lost=True)
            is_cut = True
    # Ties that come out and did not go in.
    for partners in partners_before.values():
        i = partners[0][0]
        if len(partners) > 1 and before.holds_leaf[i] and _must_keep_ties(before, i):
            _raise_other_ties(partners, before, i, sides, lost=False)
    return Join(joined, is_cut, frozenset(promoted))


def leaves_like(before: FlatDag, after: FlatDag, joined: Join) -> list[Any]:
    """Collects what comes out for each traced leaf that goes in, in flatten order of what goes in."""
    # A leaf may come out at several paths; the first counts.
    record_after = dict(reversed(joined.pairs))
    leaves: list[Any] = []
    for record in before.leaf_numbers:
        if record in record_after:
            op = after.records[record_after[record]][0]
            leaves.append(op.thaw() if type(op) is Static else after.objects[record_after[record]])
    return leaves


def fit_leaves(before: FlatDag, after: FlatDag, sides: Sides, above: Path = ()) -> list[Any]:
    """Collects what comes out for each traced leaf that goes in, and requires an exact join.

    Args:
        before: what goes in.
        after: what comes out.
        sides: names of the two, for errors.
        above: path to both trees, for errors.

    Raises:
        SharingMismatchError: if the two trees differ in anything but leaves.
    """
    return leaves_like(before, after, join(before, after, sides, above, exact=True))


class Repacking(NamedTuple):
    """Another way to pack a tree, so that what goes in has the structure of what comes out.

    It refers to no structure, so that whoever caches it keeps none alive.

    Attributes:
        origins: for each new record, the old one. The last is the root.
        children: for each new record, its children.
        promoted: old records that become traced leaves.
    """

    origins: Sequence[int]
    children: Sequence[tuple[int, ...]]
    promoted: frozenset[int]

    def structure(self, tree: FlatDag) -> Structure:
        """Makes the new structure of a tree that has the old records."""
        ops = [LEAF if record in self.promoted else tree.records[record][0] for record in self.origins]
        return intern(tuple(zip(ops, self.children, strict=True)), len(ops) - 1)


def repacking_for(whole: FlatDag, before: FlatDag, after: FlatDag, joined: Join) -> Repacking:
    """Makes the repacking that keeps the ties which both sides have, and traces the static numbers that change.

    Args:
        whole: everything that goes in.
        before: the part of it that was compared. It has the records of the whole.
        after: what comes out.
        joined: the join of the last two.
    """
    first_after: dict[int, int] = {}
    for pair in joined.pairs:
        first_after.setdefault(pair.before, pair.after)
    start = RecordsAtPath(before.root, after.root)

    # Each pair becomes a record. Above the compared part nothing comes out, so the ties of there stay.
    def expand(pair: RecordsAtPath) -> tuple[Op, Sequence[RecordsAtPath]]:
        children = whole.records[pair.before][1]
        if pair.after < 0:
            return LEAF, [
                start if child == before.root else RecordsAtPath(child, first_after.get(child, -1))
                for child in children
            ]
        children_after = after.records[pair.after][1]
        return LEAF, [RecordsAtPath(*child) for child in zip(children, children_after, strict=True)]

    root = start if whole.root == before.root else RecordsAtPath(whole.root, -1)
    table, numbered_pairs = canonical(root, expand)
    origins = [pair.before for pair in numbered_pairs]
    return Repacking(origins, [children for _, children in table], joined.promoted)


def join_of_branches(results: Mapping[str, FlatDag], transform: str) -> Structure:
    """Makes the structure that the results of all branches can be packed with.

    A note on a leaf of any branch is a note on the leaf of the join.

    Args:
        results: name of a branch → its result. Leaves are not looked at.
        transform: name of the transform, for errors.

    Raises:
        SharingMismatchError: if there is no such structure.
    """
    (first_branch, common), *further_results = results.items()
    for branch, result in further_results:
        sides = Sides(transform, f"in the result of `{first_branch}`", f"in the result of `{branch}`", are_peers=True)
        joined = join(common, result, sides, (_RESULT,))
        if not joined.fits:
            common = FlatDag.without_objects(repacking_for(common, common, result, joined).structure(common))
    # Move the notes of each branch to the records of the join.
    noted: set[int] = set()
    tied_values: set[int] = set()
    for result in results.values():
        structure = result.structure
        if structure is None or not structure.is_noted:
            continue
        pairs_of_result = join(common, result, Sides("", "", "")).pairs
        for records, positions in ((noted, structure.noted), (tied_values, structure.tied_values)):
            records_after = {result.leaf_numbers[position] for position in positions}
            records.update(pair.before for pair in pairs_of_result if pair.after in records_after)

    # A structure has the notes by the positions of leaves.
    def positions_of(records: set[int]) -> tuple[int, ...]:
        return tuple([position for position, record in enumerate(common.leaf_numbers) if record in records])

    return intern(tuple(common.records), common.root, 0, None, positions_of(noted), positions_of(tied_values))


def holds_modules(tree: FlatDag) -> bool:
    """Returns True if a tree holds a module or a reference. In other trees, JAX's own error says best what is wrong."""
    has_module = any(type(op) is Node and not op.type.is_plain for op, _ in tree.records)
    return has_module or any(isinstance(tree.objects[record], jax.Ref) for record in tree.leaf_numbers)


class _Result:
    """The key by which paths in results begin."""

    def __str__(self) -> str:
        return "result"


_RESULT = _Result()


def _must_keep_ties(tree: FlatDag, record: int) -> bool:
    """Returns True for modules and references, which do not alias by accident."""
    op = tree.records[record][0]
    return not op.type.is_plain if type(op) is Node else isinstance(tree.objects[record], jax.Ref)


def _require_same_arguments(before: FlatDag, after: FlatDag, sides: Sides) -> None:
    """Raises an error if both trees are the arguments of a call, and the calls differ in number or keywords."""
    names_before, names_after = _argument_names(before), _argument_names(after)
    if names_before is not None and names_after is not None and names_before != names_after:
        usual = "Call it with as many arguments, by position or by keyword as before."
        text = (
            f"in their arguments: {sides.before} they are {_call_with(names_before)}, "
            f"{sides.after} {_call_with(names_after)}"
        )
        raise SharingMismatchError(f"{sides.first_words} {text}.\n{sides.fix(usual)}")


def _argument_names(tree: FlatDag) -> ArgumentNames | None:
    op = tree.records[tree.root][0]
    return op.aux.peek() if type(op) is Node and op.type.cls is Arguments else None


def _call_with(names: ArgumentNames) -> str:
    """Prints the arguments of a call without their values: `(x, static, y=, static z=)`."""
    positional, keywords, static_keywords = names
    texts = ["static" if name is None else name for name in positional]
    texts += [f"{name}=" for name in keywords]
    texts += [f"static {name}=" for name in static_keywords]
    return f"`({', '.join(texts)})`"


def _require_numbers(path: Path, op: Op, op_after: Op, sides: Sides, *, exact: bool) -> None:
    """Raises an error unless both are traced leaves or static numbers. If exact, a static number may not change."""
    number, number_after = (record_op.peek() if type(record_op) is Static else 0 for record_op in (op, op_after))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(number) not in PYTHON_NUMBERS or type(number_after) not in PYTHON_NUMBERS:
        _raise_other_shape(path, describe_beside(op, op_after), describe_beside(op_after, op), sides)


def describe_beside(op: Op, partner: Op) -> str:
    """Describes a record with the static data in which it differs from another one, for errors that name both."""
    if type(op) is not Node:
        return name_of(op)
    word = "keys" if issubclass(op.type.cls, dict) else "static data"
    data_of_partner = partner.aux.peek() if type(partner) is Node and op.type.cls is partner.type.cls else None
    return f"a `{op.type.cls.__name__}` with the {word} {shown_beside(op.aux.peek(), data_of_partner)}"


_FIX = (
    "What is not traced is part of the structure, which must be the same on both sides. What changes can be an array:\n"
    "    steps: jax.Array                   # not: eqx.field(static=True)"
)


def _raise_other_shape(path: Path, left: str, right: str, sides: Sides) -> NoReturn:
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"{sides.first_words} at `{text}`: {sides.before} it is {left}, {sides.after} {right}.\n{sides.fix(_FIX)}",
        (text,),
    )


def _raise_other_ties(
    partners: Sequence[tuple[int, Path]], tree: FlatDag, record: int, sides: Sides, *, lost: bool
) -> NoReturn:
    """Raises the error for a tie that only one side has.

    Args:
        partners: records of the side without the tie, each with its path. The first two are named.
        tree: the side with the objects.
        record: the tied record, or one of those that come out tied.
        sides: names of the two.
        lost: True if the tie goes in and does not come out.
    """
    paths = [jtu.keystr(path) for _, path in partners[:2]]
    op = tree.records[record][0]
    if type(op) is Node:
        kind = f"`{op.type.cls.__name__}`"
    else:
        kind = "`jax.Ref`" if op is LEAF and isinstance(tree.objects[record], jax.Ref) else "array"
    tied_side, untied_side = (sides.before, sides.after) if lost else (sides.after, sides.before)
    fix = (
        "Keep the tie, for example with\n"
        "    model = sharedtree.tree.map(f, model)\n"
        "    model = sharedtree.retie(model, like=before)\n"
        "or undo it before:\n"
        "    model = sharedtree.untie(model)"
        if lost or sides.are_peers
        else "Tie them before, or return two objects:\n    model = sharedtree.untie(model)"
    )
    raise SharingMismatchError(
        f"{sides.first_words} in sharing: `{paths[0]}` and `{paths[1]}` are one {kind} {tied_side}, "
        f"but two {untied_side}.\n"
        f"{sides.fix(fix)}",
        paths,
    )
