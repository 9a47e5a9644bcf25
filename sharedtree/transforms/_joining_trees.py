"""Joins two trees for which JAX wants one structure: the carry of a loop, results of branches, arguments of a program.

One tree goes in (the carry when an iteration begins), the other comes out (the carry when it ends). The *join* is the
sharing that both trees can have, together with their common shape. If a tie of a module or a reference is in one tree
only, there is no join, and this is an error. Arrays and mutable containers alias by accident, as in a state that begins
as `State(zeros, zeros)`. So their ties are part of the join only if both trees have them.

- A tie that only the tree going in has is cut. The function is traced again, once.
- A tie that only the tree coming out has needs no second trace: the leaf goes out twice.
- A static number that comes out as an array or as another number becomes a traced leaf, as in vanilla JAX.

To cut a tie, or to trace a static number, the tree that goes in is packed in another way: this is a *repacking*. If it
cannot be packed again, as the arguments of a compiled program, the join has to be *exact*. Then a tie to be cut and a
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
from ..core._printing import code_that_unties
from ..core._sharing import Mismatch, op_text, pairs
from ..core._static_values import Static, distinguishing_text
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Structure, canonical_records, intern
from ..ties._tie_and_untie import static_data_text

_MAX_SEPARATED = 8
"""How many places of a tie an error names in its code."""


class Sides(NamedTuple):
    """Names of the two trees, for errors.

    Attributes:
        transform: name of the transform that joins the trees. Not read if `program` is set.
        first_place: where the tree that goes in is, in words: `when an iteration begins`, `in the result of the first
            branch`.
        second_place: where the tree that comes out is, in words.
        are_peers: True if neither tree comes before the other, as with two branches. Then the fix for a tie is the
            same, whichever tree has the tie.
        program: for a compiled program, the first words of the error: "`f` was compiled". Otherwise empty.
        code: for a compiled program, code that compiles another one. Otherwise empty.
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
            return f"{self.program} for other arguments, and a program cannot be traced again. The arguments differ"
        return f"The trees that `{self.transform}` joins differ"

    def fix(self, usual: str) -> str:
        """Returns the end of an error: how to fix it.

        Args:
            usual: the fix for two trees of a transform. For a compiled program, the fix is to compile another one.
        """
        return (f"Make a new program for these arguments:\n    program = {self.code}") if self.program else usual


class RecordsAtPath(NamedTuple):
    """Records of both trees at one path.

    Attributes:
        record_in: record of the tree that goes in.
        record_out: record of the tree that comes out. -1 if nothing comes out at this path.
    """

    record_in: int
    record_out: int


