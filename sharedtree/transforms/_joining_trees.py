"""Joins two trees where one must fit the other: a carry that goes in and out, branches, rules, callbacks, programs.

One tree goes in, the other comes out, and JAX wants one structure for both. A tie of modules on one side must be a tie
on the other. Arrays and mutable containers alias by accident (a state that begins as `State(zeros, zeros)`). Their ties
hold only if both sides have them. This is the *join* of the sharing of both sides.

If only the tree that goes in has a tie, the tie is cut, once, and the function is traced again. If only the tree that
comes out has a tie, no second trace is needed: its leaf goes out twice. A static number that comes out as an array, or
as another number, becomes a traced leaf, as in vanilla JAX. Both need a *repacking* of what goes in. If that is
impossible, as with a compiled program, the join has to be *exact*: these two cases are errors, too.

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
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Structure, canonical_records, intern


class Sides(NamedTuple):
    """Names of the two sides, for errors.

    Attributes:
        transform: name of the transform that joins them. Not read if there is a program.
        before: where the first tree is, in words: `when an iteration begins`, `in the result of the first branch`.
        after: where the second tree is, in words.
        are_peers: True if neither side comes before the other, as with two branches. Then the fix for a tie is the
            same, whichever side has the tie.
        program: for a compiled program, the first words of the error: "`f` was compiled". Otherwise empty.
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
        """Returns the end of each error: the usual fix or, for a compiled program, how to compile another one."""
        return f"Make another one for these arguments:\n    program = {self.again}" if self.program else usual


class RecordsAtPath(NamedTuple):
    """Records of two trees at one path: what goes in there, and what comes out. -1 if nothing comes out there."""

    before: int
    after: int


class Join(NamedTuple):
    """The records that two trees of one shape have at the same paths, and where the trees differ.

    Attributes:
        pairs: the distinct pairs of records at one path, in flatten order.
        is_cut: True if an object that goes in comes out as two or more, so that its tie has to be cut.
        promoted: records going in that hold a static number and have to become traced leaves.
    """

    pairs: Sequence[RecordsAtPath]
    is_cut: bool
    promoted: frozenset[int]

    @property
    def fits(self) -> bool:
        """True if what goes in needs no repacking."""
        return not self.is_cut and not self.promoted


def join(before: FlatDag, after: FlatDag, sides: Sides, above: Path = (), *, exact: bool = False) -> Join:
    """Compares what goes in with what comes out. Pairs their records, and finds what has to be repacked.

    Cost: linear in the distinct pairs of records.

    Args:
        before: what goes in. Its leaves are asked for references only, and may be None.
        after: what comes out. Its objects are not looked at.
        sides: names of the two, for errors.
        above: path to both trees, for errors.
        exact: True if what goes in cannot be packed again. Then a tie that does not come out is an error, whatever is
            tied, and so is a static number that changes. Ties that only come out are treated as always.

    Returns:
        The pairs of records, whether a tie has to be cut, and the static numbers that have to become traced leaves.

    Raises:
        SharingMismatchError: if the trees differ in classes, in static values other than numbers, or in a tie of
            modules or references. Ties of a module without traced leaves are treated as those of arrays.
    """
    _require_same_arguments(before, after, sides)

    def can_pair(i: int, j: int) -> bool:
        """Returns True for two leaves, traced or static. `pairs` asks about all records but two nodes of one class."""
        op, op_after = before.records[i][0], after.records[j][0]
        return (op is LEAF or type(op) is Static) and (op_after is LEAF or type(op_after) is Static)

    joined: list[RecordsAtPath] = []
    promoted: set[int] = set()
    # Record of one side → its distinct partners, which are the records of the other side at its paths. Each has a path.
    partners_after: dict[int, list[tuple[int, Path]]] = {}
    partners_before: dict[int, list[tuple[int, Path]]] = {}
    # `pairs` yields each pair of records once, and a `Mismatch` wherever the shapes differ.
    for pair in pairs(before, after, can_pair):
        path = (*above, *pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, sides)
        i, j = pair.left, pair.right
        op, op_after = before.records[i][0], after.records[j][0]
        # Two leaves of which at least one is static. For nodes the static data differs, which is an error.
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
    """Collects what comes out for each traced leaf that goes in, in flatten order of what goes in.

    Args:
        before: what goes in.
        after: what comes out, with its objects.
        joined: the join of the two.
    """
    # A leaf that goes in may have several partners. The first pair is the last to be entered, so it counts.
    record_after = dict(reversed(joined.pairs))
    leaves: list[Any] = []
    for record in before.leaf_numbers:
        # A part of a tree has all leaves of the whole. Those outside of the part have no pair.
        if record in record_after:
            op = after.records[record_after[record]][0]
            leaves.append(op.thaw() if type(op) is Static else after.objects[record_after[record]])
    return leaves


