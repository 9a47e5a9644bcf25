"""Warns of tied arrays that a transform takes for values.

    params = st.tie({"embed": w, "head": v}, lambda p: (p["embed"], p["head"]))
    st.jit(f)(params)       # outside modules arrays are values: inside `f` they are two

Such an array was tied by `tie`, or by an outer transform under `Policy(containers=True)`. If it has several paths, not
all of them in modules, the function gets several arrays. We warn when the function is traced, of each argument and of
the result by itself, since ties between separate arguments do not count. An array that is only in modules stays one. An
array in a module and in a dict beside it does not.
"""

from collections.abc import Iterator

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._call_arguments import Arguments
from ...core._errors import report_untied
from ...core._pack_and_unpack import Rules, flat_dag_of
from ...core._printing import listed
from ...core._structure import FlatDag, Path
from ...ties._leaf_notes import is_one_around, is_tied_value
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._function_and_options import in_code


def report_tied_values(tree: FlatDag, names: Names, transform: str, policy: Policy) -> None:
    """Looks for such arrays in arguments or in a result. Warns of the first one in each argument.

    Args:
        tree: the arguments, or the result.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: what a lost tie does. If containers carry identity, all remaining arrays are values on purpose.

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
    """Path and record of each argument, or of the result."""
    node = tree.node(tree.root)
    if node is None or node.type.cls is not Arguments:
        return [((), tree.root)]
    return [((key,), child) for key, child in zip(node.keys, tree.records[tree.root][1], strict=True)]


def _paths_of_tied_values(tree: FlatDag) -> Iterator[list[Path]]:
    """Iterates over the tied arrays with several records, not all of them in modules. Yields the paths of each."""
    tied_leaves = {record for record, leaf in tree.leaves.items() if is_tied_value(leaf) or is_one_around(leaf)}
    if not tied_leaves:
        return
    # An array has one record in modules, and another one for each value that it is outside.
    paths_of: IdentityDict[dict[int, Path]] = IdentityDict()
    for record, path in tree.first_paths.items():
        if record in tied_leaves:
            paths_of.setdefault(tree.objects[record], {})[record] = path
    for paths in paths_of.values():
        if len(paths) > 1 and tree.outside.keys() & paths.keys():
            yield list(paths.values())


def _warn(
    tree: FlatDag, root: int, root_path: Path, tied_paths: list[Path], names: Names, transform: str, policy: Policy
) -> None:
    """Warns of one array.

    Args:
        tree: the arguments, or the result.
        root: record of the argument, or of the result.
        root_path: its path.
        tied_paths: paths of the array below it.
        names: names of the function and its arguments.
        transform: name of the transform.
        policy: what a lost tie does.
    """
    name = jtu.keystr(root_path) or "result"
    paths = [name + jtu.keystr(path) for path in tied_paths]
    message = (
        f"{listed(paths)} are one array, which `sharedtree.tie` or an outer transform made of several. But outside "
        f"modules arrays are values: under `{transform}` they are {len(paths)}, each with its own gradient and updates."
    )
    lines: list[str] = []
    # The first fix helps only if the tie is in containers that can carry identity.
    tree_with_containers = flat_dag_of(tree.objects[root], Rules(containers=True, convention="outside"))
    if tied_paths not in list(_paths_of_tied_values(tree_with_containers)):
        lines += [
            "Let lists and dicts carry identity, here and under every other transform that sees them:",
            "    policy = sharedtree.Policy(containers=True)",
            f"    inner = {in_code(transform, 'policy=policy')}",
        ]
    lines += [
        "Or hand over one object that holds the tie, which vanilla transforms keep, too:",
        f"    dag = sharedtree.Dag({name})      # `dag.tree` gives it back",
        "Or, if they are meant to be several from here on, say so:",
        f"    {name} = sharedtree.untie({name})",
    ]
    report_untied(policy.on_untie, names.definition, message, "\n".join(lines), paths)
