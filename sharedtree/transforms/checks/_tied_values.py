"""Warns of tied arrays outside modules, since a transform makes a separate array for each of their paths.

    params = st.tie({"embed": w, "head": v}, lambda p: (p["embed"], p["head"]))
    st.jit(f)(params)       # outside modules arrays are values: inside `f` they are two

Only two kinds of arrays count: those tied by `tie`, and those that an outer transform under `Policy(containers=True)`
holds as one. Other arrays may be the same by accident. If such an array has several paths, and at least one of them is
outside modules, the function receives several arrays. An array with all paths in modules stays one array.

We warn when the function is traced. Each argument is checked by itself, and the result as well, because ties between
separate arguments do not count.

A *record* is the number of an object in a flat DAG: the flattened arguments or the flattened result.
"""

from collections.abc import Iterator

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._call_arguments import Arguments
from ...core._errors import report_untied
from ...core._pack_and_unpack import Rules, flat_dag_of
from ...core._printing import code_that_unties, listed
from ...core._structure import FlatDag, Path
from ...ties._leaf_notes import is_one_around, is_tied_value
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._function_and_options import in_code


def report_tied_values(tree: FlatDag, names: Names, transform: str, policy: Policy) -> None:
    """Warns of the first tied array outside modules in each argument, or in a result.

    Args:
        tree: the arguments, or the result.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: its `on_untie` makes the warning an error, or suppresses it. If its containers carry identity, there is
            no warning, since arrays that are still values are so on purpose.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.containers or policy.on_untie == "ignore":
        return
    for path, root in _separate_trees(tree):
        tied_paths = next(_paths_of_tied_values(tree.below(root)), None)
        if tied_paths is not None:
            _warn(tree, root, path, tied_paths, names, transform, policy)


def _separate_trees(tree: FlatDag) -> list[tuple[Path, int]]:
    """Returns the path and the record of each argument. For a result, those of the result."""
    node = tree.node(tree.root)
    if node is None or node.type.cls is not Arguments:
        return [((), tree.root)]
    return [((key,), child) for key, child in zip(node.keys, tree.records[tree.root][1], strict=True)]


def _paths_of_tied_values(tree: FlatDag) -> Iterator[list[Path]]:
    """Yields the paths of each tied array that the function would receive as several arrays."""
    # `is_one_around` is True for an array that an outer transform holds as one.
    tied_leaves = {record for record, leaf in tree.leaves.items() if is_tied_value(leaf) or is_one_around(leaf)}
    if not tied_leaves:
        return
    # An array has one record for all of its paths in modules, and one record for each path outside modules. All of them
    # have the same object. Array → {record: its first path}.
    paths_of: IdentityDict[dict[int, Path]] = IdentityDict()
    for record, path in tree.first_paths.items():
        if record in tied_leaves:
            paths_of.setdefault(tree.objects[record], {})[record] = path
    # `outside` has the records with a path outside modules.
    for paths in paths_of.values():
        if len(paths) > 1 and tree.outside.keys() & paths.keys():
            yield list(paths.values())


def _warn(
    tree: FlatDag, root: int, root_path: Path, tied_paths: list[Path], names: Names, transform: str, policy: Policy
) -> None:
    """Warns of one tied array in an argument or in the result.

    Args:
        tree: the arguments, or the result.
        root: record of the argument, or of the result.
        root_path: path of the argument. Empty for the result.
        tied_paths: paths of the array, beginning below the argument.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: its `on_untie` makes the warning an error.
    """
    name = jtu.keystr(root_path) or "result"
    paths = [name + jtu.keystr(path) for path in tied_paths]
    message = (
        f"{listed(paths)} are one array, tied by `sharedtree.tie` or an outer transform, but {len(paths)} arrays "
        f"inside `{transform}`, each with its own gradient and updates. By default, it keeps ties of arrays in modules "
        "only, not in lists and dicts."
    )
    lines: list[str] = []
    # The policy helps only if it makes the array one. An array whose only holders are tuples stays several. So flatten
    # the argument under the policy, and see whether the array still has several records.
    tree_with_containers = flat_dag_of(tree.objects[root], Rules(containers=True, convention="outside"))
    if tied_paths not in list(_paths_of_tied_values(tree_with_containers)):
        lines += [
            "Keep ties in lists and dicts, here and under every other transform:",
            "    policy = sharedtree.Policy(containers=True)",
            f"    inner = {in_code(transform, 'policy=policy')}",
        ]
    lines += [
        "Or pass a `Dag`, which keeps the tie under transforms of JAX, too:",
        f"    dag = sharedtree.Dag({name})      # `dag.tree` gives it back",
        "Or, if they are meant to be separate from here on, untie them:",
        code_that_unties(paths[0], paths[1:]),
    ]
    report_untied(policy.on_untie, names.definition, message, "\n".join(lines), paths)
