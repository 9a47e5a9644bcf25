"""Warns of a tie within the modules of one argument, if it is cut because its paths have two axes or specifications.

    vmap(f, in_axes=(Net(0, 1),))(Net(w, w))        inside, `embed` and `head` are two arrays

Each side is what vanilla JAX makes of it, so nothing is computed wrongly. But the function has two arrays where its
caller has one, and the results for the two may be trained apart. So we warn when the function is traced. If two
arguments share an array, it is cut in silence: they alias by accident.
"""

from jax import tree_util as jtu

from ...core._errors import report_untied
from ...core._structure import Path
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call
from .._grouping_leaves import modules_by_argument, outermost_modules
from .._leaf_labels import SPLIT_WITH_WARNING, Outcomes, Visit


def report_cut_ties(call: Call, names: Names, transform: str, policy: Policy) -> None:
    """Warns once for a trace of arrays with several labels in one argument, since they are several arrays inside.

    Args:
        call: the call, with its cuts.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: what a cut tie does.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    # One entry for each array: label in words → path.
    conflicts: list[dict[str, Path]] = []
    for cut in call.plan.cuts:
        if cut.outcomes.treatment.within_module == SPLIT_WITH_WARNING and cut.leaves:
            conflicts += _cut_within_arguments(cut.outcomes, set(cut.leaves))
    if not conflicts:
        return
    lines = [f"    `{jtu.keystr(path)}`: {label}" for label, path in conflicts[0].items()]
    lines += [f"    … and {len(conflicts) - 1} more"] * (len(conflicts) > 1)
    arguments = list(dict.fromkeys(str(path[0]) for paths in conflicts for path in paths.values()))
    names_of_arguments = ", ".join(arguments)
    tree_code = names_of_arguments if len(arguments) == 1 else f"({names_of_arguments})"
    message = "\n".join([f"`{transform}` takes one array along several ways, so inside it is several:", *lines])
    fix = (
        "Each is what vanilla JAX makes of it, but an update would part them. Give all paths one label or, if they are "
        "meant to be several, say so before the call:\n"
        f"    {names_of_arguments} = sharedtree.untie({tree_code})"
    )
    texts = [jtu.keystr(path) for paths in conflicts for path in paths.values()]
    report_untied(policy.on_untie, names.definition, message, fix, texts, verb="cut", count=len(conflicts))


def _cut_within_arguments(outcomes: Outcomes, leaves: set[int]) -> list[dict[str, Path]]:
    """Finds the arrays with several labels in the modules of one argument.

    Args:
        outcomes: outcomes of the arguments.
        leaves: records of the cut arrays.

    Returns:
        For each array: label in words → the first path under it.
    """
    conflicts: list[dict[str, Path]] = []
    modules = outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers)
    path_of = {visit: path for path, visit in modules}
    for argument in modules_by_argument(outcomes):
        paths_of: dict[int, dict[str, Path]] = {}
        for root in argument:
            for visit, path in _first_paths(outcomes, root, path_of[root]).items():
                if visit.record in leaves:
                    paths_of.setdefault(visit.record, {}).setdefault(outcomes.description(visit), path)
        conflicts += [paths for _, paths in sorted(paths_of.items()) if len(paths) > 1]
    return conflicts


def _first_paths(outcomes: Outcomes, root: Visit, root_path: Path) -> dict[Visit, Path]:
    """The first path to each visit below a root, in flatten order."""
    first_paths: dict[Visit, Path] = {}
    stack: list[tuple[Visit, Path]] = [(root, root_path)]
    while stack:
        visit, path = stack.pop()
        if visit in first_paths:
            continue
        first_paths[visit] = path
        node = outcomes.tree.node(visit.record)
        if node is not None:
            children = list(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([(child, (*path, key)) for key, child in reversed(children)])
    return first_paths
