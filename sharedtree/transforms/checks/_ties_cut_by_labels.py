"""Warns of a tied array in the modules of one argument, if the function receives several arrays for it.

    vmap(f, in_axes=(Net(0, 1),))(Net(w, w))        inside `f`, `embed` and `head` are two arrays

This happens if a transform has different *labels* for the paths of the array: two axes or two specifications. The tie
is *cut*: inside the function, each label has an array of its own. Each of these is what vanilla JAX makes of it, so
nothing is computed wrongly. But training may change the arrays in different ways, although the caller has one. So we
warn when the function is traced. A tie between two arguments is cut without a warning, because such arguments share
arrays by accident.

A *record* is the number of an object in a flat DAG, here of the flattened arguments. A *visit* is a record together
with the labels under which a path reaches it: a cut array has several visits.
"""

from jax import tree_util as jtu

from ...core._errors import report_untied
from ...core._printing import code_that_unties
from ...core._structure import Path
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call
from .._grouping_leaves import modules_by_argument, outermost_modules
from .._leaf_labels import SPLIT_WITH_WARNING, Outcomes, Visit

_MAX_UNTIED = 8
"""How many arrays the code of the fix unties."""


def report_cut_ties(call: Call, names: Names, transform: str, policy: Policy) -> None:
    """Gives one warning for all arrays that have several labels in one argument.

    Args:
        call: the call, with the ties that the transform cuts.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: its `on_untie` makes the warning an error, or suppresses it.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    # One entry for each array: label in words → the first path under it.
    conflicts: list[dict[str, Path]] = []
    for cut in call.plan.cuts:
        if cut.outcomes.treatment.within_module == SPLIT_WITH_WARNING and cut.leaves:
            conflicts += _cut_within_arguments(cut.outcomes, set(cut.leaves))
    if not conflicts:
        return
    # The message names the paths of the first array, and the number of the others.
    lines = [f"    `{jtu.keystr(path)}`: {label}" for label, path in conflicts[0].items()]
    lines += [f"    … and {len(conflicts) - 1} more"] * (len(conflicts) > 1)
    # The array stays where the first label has it. A path begins with the name of the argument.
    separate = [jtu.keystr(path) for paths in conflicts[:_MAX_UNTIED] for path in list(paths.values())[1:]]
    texts = [jtu.keystr(path) for paths in conflicts for path in paths.values()]
    message = "\n".join(
        [
            f"`{transform}` treats one array differently at its paths, so that it becomes several arrays inside:",
            *lines,
        ]
    )
    fix = (
        "Values are as in vanilla JAX, but an update would make the arrays differ. Treat all paths alike. If the "
        "arrays are meant to be separate, untie them before the call:\n"
        f"{code_that_unties(texts[0], separate)}"
    )
    report_untied(policy.on_untie, names.definition, message, fix, texts, verb="cut", count=len(conflicts))


def _cut_within_arguments(outcomes: Outcomes, leaves: set[int]) -> list[dict[str, Path]]:
    """Finds the arrays with several labels in the modules of one argument.

    Args:
        outcomes: the labels of all leaves of the arguments.
        leaves: records of the cut arrays.

    Returns:
        For each array: label in words → the first path under this label. An array that is cut only between two
        arguments is left out.
    """
    conflicts: list[dict[str, Path]] = []
    # Path and visit of each module that is in no other module. `modules_by_argument` groups the same visits.
    modules = outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers)
    path_of = {visit: path for path, visit in modules}
    for roots in modules_by_argument(outcomes):
        # Record of an array → label in words → the first path under it.
        paths_of: dict[int, dict[str, Path]] = {}
        for root in roots:
            for visit, path in _first_paths(outcomes, root, path_of[root]).items():
                if visit.record in leaves:
                    paths_of.setdefault(visit.record, {}).setdefault(outcomes.description(visit), path)
        conflicts += [paths for _, paths in sorted(paths_of.items()) if len(paths) > 1]
    return conflicts


def _first_paths(outcomes: Outcomes, root: Visit, root_path: Path) -> dict[Visit, Path]:
    """Returns the first path to each visit below a root, and to the root, in flatten order."""
    first_paths: dict[Visit, Path] = {}
    stack: list[tuple[Visit, Path]] = [(root, root_path)]
    while stack:
        visit, path = stack.pop()
        if visit in first_paths:
            continue
        first_paths[visit] = path
        node = outcomes.tree.node(visit.record)
        # Children are pushed in reverse, so that they come off the stack in flatten order.
        if node is not None:
            children = list(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([(child, (*path, key)) for key, child in reversed(children)])
    return first_paths
