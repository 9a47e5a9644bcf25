"""A gradient that lacks a part, because an array that is differentiated is also in an argument that is not.

    st.grad(loss)(encoder, decoder)         # both hold the array `w`; only the first argument is differentiated

The tie is cut between the two, and what flows through the second is lost to the gradient, as in vanilla JAX. Often that
is meant: a target network starts as the model's arrays, a filtered model is passed beside the whole one. Then both are
of one class, and the array sits at the same path in both. Elsewhere we warn: an encoder and a decoder with one
embedding, a mask that puts a tied weight on both sides. We always warn of a module, for it may be a model used twice.

An `equinox.nn.State` is an exception. It begins as the initial state that the model keeps, and nobody misses a gradient
of that.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import positions_of
from ...core._errors import report_untied
from ...core._sharing import pairs_of_one_shape
from ...core._static_values import Static
from ...core._structure import FlatDag, Path, edges
from ...nn._stateful_layers import makes_state
from ...ties._list_ties import is_inexact
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call
from .._grouping_leaves import Cut, outermost_modules
from .._leaf_labels import MAX_PATHS, Outcomes, Visit


class Gradient(NamedTuple):
    """A differentiating transform in the words of messages.

    Attributes:
        argnums: positions of the differentiated arguments.
        function: name of the differentiated function.
        transform_code: code of the transform, with a `{}` for its function and one for more options.
        advise_filter: leaves selected by a filter at some of their paths only → advice about the other paths.
    """

    argnums: Sequence[int]
    function: str
    transform_code: str
    advise_filter: Callable[[Sequence[Any]], str]


class _LostPart(NamedTuple):
    """A lost part of a gradient.

    Attributes:
        obj: the cut array or module.
        differentiated_path: its path on the differentiated side.
        lost_path: its path on the other side.
        kind: "array" or "module".
    """

    obj: Any
    differentiated_path: Path
    lost_path: Path
    kind: str = "array"

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments with the object in them: one or two."""
        return list(dict.fromkeys((str(self.differentiated_path[0]), str(self.lost_path[0]))))


def report_partial_gradients(call: Call, gradient: Gradient, names: Names, policy: Policy) -> None:
    """Warns if a gradient lacks what flows through an argument that is not differentiated.

    Args:
        call: the call. Ties between the differentiated side and the other one are cut.
        gradient: the transform.
        names: names of the function and its arguments.
        policy: what a cut tie does.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    lost_arrays = [part for cut in call.cuts for part in _lost_arrays(cut)]
    # Arrays in one argument. Only a filter can select one path in an argument and not another.
    lost = [part for part in lost_arrays if len(part.arguments) == 1]
    lost += [part for cut in call.cuts for part in _arrays_lost_by_filter(cut)]
    if lost:
        names_of_arguments = list(dict.fromkeys(name for part in lost for name in part.arguments))
        arguments = ", ".join(names_of_arguments)
        fix = (
            f"{gradient.advise_filter([part.obj for part in lost])}"
            "Let `wrt` select the array at all of its paths or at none. If it is meant, give each an array of its own "
            "before the call:\n"
            f"    {arguments} = sharedtree.untie({arguments if len(names_of_arguments) == 1 else f'({arguments})'})"
        )
        _warn(lost, fix, names, policy)
    # Arrays in two arguments.
    lost = [part for part in lost_arrays if len(part.arguments) == 2]
    if lost:
        _warn(lost, _fix(call, gradient, names, lost[0].arguments), names, policy)
    # Modules in two arguments.
    lost = [part for cut in call.cuts for part in _lost_modules(cut)]
    if lost:
        two_arguments = lost[0].arguments
        arguments = ", ".join(two_arguments)
        lines = [
            *_fix_by_argnums("If it is one model that is used twice,", call, gradient, names, two_arguments[1]),
            "What is meant to be a constant gets objects of its own:",
            f"    {arguments} = sharedtree.untie(({arguments}), lambda t: t[1:])",
        ]
        _warn(lost, "\n".join(lines), names, policy)


# ---- What is lost ----


def _lost_arrays(cut: Cut) -> list[_LostPart]:
    """Finds arrays that are in a differentiated module and, at another path, in one that is not differentiated."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    leaves = _inexact_leaves(cut)
    roots = outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers)
    # The first differentiated path of each leaf, and the differentiated leaves of each module.
    differentiated_path: dict[int, Path] = {}
    differentiated_modules: list[tuple[int, set[int]]] = []
    for path, root in roots:
        differentiated_leaves = {
            visit.record
            for visit in outcomes.reachable_from(root)
            if visit.record in leaves and outcomes.leaf_outcomes[outcomes[visit]]
        }
        if differentiated_leaves:
            differentiated_modules.append((root.record, differentiated_leaves))
            for record, path_below in tree.below(root.record).first_paths.items():
                if record in differentiated_leaves:
                    differentiated_path.setdefault(record, (*path, *path_below))
    # Look for these leaves in the modules that are not differentiated. If both modules have a leaf at one path, the cut
    # is meant.
    lost: list[_LostPart] = []
    without_state = _without_state(tree)
    for path, constant in roots:
        if outcomes.prefix_at(constant) is not False:
            continue
        first_paths = without_state.below(constant.record).first_paths
        lost_paths = {record: path_below for record, path_below in first_paths.items() if record in leaves}
        for root, differentiated_leaves in differentiated_modules:
            common = differentiated_leaves & lost_paths.keys()
            if not common:
                continue
            unmatched = _paths_without_counterpart(tree.below(constant.record), tree.below(root), common)
            # A leaf with a counterpart in this module is excused, whatever the next one has.
            for record in common - unmatched.keys():
                del lost_paths[record]
            lost_paths |= {record: path_below for record, path_below in unmatched.items() if record in lost_paths}
        lost += [
            _LostPart(tree.objects[record], differentiated_path[record], (*path, *path_below))
            for record, path_below in lost_paths.items()
        ]
    return lost


