"""Models that are shown, and what is known of them without asking the library."""

import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests import strategies as dags


class Block(eqx.Module):
    attention: list
    mlp: eqx.nn.MLP
    mask: jax.Array


class LM(eqx.Module):
    embed: jax.Array
    blocks: list
    head: eqx.nn.Linear


def block(mask, size=4):
    """One whose first two layers are one object."""
    key = jax.random.key(0)
    query = eqx.nn.Linear(size, size, key=key)
    return Block([query, query, eqx.nn.Linear(size, size, key=key)], eqx.nn.MLP(size, size, size, 1, key=key), mask)


def language_model(num_blocks, size=4):
    """A tied head, a mask that all blocks hold, and a tie in each block."""
    embed, mask = jnp.ones((10, size)), jnp.ones((2, 2))
    head = eqx.nn.Linear(size, 10, use_bias=False, key=jax.random.key(0))
    head = eqx.tree_at(lambda layer: layer.weight, head, embed)
    return LM(embed, [block(mask, size) for _ in range(num_blocks)], head)


def counted(tree, *, unique):
    """Parameters and bytes of a random DAG, each object once or as often as it is met."""
    seen, kept = set(), []
    parameters = nbytes = 0
    stack = [(tree, "equinox")]
    while stack:
        obj, convention = stack.pop()
        if unique and dags.carries_identity(obj):
            if id(obj) in seen:  # alive in `kept`
                continue
            seen.add(id(obj))
            kept.append(obj)
        if dags.is_array(obj):
            parameters += obj.size if jnp.issubdtype(obj.dtype, jnp.inexact) else 0
            nbytes += obj.nbytes
        elif type(obj) in (bool, float) and convention == "jax":
            parameters += type(obj) is float
            nbytes += np.asarray(obj).nbytes
        convention = "jax" if isinstance(obj, (dags.Mutable, dags.Record)) else convention
        convention = "equinox" if isinstance(obj, eqx.Module) else convention
        stack.extend((child, convention) for _, child in dags.children(obj))
    return parameters, nbytes


def random_dag(num_nodes, reach=30):
    """A node that reaches many others, each of which holds up to three of those made shortly before it."""
    generator, nodes = random.Random(0), []
    for i in range(num_nodes):
        inputs = generator.sample(nodes[-reach:], min(len(nodes), generator.choice([1, 1, 2, 2, 3])))
        nodes.append(dags.Record(np.ones(i % 7 + 1), inputs))
    return nodes[-1]
