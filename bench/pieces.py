"""The parts of a call alone: a model taken apart, put together and mapped over, and an eager gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

from ._kinds import KINDS, NNX as NNX_KIND, imported
from ._measuring import Case, Effort, Subject
from ._models import ONE_BLOCK, fields_of, make_model

FLATTEN, UNFLATTEN, MAP, GRAD = "flatten", "unflatten", "map", "eager gradient"

SHAREDTREE = "sharedtree.tree"
DAG = "sharedtree.Dag"
JAX = "jax.tree"
OPTREE = "optree"
EQUINOX = "equinox.partition and combine"
NNX = "nnx.split and merge"

SHAREDTREE_GRAD, JAX_GRAD, EQUINOX_GRAD, NNX_GRAD = "sharedtree.grad", "jax.grad", "equinox.filter_grad", "nnx.grad"

CALLS = 10


class Way(NamedTuple):
    """How a library does it.

    Attributes:
        apart: takes a model apart.
        together: puts together what that gives.
        map: applies a function to each leaf of a model.
    """

    apart: Callable[[Any], Any]
    together: Callable[[Any], Any]
    map: Callable[[Callable[[Any], Any], Any], Any]


def _no_map(*_: Any) -> Any:
    raise NotImplementedError


def _optree(model: Any) -> Way:
    optree = imported("optree")
    if not isinstance(model, dict):
        _tell_optree(type(model), ("blocks", "rest"))
        _tell_optree(type(model.blocks[0]), fields_of(model.blocks[0]))
    flatten, tree_map = (functools.partial(each, namespace="bench") for each in (optree.tree_flatten, optree.tree_map))
    return Way(flatten, lambda apart: optree.tree_unflatten(apart[1], apart[0]), tree_map)


@functools.cache
def _tell_optree(kind: type, names: tuple[str, ...]) -> None:
    """Registers a class, with the names of those attributes that are nodes."""

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
        rest = tuple(each for each in vars(node).items() if each[0] not in names)
        return [getattr(node, name) for name in names], rest, names

    def unflatten(rest: Any, children: Any) -> Any:
        node = object.__new__(kind)
        vars(node).update(zip(names, children, strict=True))
        vars(node).update(rest)
        return node

    imported("optree").register_pytree_node(kind, flatten, unflatten, namespace="bench")


def _nnx(_: Any) -> Way:
    nnx = imported("flax.nnx")
    return Way(nnx.split, lambda apart: nnx.merge(*apart), _no_map)


WAYS: dict[str, Callable[[Any], Way]] = {
    SHAREDTREE: lambda _: Way(st.tree.flatten, lambda apart: st.tree.unflatten(apart[1], apart[0]), st.tree.map),
    DAG: lambda _: Way(st.Dag, lambda dag: dag.tree, _no_map),
    JAX: lambda _: Way(jax.tree.flatten, lambda apart: jax.tree.unflatten(apart[1], apart[0]), jax.tree.map),
    OPTREE: _optree,
    EQUINOX: lambda _: Way(lambda m: eqx.partition(m, eqx.is_array), lambda apart: eqx.combine(*apart), _no_map),
    NNX: _nnx,
}

GRADIENTS: dict[str, Callable[[], Any]] = {
    SHAREDTREE_GRAD: lambda: st.grad,
    JAX_GRAD: lambda: jax.grad,
    EQUINOX_GRAD: lambda: eqx.filter_grad,
    NNX_GRAD: lambda: imported("flax.nnx").grad,
}


def _loss(model: Any) -> jax.Array:
    return sum((jnp.sum(x * x) for x in jax.tree.leaves(model)), jnp.zeros(()))


def name_of(piece: str, num_leaves: int, kind: str) -> str:
    """The name of a case."""
    return f"{piece}, {num_leaves:,} leaves, {kind}"


def cases(effort: Effort) -> list[Case]:
    """Each piece for each kind of model, at several sizes."""
    sizes = (24,) if effort.quick else (24, 204, 1004)
    # The gradient of a block that is everywhere is another one where the block is one object.
    chosen = {FLATTEN: (*KINDS, ONE_BLOCK), UNFLATTEN: (*KINDS, ONE_BLOCK), MAP: (*KINDS, ONE_BLOCK), GRAD: (*KINDS,)}
    return [_case(piece, size, kind, effort) for piece, kinds in chosen.items() for kind in kinds for size in sizes]


def _case(piece: str, num_leaves: int, kind: str, effort: Effort) -> Case:
    def make() -> Any:
        return make_model(num_leaves, ONE_BLOCK) if kind == ONE_BLOCK else KINDS[kind](num_leaves)

    def set_up(way: Callable[[Any], Way]) -> Subject:
        model = make()
        apart, together, tree_map = way(model)
        ready = apart(model)
        calls = {
            FLATTEN: (lambda: apart(model), together),
            UNFLATTEN: (lambda: together(ready), lambda made: made),
            MAP: (lambda: tree_map(lambda leaf: leaf, model), lambda made: made),
        }
        return _repeating(*calls[piece])

    def set_up_gradient(grad: Callable[[], Any]) -> Subject:
        model, gradient = make(), grad()(_loss)
        return _repeating(lambda: jax.block_until_ready(gradient(model)), lambda made: made, calls=1)

    others = (OPTREE, EQUINOX, EQUINOX_GRAD) if kind == NNX_KIND else (NNX, NNX_GRAD)
    others += {FLATTEN: (), UNFLATTEN: (DAG,), MAP: (DAG, EQUINOX, NNX), GRAD: ()}[piece]
    ways, of_way = (GRADIENTS, set_up_gradient) if piece == GRAD else (WAYS, set_up)
    return Case(
        name=name_of(piece, num_leaves, kind),
        group="pieces",
        parameters={"leaves": num_leaves, "kind": kind, "piece": piece},
        implementations={name: functools.partial(of_way, way) for name, way in ways.items() if name not in others},
        reference=JAX_GRAD if piece == GRAD else JAX,
        effort=effort._replace(seconds=effort.seconds / 3),
    )


def _repeating(call: Callable[[], Any], tree_of: Callable[[Any], Any], calls: int = CALLS) -> Subject:
    def run() -> None:
        for _ in range(calls):
            call()

    return Subject(run, lambda: jax.device_get(jax.tree.leaves(tree_of(call()))), calls)
