"""Warns of a gradient that lacks a part, because a differentiated array is also in an argument that is not.

    st.grad(loss)(encoder, decoder)         # both hold the array `w`; only the first argument is differentiated

The tie between the two arguments is cut: inside the function `w` is two arrays, as in vanilla JAX. The gradient is that
of the first one, and lacks the part of the second. Often that is meant: a target network starts with the model's
arrays, or a filtered model is passed beside the whole model. In these cases both arguments are of one class, and the
array is at the same path in both, so we do not warn. We warn of all other arrays, such as an embedding in an encoder
and a decoder, or a tied weight that a filter selects at one path only. We always warn of a whole module in both
arguments, since it may be a model used twice.

An `equinox.nn.State` is an exception. It begins with the same arrays as the model, its initial values, and has no
gradient.

A *record* is the number of an object in a flat DAG, here of the flattened arguments. A *visit* is a record together
with the labels under which a path reaches it: a cut array has a differentiated visit and one that is not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._call_arguments import positions_of
from ...core._errors import report_untied
from ...core._printing import code_that_unties
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
    """A differentiating transform, as messages describe it.

    Attributes:
        argnums: positions of the differentiated arguments.
        function: name of the differentiated function.
        transform_code: code of the transform, with a `{}` for its function and another `{}` for more options.
        advise_filter: (leaves that a filter selects at some of their paths only) → advice about the other paths.
    """

    argnums: Sequence[int]
    function: str
    transform_code: str
    advise_filter: Callable[[Sequence[Any]], str]


class _LostPart(NamedTuple):
    """A part missing in a gradient: the part through a second path of an array or module.

    Attributes:
        obj: the array or module.
        differentiated_path: a path at which it is differentiated.
        lost_path: a path at which it is not.
        kind: "array" or "module".
    """

    obj: Any
    differentiated_path: Path
    lost_path: Path
    kind: str = "array"

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments with the object in them: one, or the differentiated one and the other one."""
        return list(dict.fromkeys((str(self.differentiated_path[0]), str(self.lost_path[0]))))


