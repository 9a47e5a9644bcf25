"""Models of Equinox, of tiny arrays, so that what a call costs is dispatch; and how to look into models of any kind.

Either of blocks of eight arrays, where an Equinox model is nearly as flat as a list, or of linear layers, two arrays
each, which is nearer to what models are made of. `_kinds` has them in other classes.
"""

import copy
from typing import Any

import equinox as eqx
import jax
import numpy as np

FIELDS = ("query", "key", "value", "output", "up", "down", "scale", "shift")

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
    blank = eqx.filter_eval_shape(lambda: eqx.nn.Linear(1, 1, key=jax.random.key(0)))

    def layer(weight: jax.Array, bias: jax.Array) -> Any:
        made = copy.copy(blank)
        replace_array(made, "weight", weight)
        replace_array(made, "bias", bias)
        return made

    return Model([layer(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)], ())


def fields_of(block: Any) -> tuple[str, ...]:
    """The names of the arrays of a block or a layer of any kind."""
    return FIELDS if hasattr(block, "query") else ("weight", "bias")


def occurrences(model: Any) -> list[Any]:
    """What is at each path of a model of any kind: arrays, or what its library keeps them in."""
    return [getattr(block, name) for block in model.blocks for name in fields_of(block)] + list(model.rest)


def array_in(cell: Any) -> jax.Array:
    """The array itself, or that in what a library keeps it in."""
    if isinstance(cell, jax.Array):
        return cell
    return cell.get_value() if hasattr(cell, "get_value") else cell.value


def arrays_of(model: Any) -> list[jax.Array]:
    """The array at each path of a model of any kind."""
    return [array_in(cell) for cell in occurrences(model)]


def last_array(model: Any) -> jax.Array:
    """The last array of the last block of a model of any kind."""
    block = model.blocks[-1]
    return array_in(getattr(block, fields_of(block)[-1]))


def replace_array(block: Any, name: str, array: jax.Array) -> None:
    """Puts another array where a block has one, whether it is frozen or not."""
    cell = getattr(block, name)
    if hasattr(cell, "set_value"):
        cell.set_value(array)
    elif hasattr(cell, "value"):
        cell.value = array
    else:
        object.__setattr__(block, name, array)


def unique_arrays(model: Any) -> tuple[list[jax.Array], list[int]]:
    """The arrays of a model, each once, and for each path which of them is there."""
    every = arrays_of(model)
    place: dict[int, int] = {}
    for array in every:  # `model` keeps them alive while their ids are in use
        place.setdefault(id(array), len(place))
    return list({id(array): array for array in every}.values()), [place[id(array)] for array in every]
