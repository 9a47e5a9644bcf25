"""Transforms that `preserve_identities` refuses, with the code to write instead of each.

Most of them need no adapter, since they take a `Dag` as it is. A `Dag` is a pytree with one leaf for each tied array,
and comes out as a `Dag` with the same ties. `docs/transforms.md` shows the value, the gradient and the ties for each.
The others are transforms of Equinox. For each of these there is a ready-made transform that does the same.

    preserve_identities(jax.lax.custom_root)(f, net, …)     →     jax.lax.custom_root(f_of_dag, Dag(net), …)
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.experimental

from ._option_lists import title_of

# The section of the documentation to which errors point.
_SECTION = "docs/transforms.md, “Transforms that need no adapter”"

_DAG_FORMS: dict[Callable[..., Any], str] = {
    jax.lax.custom_root: ("    result = jax.lax.custom_root(f, sharedtree.Dag(guess), solve, tangent_solve).tree"),
    jax.lax.custom_linear_solve: (
        "    result = jax.lax.custom_linear_solve(matvec, sharedtree.Dag(b), solve, symmetric=True).tree"
    ),
    jax.closure_convert: "    converted, constants = jax.closure_convert(f, sharedtree.Dag(model))",
    eqx.filter_closure_convert: "    converted = equinox.filter_closure_convert(f, sharedtree.Dag(model))",
    jax.pure_callback: "    result = jax.pure_callback(host, sharedtree.Dag(shapes), sharedtree.Dag(model)).tree",
    jax.experimental.io_callback: (
        "    result = jax.experimental.io_callback(host, sharedtree.Dag(shapes), sharedtree.Dag(model)).tree"
    ),
    eqx.filter_pure_callback: (
        "    result = equinox.filter_pure_callback(host, sharedtree.Dag(model), "
        "result_shape_dtypes=sharedtree.Dag(shapes)).tree"
    ),
    jax.debug.callback: "    jax.debug.callback(host, sharedtree.Dag(model))",
}
"""Transform → its call with a `Dag` in the place of the model, as a line of code. The user's functions get `Dag`s."""

_READY_MADE: dict[Callable[..., Any], str] = {
    eqx.filter_custom_vjp: "custom_vjp",
    eqx.filter_custom_jvp: "custom_jvp",
    eqx.filter_pmap: "pmap",
}
"""Refused transform of Equinox → name of the ready-made transform to use instead. It takes Equinox modules, too."""


def refusal_of(transform: Any) -> TypeError | None:
    """Makes the error for a transform of the two tables above. Returns None for all other transforms.

    Args:
        transform: the vanilla transform, or any other hashable object.
    """
    # Any other object has no title to ask for, and none is needed.
    title = title_of(transform) if transform in _DAG_FORMS or transform in _READY_MADE else ""
    if transform in _DAG_FORMS:
        return TypeError(
            f"`sharedtree.preserve_identities` does not wrap `{title}`. Call it directly, with a `sharedtree.Dag` in "
            "the place of each model.\n"
            "A `Dag` is a pytree in which a tied array is one leaf. Your functions get `Dag`s (`dag.tree` is the "
            f"model), and must return `Dag`s in the place of models ({_SECTION}):\n"
            f"{_DAG_FORMS[transform]}"
        )
    if transform in _READY_MADE:
        return TypeError(
            f"`sharedtree.preserve_identities` does not wrap `{title}`, whose own rules for leaves that are not "
            f"mapped do not suit models with sharing. `sharedtree.{_READY_MADE[transform]}` takes Equinox modules as "
            "they are:\n"
            f"    f = sharedtree.{_READY_MADE[transform]}(f)"
        )
    return None
