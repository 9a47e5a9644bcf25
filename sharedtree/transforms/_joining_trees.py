"""Joins two trees for which JAX wants one structure: the carry of a loop, results of branches, arguments of a program.

One tree goes in (the carry when an iteration begins), the other comes out (the carry when it ends). A tie of modules in
one tree must be a tie in the other. Arrays and mutable containers alias by accident (a state that begins as
`State(zeros, zeros)`), so their ties hold only if both trees have them. The ties that hold are the *join*.

If only the tree that goes in has a tie, the tie is cut, once, and the function is traced again. If only the tree that
comes out has a tie, no second trace is needed: its leaf goes out twice. A static number that comes out as an array, or
as another number, becomes a traced leaf, as in vanilla JAX. For a cut tie and for such a number, the tree that goes in
needs a *repacking*. If that is impossible, as with a compiled program, the join has to be *exact*: then a cut tie and a
changed number are errors, too.

    goes in           comes out         the join
    State(z, z)       State(a, b)       State(·, ·), two leaves: z goes in twice
    State(y, z)       State(a, a)       State(·, ·): a comes out twice
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·): 0 goes in as a leaf

A *record* is the number of an object in a flat DAG, here of one of the two trees.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import ArgumentNames, Arguments
from ..core._errors import SharingMismatchError
from ..core._node_types import PYTHON_NUMBERS
from ..core._sharing import Mismatch, op_text, pairs
from ..core._static_values import Static, distinguishing_text
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Structure, canonical_records, intern


class Sides(NamedTuple):
    """Names of the two trees, for errors.

    Attributes:
        transform: name of the transform that joins them. Not read if there is a program.
        first_place: where the first tree is, in words: `when an iteration begins`, `in the result of the first branch`.
        second_place: where the second tree is, in words.
        are_peers: True if neither tree comes before the other, as with two branches. Then the fix for a tie is the
            same, whichever tree has the tie.
        program: for a compiled program, the first words of the error: "`f` was compiled". Otherwise empty.
        code: code that compiles another program.
    """

    transform: str
    first_place: str
    second_place: str
    are_peers: bool = False
    program: str = ""
    code: str = ""

    @property
    def first_words(self) -> str:
        """The beginning of each error."""
        if self.program:
            return f"{self.program} for other arguments, and a program cannot be traced again: they differ"
        return f"`{self.transform}` joins two trees that differ"

    def fix(self, usual: str) -> str:
        """Returns the end of each error: the usual fix or, for a compiled program, how to compile another one."""
        return f"Make another one for these arguments:\n    program = {self.code}" if self.program else usual


class RecordsAtPath(NamedTuple):
    """Records of both trees at one path.

    Attributes:
        record_in: record of the tree that goes in.
        record_out: record of the tree that comes out. -1 if nothing comes out at this path.
    """

    record_in: int
    record_out: int


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
        """True if the tree that goes in needs no repacking."""
        return not self.is_cut and not self.promoted


def join(tree_in: FlatDag, tree_out: FlatDag, sides: Sides, prefix: Path = (), *, exact: bool = False) -> Join:
    """Pairs the records that two trees have at the same paths, and finds the differences that need a repacking.

    Cost: linear in the distinct pairs of records.

    Args:
        tree_in: the tree that goes in. Only references (`jax.Ref`) among its leaves are read. Others may be None.
        tree_out: the tree that comes out. Its objects are not read.
        sides: names of both trees, for errors.
        prefix: path to both trees, for errors.
        exact: True if the tree that goes in cannot be packed again. Then every tie that does not come out is an error,
            and so is a static number that changes. Ties that only come out are treated as without `exact`.

    Returns:
        The pairs of records, whether a tie has to be cut, and the static numbers that have to become traced leaves.

    Raises:
        SharingMismatchError: if the trees differ in classes, in static values other than numbers, or in a tie of
            modules or references. A module without traced leaves counts as an array.
    """
    _require_same_arguments(tree_in, tree_out, sides)

    def can_pair(i: int, j: int) -> bool:
        """Returns True for two leaves, traced or static. `pairs` asks about all records but two nodes of one class."""
        op, op_out = tree_in.records[i][0], tree_out.records[j][0]
        return (op is LEAF or type(op) is Static) and (op_out is LEAF or type(op_out) is Static)

    joined: list[RecordsAtPath] = []
    promoted: set[int] = set()
    # Record of one side → its distinct partners, which are the records of the other side at its paths. Each has a path.
    partners_out: dict[int, list[tuple[int, Path]]] = {}
    partners_in: dict[int, list[tuple[int, Path]]] = {}
    # `pairs` yields each pair of records once, and a `Mismatch` wherever the shapes differ.
    for pair in pairs(tree_in, tree_out, can_pair):
        path = (*prefix, *pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, sides)
        i, j = pair.left, pair.right
        op, op_out = tree_in.records[i][0], tree_out.records[j][0]
        # Two different leaves, of which at least one is static, or two nodes with different static data. The call
        # raises for all of them but numbers that may become traced leaves.
        if op != op_out:
            _require_numbers(path, op, op_out, sides, exact=exact)
            if type(op) is Static:
                promoted.add(i)
        joined.append(RecordsAtPath(i, j))
        partners_out.setdefault(i, []).append((j, path))
        partners_in.setdefault(j, []).append((i, path))
    # Ties that go in and do not come out: a record that goes in has several partners.
    is_cut = False
    for i, partners in partners_out.items():
        if len(partners) > 1:
            if exact or (tree_in.holds_leaf[i] and _must_keep_ties(tree_in, i)):
                _raise_other_ties(partners, tree_in, i, sides, lost=True)
            is_cut = True
    # Ties that come out and did not go in. An array that comes out at several paths is returned several times.
    for partners in partners_in.values():
        i = partners[0][0]
        if len(partners) > 1 and tree_in.holds_leaf[i] and _must_keep_ties(tree_in, i):
            _raise_other_ties(partners, tree_in, i, sides, lost=False)
    return Join(joined, is_cut, frozenset(promoted))


def leaves_like(tree_in: FlatDag, tree_out: FlatDag, joined: Join) -> list[Any]:
    """Returns the leaves that come out at the paths of the leaves that go in, in the order of the leaves that go in.

    Args:
        tree_in: the tree that goes in.
        tree_out: the tree that comes out, with its objects. A static number in it becomes a leaf where a leaf went in.
        joined: the join of both trees.
    """
    # A leaf that goes in may have several partners. In reverse, the first of its pairs comes last, and stays.
    record_out_of = dict(reversed(joined.pairs))
    leaves: list[Any] = []
    for record in tree_in.leaf_numbers:
        # If `tree_in` is a part of a tree, `leaf_numbers` has all leaves of the whole tree. Leaves outside of the part
        # have no pair.
        if record in record_out_of:
            op = tree_out.records[record_out_of[record]][0]
            leaves.append(op.thaw() if type(op) is Static else tree_out.objects[record_out_of[record]])
    return leaves


def fit_leaves(tree_in: FlatDag, tree_out: FlatDag, sides: Sides, prefix: Path = ()) -> list[Any]:
    """Returns the leaves of one tree in the order of another tree, which must have the same structure.

    Args:
        tree_in: the tree whose structure is required.
        tree_out: the tree with the leaves. An array in it may be tied where `tree_in` has two arrays.
        sides: names of both trees, for errors.
        prefix: path to both trees, for errors.

    Raises:
        SharingMismatchError: if there is no exact join of the trees. See `join`.
    """
    return leaves_like(tree_in, tree_out, join(tree_in, tree_out, sides, prefix, exact=True))


class Repacking(NamedTuple):
    """Another way to pack the tree that goes in, with the ties of a join, so that the tree that comes out fits it.

    A repacking refers to no structure, so a cache of repackings keeps no structure alive.

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


