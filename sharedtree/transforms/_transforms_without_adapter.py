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
    jax.lax.custom_root: "jax.lax.custom_root(f, sharedtree.Dag(guess), solve, tangent_solve).tree",
    jax.lax.custom_linear_solve: "jax.lax.custom_linear_solve(matvec, sharedtree.Dag(b), solve, symmetric=True).tree",
    jax.closure_convert: "jax.closure_convert(f, sharedtree.Dag(model))",
    eqx.filter_closure_convert: "equinox.filter_closure_convert(f, sharedtree.Dag(model))",
    jax.pure_callback: "jax.pure_callback(host, sharedtree.Dag(shapes), sharedtree.Dag(model)).tree",
    jax.experimental.io_callback: (
        "jax.experimental.io_callback(host, sharedtree.Dag(shapes), sharedtree.Dag(model)).tree"
    ),
    eqx.filter_pure_callback: (
        "equinox.filter_pure_callback(host, sharedtree.Dag(model), result_shape_dtypes=sharedtree.Dag(shapes)).tree"
    ),
    jax.debug.callback: "jax.debug.callback(host, sharedtree.Dag(model))",
}
"""Transform → code of its call with a `Dag` in the place of the model. The user's functions get `Dag`s, too."""

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
            f"`sharedtree.preserve_identities` does not wrap `{title}`, which takes a `sharedtree.Dag` as it is.\n"
            "In a `Dag` a tied array is one leaf. Pass one in the place of each model. The functions get and return "
            f"`Dag`s, too ({_SECTION}):\n"
            f"    result = {_DAG_FORMS[transform]}"
        )
    if transform in _READY_MADE:
        return TypeError(
            f"`sharedtree.preserve_identities` does not wrap `{title}`, whose own rules for leaves that are not "
            f"mapped do not suit models with sharing. `sharedtree.{_READY_MADE[transform]}` takes Equinox modules as "
            "they are:\n"
            f"    f = sharedtree.{_READY_MADE[transform]}(f)"
        )
    return None