def report_partial_gradients(call: Call, gradient: Gradient, names: Names, policy: Policy) -> None:
    """Warns if a gradient lacks the part of an array or a module at a path where it is not differentiated.

    Gives at most three warnings, each with fixes of its own: for arrays within one argument, for arrays in two
    arguments, and for modules in two arguments.

    Args:
        call: the call, with the ties that the transform cuts.
        gradient: the transform.
        names: names of the function and its arguments.
        policy: its `on_untie` makes the warnings an error, or suppresses them.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    lost_arrays = [part for cut in call.cuts for part in _lost_arrays(cut)]
    # Arrays with both paths in one argument. Only a filter (`wrt`) can select one of them and not the other.
    lost = [part for part in lost_arrays if len(part.arguments) == 1]
    lost += [part for cut in call.cuts for part in _arrays_lost_by_filter(cut)]
    if lost:
        separate = [jtu.keystr(part.lost_path) for part in lost[:MAX_PATHS]]
        fix = (
            f"{gradient.advise_filter([part.obj for part in lost])}"
            "Let `wrt` select the array at all of its paths or at none. To leave the missing term out, untie the paths "
            "before the call:\n"
            f"{code_that_unties(jtu.keystr(lost[0].differentiated_path), separate)}"
        )
        _warn(lost, fix, names, policy)
    # Arrays with the two paths in two arguments.
    lost = [part for part in lost_arrays if len(part.arguments) == 2]
    if lost:
        _warn(lost, _fix(call, gradient, names, lost[0].arguments), names, policy)
    # Modules in two arguments.
    lost = [part for cut in call.cuts for part in _lost_modules(cut)]
    if lost:
        two_arguments = lost[0].arguments
        arguments = ", ".join(two_arguments)
        lines = [
            *_fix_by_argnums("If one model is used twice, differentiate", call, gradient, names, two_arguments[1]),
            f"If `{two_arguments[1]}` is meant as a constant, give it objects of its own:",
            f"    {arguments} = sharedtree.untie(({arguments}), lambda t: t[1:])",
        ]
        _warn(lost, "\n".join(lines), names, policy)


# ---- The lost parts ----


def _lost_arrays(cut: Cut) -> list[_LostPart]:
    """Finds the arrays in a differentiated module and also in a module without any differentiated leaf.

    Leaves out an array that is at the same path in both, if the modules are of one class.
    """
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    leaves = _inexact_leaves(cut)
    # Path and visit of each module that is in no other module.
    roots = outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers)
    # The first differentiated path of each leaf, and the differentiated leaves of each module.
    differentiated_path: dict[int, Path] = {}
    differentiated_modules: list[tuple[int, set[int]]] = []
    for path, root in roots:
        # The outcome of a leaf is True if it is differentiated there.
        leaf_visits = [visit for visit in outcomes.reachable_from(root) if visit.record in leaves]
        differentiated_leaves = {visit.record for visit in leaf_visits if outcomes.leaf_outcomes[outcomes[visit]]}
        if differentiated_leaves:
            differentiated_modules.append((root.record, differentiated_leaves))
            for record, path_below in tree.below(root.record).first_paths.items():
                if record in differentiated_leaves:
                    differentiated_path.setdefault(record, (*path, *path_below))
    # Look for these leaves in the modules that are not differentiated, the constants.
    lost: list[_LostPart] = []
    without_state = _without_state(tree)
    for path, constant in roots:
        # The label False, for the whole module, says that nothing in it is differentiated.
        if outcomes.prefix_at(constant) is not False:
            continue
        first_paths = without_state.below(constant.record).first_paths
        lost_paths = {record: path_below for record, path_below in first_paths.items() if record in leaves}
        for root, differentiated_leaves in differentiated_modules:
            common = differentiated_leaves & lost_paths.keys()
            if not common:
                continue
            unmatched = _paths_without_counterpart(tree.below(constant.record), tree.below(root), common)
            # If a leaf is at the same paths in both modules, the cut is meant. Once is enough, so no further
            # differentiated module can bring the leaf back.
            for record in common - unmatched.keys():
                del lost_paths[record]
            # For the others, name a path that this module lacks.
            lost_paths |= {record: path_below for record, path_below in unmatched.items() if record in lost_paths}
        for record, path_below in lost_paths.items():
            lost.append(_LostPart(tree.objects[record], differentiated_path[record], (*path, *path_below)))
    return lost


def _arrays_lost_by_filter(cut: Cut) -> list[_LostPart]:
    """Finds the arrays in differentiated arguments that a filter selects at some of their paths and not at others."""
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    leaves = _inexact_leaves(cut)
    # Leaf → {True: the first path at which it is differentiated, False: the first path at which it is not}.
    paths_of: dict[int, dict[bool, Path]] = {record: {} for record in sorted(leaves)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        # The label False: this argument is not differentiated at all. `_lost_arrays` looks at it.
        if outcomes.prefix_at(root) is not False:
            for visit, leaf_path in _first_paths_outside_state(outcomes, root, path):
                if visit.record in leaves:
                    is_differentiated = bool(outcomes.leaf_outcomes[outcomes[visit]])
                    paths_of[visit.record].setdefault(is_differentiated, leaf_path)
    lost: list[_LostPart] = []
    for record, paths in paths_of.items():
        if len(paths) == 2:
            lost.append(_LostPart(tree.objects[record], paths[True], paths[False]))
    return lost


def _lost_modules(cut: Cut) -> list[_LostPart]:
    """Finds the cut modules that are in no other cut module.

    Only a module that is in one differentiated argument and in one other argument is cut. All others are refused.
    """
    outcomes, tree = cut.outcomes, cut.outcomes.tree
    # Remove every module that is below a cut one. `edges` yields all records below its roots.
    children = [((), child) for record in cut.modules for child in tree.records[record][1]]
    largest = set(cut.modules).difference(record for record, _ in edges(tree.records, children))
    # Module → {True: its path in the differentiated argument, False: its path in the other one}.
    paths_of: dict[int, dict[bool, Path]] = {record: {} for record in sorted(largest)}
    for path, root in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        for record, path_below in tree.below(root.record).first_paths.items():
            if record in largest:
                is_differentiated = outcomes.prefix_at(root) is not False
                paths_of[record][is_differentiated] = (*path, *path_below)
    return [_LostPart(tree.objects[record], paths[True], paths[False], "module") for record, paths in paths_of.items()]


def _inexact_leaves(cut: Cut) -> set[int]:
    """Returns the records of the cut floating-point arrays. Others have an empty gradient (`allow_int`) or none."""
    return {record for record in cut.leaves if is_inexact(cut.outcomes.tree.objects[record])}


def _without_state(tree: FlatDag) -> FlatDag:
    """Returns a copy of a tree with a static leaf in place of each `equinox.nn.State`. So nothing is below it."""
    records = [(Static(None), ()) if makes_state(op) else (op, children) for op, children in tree.records]
    return FlatDag(records, tree.root)


def _first_paths_outside_state(outcomes: Outcomes, root: Visit, root_path: Path) -> list[tuple[Visit, Path]]:
    """Returns all visits below a root, each with its first path, except for those in an `equinox.nn.State`."""
    first_paths: dict[Visit, Path] = {}
    stack = [(root, root_path)]
    while stack:
        visit, path = stack.pop()
        if visit not in first_paths and not makes_state(outcomes.tree.records[visit.record][0]):
            first_paths[visit] = path
            # Children are pushed in reverse, so that they come off the stack in flatten order.
            node = outcomes.tree.node(visit.record)
            steps = () if node is None else tuple(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([(child, (*path, key)) for key, child in reversed(steps)])
    return list(first_paths.items())


def _paths_without_counterpart(module: FlatDag, counterpart: FlatDag, leaves: Collection[int]) -> dict[int, Path]:
    """Finds the leaves of a module that another module does not have at the same path.

    If the modules are of different classes, no path is the same.

    Args:
        module: the first module.
        counterpart: the second module, in the same table of records.
        leaves: records of the leaves.

    Returns:
        Leaf → the first path in `module` at which `counterpart` does not have it. A leaf that the modules have in
        common at all of its paths is left out.
    """
    # Pairs of records with nothing below them to compare: two leaves, or two records that differ.
    ends: set[tuple[int, int]] = set()

    def agree(i: int, j: int) -> bool:
        """Stores a pair of records that are not nodes of one class with the same keys. All of them may differ."""
        ends.add((i, j))
        return True

    unmatched: dict[int, Path] = {}
    # `pairs_of_one_shape` walks both modules at once, yields the records at each path, and does not go below the pairs
    # in `ends`.
    for pair in pairs_of_one_shape(module, counterpart, agree, compares_keys=True):
        # At the end of a walk the modules have one object, or none of the leaves below has a counterpart.
        if (pair.left, pair.right) in ends and pair.left != pair.right:
            for record, path in module.below(pair.left).edges(pair.path):
                if record in leaves:
                    unmatched.setdefault(record, path)
    return unmatched


# ---- The warning ----


def _warn(lost: Sequence[_LostPart], fix: str, names: Names, policy: Policy) -> None:
    """Gives one warning for several lost parts with the same fix.

    Args:
        lost: the lost parts. The first few are listed.
        fix: the lines that say what to do.
        names: names of the function and its arguments.
        policy: its `on_untie` makes the warning an error.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    texts = [(jtu.keystr(part.differentiated_path), jtu.keystr(part.lost_path)) for part in lost]
    # `report_untied` puts a sentence in front, which says that a tie was cut.
    lines = ["Only some of its paths are differentiated, so the gradient misses a term:"]
    for (differentiated, constant), part in zip(texts[:MAX_PATHS], lost, strict=False):
        lines.append(f"    `{differentiated}` lacks what flows through `{constant}`, which is the same {part.kind}")
    lines += ["    … and more"] * (len(lost) > MAX_PATHS)
    message = "\n".join(lines)
    paths = [path for path_pair in texts for path in path_pair]
    report_untied(policy.on_untie, names.definition, message, fix, paths, verb="cut")