class Join(NamedTuple):
    """The records that two trees of one shape have at the same paths, and the differences between the trees.

        goes in     State(z, z)          comes out     State(a, b)
        pairs       (State, State)   (z, a)   (z, b)                 is_cut      True

    Attributes:
        pairs: the distinct pairs of records at one path, in flatten order.
        is_cut: True if an object that goes in comes out as two or more, so that its tie has to be cut.
        promoted: records of the tree that goes in. Each holds a static number that has to become a traced leaf.
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
        exact: True if the tree that goes in cannot be packed again. Then it is an error if a tie goes in and does not
            come out, or if a static number changes. Ties that only come out are treated as without `exact`.

    Raises:
        SharingMismatchError: if the trees differ in classes, in static values other than numbers, or in a tie of
            a module or a reference. A tie of a module without traced leaves may be cut, as that of an array.
    """
    _require_same_arguments(tree_in, tree_out, sides)

    def can_pair(i: int, j: int) -> bool:
        """Returns True if both records are leaves, traced or static. Otherwise `pairs` yields a `Mismatch` for them.

        `pairs` calls this for all pairs but two nodes of one class and size, which it always pairs.
        """
        op, op_out = tree_in.records[i][0], tree_out.records[j][0]
        return (op is LEAF or type(op) is Static) and (op_out is LEAF or type(op_out) is Static)

    joined: list[RecordsAtPath] = []
    promoted: set[int] = set()
    # Record of one tree → its distinct partners: the records that the other tree has at the same paths, each with a
    # path. A record with several partners is tied in its own tree only.
    partners_out: dict[int, list[tuple[int, Path]]] = {}
    partners_in: dict[int, list[tuple[int, Path]]] = {}
    # `pairs` yields each pair of records once, and a `Mismatch` wherever the shapes differ.
    for pair in pairs(tree_in, tree_out, can_pair):
        path = (*prefix, *pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, sides)
        i, j = pair.left, pair.right
        op, op_out = tree_in.records[i][0], tree_out.records[j][0]
        # Two nodes with different static data, or two leaves of which at least one is static. `_require_numbers`
        # raises, unless both are numbers that may become traced leaves.
        if op != op_out:
            _require_numbers(path, op, op_out, sides, exact=exact)
            if type(op) is Static:
                promoted.add(i)
        joined.append(RecordsAtPath(i, j))
        partners_out.setdefault(i, []).append((j, path))
        partners_in.setdefault(j, []).append((i, path))
    # Ties that go in and do not come out: the record that goes in has several partners.
    is_cut = False
    for i, partners in partners_out.items():
        if len(partners) > 1:
            if exact or (tree_in.holds_leaf[i] and _must_keep_ties(tree_in, i)):
                _raise_other_ties(partners, tree_in, i, sides, lost=True)
            is_cut = True
    # Ties that come out and did not go in. For an array there is nothing to do: it is returned several times.
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
    # Record that goes in → its first partner. In reverse, the first pair of a record is entered last, and replaces the
    # others.
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
    """Returns the leaves of one tree in the order of another tree, and raises an error if it does not fit the other.

    It fits if it has the same classes and static values, and all ties of the other tree. It may have more ties of
    arrays: one array in the place of two.

    Args:
        tree_in: the tree with the required structure.
        tree_out: the tree with the leaves.
        sides: names of both trees, for errors.
        prefix: path to both trees, for errors.

    Raises:
        SharingMismatchError: if there is no exact join of the trees. See `join`.
    """
    return leaves_like(tree_in, tree_out, join(tree_in, tree_out, sides, prefix, exact=True))


class Repacking(NamedTuple):
    """Another way to pack the tree that goes in: only with the ties of a join, so that the tree that comes out fits.

        old records     0: z   1: State(0, 0)
        new records     0: x   1: y   2: State(0, 1)         origins (0, 0, 1)      children ((), (), (0, 1))

    A repacking refers to no structure, so a cache of repackings keeps no structure alive.

    Attributes:
        origins: for each new record, the old record from which it is made. The last new record is the root.
        children: for each new record, its children, which are new records.
        promoted: old records of static numbers that become traced leaves.
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
    """Makes the repacking for a join: it keeps only ties that both trees have, and traces static numbers that change.

        goes in         args(State(z, z), z)     `all_inputs`, of which State(z, z) is `tree_in`
        comes out       State(a, b)              `tree_out`
        pairs           (args, -1)   (State, State)   (z, a)   (z, b)
        new records     args(State(x, y), x)     x is the pair (z, a), and y is the pair (z, b)

    -1 stands for a record that comes out, where nothing comes out: outside the part that was compared.

    Args:
        all_inputs: all arguments that go in.
        tree_in: the part of `all_inputs` that was compared. It has the same table of records, and another root.
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
            # Outside the compared part, ties stay as they are. An object outside may be in the compared part, too, and
            # be split there into one object for each partner. Then it stays tied to the first of these.
            child_pairs: list[RecordsAtPath] = []
            for child in children:
                is_start = child == tree_in.root
                child_pairs.append(start if is_start else RecordsAtPath(child, first_record_out.get(child, -1)))
            return LEAF, child_pairs
        children_out = tree_out.records[pair.record_out][1]
        return LEAF, [RecordsAtPath(*child) for child in zip(children, children_out, strict=True)]

    root = start if all_inputs.root == tree_in.root else RecordsAtPath(all_inputs.root, record_out=-1)
    # `canonical_records` returns the table of the new records and, in the order of their numbers, the pairs.
    table, numbered_pairs = canonical_records(root, expand)
    origins = [pair.record_in for pair in numbered_pairs]
    return Repacking(origins, [children for _, children in table], joined.promoted)


