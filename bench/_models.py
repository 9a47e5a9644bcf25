"""Models in the classes of each library, of tiny arrays, so that what a call costs is dispatch.

Either of blocks of eight arrays, where an Equinox model is nearly as flat as a list, or of linear layers, two arrays
each, which is nearer to what models are made of.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._measuring import UnavailableError

FIELDS = ("query", "key", "value", "output", "up", "down", "scale", "shift")

LAYERS = "linear layers"
BLOCKS = "blocks of 8 arrays"

NO_TIES = "no ties"
ONE_TIE = "one tie"
ONE_BLOCK = "one block everywhere"


class Block(eqx.Module):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array
    shift: jax.Array
    name: str = eqx.field(static=True, default="block")


class Model(eqx.Module):
    blocks: list[Any]
    rest: tuple[jax.Array, ...]


def make_model(num_leaves: int, sharing: str = NO_TIES) -> Model:
    """A model with a number of leaves, tied ones counted at each path.

    Args:
        num_leaves: how many.
        sharing: `NO_TIES`; `ONE_TIE`, one array in the first and the last block; or `ONE_BLOCK`, all blocks one object.
    """
    arrays = jax.device_put([np.full(2, i, np.float32) for i in range(num_leaves)])
    count = num_leaves // 8
    blocks = [Block(*arrays[8 * i : 8 * i + 8]) for i in range(count)]
    if sharing == ONE_TIE:
        blocks[-1] = Block(*[*arrays[8 * count - 8 : 8 * count - 2], blocks[0].up, arrays[8 * count - 1]])
    elif sharing == ONE_BLOCK:
        blocks = [blocks[0]] * count
    return Model(blocks, tuple(arrays[8 * count :]))


def make_layers(num_leaves: int) -> Model:
    """A model of `equinox.nn.Linear` layers, with weights and biases."""
    arrays = jax.device_put([np.full(2, i, np.float32) for i in range(num_leaves)])
    blank = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return Model([eqx.tree_at(lambda layer: (layer.weight, layer.bias), blank, pair) for pair in pairs], ())


def fields_of(block: Any) -> tuple[str, ...]:
    """The names of the arrays of a block or a layer of any of these libraries."""
    return FIELDS if hasattr(block, "query") else ("weight", "bias")


def occurrences(model: Any) -> list[Any]:
    """What is at each path of a model of any of these libraries: arrays, or what the library keeps them in."""
    return [getattr(block, name) for block in model.blocks for name in fields_of(block)] + list(model.rest)


def unique_arrays(model: Model) -> tuple[list[jax.Array], list[int]]:
    """The arrays of a model, each once, and for each path which of them is there."""
    every = occurrences(model)
    place: dict[int, int] = {}
    for array in every:  # `model` keeps them alive while their ids are in use
        place.setdefault(id(array), len(place))
    return list({id(array): array for array in every}.values()), [place[id(array)] for array in every]


def to_nnx(model: Model) -> Any:
    """The same network as a `flax.nnx.Module` with `flax.nnx.Param` leaves and the same ties."""
    nnx = import_nnx()

    class NnxBlock(nnx.Module):
        def __init__(self, parameters: dict[str, Any]) -> None:
            for name, parameter in parameters.items():
                setattr(self, name, parameter)
            self.name = "block"

    class NnxModel(nnx.Module):
        def __init__(self, blocks: list[Any], rest: list[Any]) -> None:
            self.blocks = nnx.List(blocks)
            self.rest = nnx.List(rest)

    return _translate(model, nnx.Param, NnxBlock, NnxModel)


def to_brainstate(model: Model) -> Any:
    """The same network as a `brainstate.nn.Module` with `brainstate.ParamState` leaves and the same ties."""
    brainstate = import_brainstate()

    class BrainstateBlock(brainstate.nn.Module):
        def __init__(self, parameters: dict[str, Any]) -> None:
            super().__init__()
            for name, parameter in parameters.items():
                setattr(self, name, parameter)

    class BrainstateModel(brainstate.nn.Module):
        def __init__(self, blocks: list[Any], rest: list[Any]) -> None:
            super().__init__()
            self.blocks = blocks
            self.rest = rest

    return _translate(model, brainstate.ParamState, BrainstateBlock, BrainstateModel)


def _translate(model: Model, parameter: Any, block_class: Any, model_class: Any) -> Any:
    # `model` keeps arrays and blocks alive while their ids are in use.
    parameters = {id(array): parameter(array) for array in unique_arrays(model)[0]}
    blocks: dict[int, Any] = {}
    for block in model.blocks:
        if id(block) not in blocks:
            blocks[id(block)] = block_class({name: parameters[id(getattr(block, name))] for name in fields_of(block)})
    return model_class([blocks[id(block)] for block in model.blocks], [parameters[id(a)] for a in model.rest])


def import_nnx() -> Any:
    """`flax.nnx`, or `UnavailableError`."""
    try:
        from flax import nnx
    except Exception as error:  # noqa: BLE001 -- whatever a peer raises on import, others can be measured
        raise UnavailableError(f"is of flax, which cannot be imported: {error}") from None
    return nnx


def import_brainstate() -> Any:
    """`brainstate`, or `UnavailableError`."""
    try:
        import brainstate
    except Exception as error:  # noqa: BLE001 -- as above
        raise UnavailableError(f"is of brainstate, which cannot be imported: {error}") from None
    return brainstate
