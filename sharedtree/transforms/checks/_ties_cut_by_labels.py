"""A tie within the modules of one argument that is cut because its paths have two axes or specifications.

    vmap(f, in_axes=(Net(0, 1),))(Net(w, w))        inside, `embed` and `head` are two arrays

Each side is what vanilla JAX makes of it, so nothing is computed wrongly. But the function has two arrays where its
caller has one, and what it returns for the two may be trained apart. So it is said when the function is traced. Arrays
that two arguments share are cut in silence: they alias by accident.
"""

from typing import Any

from jax import tree_util as jtu

from ...core._structure import Path
from ...core._warning_source import report_untied
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call
from .._dealing_into_hands import modules_of_arguments, outermost_ways
from .._leaf_labels import SAID, Fates, Way


def report_cut_ties(call: Call, names: Names, transform: str, policy: Policy) -> None:
    """Warns, once for a trace, of arrays that are several inside, because one argument has them under several labels.

    Args:
        call: the arguments, as they were dealt.
        names: of the function.
        transform: what it is called.
        policy: what to do.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    cuts = [cut for cut in call.plan.cuts if cut.fates.treatment.within_module == SAID and cut.leaves]
    found = [paths for cut in cuts for paths in _cut_within_arguments(cut.fates, set(cut.leaves))]
    if not found:
        return
    lines = [f"    `{jtu.keystr(path)}`: {treatment}" for treatment, path in found[0].items()]
    lines += [f"    … and {len(found) - 1} more"] * (len(found) > 1)
    arguments = list(dict.fromkeys(str(path[0]) for paths in found for path in paths.values()))
    together = ", ".join(arguments)
    several = together if len(arguments) == 1 else f"({together})"
    what = "\n".join([f"`{transform}` takes one array along several ways, so inside it is several:", *lines])
    fix = (
        "Each is what vanilla JAX makes of it, but an update would part them. Give all paths one label or, if they are "
        "meant to be several, say so before the call:\n"
        f"    {together} = sharedtree.untie({several})"
    )
    texts = [jtu.keystr(path) for paths in found for path in paths.values()]
    report_untied(policy.on_untie, names.definition, what, fix, texts, verb="cut", count=len(found))


def _cut_within_arguments(fates: Fates, leaves: set[int]) -> list[dict[str, Path]]:
    """For each array that the modules of an argument have under several labels: each in words, with its first path."""
    found: list[dict[str, Path]] = []
    start_of = {way: path for path, way in outermost_ways(fates, has_containers=fates.treatment.has_containers)}
    for group in modules_of_arguments(fates):
        places: dict[int, dict[str, Path]] = {}
        for root in group:
            for way, path in _first_paths(fates, root, start_of[root]).items():
                if way[0] in leaves:
                    places.setdefault(way[0], {}).setdefault(fates.described(way), path)
        found += [paths for _, paths in sorted(places.items()) if len(paths) > 1]
    return found


def _first_paths(fates: Fates, root: Way, start: Path) -> dict[Way, Path]:
    """The ways that lead on from a root, each with the first path to it, in the order of a walk."""
    found: dict[Way, Path] = {}
    stack: list[tuple[Way, Any]] = [(root, start)]
    while stack:
        way, path = stack.pop()
        if way in found:
            continue
        found[way] = path
        node = fates.tree.node(way[0])
        if node is not None:
            steps = list(zip(node.keys, fates.below(way), strict=True))
            stack.extend([(below, (*path, key)) for key, below in reversed(steps)])
    return found
