"""A gradient that lacks a part, because an array that is differentiated is also in an argument that is not.

Between the two the tie is cut, and what flows through the second is lost to the gradient, as in vanilla JAX. Often that
is meant: a target network starts as the model's arrays, a filtered model is passed beside the whole one. Then both are
of one class, and the array sits at the same path in both. Elsewhere it is said: an encoder and a decoder with one
embedding, a mask that puts a tied weight on both sides; and always of a module, which a model used twice may be. But
not of an `equinox.nn.State`: it begins as the initial state that the model keeps, of which no gradient is missed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import positions_of
from ...core._flat_dags import FlatDag
from ...core._sharing import matching
from ...core._static_values import Static
from ...core._structure import Path, edges
from ...core._warning_source import report_untied
from ...nn._stateful_layers import makes_state
from ...ties._list_ties import is_inexact
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call
from .._grouping_leaves import Cut, outermost_modules
from .._inconsistent_sharing import MAX_PATHS
from .._leaf_labels import Outcomes, Visit


class Gradient(NamedTuple):
    """What is differentiated, as messages write it.

    Attributes:
        chosen: the positions of the arguments that are.
        function: what is differentiated is called.
        again: how to write the transform, with `{}` for its function and for more options.
        select: leaves that a filter selects at some of their paths only → what an error says of the others.
    """

    chosen: Sequence[int]
    function: str
    again: str
    select: Callable[[Sequence[Any]], str]


class _Lost(NamedTuple):
    leaf: Any
    differentiated: Path
    through: Path
    what: str = "array"

    @property
    def arguments(self) -> list[str]:
        return list(dict.fromkeys((str(self.differentiated[0]), str(self.through[0]))))


def report_partial_gradients(call: Call, gradient: Gradient, names: Names, policy: Policy) -> None:
    """Warns if a gradient lacks what flows through an argument that is not differentiated.

    Args:
        call: the arguments, with the ties between what is differentiated and what is not cut.
        gradient: what is differentiated.
        names: of the function.
        policy: what to do.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    found = [each for cut in call.cuts for each in _lost_in(cut)]
    # Of several modules in one argument only a filter selects some.
    lost = [each for each in found if len(each.arguments) == 1]
    lost += [each for cut in call.cuts for each in _lost_within(cut)]
    if lost:
        involved = list(dict.fromkeys(name for each in lost for name in each.arguments))
        together = ", ".join(involved)
        fix = (
            f"{gradient.select([each.leaf for each in lost])}"
            "Let `wrt` select the array at all of its paths or at none. If it is meant, give each an array of its own "
            "before the call:\n"
            f"    {together} = sharedtree.untie({together if len(involved) == 1 else f'({together})'})"
        )
        _emit(lost, fix, names, policy)
    lost = [each for each in found if len(each.arguments) == 2]
    if lost:
        _emit(lost, _fix(call, gradient, names, lost[0].arguments), names, policy)
    lost = [each for cut in call.cuts for each in _modules_lost_in(cut)]
    if lost:
        both = lost[0].arguments
        lines = [
            *_in_both("If it is one model that is used twice,", call, gradient, names, both[1]),
            "What is meant to be a constant gets objects of its own:",
            f"    {', '.join(both)} = sharedtree.untie(({', '.join(both)}), lambda t: t[1:])",
        ]
        _emit(lost, "\n".join(lines), names, policy)


