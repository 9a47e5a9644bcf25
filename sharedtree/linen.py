"""`TrainState` is Flax's class of the same name, for parameters with ties. Only this file imports Flax.

It takes the same arguments as Flax's class: parameters (dicts of arrays, as Linen makes them), an optax transformation
and gradients. A `TrainState` is a module, so its arrays carry identity, even those in dicts, and `sharedtree.jit` keeps
their ties without a policy. Only the update differs from Flax's:

    Flax          tx.update                       optax.apply_updates           a slot and an update for each path
    here          sharedtree.optimizer(tx).update sharedtree.apply_updates      one for each tied array
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeGuard

from .core._by_identity import WeakIdentityDict
from .core._printing import shown
from .optim import apply_updates
from .optim._optimizer import is_optimizer, optimizer_with
from .optim._ties_of_parameters import InitialTies, Wording, holds_several_models
from .tree._jax_tree import require_alike

try:
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state as _of_flax
except ImportError as error:
    if (error.name or "").partition(".")[0] != "flax":
        # Flax is installed, but a library that it needs is not.
        raise
    raise ImportError(
        "`sharedtree.linen` needs Flax, whose `TrainState` it extends. Install it:\n    pip install flax",
        name=error.name,
    ) from None

__all__ = ["TrainState"]


def __dir__() -> list[str]:
    """Returns the public names only, since users complete names in this very module."""
    return __all__


class TrainState(_of_flax.TrainState):
    """`flax.training.train_state.TrainState` whose parameters may have ties. Without ties, they are Flax's.

    This is a subclass of Flax's class, with the same fields, `create` and `replace`. A program changes only the import.
    `apply_gradients` updates a tied array once and keeps it tied. The state of the optimizer has one slot for it. This
    holds for dicts, too, without a policy.

    The code around the update must keep ties, too. Use `sharedtree.jit` for the step. Take the gradient with
    `sharedtree.grad` under `Policy(containers=True)`, because `state.params` by itself is a dict, whose arrays are
    separate for transforms. `jax.grad` returns a part of the gradient for each path, and `apply_gradients` then raises.
    With `sharedtree.Dag`, vanilla transforms keep ties as well.

    `st.save(path, state, leave_out=["apply_fn", "tx"])` saves a state, and `st.load(path, like=state)` loads it.

    Args:
        step: the number of updates so far.
        apply_fn: usually `model.apply`. Static.
        params: the parameters. Arrays that are one object are tied.
        tx: any optax transformation, unchanged. `sharedtree.optimizer(tx, wrt=...)` selects what is trained. Static.
        opt_state: the state of `sharedtree.optimizer(tx)`, which `create` makes.

    Example:
        >>> import jax.numpy as jnp, optax, sharedtree as st
        >>> from sharedtree.linen import TrainState
        >>> weight = jnp.ones((2, 3))
        >>> params = {"embed": weight, "head": weight}
        >>> apply_fn = lambda params, x: x @ params["embed"] @ params["head"].T
        >>> state = TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(0.1))
        >>> @st.jit
        ... def train_step(state, x):
        ...     loss_fn = lambda params: (state.apply_fn(params, x) ** 2).mean()
        ...     grads = st.grad(loss_fn, policy=st.Policy(containers=True))(state.params)
        ...     return state.apply_gradients(grads=grads)
        >>> state = train_step(state, jnp.ones((1, 2)))
        >>> state.params["embed"] is state.params["head"], int(state.step)
        (True, 1)
        >>> state.opt_state[0].mu["embed"] is state.opt_state[0].mu["head"]
        True

    Limitations: if the loss depends only on a sum `a + b` of two tied arrays, `jax.grad` may return one array for both
    paths. It looks like the whole gradient and is half of it. `sharedtree.grad` returns the whole. Leaves that are not
    floating point have no slots and no updates; Flax's class rounds updates for them. A field of a subclass that begins
    as `params` itself, such as a target network, is tied to `params`: begin with `sharedtree.copy(params)`.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the state after one update. Tied parameters stay tied.

        Args:
            grads: a gradient with the nodes and ties of `params`, as `sharedtree.grad` returns it. The arrays of a
                collection `"_overwrite_with_gradient"` become the new parameters themselves, as in Flax.
            **kwargs: other fields to replace.

        Raises:
            SharingMismatchError: if the gradient or the optimizer's state has other nodes than the parameters, or lacks
                ties of the parameters.

        Warns with `UntiedWarning`, like `sharedtree.optimizer`, if the parameters have lost ties that they had in
        `create`. An example is a step under vanilla `jax.jit`.

        Cost: besides the update, a few walks over the nodes of the parameters and of the optimizer's state, while a
        step is traced. Arrays are aliased.
        """
        params: Any = self.params
        gradient = grads
        # Raises if the gradient has other nodes than the parameters, or lacks ties. `_how_to_sum` gives the advice.
        require_alike(_differentiated(params), grads, "grads", "tree of parameters", _how_to_sum)
        # The collection that gradients overwrite takes no part in the optimizer's update.
        if _has_overwritten(grads):
            params, gradient = params["params"], grads["params"]
        updates, opt_state = _keeping_ties(self.tx).update(gradient, self.opt_state, params)
        new_params: Any = apply_updates(params, updates)
        if _has_overwritten(grads):
            new_params = {"params": new_params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=new_params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any] | None, params: Any, tx: Any, **kwargs: Any) -> Self:
        """Makes a state at step 0, with a new state of the optimizer.

        Args:
            apply_fn: usually `model.apply`.
            params: the parameters. A collection `"_overwrite_with_gradient"` has no slots, as in Flax.
            tx: any optax transformation.
            **kwargs: the fields that a subclass adds.

        Raises:
            TypeError: if `tx` has no `init` and `update`.
        """
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            raise TypeError(
                f"`tx` is {shown(tx)}, but `{cls.__name__}.create` needs an optax transformation, with the methods "
                "`init` and `update`. Call a function of optax that returns one:\n"
                "    tx = optax.adam(1e-3)"
            )
        trained = params["params"] if _has_overwritten(params) else params
        opt_state = _keeping_ties(tx).init(trained)
        # The types of Flax's fields are narrower than the values that Flax accepts, so no type is checked here.
        make: Any = cls
        return make(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)


def _differentiated(params: Any) -> Any:
    """Returns the parameters that the loss is a function of. With `optax.lookahead` these are the fast ones."""
    return getattr(params, "fast", params) if holds_several_models(params) else params


def _has_overwritten(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    """Returns True if parameters or gradients have the collection `"_overwrite_with_gradient"`.

    Linen's fp8 layers keep scales there, whose gradient is the new value itself. Modules have no collections.
    """
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


# --- the transformation that keeps ties -------------------------------------------------------------------------------


def _keeping_ties(tx: Any) -> Any:
    """Returns `sharedtree.optimizer(tx)`. It warns if parameters have lost ties that they had in `create`.

    If `tx` is an optimizer of sharedtree already, returns it. The state has only `tx` itself in its fields. So two
    states of one `tx` have one treedef, and `replace(tx=...)` works, as in Flax.
    """
    return tx if is_optimizer(tx) else optimizer_with(tx, None, _ties_seen_with(tx), _WORDING)


_initial_ties: WeakIdentityDict[InitialTies] = WeakIdentityDict()
"""Transformation → the ties of the parameters in `create`. If it is a tuple, the key is its function `update`."""


def _ties_seen_with(tx: Any) -> InitialTies:
    """Returns the ties that parameters had in `create` with a transformation. The first call makes an empty record.

    Each call with the same transformation returns the same record, to which the optimizer adds ties.
    """
    update = tx.update
    # A tuple allows no weak references. Optax's transformations are tuples.
    owner = update if isinstance(tx, tuple) else tx
    initial_ties = _initial_ties.get(owner)
    if initial_ties is None:
        initial_ties = InitialTies(_WORDING)
        # The record of an owner without weak references is lost. Then a loss of ties under `jax.jit` is not reported.
        with contextlib.suppress(TypeError):
            _initial_ties[owner] = initial_ties
    return initial_ties


# Advice for a loss of ties between two calls of `apply_gradients`.
_AROUND = (
    "`jax.jit` around the step unties a `TrainState`, and so do functions on trees. Keep its ties in the step, or put "
    "them back:",
    "    step = sharedtree.jit(step)\n    state = sharedtree.retie(state, like=before)",
)

# Words of the warnings and errors of the optimizer, for users who see only the `TrainState`.
_WORDING = Wording(
    model="state.params",
    around_modules=_AROUND,
    around_containers=_AROUND,
    eagerly=(
        "In an eager loop, this keeps ties:",
        "    state = state.replace(params=sharedtree.tree.map(f, state.params))",
    ),
    meant=("If the state is meant to have no ties, untie it before:", "    state = sharedtree.untie(state)"),
    untied_state="`TrainState.create` makes such a state, `state.tx.init` does not. Begin with a new state, without "
    "the moments so far:\n"
    "    fresh = sharedtree.optimizer(state.tx).init(state.params)\n"
    "    state = state.replace(opt_state=fresh)\n"
    "Or, if the arrays for both paths are equal in `state.opt_state`, tie them:\n"
    "    state = state.replace(opt_state=sharedtree.retie(state.opt_state, like=fresh))",
    new_state="    fresh = sharedtree.optimizer(state.tx).init(state.params)\n"
    "    state = state.replace(opt_state=fresh)",
)


def _how_to_sum(name: str, like: str, *, in_containers: bool) -> str:
    """Returns the advice for a gradient that lacks ties of the parameters. `require_alike` calls it.

    Args:
        name: name of the argument, which this advice does not need.
        like: name of the tree it is compared with, which this advice does not need.
        in_containers: True if a tie that the gradient lacks is outside modules, where lists and dicts need a policy.
    """
    by, policy = "`sharedtree.grad`", ""
    if in_containers:
        by += ", with this policy for parameters in lists and dicts"
        policy = ", policy=sharedtree.Policy(containers=True)"
    return (
        "A tied weight has one gradient, the sum over its paths. `jax.grad` returns a part of it for each path. The "
        f"sum comes from {by}:\n"
        f"    grads = sharedtree.grad(loss_fn{policy})(state.params)\n"
        "Functions on trees, such as `jax.tree.map`, untie such a gradient again. This keeps its ties:\n"
        "    grads = sharedtree.tree.map(f, grads)"
    )