def fit_leaves(before: FlatDag, after: FlatDag, sides: Sides, above: Path = ()) -> list[Any]:
    """Requires an exact join. Returns what comes out for each traced leaf that goes in, in order.

    Args:
        before: what goes in.
        after: what comes out, with its objects.
        sides: names of the two, for errors.
        above: path to both trees, for errors.

    Raises:
        SharingMismatchError: if the join is not exact. See `join`.
    """
    return leaves_like(before, after, join(before, after, sides, above, exact=True))


class Repacking(NamedTuple):
    """Another way to pack a tree, so that what goes in has the structure of what comes out.

    It refers to no structure, so a cache that holds it keeps no structure alive.

    Attributes:
        origins: for each new record, the old record from which it is made. The last new record is the root.
        children: for each new record, its children, which are new records.
        promoted: old records that become traced leaves.
    """

    origins: Sequence[int]
    children: Sequence[tuple[int, ...]]
    promoted: frozenset[int]

    def structure(self, tree: FlatDag) -> Structure:
        """Returns the new structure of a tree.

        Args:
            tree: a tree with the old records.
        """
        ops = [LEAF if record in self.promoted else tree.records[record][0] for record in self.origins]
        return intern(tuple(zip(ops, self.children, strict=True)), len(ops) - 1)


def repacking_for(whole: FlatDag, before: FlatDag, after: FlatDag, joined: Join) -> Repacking:
    """Makes the repacking that keeps only the ties which both sides have, and traces the static numbers that change.

        goes in         args(State(z, z), z)     `whole`, of which State(z, z) is `before`
        comes out       State(a, b)              `after`
        pairs           (args, -1)   (State, State)   (z, a)   (z, b)
        new records     args(State(x, y), x)     x is the pair (z, a), and y is (z, b)

    Args:
        whole: everything that goes in.
        before: the part of it that was compared. It has the records of the whole, and another root.
        after: what comes out in the place of that part.
        joined: the join of the last two.
    """
    # Record that goes in → its first partner.
    first_after: dict[int, int] = {}
    for pair in joined.pairs:
        first_after.setdefault(pair.before, pair.after)
    start = RecordsAtPath(before.root, after.root)

    # Each distinct pair becomes a record. Equal pairs are one, so a tie holds if both sides have it.
    def expand(pair: RecordsAtPath) -> tuple[Op, Sequence[RecordsAtPath]]:
        """Returns the pairs below a pair. The operation is not used, so `LEAF` stands for any."""
        children = whole.records[pair.before][1]
        if pair.after < 0:
            # Outside the compared part nothing comes out, so its ties stay. What is also in the part is tied to the
            # first of the pieces into which it is split there.
            child_pairs: list[RecordsAtPath] = []
            for child in children:
                is_start = child == before.root
                child_pairs.append(start if is_start else RecordsAtPath(child, first_after.get(child, -1)))
            return LEAF, child_pairs
        children_after = after.records[pair.after][1]
        return LEAF, [RecordsAtPath(*child) for child in zip(children, children_after, strict=True)]

    root = start if whole.root == before.root else RecordsAtPath(whole.root, -1)
    # The pairs, numbered as a walk would number the objects of the new tree.
    table, numbered_pairs = canonical_records(root, expand)
    origins = [pair.before for pair in numbered_pairs]
    return Repacking(origins, [children for _, children in table], joined.promoted)


