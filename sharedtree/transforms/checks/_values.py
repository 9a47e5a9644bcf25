"""An array that was made one, met twice where arrays are values: the function gets two, so the transform says so.

It was made one by `tie`, or by an outer transform under `Policy(containers=True)`.

It is said when the function is traced, of its arguments and of its results, and of each by itself: ties between
separate arguments do not count. What lies in modules is packed, so an array that is met there twice stays one, but not
an array that is met there and in a dict beside it.
"""

from collections.abc import Iterable
from typing import Any

from jax import tree_util as jtu

from ..._attribution import report_untied
from ..._context import Policy
from ..._graph import Rules, Tags
from ..._packed import Packed, leaf_paths
from ..._text import listed
from ..._tied_values import is_one_around, is_tied_value
from .._crossed import Names, Position, is_packed
from .._packing import pack_tree


def report_tied_values(trees: Iterable[tuple[Position, Any]], names: Names, transform: str, policy: Policy) -> None:
    """Looks for such arrays in packed arguments or results.

    Args:
        trees: the arguments, or the one result.
        names: what they are called.
        transform: what the transform is called.
        policy: what to do. If containers carry identity, what is left outside is meant to be a value.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.containers or policy.on_untie == "ignore":
        return
    for position, tree in trees:
        met = _met_twice(tree)
        if met:
            _report(position, tree, met[0], names, transform, policy)


def _met_twice(tree: Any) -> list[list[str]]:
    """The paths of each array that was tied and is met twice in a packed tree, outside modules at least once."""
    found: dict[int, tuple[Any, list[str]]] = {}
    outside: set[int] = set()
    for path, item in jtu.tree_flatten_with_path(tree, is_leaf=is_packed)[0]:
        for place, leaf in enumerate(item.leaves if type(item) is Packed else (item,)):
            if is_tied_value(leaf) or is_one_around(leaf):
                below = leaf_paths(item.structure)[place] if type(item) is Packed else ""
                found.setdefault(id(leaf), (leaf, []))[1].append(jtu.keystr(path) + below)  # alive in `found`
                if leaf is item:
                    outside.add(id(leaf))  # as above
    return [paths for number, (_, paths) in found.items() if len(paths) > 1 and number in outside]


def _report(position: Position, tree: Any, met: list[str], names: Names, transform: str, policy: Policy) -> None:
    name = names.text(position)
    paths = [name + path for path in met]
    what = (
        f"{listed(paths)} are one array, which `sharedtree.tie` or an outer transform made of several. But outside "
        f"modules arrays are values: under `{transform}` they are {len(paths)}, each with its own gradient and updates."
    )
    lines: list[str] = []
    if met not in _met_twice(pack_tree(tree, Tags(), Rules(containers=True), "")):
        lines += [
            "Let lists and dicts carry identity, here and under every other transform that sees them:",
            "    policy = sharedtree.Policy(containers=True)",
            f"    sharedtree.preserve_identities({transform}, policy=policy)(f)",
        ]
    lines += [
        "Or hand over one object that holds the tie, which vanilla transforms keep, too:",
        f"    dag = sharedtree.Dag({name})      # `dag.tree` gives it back",
        "Or, if they are meant to be several from here on, say so:",
        f"    {name} = sharedtree.untie({name})",
    ]
    report_untied(policy.on_untie, names.definition, what, "\n".join(lines), paths)
