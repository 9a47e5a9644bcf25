"""A model as plain nested data: `sharedtree.state`.

The idea is that of `Flux.state` (Flux.jl, pull request 2239): names always match, for what is no state is replaced by
the empty tuple and never left out. It departs from it in that the state shares where the model shares.
"""

from collections.abc import Callable
from typing import Any

from ...core._node_types import require_registered
from ._state_forms import form_of, is_state_leaf
from ._state_objects import Objects


def state(tree: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """A model as nested dicts, lists and tuples of arrays, numbers, strings and None.

    - A module is a dict of all its fields by name, the static ones too.
    - Containers stay: a dict a dict with its own keys, in its order, whatever kind of dict it is; a list a list, a
      tuple a tuple. A namedtuple is a dict by field name, and a `deque` a list.
    - Arrays, JAX's and NumPy's, PRNG keys, `jax.ShapeDtypeStruct`s, numbers, NumPy scalars, strings, bytes, bools and
      None are kept: the very same objects. Nothing is copied, however large.
    - What is no state is the empty tuple: functions, classes, dtypes, enumerations, every other object.
    - A registered class whose fields nobody knows is a dict by the keys that it was registered with, or else by
      `"0"`, `"1"` and so on. What its author made auxiliary data is not in it.
    - `jax.tree_util.Partial` is a dict of `func`, `args` and `keywords`. A variable of Flax NNX is its value, an
      `nnx.List` a list, and a `sharedtree.Dag` its model.
    - What `register_state` was told comes first.

    The state shares where the model shares: an object at two paths is one object in the state, at both.

    Args:
        tree: a module, or any container of modules and arrays.
        keep: takes a leaf and says whether it is kept; the others are the empty tuple. For the trainable part,
            `equinox.is_inexact_array`. It is asked once for each object.

    Returns:
        New containers, with the leaves of `tree`.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one visit for each object, however many paths lead to it.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Linear(eqx.Module):
        ...     weight: jax.Array
        ...     activation: object
        ...     name: str = eqx.field(static=True)
        >>> linear = Linear(jnp.ones(2), jax.nn.relu, "linear")
        >>> st.state([linear, 3])
        [{'weight': Array([1., 1.], dtype=float32), 'activation': (), 'name': 'linear'}, 3]
        >>> st.state(linear, keep=eqx.is_inexact_array)
        {'weight': Array([1., 1.], dtype=float32), 'activation': (), 'name': ()}

    Limitations: an empty tuple of the model cannot be told from what is no state. Two keys of a dict may become one
    where a format has only strings for keys, as JSON has.
    """
    if form_of(tree) is None:
        require_registered(tree)
    objects = Objects(tree)
    made: dict[int, Any] = {}
    for obj in objects.in_order:
        form = objects.form(obj)
        # The ids are those of objects that `objects` keeps alive.
        if form is not None:
            made[id(obj)] = form.holding([made[id(part)] for part in form.parts])
        else:
            made[id(obj)] = obj if is_state_leaf(obj) and (keep is None or keep(obj)) else ()
    return made[id(tree)]