def join_of_branches(results: Mapping[str, FlatDag], transform: str) -> Structure:
    """Makes the structure with which the results of all branches can be packed: the join of all of them.

    The structure of a result has notes on leaves, such as that a tie was undone on purpose (`ties/_leaf_notes`). A leaf
    of the join has the notes that it has in any branch.

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
    # The notes of each branch go to the records of the join.
    noted: set[int] = set()
    tied_values: set[int] = set()
    for result in results.values():
        structure = result.structure
        if structure is None or not structure.is_noted:
            continue
        # The results fit by now, so no error names the sides.
        pairs_of_result = join(common, result, Sides("", "", "")).pairs
        for records, positions in ((noted, structure.noted), (tied_values, structure.tied_values)):
            records_after = {result.leaf_numbers[position] for position in positions}
            records.update(pair.before for pair in pairs_of_result if pair.after in records_after)

    # In a structure, a note is the position of a leaf among all leaves.
    def positions_of(records: set[int]) -> tuple[int, ...]:
        return tuple([position for position, record in enumerate(common.leaf_numbers) if record in records])

    # 0 and None: the structure belongs to no `Context`.
    return intern(tuple(common.records), common.root, 0, None, positions_of(noted), positions_of(tied_values))


def holds_modules(tree: FlatDag) -> bool:
    """Returns True if a tree holds a module or a reference. For other trees, callers let JAX raise its own error."""
    has_module = any(type(op) is Node and not op.type.is_plain for op, _ in tree.records)
    return has_module or any(isinstance(tree.objects[record], jax.Ref) for record in tree.leaf_numbers)


class _Result:
    """The key with which paths in a result begin."""

    def __str__(self) -> str:
        return "result"


_RESULT = _Result()


def _must_keep_ties(tree: FlatDag, record: int) -> bool:
    """Returns True for modules and references, which do not alias by accident, so that their ties may not be cut."""
    op = tree.records[record][0]
    return not op.type.is_plain if type(op) is Node else isinstance(tree.objects[record], jax.Ref)


def _require_same_arguments(before: FlatDag, after: FlatDag, sides: Sides) -> None:
    """Raises an error if both trees are arguments of calls that differ in number or keywords of arguments."""
    names_before, names_after = _argument_names(before), _argument_names(after)
    if names_before is not None and names_after is not None and names_before != names_after:
        usual = "Call it with as many arguments, by position or by keyword as before."
        text = (
            f"in their arguments: {sides.before} they are {_call_with(names_before)}, "
            f"{sides.after} {_call_with(names_after)}"
        )
        raise SharingMismatchError(f"{sides.first_words} {text}.\n{sides.fix(usual)}")


def _argument_names(tree: FlatDag) -> ArgumentNames | None:
    """Returns the names of arguments, without their values. None if a tree is not the arguments of a call."""
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
    """Raises an error unless each of two operations that differ is a traced leaf or a static number.

    Args:
        path: the path of both, for errors.
        op: what goes in.
        op_after: what comes out.
        sides: names of the two.
        exact: True if a static number that goes in may not change.
    """
    # A traced leaf passes as the number 0.
    number, number_after = (record_op.peek() if type(record_op) is Static else 0 for record_op in (op, op_after))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(number) not in PYTHON_NUMBERS or type(number_after) not in PYTHON_NUMBERS:
        _raise_other_shape(path, describe_beside(op, op_after), describe_beside(op_after, op), sides)


def describe_beside(op: Op, partner: Op) -> str:
    """Describes a record in words, for errors that describe a second record, too.

    Args:
        op: operation of the record.
        partner: operation of the second record. If the static data of both prints alike, only the first part in which
            they differ is printed.
    """
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
    """Raises the error for two trees that differ at a path, where they have `left` and `right`, in words."""
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
        partners: records of the side without the tie, each with its path. The first two paths are named.
        tree: what goes in, with its objects.
        record: a record of that tree: the tied one or, if it comes out tied, one of those that do.
        sides: names of the two.
        lost: True if the tie goes in and does not come out. False if it comes out and did not go in.
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
