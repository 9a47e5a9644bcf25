"""Where one tree must fit another: a carry that goes in and out, branches, rules, callbacks, solvers, programs.

JAX wants one structure on both sides. What is a tie of modules on one side must be one on the other. Arrays and mutable
containers alias by accident (a state that begins as `State(zeros, zeros)`), so of their ties those hold that both sides
have, the *meet*: what goes in is cut, once, and the function is traced again. A tie that only the result has needs no
second trace: the leaf goes out twice. A static number that comes out as an array, or as another number, becomes a
traced leaf, as vanilla JAX has it. Where what goes in cannot be made anew, it has to be *exact*.

    goes in           comes out         the meet
    State(z, z)       State(a, b)       State(·, ·), two leaves: z and z go in
    State(y, z)       State(a, a)       State(·, ·): a and a come out
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·): 0 goes in as a leaf
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import ArgumentNames, Arguments
from ..core._errors import SharingMismatchError
from ..core._sharing import Mismatch, name_of, pairs
from ..core._static_values import Static, shown_beside
from ..core._structure import LEAF, Node, Op, Path, Structure, canonical, intern
from ..core._traced_leaves_and_identity import PYTHON_NUMBERS
from ..core._trees_taken_apart import Walked

Name = tuple[int, int]
"""A record of what goes in and one of what comes out; or -1 where there is none."""


class Words(NamedTuple):
    """What the two sides are called in errors.

    Attributes:
        transform: what joins them.
        before: the one: `when an iteration begins`, `in the result of the first branch`.
        after: the other.
        are_peers: whether neither comes before the other, so that a tie which one of them lacks is the same fault.
        program: what was made of the one and cannot be made anew, if that is so: `f` was compiled.
        again: how to make another one, as code.
    """

    transform: str
    before: str
    after: str
    are_peers: bool = False
    program: str = ""
    again: str = ""

    @property
    def head(self) -> str:
        """How messages begin."""
        if self.program:
            return f"{self.program} for other arguments, and a program cannot be traced again: they differ"
        return f"`{self.transform}` joins two trees that differ"

    def fix(self, usual: str) -> str:
        """How messages end."""
        return f"Make another one for these arguments:\n    program = {self.again}" if self.program else usual


class Met(NamedTuple):
    """Two trees, record by record.

    Attributes:
        pairs: each pair of records that a path leads to, in the order of a walk.
        is_cut: whether something that goes in as one comes out as two.
        promoted: the records going in whose static numbers become traced leaves.
    """

    pairs: Sequence[Name]
    is_cut: bool
    promoted: frozenset[int]

    @property
    def fits(self) -> bool:
        """Whether what goes in can stay as it is."""
        return not self.is_cut and not self.promoted


def meet(before: Walked, after: Walked, words: Words, above: Path = (), *, exact: bool = False) -> Met:
    """Compares what goes in with what comes out.

    Args:
        before: what goes in; its leaves, if at hand, tell references.
        after: what comes out.
        words: what they are called.
        above: the path to both, for errors.
        exact: what goes in cannot be packed in another way, so no tie of it may be lost, and no static number change.

    Raises:
        SharingMismatchError: if their classes or static values differ, or a tie of modules.
    """
    promoted: set[int] = set()
    _require_same_arguments(before, after, words)

    def agree(i: int, j: int) -> bool:
        op, other = before.records[i][0], after.records[j][0]
        return (op is LEAF or type(op) is Static) and (other is LEAF or type(other) is Static)

    met: list[Name] = []
    of_left: dict[int, list[tuple[int, Path]]] = {}
    of_right: dict[int, list[tuple[int, Path]]] = {}
    for pair in pairs(before, after, agree):
        path = (*above, *pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, words)
        i, j = pair.left, pair.right
        op, other = before.records[i][0], after.records[j][0]
        if op != other:
            _require_numbers(path, op, other, words, exact=exact)
            if type(op) is Static:
                promoted.add(i)
        met.append((i, j))
        of_left.setdefault(i, []).append((j, path))
        of_right.setdefault(j, []).append((i, path))
    is_cut = False
    for i, ends in of_left.items():
        if len(ends) > 1:
            if exact or (before.holds_leaf[i] and _is_firm(before, i)):
                _raise_other_ties(ends, before, i, words, lost=True)
            is_cut = True
    for ends in of_right.values():
        i = ends[0][0]
        if len(ends) > 1 and before.holds_leaf[i] and _is_firm(before, i):
            _raise_other_ties(ends, before, i, words, lost=False)
    return Met(met, is_cut, frozenset(promoted))


def leaves_like(before: Walked, after: Walked, found: Met) -> list[Any]:
    """What comes out for each traced leaf that goes in, in order."""
    end = dict(reversed(found.pairs))
    records = after.records
    result: list[Any] = []
    for i in before.leaf_numbers:
        if i in end:
            op = records[end[i]][0]
            result.append(op.thaw() if type(op) is Static else after.objects[end[i]])
    return result


def fitted(before: Walked, after: Walked, words: Words, above: Path = ()) -> list[Any]:
    """What comes out for each traced leaf that goes in, where the two have to be exactly alike."""
    return leaves_like(before, after, meet(before, after, words, above, exact=True))


class Lowering(NamedTuple):
    """How a tree is to be packed instead, so that what goes in is like what comes out.

    It names no structure, so that whoever remembers it keeps none alive.

    Attributes:
        origins: for each new record, the old one; the last is the root.
        children: those of each new record.
        promoted: the old records that become traced leaves.
    """

    origins: Sequence[int]
    children: Sequence[tuple[int, ...]]
    promoted: frozenset[int]

    def structure(self, tree: Walked) -> Structure:
        """That of the tree as it is to be packed."""
        ops = [LEAF if i in self.promoted else tree.records[i][0] for i in self.origins]
        return intern(tuple(zip(ops, self.children, strict=True)), len(ops) - 1)


def lowering(whole: Walked, before: Walked, after: Walked, found: Met) -> Lowering:
    """A tree with the ties that both sides have, and the static numbers that change traced.

    Args:
        whole: all that goes in.
        before: the part of it that was compared.
        after: what comes out.
        found: how they compare.
    """
    first: dict[int, int] = {}
    for i, j in found.pairs:
        first.setdefault(i, j)
    start = (before.root, after.root)

    def expand(name: Name) -> tuple[Op, Sequence[Name]]:
        i, j = name
        children = whole.records[i][1]
        if j < 0:
            return LEAF, [start if child == before.root else (child, first.get(child, -1)) for child in children]
        return LEAF, list(zip(children, after.records[j][1], strict=True))

    table, numbers = canonical(start if whole.root == before.root else (whole.root, -1), expand)
    return Lowering([i for i, _ in numbers], [below for _, below in table], found.promoted)


def meet_of(trees: dict[str, Walked], transform: str) -> Structure:
    """What the results of branches can all be packed like, with what was noted of a leaf in any of them.

    Args:
        trees: by what the branches are called; of their leaves nothing is asked.
        transform: what joins them.

    Raises:
        SharingMismatchError: if they cannot.
    """
    (first, known), *others = trees.items()
    for branch, tree in others:
        words = Words(transform, f"in the result of `{first}`", f"in the result of `{branch}`", are_peers=True)
        found = meet(known, tree, words, (_RESULT,))
        if not found.fits:
            known = Walked.without_objects(lowering(known, known, tree, found).structure(known))
    noted: tuple[set[int], set[int]] = set(), set()
    for tree in trees.values():
        structure = tree.structure
        if structure is not None and structure.is_noted:
            met = meet(known, tree, Words("", "", "")).pairs
            for marks, places in zip(noted, (structure.noted, structure.tied_values), strict=True):
                chosen = {tree.leaf_numbers[place] for place in places}
                marks.update(i for i, j in met if j in chosen)
    places = [tuple([k for k, number in enumerate(known.leaf_numbers) if number in marks]) for marks in noted]
    return intern(tuple(known.records), known.root, 0, None, *places)


def holds_modules(tree: Walked) -> bool:
    """Whether there is a module, or a reference, in a tree. Otherwise the transform itself says best what is wrong."""
    of_nodes = (type(op) is Node and not op.type.is_plain for op, _ in tree.records)
    return any(of_nodes) or any(isinstance(tree.objects[n], jax.Ref) for n in tree.leaf_numbers)


class _Result:
    """The key by which paths in results begin."""

    def __str__(self) -> str:
        return "result"


_RESULT = _Result()


def _is_firm(tree: Walked, number: int) -> bool:
    """Whether a tie is one of modules, or of references, which do not alias by accident."""
    op = tree.records[number][0]
    return not op.type.is_plain if type(op) is Node else isinstance(tree.objects[number], jax.Ref)


def _require_same_arguments(before: Walked, after: Walked, words: Words) -> None:
    ops = [tree.records[tree.root][0] for tree in (before, after)]
    one, two = [op.aux.peek() if type(op) is Node and op.type.cls is Arguments else None for op in ops]
    if one is not None and two is not None and one != two:
        usual = "Call it with as many arguments, by position or by keyword as before."
        text = f"in their arguments: {words.before} they are {_call_with(one)}, {words.after} {_call_with(two)}"
        raise SharingMismatchError(f"{words.head} {text}.\n{words.fix(usual)}")


def _call_with(names: ArgumentNames) -> str:
    positional, keywords, static = names
    own = [*["static" if name is None else name for name in positional], *[f"{name}=" for name in keywords]]
    return f"`({', '.join([*own, *[f'static {name}=' for name in static]])})`"


def _require_numbers(path: Path, op: Op, other: Op, words: Words, *, exact: bool) -> None:
    """Raises unless a static number becomes a traced leaf, or the other way round; the first only if not exact."""
    one, two = (each.peek() if type(each) is Static else 0 for each in (op, other))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(one) not in PYTHON_NUMBERS or type(two) not in PYTHON_NUMBERS:
        _raise_other_shape(path, described(op, other), described(other, op), words)


def described(op: Op, other: Op) -> str:
    """What a record is, with its static data, for errors that name another one beside it."""
    if type(op) is not Node:
        return name_of(op)
    data = "keys" if issubclass(op.type.cls, dict) else "static data"
    of_other = other.aux.peek() if type(other) is Node and op.type.cls is other.type.cls else None
    return f"a `{op.type.cls.__name__}` with the {data} {shown_beside(op.aux.peek(), of_other)}"


_FIX = (
    "What is not traced is part of the structure, which must be the same on both sides. What changes can be an array:\n"
    "    steps: jax.Array                   # not: eqx.field(static=True)"
)


def _raise_other_shape(path: Path, left: str, right: str, words: Words) -> NoReturn:
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"{words.head} at `{text}`: {words.before} it is {left}, {words.after} {right}.\n{words.fix(_FIX)}",
        (text,),
    )


def _raise_other_ties(
    ends: Sequence[tuple[int, Path]], tree: Walked, number: int, words: Words, *, lost: bool
) -> NoReturn:
    paths = [jtu.keystr(path) for _, path in ends[:2]]
    op = tree.records[number][0]
    of_leaf = "`jax.Ref`" if op is LEAF and isinstance(tree.objects[number], jax.Ref) else "array"
    what = f"`{op.type.cls.__name__}`" if type(op) is Node else of_leaf
    one, two = (words.before, words.after) if lost else (words.after, words.before)
    fix = (
        "Keep the tie, for example with\n"
        "    model = sharedtree.tree.map(f, model)\n"
        "    model = sharedtree.retie(model, like=before)\n"
        "or undo it before:\n"
        "    model = sharedtree.untie(model)"
        if lost or words.are_peers
        else "Tie them before, or return two objects:\n    model = sharedtree.untie(model)"
    )
    raise SharingMismatchError(
        f"{words.head} in sharing: `{paths[0]}` and `{paths[1]}` are one {what} {one}, but two {two}.\n"
        f"{words.fix(fix)}",
        paths,
    )