def repacking_for(all_inputs: FlatDag, tree_in: FlatDag, tree_out: FlatDag, joined: Join) -> Repacking:
    """Makes the repacking that keeps only the ties of both trees, and makes leaves of the static numbers that change.

        goes in         args(State(z, z), z)     `all_inputs`, of which State(z, z) is `tree_in`
        comes out       State(a, b)              `tree_out`
        pairs           (args, -1)   (State, State)   (z, a)   (z, b)
        new records     args(State(x, y), x)     x is the pair (z, a), and y is (z, b)

    Args:
        all_inputs: all arguments that go in.
        tree_in: the part of them that was compared. It has the same table of records, and another root.
        tree_out: the tree that comes out in the place of this part.
        joined: the join of `tree_in` and `tree_out`.
    """
    # Record that goes in → its first partner, a record that comes out.
    first_record_out: dict[int, int] = {}
    for pair in joined.pairs:
        first_record_out.setdefault(pair.record_in, pair.record_out)
    start = RecordsAtPath(tree_in.root, tree_out.root)

    # Each distinct pair becomes a new record. Two paths with the same pair lead to one record, so a tie that both trees
    # have stays a tie. Two paths with different pairs lead to two records.
    def expand(pair: RecordsAtPath) -> tuple[Op, Sequence[RecordsAtPath]]:
        """Returns the pairs below a pair. The operation is not used, so `LEAF` stands for any."""
        children = all_inputs.records[pair.record_in][1]
        if pair.record_out < 0:
            # Outside the compared part nothing comes out, so ties stay as they are. An object that is also in the part
            # may be split there, into one object for each partner. Then the tie is to the first of them.
            child_pairs: list[RecordsAtPath] = []
            for child in children:
                is_start = child == tree_in.root
                child_pairs.append(start if is_start else RecordsAtPath(child, first_record_out.get(child, -1)))
            return LEAF, child_pairs
        children_out = tree_out.records[pair.record_out][1]
        return LEAF, [RecordsAtPath(*child) for child in zip(children, children_out, strict=True)]

    root = start if all_inputs.root == tree_in.root else RecordsAtPath(all_inputs.root, -1)
    # `canonical_records` returns the table of the new records and, in the order of their numbers, the pairs.
    table, numbered_pairs = canonical_records(root, expand)
    origins = [pair.record_in for pair in numbered_pairs]
    return Repacking(origins, [children for _, children in table], joined.promoted)


