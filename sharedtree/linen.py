"""Flax's `TrainState` for parameters with ties. The one file that imports Flax.

In comes what Flax's own takes: parameters (dicts of arrays, as Linen makes them), an optax transformation, gradients;
out go states. Nothing here is a transform, and nothing decides what is tied: a `TrainState` is a module, so all that it
holds is inside one, and `sharedtree.jit` keeps its ties without a policy. Only the update is another one than Flax's:

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
        raise  # Flax is there, and lacks something itself
    raise ImportError(
        "`sharedtree.linen` needs Flax, whose `TrainState` it extends. Install it:\n    pip install flax",
        name=error.name,
    ) from None

__all__ = ["TrainState"]


def __dir__() -> list[str]:
    """What is offered, since this file is the public module."""
    return __all__


class TrainState(_of_flax.TrainState):
    """`flax.training.train_state.TrainState` whose parameters may have ties. Without ties, they are Flax's.

    A subclass of Flax's, with its fields, `create`, `replace` and subclasses with fields of their own. A program that
    has Flax's changes the import. `apply_gradients` updates what is tied once and keeps it tied, and the state of the
    optimizer has one slot for it, in dicts, too, without a policy.

    What is around the update must keep ties, too. Use `sharedtree.jit` for the step. Take the gradient with
    `sharedtree.grad` under `Policy(containers=True)`: `state.params` by itself is a dict, which transforms take for
    separate arrays. `jax.grad` returns a part of the gradient for each path, and `apply_gradients` then raises. With
    `sharedtree.Dag`, vanilla transforms do as well.

    `st.save(path, state, leave_out=["apply_fn", "tx"])` saves a state, and `st.load(path, like=state)` loads it.

    Args:
        step: the number of updates so far.
        apply_fn: usually `model.apply`. Static.
        params: the parameters. Arrays that are one object are tied.
        tx: any optax transformation, as it is. `sharedtree.optimizer(tx, wrt=...)` selects what is trained. Static.
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

    Limitations: where the loss depends on a sum `a + b` of two tied arrays alone, `jax.grad` may return one array for
    both paths, which looks like the whole gradient and is half of it. `sharedtree.grad` returns the whole. Leaves that
    are not floating point have no slots and no updates; Flax's rounds updates for them. A field of a subclass that
    begins as `params` itself, such as a target, is tied to them: begin with `sharedtree.copy(params)`.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """The state after one update, in which what was tied is tied.

        Args:
            grads: a gradient with the nodes and ties of `params`, as `sharedtree.grad` returns it. What is in a
                collection `"_overwrite_with_gradient"` becomes the new value itself, as in Flax.
            **kwargs: other fields to replace.

        Raises:
            SharingMismatchError: if the gradient or the optimizer's state has other nodes than the parameters, or lacks
                ties of theirs.

        Warns with `UntiedWarning` as `sharedtree.optimizer` does: if the parameters have lost ties that they had in
        `create`, because vanilla `jax.jit` is around the step, say.

        Cost: beside the update, a few walks over the nodes of the parameters and the optimizer's state, while a step is
        traced. Arrays are aliased.
        """
        params: Any = self.params
        gradient = grads
        require_alike(_differentiated(params), grads, "grads", "tree of parameters", _how_to_sum)
        if _is_overwritten(grads):
            params, gradient = params["params"], grads["params"]
        updates, opt_state = _keeping_ties(self.tx).update(gradient, self.opt_state, params)
        new: Any = apply_updates(params, updates)
        if _is_overwritten(grads):
            new = {"params": new, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=new, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any] | None, params: Any, tx: Any, **kwargs: Any) -> Self:
        """A state at step 0, with a new state of the optimizer.

        Args:
            apply_fn: see the class.
            params: see the class. A collection `"_overwrite_with_gradient"` has no slots, as in Flax.
            tx: see the class.
            **kwargs: the fields that a subclass adds.

        Raises:
            TypeError: if `tx` is no transformation.
        """
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            raise TypeError(
                f"`{cls.__name__}.create` takes an optax transformation as `tx`, which has `init` and `update`, not "
                f"{shown(tx)}. Functions of optax make one:\n"
                "    tx = optax.adam(1e-3)"
            )
        trained = params["params"] if _is_overwritten(params) else params
        opt_state = _keeping_ties(tx).init(trained)
        make: Any = cls  # Flax's fields are typed more narrowly than what it takes
        return make(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)


def _differentiated(params: Any) -> Any:
    """The parameters that a gradient is of. With `optax.lookahead` these are the fast ones."""
    return getattr(params, "fast", params) if holds_several_models(params) else params


def _is_overwritten(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether parameters or gradients have the collection that gradients overwrite. Modules have no collections."""
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


# --- the transformation that keeps ties -------------------------------------------------------------------------------


def _keeping_ties(tx: Any) -> Any:
    """`sharedtree.optimizer(tx)`, which knows what `create` has seen with the same `tx`.

    The state keeps `tx` as it is, so two states of one `tx` have one treedef, and `replace(tx=...)` works, as in Flax.
    """
    return tx if is_optimizer(tx) else optimizer_with(tx, None, _ties_seen_with(tx), _WORDING)


_seen: WeakIdentityDict[InitialTies] = WeakIdentityDict()
"""Of a transformation, or of its `update` where it is a tuple, to which there are no weak references: what was tied."""


def _ties_seen_with(tx: Any) -> InitialTies:
    update = tx.update
    owner = update if isinstance(tx, tuple) else tx
    seen = _seen.get(owner)
    if seen is None:
        seen = InitialTies(_WORDING)
        # One that allows no weak reference is not remembered. Then a loss of ties under `jax.jit` is not reported.
        with contextlib.suppress(TypeError):
            _seen[owner] = seen
    return seen


_AROUND = (
    "`jax.jit` around the step takes a tied `TrainState` apart, and so does what reads or moves it as a tree. The "
    "first of these keeps its ties, the second puts them back:",
    "    step = sharedtree.jit(step)\n    state = sharedtree.retie(state, like=before)",
)

_WORDING = Wording(
    model="state.params",
    around_modules=_AROUND,
    around_containers=_AROUND,
    eagerly=(
        "In an eager loop, this keeps ties:",
        "    state = state.replace(params=sharedtree.tree.map(f, state.params))",
    ),
    meant=("To say that it is meant, of the state that should have no ties:", "    state = sharedtree.untie(state)"),
    untied_state="`create` makes such a state, and `state.tx.init` does not. Begin anew:\n"
    "    fresh = sharedtree.optimizer(state.tx).init(state.params)\n"
    "    state = state.replace(opt_state=fresh)\n"
    "Or keep of each tied slot the one at its first path, which is right if all of them are equal:\n"
    "    state = state.replace(opt_state=sharedtree.retie(state.opt_state, like=fresh))",
)


def _how_to_sum(name: str, like: str, *, in_containers: bool) -> str:
    by, policy = "`sharedtree.grad`", ""
    if in_containers:
        by += " under this policy, which makes lists and dicts carry identity"
        policy = ", policy=sharedtree.Policy(containers=True)"
    return (
        "A tied weight has one gradient, the sum over its paths. `jax.grad` returns a part of it for each path. Take "
        f"it with {by}:\n"
        f"    grads = sharedtree.grad(loss_fn{policy})(state.params)\n"
        "`jax.tree.map` and other functions that see trees lose the ties of such a gradient. This keeps them:\n"
        "    grads = sharedtree.tree.map(f, grads)"
    )
