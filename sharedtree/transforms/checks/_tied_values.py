"""Arrays that were made one, where a transform takes them for values.

An array that was made one, by `tie` or by an outer transform under `Policy(containers=True)`, may be met twice where
arrays are values: the function gets two, so the transform says so. It is said when the function is traced, of each
argument and of the result by itself: ties between separate arguments do not count. An array that is met twice in
modules stays one, but not one that is met there and in a dict beside them.
"""

from collections.abc import Iterator

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._call_arguments import Arguments
from ...core._flat_dags import FlatDag
from ...core._pack_and_unpack import Rules, walked
from ...core._printing import listed
from ...core._structure import Path
from ...core._warning_source import report_untied
from ...ties._leaf_notes import is_one_around, is_tied_value
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._function_and_options import in_code


def report_tied_values(tree: FlatDag, names: Names, transform: str, policy: Policy) -> None:
    """Looks for such arrays in arguments or in a result.

    Args:
        tree: the arguments, or the result.
        names: of the function.
        transform: what it is called.
        policy: what to do. If containers carry identity, what is left outside is meant to be a value.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.containers or policy.on_untie == "ignore":
        return
    for path, root in _each(tree):
        met = next(_met_twice(tree.below(root)), None)
        if met is not None:
            _report(tree, root, path, met, names, transform, policy)


def _each(tree: FlatDag) -> list[tuple[Path, int]]:
    node = tree.node(tree.root)
    if node is None or node.type.cls is not Arguments:
        return [((), tree.root)]
    return [((key,), child) for key, child in zip(node.keys, tree.records[tree.root][1], strict=True)]


def _met_twice(tree: FlatDag) -> Iterator[list[Path]]:
    """The paths of each array that was tied and is met twice, outside modules at least once."""
    noted = {n for n, leaf in tree.leaves.items() if is_tied_value(leaf) or is_one_around(leaf)}
    if not noted:
        return
    found: IdentityDict[dict[int, Path]] = IdentityDict()
    for number, path in tree.first_paths.items():
        if number in noted:
            found.setdefault(tree.objects[number], {})[number] = path
    for first_paths in found.values():
        if len(first_paths) > 1 and tree.outside.keys() & first_paths.keys():
            yield list(first_paths.values())


def _report(
    tree: FlatDag, root: int, above: Path, met: list[Path], names: Names, transform: str, policy: Policy
) -> None:
    name = jtu.keystr(above) or "result"
    paths = [name + jtu.keystr(path) for path in met]
    what = (
        f"{listed(paths)} are one array, which `sharedtree.tie` or an outer transform made of several. But outside "
        f"modules arrays are values: under `{transform}` they are {len(paths)}, each with its own gradient and updates."
    )
    lines: list[str] = []
    if met not in list(_met_twice(walked(tree.objects[root], Rules(containers=True, convention="outside")))):
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
    report_untied(policy.on_untie, names.definition, what, "\n".join(lines), paths)