def _modules_lost_in(cut: Cut) -> list[_Lost]:
    """The largest modules that were cut: they are in one differentiated argument and in one that is not."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    children = [((), child) for number in cut.modules for child in tree.records[number][1]]
    largest = set(cut.modules).difference(number for number, _ in edges(tree.records, children))
    places: dict[int, dict[bool, Path]] = {number: {} for number in sorted(largest)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        for number, own in tree.below(root.record).first_paths.items():
            if number in largest:
                places[number][outcomes.prefix_at(root) is not False] = (*path, *own)
    return [_Lost(tree.objects[n], each[True], each[False], "module") for n, each in places.items()]


def _lost_in(cut: Cut) -> list[_Lost]:
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    # The gradients of others, under `allow_int`, are empty, and so lack nothing.
    leaves = {number for number in cut.leaves if is_inexact(tree.objects[number])}
    roots = outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers)
    differentiated: dict[int, Path] = {}  # leaf → the first path at which it is
    of_some: list[tuple[int, set[int]]] = []
    for path, root in roots:
        found = {
            visit.record
            for visit in outcomes.reachable_from(root)
            if visit.record in leaves and outcomes.leaf_outcomes[outcomes[visit]]
        }
        if found:
            of_some.append((root.record, found))
            for number, own in tree.below(root.record).first_paths.items():
                if number in found:
                    differentiated.setdefault(number, (*path, *own))
    lost: list[_Lost] = []
    without_state = _without_state(tree)
    for path, other in roots:
        if outcomes.prefix_at(other) is not False:
            continue
        paths = without_state.below(other.record).first_paths
        parts = {number: own for number, own in paths.items() if number in leaves}
        for root, found in of_some:
            common = found & parts.keys()
            if not common:
                continue
            unmatched = _not_at_the_same_path(tree.below(other.record), tree.below(root), common)
            # A second module that holds it at the same path is not asked about what the first one has.
            for number in common - unmatched.keys():
                del parts[number]
            parts |= {number: own for number, own in unmatched.items() if number in parts}
        lost += [_Lost(tree.objects[n], differentiated[n], (*path, *own)) for n, own in parts.items()]
    return lost


def _lost_within(cut: Cut) -> list[_Lost]:
    """What is lost among the differentiated arguments, where a filter selects an array at some of its paths only."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    leaves = {number for number in cut.leaves if is_inexact(tree.objects[number])}
    places: dict[int, dict[bool, Path]] = {number: {} for number in sorted(leaves)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        if outcomes.prefix_at(root) is not False:
            for visit, own in _paths_beside_state(outcomes, root, path):
                if visit.record in leaves:
                    places[visit.record].setdefault(bool(outcomes.leaf_outcomes[outcomes[visit]]), own)
    return [_Lost(tree.objects[n], each[True], each[False]) for n, each in places.items() if len(each) == 2]


def _without_state(tree: FlatDag) -> FlatDag:
    """A tree with nothing below the states of Equinox's."""
    records = [(Static(None), ()) if makes_state(op) else (op, children) for op, children in tree.records]
    return FlatDag(records, tree.root)


def _paths_beside_state(outcomes: Outcomes, root: Visit, path: Path) -> list[tuple[Visit, Path]]:
    """The ways that lead on from a root, each with its first path, but for those into the states of Equinox's."""
    found: dict[Visit, Path] = {}
    stack = [(root, path)]
    while stack:
        visit, here = stack.pop()
        if visit not in found and not makes_state(outcomes.tree.records[visit.record][0]):
            found[visit] = here
            node = outcomes.tree.node(visit.record)
            steps = () if node is None else tuple(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([(below, (*here, key)) for key, below in reversed(steps)])
    return list(found.items())


def _not_at_the_same_path(other: FlatDag, root: FlatDag, leaves: Collection[int]) -> dict[int, Path]:
    """Which of these leaves are at a path of `other` at which `root` does not have them; all, if the classes differ."""
    ends: set[tuple[int, int]] = set()  # where the two part, or both end

    def agree(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    found: dict[int, Path] = {}
    for pair in matching(other, root, agree, compares_keys=True):
        if (pair.left, pair.right) in ends and pair.left != pair.right:
            for number, path in other.below(pair.left).edges(pair.path):
                if number in leaves:
                    found.setdefault(number, path)
    return found


def _fix(call: Call, gradient: Gradient, names: Names, both: Sequence[str]) -> str:
    instead = {name: f"both[{i}]" for i, name in enumerate(both)}
    together, again = ", ".join(both), gradient.again
    lines = [
        "For the whole gradient differentiate one argument that holds both:",
        f"    of_both = lambda both: {gradient.function}({_written(call, names, instead)})",
        f"    {again.format('of_both', '')}(({together}))",
        "or, if only some leaves are to be differentiated, split both at once, which keeps a tie on one side:",
        f"    some, rest = sharedtree.tree.partition(({together}), equinox.is_inexact_array)",
        f"    {again.format('lambda some: of_both(sharedtree.tree.combine(some, rest))', '')}(some)",
        *_in_both("or", call, gradient, names, both[1]),
        "If it is meant, give the second arrays of its own:",
        f"    {together} = sharedtree.untie(({together}), lambda t: t[1:])",
    ]
    return "\n".join(lines)


def _in_both(why: str, call: Call, gradient: Gradient, names: Names, other: str) -> list[str]:
    """The fix that differentiates the other argument as well, by position, where that can be."""
    arguments = call.arguments
    given, known = len(arguments.args), list(names.positional)
    by_name = dict(zip([names.text(i) for i in range(given)], range(given), strict=True))
    number = known.index(other) if other in known else by_name.get(other)
    if number is None or "preserve_identities" in gradient.again:
        return []
    if not arguments.kwargs.keys() >= {*known[given:number]}:
        return []
    argnums = tuple(sorted({*gradient.chosen, number}))
    by_position = [names.text(i) for i in range(max(given, number + 1))]
    by_keyword = [f"{name}={name}" for name in arguments.kwargs if name not in by_position]
    written = ", ".join(by_position + by_keyword)
    again = gradient.again.format(gradient.function, f", argnums={argnums}")
    return [f"{why} differentiate both, and each gets the sum:", f"    {again}({written})"]


def _written(call: Call, names: Names, instead: Mapping[str, str]) -> str:
    """The arguments of a call, some of them written otherwise."""
    texts: list[str] = []
    for position in positions_of(call.arguments.parts()[1]):
        name = names.text(position)
        texts.append(("" if isinstance(position, int) else f"{position}=") + instead.get(name, name))
    return ", ".join(texts)


def _emit(lost: Sequence[_Lost], fix: str, names: Names, policy: Policy) -> None:
    """Says it, once for all that one call loses."""
    texts = [(jtu.keystr(each.differentiated), jtu.keystr(each.through)) for each in lost]
    lines = [
        f"    `{one}` lacks what flows through `{other}`, which is the same {each.what}"
        for (one, other), each in zip(texts[:MAX_PATHS], lost, strict=False)
    ]
    lines += ["    … and more"] * (len(lost) > MAX_PATHS)
    what = "\n".join(["It was between what is differentiated and what is not, so the gradient is not whole:", *lines])
    paths = [path for both in texts for path in both]
    report_untied(policy.on_untie, names.definition, what, fix, paths, verb="cut")
