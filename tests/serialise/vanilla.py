"""Equinox modules after what Equinox and JAX do to them, each bound to a global of this module.

What is done to a module leaves attributes on it: a marker as its `__qualname__`, or the name of what it wraps. Neither
is a name of its own, and a global that refers to it gives it none: in a new process the global is another object.
"""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .equinox_layers import EQUINOX, make_layer


class Gapped(eqx.Module):
    """The defaults of three fields are never set, one of them static."""

    weight: jax.Array
    child: Any
    bias: Any = None
    flag: Any = eqx.field(static=True, default=None)
    mode: str = "train"

    def __init__(self, weight: Any, child: Any = None) -> None:
        self.weight, self.child = weight, child

    def __call__(self, x: Any) -> Any:
        return x * self.weight

    def forward(self, x: Any) -> Any:
        """A method."""
        return self(x)


class Wrapper(eqx.Module):
    function: Any

    @property
    def __wrapped__(self) -> Any:
        return self.function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


def modules() -> dict[str, Any]:
    w = jnp.arange(3.0)
    found = {name: make_layer(name) for name in EQUINOX}
    found["Gapped"] = Gapped(w)
    found["Nested"] = Gapped(w, [Gapped(w), {"a": Gapped(w + 1)}])
    found["Sequential"] = eqx.nn.Sequential([found["Linear"], eqx.nn.Lambda(jax.nn.relu), found["Linear"]])
    return found


def shift(x: Any) -> Any:
    """By NumPy, for which nothing is compiled."""
    return jnp.asarray(np.asarray(x) + 1) if eqx.is_inexact_array(x) else x


def ones(x: Any) -> Any:
    return jnp.asarray(np.ones_like(x))


@eqx.filter_jit
def jitted(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1 if eqx.is_inexact_array(x) else x, tree)


def replaced(module: Any) -> Any:
    first = next((i for i, leaf in enumerate(jax.tree.leaves(module)) if eqx.is_array(leaf)), None)
    return module if first is None else eqx.tree_at(lambda m: jax.tree.leaves(m)[first], module, replace_fn=shift)


REMAKING = {
    "as it is": lambda m: m,
    "apply_updates": lambda m: eqx.apply_updates(m, jax.tree.map(ones, eqx.filter(m, eqx.is_inexact_array))),
    "tree_at": replaced,
    "combine": lambda m: eqx.combine(*eqx.partition(m, eqx.is_array)),
    "inference_mode": eqx.nn.inference_mode,
    "tree map": lambda m: jax.tree.map(shift, m),
    "twice": lambda m: jax.tree.map(shift, jax.tree.map(shift, m)),
}
"""What makes another module of a module."""

WRAPPING = {
    "bound method": lambda f: f,
    "filter_vmap": eqx.filter_vmap,
    "filter_grad": eqx.filter_grad,
    "filter_value_and_grad": eqx.filter_value_and_grad,
    "filter_checkpoint": eqx.filter_checkpoint,
    "filter_hessian": eqx.filter_hessian,
    "filter_make_jaxpr": eqx.filter_make_jaxpr,
    "Partial": lambda f: eqx.Partial(f, jnp.ones(2)),
    "tree_util.Partial": lambda f: jtu.Partial(f, jnp.ones(2)),
    "functools.partial": lambda f: functools.partial(f, jnp.ones(2)),
    "module_update_wrapper": lambda f: eqx.module_update_wrapper(Wrapper(f)),
    "wrapped twice": lambda f: eqx.filter_vmap(eqx.module_update_wrapper(Wrapper(f))),
    "wrapped and mapped": lambda f: jax.tree.map(shift, eqx.module_update_wrapper(Wrapper(f))),
}
"""What makes something that is called of a callable that holds arrays."""


def subjects() -> dict[str, dict[str, Any]]:
    """Every module after every operation: operation → name of the global to which `bind` binds it → module."""
    plain = modules()
    made = {label: {name: make(module) for name, module in plain.items()} for label, make in REMAKING.items()}
    made["filter_jit"] = jitted(plain)  # one call for all of them, since each would be compiled
    called = {
        "forward": plain["Gapped"].forward,
        "updated_forward": REMAKING["apply_updates"](plain["Gapped"]).forward,
        "module": plain["Gapped"],
        "updated_module": REMAKING["tree map"](plain["Nested"]),
        "MLP_call": plain["MLP"].__call__,
        "Linear": plain["Linear"],
    }
    made |= {label: {name: wrap(each) for name, each in called.items()} for label, wrap in WRAPPING.items()}
    return {
        label: {"_".join([*re.findall(r"\w+", label), name]): each for name, each in group.items()}
        for label, group in made.items()
    }


def bind(group: dict[str, Any]) -> None:
    """Binds each to a global, and all of them, one after the other, to one that a loop would use."""
    for name, value in group.items():
        globals()[name] = globals()["subject"] = value


def bind_others(names: list[str]) -> None:
    """What a new process has under the same names: other modules of the same classes, made anew."""
    bind({name: Gapped(jnp.full(3, -1.0)) for name in names})
