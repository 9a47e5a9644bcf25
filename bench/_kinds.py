"""The same network in every kind of class that a model may be made of, with the same arrays and the same ties."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from ._measuring import UnavailableError
from ._models import array_in, fields_of, make_layers, make_model, occurrences

LAYERS = "Equinox, linear layers"
BLOCKS = "Equinox, blocks of 8 arrays"
DATACLASS = "jax.tree_util.register_dataclass"
STRUCT = "flax.struct"
REGISTERED = "register_pytree_node"
NNX = "flax.nnx"
MODULE = "sharedtree.Module"
DICT = "dict of dicts"

# As JAX asks for it, and as `flax.struct` does.
_static: Any = functools.partial(dataclasses.field, metadata={"static": True, "pytree_node": False})


def _dataclasses(decorated: Callable[[Any], Any]) -> tuple[Any, Any]:
    @decorated
    class Linear:
        weight: jax.Array
        bias: jax.Array
        in_features: int = _static(default=1)
        out_features: int = _static(default=1)

    @decorated
    class Network:
        blocks: list[Any]
        rest: tuple[jax.Array, ...]

    return Linear, Network


@functools.cache
def _struct_classes() -> tuple[Any, Any]:
    return _dataclasses(imported("flax.struct").dataclass)


_DATACLASSES = _dataclasses(lambda cls: jax.tree_util.register_dataclass(dataclasses.dataclass(cls)))


class OwnLinear:
    """Of an author who wrote how it comes apart, in Python."""

    def __init__(self, weight: Any, bias: Any, in_features: int = 1, out_features: int = 1) -> None:
        self.weight = weight
        self.bias = bias
        self.in_features = in_features
        self.out_features = out_features


class OwnNetwork:
    def __init__(self, blocks: Any, rest: Any) -> None:
        self.blocks = blocks
        self.rest = rest


jax.tree_util.register_pytree_node(
    OwnLinear,
    lambda layer: ((layer.weight, layer.bias), (layer.in_features, layer.out_features)),
    lambda features, arrays: OwnLinear(*arrays, *features),
)
jax.tree_util.register_pytree_node(
    OwnNetwork, lambda model: ((model.blocks, model.rest), None), lambda _, parts: OwnNetwork(*parts)
)


@functools.cache
def _own_module_classes() -> tuple[Any, Any]:
    module: Any = imported("sharedtree").Module
    parameter: Any = imported("sharedtree").parameter

    class Linear(module):
        def __init__(self, weight: Any, bias: Any, in_features: int = 1, out_features: int = 1) -> None:
            self.weight, self.bias = parameter(weight), parameter(bias)
            self.in_features, self.out_features = in_features, out_features

    class Network(module):
        def __init__(self, blocks: Any, rest: Any) -> None:
            self.blocks, self.rest = blocks, parameter(rest)

    return Linear, Network


@functools.cache
def _module_classes(base: Any, sequence: Any) -> tuple[Any, Any]:
    class Block(base):
        def __init__(self, **parameters: Any) -> None:
            super().__init__()
            for name, parameter in parameters.items():
                setattr(self, name, parameter)
            self.label = "block"

    class Network(base):
        def __init__(self, blocks: Any, rest: Any) -> None:
            super().__init__()
            self.blocks = sequence(blocks)
            self.rest = sequence(rest)

    return Block, Network


def to_nnx(model: Any) -> Any:
    """The same network as a `flax.nnx.Module` with `flax.nnx.Param` leaves and the same ties."""
    nnx = imported("flax.nnx")
    return _translated(model, nnx.Param, *_module_classes(nnx.Module, nnx.List))


def to_brainstate(model: Any) -> Any:
    """The same network as a `brainstate.nn.Module` with `brainstate.ParamState` leaves and the same ties."""
    brainstate = imported("brainstate")
    return _translated(model, brainstate.ParamState, *_module_classes(brainstate.nn.Module, list))


def _translated(model: Any, parameter: Callable[[jax.Array], Any], block_class: Any, model_class: Any) -> Any:
    # `model` keeps what holds its arrays, and its blocks, alive while their ids are in use.
    parameters = {id(cell): parameter(array_in(cell)) for cell in {id(c): c for c in occurrences(model)}.values()}
    blocks: dict[int, Any] = {}
    for block in model.blocks:
        if id(block) not in blocks:
            made = {name: parameters[id(getattr(block, name))] for name in fields_of(block)}
            blocks[id(block)] = block_class(**made)
    return model_class([blocks[id(block)] for block in model.blocks], tuple(parameters[id(a)] for a in model.rest))


def _same(array: jax.Array) -> jax.Array:
    return array


def _to_dicts(model: Any) -> dict[str, Any]:
    return {f"layer{i}": {name: getattr(each, name) for name in fields_of(each)} for i, each in enumerate(model.blocks)}


KINDS: dict[str, Callable[[int], Any]] = {
    LAYERS: make_layers,
    BLOCKS: make_model,
    DATACLASS: lambda num_leaves: _translated(make_layers(num_leaves), _same, *_DATACLASSES),
    STRUCT: lambda num_leaves: _translated(make_layers(num_leaves), _same, *_struct_classes()),
    REGISTERED: lambda num_leaves: _translated(make_layers(num_leaves), _same, OwnLinear, OwnNetwork),
    NNX: lambda num_leaves: to_nnx(make_layers(num_leaves)),
    MODULE: lambda num_leaves: _translated(make_layers(num_leaves), _same, *_own_module_classes()),
    DICT: lambda num_leaves: _to_dicts(make_layers(num_leaves)),
}
"""Name → number of leaves → a model without ties."""


def imported(module: str) -> Any:
    """A module of another library, or `UnavailableError`."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 -- whatever a peer raises on import, others can be measured
        raise UnavailableError(f"cannot be imported: {error}") from None