def join_of_branches(results: Mapping[str, FlatDag], transform: str) -> Structure:
    """Returns the structure for the results of all branches: the join of their sharing.

    The structure of a result has notes on leaves, such as that a tie was undone on purpose (`ties/_leaf_notes`). A leaf
    of the join has a note if it has the note in at least one branch.

    Args:
        results: name of a branch → its result. Leaves are not read.
        transform: name of the transform, for errors.

    Raises:
        SharingMismatchError: if there is no join, see the function `join`.
    """
    # Join the first result with the second one, their join with the third one, and so on. `common` is the join so far.
    (first_branch, common), *further_results = results.items()
    for branch, result in further_results:
        sides = Sides(transform, f"in the result of `{first_branch}`", f"in the result of `{branch}`", are_peers=True)
        joined = join(common, result, sides, (RESULT_KEY,))
        if not joined.fits:
            common = FlatDag.without_objects(repacking_for(common, common, result, joined).structure(common))
    # Collect the records of the join whose leaves have a note in a branch, for each of the two kinds of notes.
    noted: set[int] = set()
    tied_values: set[int] = set()
    for result in results.values():
        structure = result.structure
        if structure is None or not structure.is_noted:
            continue
        # Each result fits `common` by now. So `join` raises no error, and reads no names.
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
    """Returns True if a tree holds a module or a reference. If it holds none, callers let JAX raise its own error."""
    has_module = any(type(op) is Node and not op.type.is_plain for op, _ in tree.records)
    return has_module or any(isinstance(tree.objects[record], jax.Ref) for record in tree.leaf_numbers)


class _ResultKey:
    """The class of `RESULT_KEY`."""

    def __str__(self) -> str:
        return "result"


RESULT_KEY = _ResultKey()
"""The first key of each path in a result, for errors. It prints as "result"."""


def _must_keep_ties(tree: FlatDag, record: int) -> bool:
    """Returns True for a module or a reference: they do not alias by accident, so no tie of theirs may be cut."""
    op = tree.records[record][0]
    return not op.type.is_plain if type(op) is Node else isinstance(tree.objects[record], jax.Ref)


def _require_same_arguments(tree_in: FlatDag, tree_out: FlatDag, sides: Sides) -> None:
    """Raises a `SharingMismatchError` if both trees are arguments of calls, and the calls differ in their arguments.

    They differ if they have another number of positional arguments, or other keywords.
    """
    names_in, names_out = _argument_names(tree_in), _argument_names(tree_out)
    if names_in is not None and names_out is not None and names_in != names_out:
        usual = "Call it with as many arguments, by position or by keyword as before."
        text = (
            f"in their arguments: {sides.first_place} they are {_call_with(names_in)}, "
            f"{sides.second_place} {_call_with(names_out)}"
        )
        raise SharingMismatchError(f"{sides.first_words} {text}.\n{sides.fix(usual)}")


def _argument_names(tree: FlatDag) -> ArgumentNames | None:
    """Returns the names of the arguments of a call, without their values. None if the tree is something else."""
    op = tree.records[tree.root][0]
    return op.aux.peek() if type(op) is Node and op.type.cls is Arguments else None


def _call_with(names: ArgumentNames) -> str:
    """Returns a text for the arguments of a call, without their values: "`(x, static, y=, static z=)`"."""
    positional, keywords, static_keywords = names
    texts = ["static" if name is None else name for name in positional]
    texts += [f"{name}=" for name in keywords]
    texts += [f"static {name}=" for name in static_keywords]
    return f"`({', '.join(texts)})`"


def _require_numbers(path: Path, op: Op, op_out: Op, sides: Sides, *, exact: bool) -> None:
    """Raises an error if two different records at one path cannot both be traced leaves.

    They can if each of them is a traced leaf or a static number. Hence the name: any static value must be a number. It
    is called only if the two operations differ.

    Args:
        path: the path of both operations, for errors.
        op: operation that goes in: a node, a leaf or a static value.
        op_out: operation that comes out.
        sides: names of both trees.
        exact: True if a static number that goes in may not change.

    Raises:
        SharingMismatchError: for nodes, and for static values other than numbers. If `exact`, also for a static number
            that goes in.
    """
    # The static values, of any type: whether they are numbers is tested below. For a traced leaf, the number 0 stands
    # here, so that it passes the test.
    number, number_out = (record_op.peek() if type(record_op) is Static else 0 for record_op in (op, op_out))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(number) not in PYTHON_NUMBERS or type(number_out) not in PYTHON_NUMBERS:
        _raise_other_shape(path, describe_beside(op, op_out), describe_beside(op_out, op), sides)