def join_of_branches(results: Mapping[str, FlatDag], transform: str) -> Structure:
    """Makes one structure for the results of all branches: the join of their sharing.

    The structure of a result has notes on leaves, such as that a tie was undone on purpose (`ties/_leaf_notes`). A leaf
    of the join has the notes that it has in at least one branch.

    Args:
        results: name of a branch → its result. Leaves are not read.
        transform: name of the transform, for errors.

    Raises:
        SharingMismatchError: if there is no join, see the function `join`.
    """
    # Join the first result with the second one, the join with the third one, and so on.
    (first_branch, common), *further_results = results.items()
    for branch, result in further_results:
        sides = Sides(transform, f"in the result of `{first_branch}`", f"in the result of `{branch}`", are_peers=True)
        joined = join(common, result, sides, (_RESULT,))
        if not joined.fits:
            common = FlatDag.without_objects(repacking_for(common, common, result, joined).structure(common))
    # Collect the records of the join whose leaves have a note in a branch, for each of the two kinds of notes.
    noted: set[int] = set()
    tied_values: set[int] = set()
    for result in results.values():
        structure = result.structure
        if structure is None or not structure.is_noted:
            continue
        # Each result fits the join by now, so there is no error that would need the names.
        pairs_of_result = join(common, result, Sides("", "", "")).pairs
        for records, positions in ((noted, structure.noted), (tied_values, structure.tied_values)):
            records_out = {result.leaf_numbers[position] for position in positions}
            records.update(pair.record_in for pair in pairs_of_result if pair.record_out in records_out)

    # In a structure, a note is the position of a leaf among all leaves.
    def positions_of(records: set[int]) -> tuple[int, ...]:
        """Returns the positions of leaves among all leaves of the join."""
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
    """Returns True for a module or a reference. They do not alias by accident, so their ties must not be cut."""
    op = tree.records[record][0]
    return not op.type.is_plain if type(op) is Node else isinstance(tree.objects[record], jax.Ref)