def _arrays_lost_by_filter(cut: Cut) -> list[_LostPart]:
    """Finds arrays in the differentiated arguments that a filter selects at some of their paths, but not at all."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    leaves = _inexact_leaves(cut)
    # For each leaf, the first path at which it is differentiated, and the first at which it is not.
    paths_of: dict[int, dict[bool, Path]] = {record: {} for record in sorted(leaves)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        if outcomes.prefix_at(root) is not False:
            for visit, leaf_path in _first_paths_outside_state(outcomes, root, path):
                if visit.record in leaves:
                    is_differentiated = bool(outcomes.leaf_outcomes[outcomes[visit]])
                    paths_of[visit.record].setdefault(is_differentiated, leaf_path)
    return [
        _LostPart(tree.objects[record], paths[True], paths[False])
        for record, paths in paths_of.items()
        if len(paths) == 2
    ]


def _lost_modules(cut: Cut) -> list[_LostPart]:
    """Finds the largest modules that were cut. Each is in one differentiated argument and in one other argument."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    children = [((), child) for record in cut.modules for child in tree.records[record][1]]
    largest = set(cut.modules).difference(record for record, _ in edges(tree.records, children))
    paths_of: dict[int, dict[bool, Path]] = {record: {} for record in sorted(largest)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        for record, path_below in tree.below(root.record).first_paths.items():
            if record in largest:
                is_differentiated = outcomes.prefix_at(root) is not False
                paths_of[record][is_differentiated] = (*path, *path_below)
    return [_LostPart(tree.objects[record], paths[True], paths[False], "module") for record, paths in paths_of.items()]


def _inexact_leaves(cut: Cut) -> set[int]:
    """Records of the cut arrays with a gradient. Other gradients, under `allow_int`, are empty and lack nothing."""
    return {record for record in cut.leaves if is_inexact(cut.outcomes.tree.objects[record])}


def _without_state(tree: FlatDag) -> FlatDag:
    """Returns a tree with nothing below the states of Equinox."""
    records = [(Static(None), ()) if makes_state(op) else (op, children) for op, children in tree.records]
    return FlatDag(records, tree.root)


def _first_paths_outside_state(outcomes: Outcomes, root: Visit, root_path: Path) -> list[tuple[Visit, Path]]:
    """Visits below a root, each with its first path, but without the states of Equinox and everything in them."""
    first_paths: dict[Visit, Path] = {}
    stack = [(root, root_path)]
    while stack:
        visit, path = stack.pop()
        if visit not in first_paths and not makes_state(outcomes.tree.records[visit.record][0]):
            first_paths[visit] = path
            node = outcomes.tree.node(visit.record)
            steps = () if node is None else tuple(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([(child, (*path, key)) for key, child in reversed(steps)])
    return list(first_paths.items())


def _paths_without_counterpart(module: FlatDag, counterpart: FlatDag, leaves: Collection[int]) -> dict[int, Path]:
    """Finds paths of leaves in one module where another module lacks them. If the classes differ, that is all paths.

    Args:
        module: the first module.
        counterpart: the second module.
        leaves: records of the leaves.

    Returns:
        Leaf → the first of its paths without a counterpart.
    """
    # Pairs of records at which the two modules part, or both end.
    ends: set[tuple[int, int]] = set()

    def agree(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    unmatched: dict[int, Path] = {}
    for pair in pairs_of_one_shape(module, counterpart, agree, compares_keys=True):
        if (pair.left, pair.right) in ends and pair.left != pair.right:
            for record, path in module.below(pair.left).edges(pair.path):
                if record in leaves:
                    unmatched.setdefault(record, path)
    return unmatched


# ---- The warning ----


def _warn(lost: Sequence[_LostPart], fix: str, names: Names, policy: Policy) -> None:
    """Warns once of all parts lost by a call for one reason."""
    texts = [(jtu.keystr(part.differentiated_path), jtu.keystr(part.lost_path)) for part in lost]
    lines = ["It was between what is differentiated and what is not, so the gradient is not whole:"]
    for (differentiated, constant), part in zip(texts[:MAX_PATHS], lost, strict=False):
        lines.append(f"    `{differentiated}` lacks what flows through `{constant}`, which is the same {part.kind}")
    lines += ["    … and more"] * (len(lost) > MAX_PATHS)
    message = "\n".join(lines)
    paths = [path for path_pair in texts for path in path_pair]
    report_untied(policy.on_untie, names.definition, message, fix, paths, verb="cut")


def _fix(call: Call, gradient: Gradient, names: Names, two_arguments: Sequence[str]) -> str:
    """Lists the fixes for arrays in two arguments, as code with the user's names.

    Args:
        call: the call.
        gradient: the transform.
        names: names of the function's arguments.
        two_arguments: names of the differentiated argument and of the other one.
    """
    replacements = {name: f"both[{i}]" for i, name in enumerate(two_arguments)}
    arguments, transform_code = ", ".join(two_arguments), gradient.transform_code
    lines = [
        "For the whole gradient differentiate one argument that holds both:",
        f"    of_both = lambda both: {gradient.function}({_call_code(call, names, replacements)})",
        f"    {transform_code.format('of_both', '')}(({arguments}))",
        "or, if only some leaves are to be differentiated, split both at once, which keeps a tie on one side:",
        f"    some, rest = sharedtree.tree.partition(({arguments}), equinox.is_inexact_array)",
        f"    {transform_code.format('lambda some: of_both(sharedtree.tree.combine(some, rest))', '')}(some)",
        *_fix_by_argnums("or", call, gradient, names, two_arguments[1]),
        "If it is meant, give the second arrays of its own:",
        f"    {arguments} = sharedtree.untie(({arguments}), lambda t: t[1:])",
    ]
    return "\n".join(lines)


def _fix_by_argnums(start: str, call: Call, gradient: Gradient, names: Names, argument: str) -> list[str]:
    """Returns the fix of differentiating another argument as well, by its position. Empty if impossible.

    Args:
        start: the beginning of the sentence.
        call: the call.
        gradient: the transform.
        names: names of the function's arguments.
        argument: name of the other argument.
    """
    arguments = call.arguments
    num_args, positional_names = len(arguments.args), list(names.positional)
    position_of = dict(zip([names.text(i) for i in range(num_args)], range(num_args), strict=True))
    position = positional_names.index(argument) if argument in positional_names else position_of.get(argument)
    if position is None or "preserve_identities" in gradient.transform_code:
        return []
    # An argument passed by name gets a position. All arguments before it must be in the call, too.
    if not arguments.kwargs.keys() >= {*positional_names[num_args:position]}:
        return []
    argnums = tuple(sorted({*gradient.argnums, position}))
    by_position = [names.text(i) for i in range(max(num_args, position + 1))]
    by_keyword = [f"{name}={name}" for name in arguments.kwargs if name not in by_position]
    arguments_code = ", ".join(by_position + by_keyword)
    code = gradient.transform_code.format(gradient.function, f", argnums={argnums}")
    return [f"{start} differentiate both, and each gets the sum:", f"    {code}({arguments_code})"]


def _call_code(call: Call, names: Names, replacements: Mapping[str, str]) -> str:
    """Writes the arguments of a call as code.

    Args:
        call: the call.
        names: names of the arguments.
        replacements: name of an argument → code to write in its place.
    """
    texts: list[str] = []
    for position in positions_of(call.arguments.parts()[1]):
        name = names.text(position)
        texts.append(("" if isinstance(position, int) else f"{position}=") + replacements.get(name, name))
    return ", ".join(texts)
