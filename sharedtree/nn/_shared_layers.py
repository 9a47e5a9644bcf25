"""Models that were written with `equinox.nn.Shared`, turned into models with ties.

`Shared(pytree, where, get)` keeps `pytree` with a placeholder at each node that `where` names. Called, it puts there
what `get` finds elsewhere in `pytree`. Both functions choose nodes and look at no values, so they can be asked as any
`where` is. What `where` names is then another path to what `get` names, which is a tie.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from ..core._errors import CycleError, SharingMismatchError
from ..core._node_types import require_registered
from ..core._printing import shown
from ..core._structure import FlatDag, Op
from ..ties._policy_and_context import walk_exactly
from ..ties._where_functions import WhereTree
from ..tree._partition import rebuilt


def unwrap_shared(tree: Any) -> Any:
    """Puts in the place of each `equinox.nn.Shared` the pytree that calling it returns, with real ties.

    The way from Equinox's wrapper to a plain model: what the wrapper tied is one object, and stays one under the
    transforms of this library. In the model's own code `self.shared()` becomes `self.shared`.

    Args:
        tree: a `Shared`, or a model that holds some at whatever depth; it is not changed.

    Returns:
        A tree of new nodes, whose arrays are the same objects as those of `tree`. For a `Shared` itself, its pytree.
        Ties that `tree` has are kept.

    Raises:
        TypeError: if there is no `Shared` in the tree, or only one that was filtered, as a gradient is, and so has lost
            its functions.
        SharingMismatchError: if `get` computes what it returns, such as a transpose: that is another array, which no
            tie can express.
        CycleError: if what a `get` returns is itself taken away, or an object contains itself.

    Cost: two walks over the nodes. Nothing is copied.

    Example:
        >>> import equinox as eqx, jax, sharedtree as st
        >>> keys = jax.random.split(jax.random.key(0))
        >>> pair = (eqx.nn.Embedding(5, 3, key=keys[0]), eqx.nn.Linear(3, 5, key=keys[1]))
        >>> shared = eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        >>> embed, head = st.unwrap_shared(shared)
        >>> embed.weight is head.weight
        True
        >>> model = st.unwrap_shared({"layers": shared, "scale": 2.0})
        >>> [tie.paths for tie in st.ties(model)]
        [("['layers'][0].weight", "['layers'][1].weight")]

    Limitations: `where` and `get` are called on stand-ins without values, too, so they cannot call a `Shared` inside
    the pytree of another; its nodes are at `.pytree`. Instances of subclasses stay as they are.
    """
    require_registered(tree)
    walked = walk_exactly(tree)
    records = walked.records
    wrappers = _wrappers(walked)
    if not wrappers:
        raise TypeError(
            f"`unwrap_shared` found no `equinox.nn.Shared` in {shown(tree)}. If what is to be one object is two there, "
            "tie it:\n    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))"
        )
    asked = WhereTree(walked)
    instead: dict[int, int] = {}
    for number, path in wrappers.items():
        pytree, *functions = records[number][1]
        where, get = [walked.objects[function] for function in functions]
        if not callable(where) or not callable(get):
            raise _filtered(path)
        targets, is_one = asked.named_by(where, root=pytree)
        sources, is_found_whole = _sources(get, asked, pytree, path)
        if is_found_whole and not is_one:  # a sequence of nodes that the pytree itself holds
            sources = records[sources[0]][1]
        if len(sources) != len(targets):
            raise _uneven(path, len(targets), len(sources))
        instead.update(zip(targets, sources, strict=True))
        instead[number] = pytree

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        op, children = records[number]
        return op, [_followed(child, instead) for child in children]

    if _goes_in_circles(walked, instead):
        raise _circular([*wrappers.values()])
    return rebuilt(_followed(walked.root, instead), expand, walked.objects.__getitem__)


def _wrappers(tree: FlatDag) -> dict[int, str]:
    """The records that are a `Shared`, each with its first path."""
    nodes = {number: tree.node(number) for number in tree.first_paths}
    return {n: tree.text(n) for n, node in nodes.items() if node is not None and node.type.cls is eqx.nn.Shared}


def _sources(get: Callable[[Any], Any], asked: WhereTree, pytree: int, path: str) -> tuple[Sequence[int], bool]:
    """The records that `get` returns, and whether it returned just one."""
    try:
        return asked.named_by(get, "get", root=pytree)
    except SharingMismatchError as error:
        fact, _, _ = str(error).partition(".\n")
        raise SharingMismatchError(
            f"The `equinox.nn.Shared`{_at(path)} cannot be unwrapped, for its {fact}.\n"
            "What it computes, such as a transpose, is another array, and a tie is one object. Either keep the "
            "wrapper, which every transform of `sharedtree` takes as it is; or let both layers hold the array itself, "
            "and compute where it is used:\n"
            "    logits = x @ model.embed.weight.T\n"
            "or tie the array of the one layer to that of the other through the function, with `through=` of "
            "`sharedtree.tie`.",
            (path,),
        ) from None


def _followed(number: int, instead: dict[int, int]) -> int:
    end = number
    while end in instead:
        end = instead[end]
    while number != end:  # so that no chain is followed twice
        instead[number], number = end, instead[number]
    return end


def _goes_in_circles(tree: FlatDag, instead: dict[int, int]) -> bool:
    """Whether a record holds itself, where some stand in the place of others."""
    is_open: dict[int, bool] = {}
    stack = [(tree.root, False)]
    while stack:
        number, is_done = stack.pop()
        if is_done or number in is_open:
            if not is_done and is_open[number]:
                return True
            is_open[number] = is_open[number] and not is_done
            continue
        is_open[number] = True
        stack.append((number, True))
        stack.extend((child, False) for child in ([instead[number]] if number in instead else tree.records[number][1]))
    return False


def _uneven(path: str, num_targets: int, num_sources: int) -> SharingMismatchError:
    return SharingMismatchError(
        f"The `where` of the `equinox.nn.Shared`{_at(path)} returns {num_targets} of its nodes, and its `get` "
        f"{num_sources}. Each returns as many as the other.",
        (path,),
    )


def _filtered(path: str) -> TypeError:
    return TypeError(
        f"The `equinox.nn.Shared`{_at(path)} has lost its functions, as in a gradient, in a state of an optimizer or "
        "in half of a partition. Join it to the rest of the model first:\n"
        "    tree = equinox.combine(tree, equinox.filter(model, equinox.is_array, inverse=True))"
    )


def _circular(paths: Sequence[str]) -> CycleError:
    names = ", ".join(f"`{path}`" if path else "the whole tree" for path in paths)
    return CycleError(
        f"An `equinox.nn.Shared` goes round in a circle: what its `get` returns is itself taken away by its `where`, "
        f"or holds such a node. Those in question: {names}. Name in `get` a node that stays.",
        paths,
    )


def _at(path: str) -> str:
    return f" at `{path}`" if path else ""