def describe_beside(op: Op, partner: Op) -> str:
    """Returns a description of a record in words, for an error that describes a second record, too.

    Args:
        op: operation of the record.
        partner: operation of the second record. If both are nodes of one class, the description has only the static
            data in which they differ: "a `Net` with steps=1".
    """
    if type(op) is not Node:
        return op_text(op)
    name, is_dict = op.type.cls.__name__, issubclass(op.type.cls, dict)
    data_of_partner = None
    if type(partner) is Node and op.type.cls is partner.type.cls:
        if not is_dict:
            return f"a `{name}` with {static_data_text(op, partner)}"
        data_of_partner = partner.aux.peek()
    word = "keys" if is_dict else "static data"
    return f"a `{name}` with the {word} {distinguishing_text(op.aux.peek(), data_of_partner)}"


_FIX = (
    "Static values are part of the structure, which must be the same on both sides. If a static value is to change, "
    "let it be an array:\n"
    "    steps: jax.Array                   # not: eqx.field(static=True)"
)


def _raise_other_shape(path: Path, left: str, right: str, sides: Sides) -> NoReturn:
    """Raises the error for two trees that differ in shape or static values.

    Args:
        path: the first path at which they differ.
        left: what the tree that goes in has there, in words.
        right: what the tree that comes out has there, in words.
        sides: names of both trees.

    Raises:
        SharingMismatchError: always.
    """
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"{sides.first_words} at `{text}`: {sides.first_place} it is {left}, {sides.second_place} {right}.\n"
        f"{sides.fix(_FIX)}",
        (text,),
    )


def _raise_other_ties(
    partners: Sequence[tuple[int, Path]], tree_in: FlatDag, record: int, sides: Sides, *, lost: bool
) -> NoReturn:
    """Raises the error for a tie that only one tree has.

    Args:
        partners: the different records that the tree without the tie has at the tied paths, each with its path. The
            error names the first two paths.
        tree_in: the tree that goes in, with its objects.
        record: record in `tree_in` of an object at the tied paths. If that tree has the tie, it is the only one.
        sides: names of both trees.
        lost: True if the tie goes in and does not come out. False if it comes out and did not go in.

    Raises:
        SharingMismatchError: always.
    """
    paths = [jtu.keystr(path) for _, path in partners[:2]]
    # What is tied, in words.
    op = tree_in.records[record][0]
    if type(op) is Node:
        kind = f"`{op.type.cls.__name__}`"
    else:
        kind = "`jax.Ref`" if op is LEAF and isinstance(tree_in.objects[record], jax.Ref) else "array"
    tied_side, untied_side = (
        (sides.first_place, sides.second_place) if lost else (sides.second_place, sides.first_place)
    )
    # The fix names the places, since the ties inside the two objects must survive it.
    separate = code_that_unties(paths[0], [jtu.keystr(path) for _, path in partners[1:_MAX_SEPARATED]])
    if sides.are_peers:
        fix = (
            "Keep the tie in both, for example with `sharedtree.tree.map`:\n"
            "    model = sharedtree.tree.map(f, model)\n"
            f"Or give them objects of their own in both. Ties inside them are kept:\n{separate}"
        )
    elif lost:
        fix = (
            "If they are meant to differ from now on, such as a model and its target, give them objects of their own "
            f"before the call. Ties inside them are kept:\n{separate}\n"
            "If they are meant to stay one, keep the tie, for example with `sharedtree.tree.map`:\n"
            "    model = sharedtree.tree.map(f, model)"
        )
    else:
        fix = f"Tie them before the call, or return two objects. Ties inside them are kept:\n{separate}"
    raise SharingMismatchError(
        f"{sides.first_words} in sharing: `{paths[0]}` and `{paths[1]}` are one {kind} {tied_side}, "
        f"but two {untied_side}.\n"
        f"{sides.fix(fix)}",
        paths,
    )
