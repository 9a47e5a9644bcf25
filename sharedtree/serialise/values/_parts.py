"""A part of a file's tree: the manifest of what lies at one path, and no more."""

from collections.abc import Callable
from typing import Any

from ..._errors import StructureMismatchError
from ..._printable import printable
from ._atoms import atom_text, is_name
from ._called import name_of_method
from ._kinds import children_of, node_text, operands, steps
from ._nodes import Child, Manifest, Node

_MAX_LISTED = 20


def part_at(manifest: Manifest, path: str) -> Manifest:
    """The manifest of the subtree at a path, as `jax.tree_util.keystr` prints it; the first dot may be left out.

    Raises:
        StructureMismatchError: if nothing is there, or more than one thing is: keys of a dictionary may look the same
            in print, and one text may be cut into steps in several ways.

    Cost: a look at each node of the part, and at the nodes on the way.
    """
    whole = path if not path or path[0] in ".[" else f".{path}"
    # How much of the path is behind → what it leads to, once for each object. Equal atoms are one thing.
    reached: dict[int, dict[Any, Child]] = {0: {"": manifest.root}}
    for done in range(len(whole)):
        for child in reached.get(done, {}).values():
            for each, step in _ways(manifest, child):
                # As it is, or as it was printed, without what a terminal would obey.
                for text in {step, printable(step)}:
                    stop = done + len(text)
                    if whole.startswith(text, done) and (len(whole) == stop or whole[stop] in ".["):
                        identity = tuple(each) if type(each) is list else (type(each), each)
                        reached.setdefault(stop, {})[identity] = each
    there = list(reached.get(len(whole), {}).values())
    if len(there) == 1:
        return _pruned(manifest, there[0])
    if there:
        texts = [node_text(manifest, manifest.nodes[each]) if type(each) is int else atom_text(each) for each in there]
        fact = (
            f"The file has {len(there)} things at `{printable(path)}`, for keys that look the same in print lead to "
            f"them: {_listed(texts)}. Load all of it, and take the one that you mean:\n"
            "    model = sharedtree.load(path)"
        )
    else:
        furthest = max(reached)
        ways = [step for child in reached[furthest].values() for _, step in _ways(manifest, child)]
        place = f"Below `{printable(whole[:furthest])}`" if furthest else "At its root"
        fact = (
            f"The file has nothing at `{printable(path)}`. {place} there is {_listed(ways) or 'nothing'}.\n"
            "See what it has:\n    print(sharedtree.inspect(path))"
        )
    raise StructureMismatchError(fact, (path,))


def _ways(manifest: Manifest, child: Child) -> list[tuple[Child, str]]:
    below = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
    return [(each, step) for each, step in below if step != "<key>"]


def _listed(texts: list[str]) -> str:
    shown = ", ".join(f"`{printable(text)}`" for text in texts[:_MAX_LISTED])
    return f"{shown}, ..." if len(texts) > _MAX_LISTED else shown


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
    old_nodes = [manifest.nodes[number] for number in numbers]
    nodes: list[Node] = []
    for node in old_nodes:
        rewritten = [rewrite[each.type](value) if each.type in rewrite else value for each, value in operands(node)]
        nodes.append([node[0], *rewritten])
    atoms = [root, *(child for node in old_nodes for child in children_of(node))]
    named = {("class", manifest.types[index].name) for index in types}
    named |= {(atom[0], atom[1]) for atom in atoms if type(atom) is list and is_name(atom)}
    owners = [entry.name for entry in manifest.types]
    named |= {("method", str(name_of_method(owners, manifest.nodes, node))) for node in old_nodes}
    return manifest._replace(
        types=tuple(manifest.types[index] for index in types),
        arrays=tuple(manifest.arrays[index] for index in arrays),
        nodes=nodes,
        root=renumbered(root),
        names=tuple(name for name in manifest.names if name in named),
    )