def _fix(call: Call, gradient: Gradient, names: Names, two_arguments: Sequence[str]) -> str:
    """Returns the fixes for arrays in two arguments, as lines of text and of code with the user's names.

    Args:
        call: the call.
        gradient: the transform.
        names: names of the function's arguments.
        two_arguments: names of the differentiated argument and of the other one.
    """
    # In the code of the fixes, `both` is the pair of the two arguments.
    replacements = {name: f"both[{i}]" for i, name in enumerate(two_arguments)}
    arguments = ", ".join(two_arguments)
    of_both = f"lambda both: {gradient.function}({_call_code(call, names, replacements)})"
    lines = [
        *_fix_by_argnums("Differentiate", call, gradient, names, two_arguments[1]),
        "For one gradient of both, pass them as one argument. `sharedtree.tree.partition` can split such a pair:",
        f"    {gradient.transform_code.format(of_both, '')}(({arguments}))",
        f"If the missing term is meant, give `{two_arguments[1]}` arrays of its own:",
        f"    {arguments} = sharedtree.untie(({arguments}), lambda t: t[1:])",
    ]
    return "\n".join(lines)


def _fix_by_argnums(start: str, call: Call, gradient: Gradient, names: Names, argument: str) -> list[str]:
    """Returns the lines of the fix that another argument is differentiated, too, with `argnums`.

    Args:
        start: the beginning of the sentence, up to the verb.
        call: the call.
        gradient: the transform.
        names: names of the function's arguments.
        argument: name of the other argument.

    Returns:
        A sentence and a line of code. Empty if the argument can have no position, or the transform has no `argnums`.
    """
    arguments = call.arguments
    num_args, positional_names = len(arguments.args), list(names.positional)
    # The position in the signature. An argument in `*args` has a position in the call only.
    position_of = dict(zip([names.text(i) for i in range(num_args)], range(num_args), strict=True))
    position = positional_names.index(argument) if argument in positional_names else position_of.get(argument)
    # Only the ready-made transforms are known to take `argnums`.
    if position is None or "preserve_identities" in gradient.transform_code:
        return []
    # The code passes the argument by position. So all arguments before it must be in the call, too.
    if not arguments.kwargs.keys() >= {*positional_names[num_args:position]}:
        return []
    argnums = tuple(sorted({*gradient.argnums, position}))
    by_position = [names.text(i) for i in range(max(num_args, position + 1))]
    by_keyword = [f"{name}={name}" for name in arguments.kwargs if name not in by_position]
    arguments_code = ", ".join(by_position + by_keyword)
    code = gradient.transform_code.format(gradient.function, f", argnums={argnums}")
    return [f"{start} both arguments, and each gets the sum:", f"    {code}({arguments_code})"]


def _call_code(call: Call, names: Names, replacements: Mapping[str, str]) -> str:
    """Returns the arguments of a call as code, such as "model, both[1], rate=rate".

    Args:
        call: the call.
        names: names of the arguments.
        replacements: name of an argument → code to write in its place.
    """
    texts: list[str] = []
    # The position of an argument is a number, or its name if it was passed by keyword. Static arguments are left out.
    for position in positions_of(call.arguments.parts()[1]):
        name = names.text(position)
        texts.append(("" if isinstance(position, int) else f"{position}=") + replacements.get(name, name))
    return ", ".join(texts)
