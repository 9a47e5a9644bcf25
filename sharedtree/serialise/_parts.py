"""A part of a file's tree: the manifest of what lies at one path, and no more."""

from collections.abc import Callable
from typing import Any

from .._errors import StructureMismatchError
from ._atoms import is_name
from ._manifest import Child, Manifest, children_of, operands, owner_of_method
from ._steps import steps

_MAX_LISTED = 20


def part_at(manifest: Manifest, path: str) -> Manifest:
    """The manifest of the subtree at a path.

    Args:
        manifest: of the whole tree.
        path: as `jax.tree_util.keystr` prints it, `.blocks[0].attn` or `['params']`; the first dot may be left out.

    Raises:
        StructureMismatchError: if nothing is there.

    Cost: a look at each node of the part and at the nodes on the way.
    """
    rest = whole = path if not path or path[0] in ".[" else f".{path}"
    child = manifest.root
    while rest:
        below = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
        ways = [(each, step) for each, step in below if step != "<key>"]
        fitting = [(step, each) for each, step in ways if _begins_with(rest, step)]
        if not fitting:
            done = whole[: len(whole) - len(rest)]
            there = [step for _, step in ways[:_MAX_LISTED]]
            listed = ", ".join(f"`{step}`" for step in there) if there else "nothing"
            raise StructureMismatchError(
                f"The file has nothing at `{path}`. {f'Below `{done}`' if done else 'At its root'} there is {listed}"
                f"{', ...' if len(ways) > _MAX_LISTED else ''}.\n"
                "See what it has:\n    print(sharedtree.inspect(path))",
                (path,),
            )
        step, child = max(fitting, key=lambda way: len(way[0]))
        rest = rest[len(step) :]
    return _pruned(manifest, child)


def _begins_with(path: str, step: str) -> bool:
    return path.startswith(step) and (len(path) == len(step) or path[len(step)] in ".[")


def _pruned(manifest: Manifest, root: Child) -> Manifest:
    needed = {root} if type(root) is int else set[int]()
    for number in range(root if type(root) is int else -1, -1, -1):  # children stand before their parents
        if number in needed:
            needed.update(child for child in children_of(manifest.nodes[number]) if type(child) is int)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    types: dict[int, int] = {}
    arrays: dict[int, int] = {}

    def renumbered(child: Child) -> Child:
        return numbers[child] if type(child) is int else child

    rewrite: dict[str, Callable[[Any], Any]] = {
        "child": renumbered,
        "children": lambda children: [renumbered(child) for child in children],
        "type": lambda index: types.setdefault(index, len(types)),
        "array": lambda index: arrays.setdefault(index, len(arrays)),
    }
    nodes: list[list[Any]] = []
    atoms = [root]
    for number in sorted(needed):
        node = manifest.nodes[number]
        atoms += children_of(node)
        nodes.append([node[0], *(rewrite.get(operand, _as_it_is)(value) for operand, value in operands(node))])
    named = {("class", manifest.types[index].name) for index in types}
    named |= {(atom[0], atom[1]) for atom in atoms if type(atom) is list and is_name(atom)}
    owners = [entry.name for entry in manifest.types]
    methods = [manifest.nodes[number] for number in needed if manifest.nodes[number][0] in ("method", "bound")]
    named |= {("method", f"{owner_of_method(owners, manifest.nodes, node)}.{node[2]}") for node in methods}
    return manifest._replace(
        types=tuple(manifest.types[index] for index in types),
        arrays=tuple(manifest.arrays[index] for index in arrays),
        nodes=nodes,
        root=renumbered(root),
        names=tuple(name for name in manifest.names if name in named),
    )


def _as_it_is(value: Any) -> Any:
    return value
