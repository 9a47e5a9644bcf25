"""The parts of a call alone: a model taken apart, put together and mapped over, and an eager gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax

import sharedtree as st

from ._kinds import KINDS, NNX as NNX_KIND, imported
from ._measuring import Case, Effort, Subject
from ._models import ONE_BLOCK, fields_of, make_model

SHAREDTREE, DAG, JAX, OPTREE, EQUINOX, NNX = "sharedtree", "sharedtree.Dag", "jax", "optree", "equinox", "flax.nnx"

FLATTEN, UNFLATTEN, MAP, GRAD = "flatten", "unflatten", "map", "eager gradient"

PIECES = {
    FLATTEN: (SHAREDTREE, DAG, JAX, OPTREE, EQUINOX, NNX),
    UNFLATTEN: (SHAREDTREE, JAX, OPTREE, EQUINOX, NNX),
    MAP: (SHAREDTREE, JAX, OPTREE),
    GRAD: (SHAREDTREE, JAX, EQUINOX, NNX),
}
"""Who has them."""

CALLS = 10


class Way(NamedTuple):
    """How a library does it.

    Attributes:
        apart: takes a model apart.
        together: puts together what that gives.
        map: applies a function to each leaf of a model.
        grad: function of a model → function of a model that returns the gradient.
    """

    apart: Callable[[Any], Any]
    together: Callable[[Any], Any]
    map: Any = None
    grad: Any = None


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
    return Way(nnx.split, lambda a: nnx.merge(*a), grad=nnx.grad)


def _equinox(_: Any) -> Way:
    return Way(lambda model: eqx.partition(model, eqx.is_array), lambda a: eqx.combine(*a), grad=eqx.filter_grad)


WAYS: dict[str, Callable[[Any], Way]] = {
    SHAREDTREE: lambda _: Way(st.tree.flatten, lambda a: st.tree.unflatten(a[1], a[0]), st.tree.map, st.grad),
    DAG: lambda _: Way(st.Dag, lambda dag: dag.tree),
    JAX: lambda _: Way(jax.tree.flatten, lambda a: jax.tree.unflatten(a[1], a[0]), jax.tree.map, jax.grad),
    OPTREE: _optree,
    EQUINOX: _equinox,
    NNX: _nnx,
}
"""Library → model → how it does that."""


def _same(it: Any) -> Any:
    return it


def _loss(model: Any) -> jax.Array:
    return jax.lax.concatenate([x * x for x in jax.tree.leaves(model)], 0).sum()


def name_of(piece: str, num_leaves: int, kind: str) -> str:
    """The name of a case."""
    return f"{piece}, {num_leaves:,} leaves, {kind}"


def cases(effort: Effort) -> list[Case]:
    """Each piece for each kind of model, at several sizes."""
    sizes = (24,) if effort.quick else (24, 204, 1004)
    # The gradient of a block that is everywhere is another one where the block is one object.
    chosen = [(piece, kind) for piece in PIECES for kind in (*KINDS, ONE_BLOCK) if (piece, kind) != (GRAD, ONE_BLOCK)]
    return [_case(piece, size, kind, effort) for piece, kind in chosen for size in sizes]


def _case(piece: str, num_leaves: int, kind: str, effort: Effort) -> Case:
    def set_up(way_of: Callable[[Any], Way]) -> Subject:
        model = make_model(num_leaves, ONE_BLOCK) if kind == ONE_BLOCK else KINDS[kind](num_leaves)
        way = way_of(model)
        ready, gradient = way.apart(model), way.grad and way.grad(_loss)
        call, model_of = {
            FLATTEN: (lambda: way.apart(model), way.together),
            UNFLATTEN: (lambda: way.together(ready), _same),
            MAP: (lambda: way.map(_same, model), _same),
            GRAD: (lambda: jax.block_until_ready(gradient(model)), _same),
        }[piece]
        calls = 1 if piece == GRAD else CALLS

        def run() -> None:
            for _ in range(calls):
                call()

        return Subject(run, lambda: jax.device_get(jax.tree.leaves(model_of(call()))), calls)

    missing = (OPTREE, EQUINOX) if kind == NNX_KIND else (NNX,)
    return Case(
        name=name_of(piece, num_leaves, kind),
        group="pieces",
        parameters={"leaves": num_leaves, "kind": kind, "piece": piece},
        implementations={name: functools.partial(set_up, WAYS[name]) for name in PIECES[piece] if name not in missing},
        reference=JAX,
        effort=effort._replace(seconds=effort.seconds / 3),
    )
