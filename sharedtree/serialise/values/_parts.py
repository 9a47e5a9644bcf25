"""A part of a file's tree: the manifest of what lies at one path, and no more."""

from collections.abc import Callable
from typing import Any

from ..._errors import StructureMismatchError
from ..._printable import printable
from ._atoms import is_name
from ._manifest import Child, Manifest, children_of, operands, owner_of_method
from ._steps import steps
from ._texts import atom_text, node_text

_MAX_LISTED = 20


def part_at(manifest: Manifest, path: str) -> Manifest:
    """The manifest of the subtree at a path.

    Args:
        manifest: of the whole tree.
        path: as `jax.tree_util.keystr` prints it, `.blocks[0].attn` or `['params']`; the first dot may be left out.

    Raises:
        StructureMismatchError: if nothing is there, or more than one thing is: keys of a dictionary may look the same
            in print, and one text may be cut into steps in several ways.

    Cost: a look at each node of the part, and at the nodes on the way.
    """
    whole = path if not path or path[0] in ".[" else f".{path}"
    # How much of the path is behind → what it leads to. One path can be cut into steps in several ways.
    reached: dict[int, dict[Any, Child]] = {0: {_identity(manifest.root): manifest.root}}
    for done in range(len(whole)):
        for child in reached.get(done, {}).values():
            for each, step in _ways(manifest, child):
                # As it is, or as it was printed, without what a terminal would obey.
                for text in {step, printable(step)}:
                    if _continues_with(whole, done, text):
                        reached.setdefault(done + len(text), {})[_identity(each)] = each
    there = list(reached.get(len(whole), {}).values())
    if len(there) != 1:
        raise _not_one(manifest, path, there) if there else _nothing(manifest, path, whole, reached)
    return _pruned(manifest, there[0])


def _ways(manifest: Manifest, child: Child) -> list[tuple[Child, str]]:
    below = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
    return [(each, step) for each, step in below if step != "<key>"]


def _identity(child: Child) -> Any:
    """The same for what is one object; atoms have none, and equal ones are one thing."""
    return tuple(child) if type(child) is list else (type(child), child)


def _continues_with(path: str, done: int, step: str) -> bool:
    stop = done + len(step)
    return path.startswith(step, done) and (len(path) == stop or path[stop] in ".[")


def _nothing(manifest: Manifest, path: str, whole: str, reached: dict[int, dict[Any, Child]]) -> StructureMismatchError:
    furthest = max(reached)
    ways = [step for child in reached[furthest].values() for _, step in _ways(manifest, child)]
    listed = ", ".join(f"`{printable(step)}`" for step in ways[:_MAX_LISTED]) or "nothing"
    return StructureMismatchError(
        f"The file has nothing at `{printable(path)}`. "
        f"{f'Below `{printable(whole[:furthest])}`' if furthest else 'At its root'} there is {listed}"
        f"{', ...' if len(ways) > _MAX_LISTED else ''}.\n"
        "See what it has:\n    print(sharedtree.inspect(path))",
        (path,),
    )


def _not_one(manifest: Manifest, path: str, there: list[Child]) -> StructureMismatchError:
    texts = [node_text(manifest, manifest.nodes[each]) if type(each) is int else atom_text(each) for each in there]
    listed = ", ".join(f"`{printable(text)}`" for text in texts[:_MAX_LISTED])
    return StructureMismatchError(
        f"The file has {len(there)} things at `{printable(path)}`, for keys that look the same in print lead to them: "
        f"{listed}{', ...' if len(texts) > _MAX_LISTED else ''}. Load all of it, and take the one that you mean:\n"
        "    model = sharedtree.load(path)",
        (path,),
    )


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