def _require_same_arguments(tree_in: FlatDag, tree_out: FlatDag, sides: Sides) -> None:
    """Raises an error if both trees are arguments of calls that differ in number or keywords of arguments."""
    names_in, names_out = _argument_names(tree_in), _argument_names(tree_out)
    if names_in is not None and names_out is not None and names_in != names_out:
        usual = "Call it with as many arguments, by position or by keyword as before."
        text = (
            f"in their arguments: {sides.first_place} they are {_call_with(names_in)}, "
            f"{sides.second_place} {_call_with(names_out)}"
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


def _require_numbers(path: Path, op: Op, op_out: Op, sides: Sides, *, exact: bool) -> None:
    """Raises an error if one of two different operations is neither a traced leaf nor a static number.

    Args:
        path: the path of both operations, for errors.
        op: operation that goes in: a node, a leaf or a static value.
        op_out: operation that comes out.
        sides: names of both trees.
        exact: True if a static number that goes in may not change.

    Raises:
        SharingMismatchError: for nodes and other static values. If `exact`, for a static number that goes in, too.
    """
    # A traced leaf passes as the number 0.
    number, number_out = (record_op.peek() if type(record_op) is Static else 0 for record_op in (op, op_out))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(number) not in PYTHON_NUMBERS or type(number_out) not in PYTHON_NUMBERS:
        _raise_other_shape(path, describe_beside(op, op_out), describe_beside(op_out, op), sides)


def describe_beside(op: Op, partner: Op) -> str:
    """Describes a record in words, for errors that describe a second record, too.

    Args:
        op: operation of the record.
        partner: operation of the second record. If the static data of both prints alike, only the first part in which
            they differ is printed.
    """
    if type(op) is not Node:
        return op_text(op)
    word = "keys" if issubclass(op.type.cls, dict) else "static data"
    data_of_partner = partner.aux.peek() if type(partner) is Node and op.type.cls is partner.type.cls else None
    return f"a `{op.type.cls.__name__}` with the {word} {distinguishing_text(op.aux.peek(), data_of_partner)}"


_FIX = (
    "What is not traced is part of the structure, which must be the same on both sides. What changes can be an array:\n"
    "    steps: jax.Array                   # not: eqx.field(static=True)"
)


def _raise_other_shape(path: Path, left: str, right: str, sides: Sides) -> NoReturn:
    """Raises the error for two trees that differ at a path, where they have `left` and `right`, in words."""
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"{sides.first_words} at `{text}`: {sides.first_place} it is {left}, {sides.second_place} {right}.\n"
        f"{sides.fix(_FIX)}",
        (text,),
    )


def _raise_other_ties(
    partners: Sequence[tuple[int, Path]], tree: FlatDag, record: int, sides: Sides, *, lost: bool
) -> NoReturn:
    """Raises the error for a tie that only one tree has.

    Args:
        partners: records of the tree without the tie, each with its path. The error names the first two paths.
        tree: the tree that goes in, with its objects.
        record: record of the object in this tree: the tied object or, if only the other tree has the tie, one of the
            objects at the tied paths.
        sides: names of both trees.
        lost: True if the tie goes in and does not come out. False if it comes out and did not go in.
    """
    paths = [jtu.keystr(path) for _, path in partners[:2]]
    op = tree.records[record][0]
    if type(op) is Node:
        kind = f"`{op.type.cls.__name__}`"
    else:
        kind = "`jax.Ref`" if op is LEAF and isinstance(tree.objects[record], jax.Ref) else "array"
    tied_side, untied_side = (
        (sides.first_place, sides.second_place) if lost else (sides.second_place, sides.first_place)
    )
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
