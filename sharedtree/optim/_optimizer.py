"""Optimizers on DAGs: any optax transformation, with one slot for each tied leaf.

The transformation never sees a tie. It gets a *cut* model (see `_ties_of_parameters`): the model, in which each
parameter stands at its first path only, and leaves that are not optimised are absent. So everything that optax does by
tree structure or by path works as on any Equinox model.

The results of optax, updates and states, are made *whole*: each tree in them that has the shape of the parameters gets
the ties back, so that `state[0].mu.embed.weight` can be read at every path of the weight. Masks and labels, which the
user writes for every path, are translated for the cut model.

A *slot* is the part of the optimizer's state for one parameter.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import WeakIdentityDict
from ..core._errors import SharingMismatchError
from ..core._hidden_arrays import refuse_hidden_arrays
from ..core._node_types import node_type_of, require_registered
from ..core._printing import listed, shown
from ..core._recursion_limit import restores_limit
from ..core._sharing import with_repeats_copied
from ..core._structure import Path
from ..libraries._optax import has_labels, with_labels
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import pack_alone
from ..tree._filters import filter_of
from ..tree._jax_tree import map as _map, map_pairs, map_updates
from ._ties_of_parameters import OF_OPTIMIZERS, InitialTies, Models, Wording, holds_several_models, note_in_state
from ._wrt import OF_OPTIMIZER, require_nothing_left, settle

if TYPE_CHECKING:
    import optax

T = TypeVar("T")


def optimizer(tx: "optax.GradientTransformation", wrt: Any = None) -> "optax.GradientTransformationExtraArgs":
    """Wraps an optax transformation, so that it works on models with ties, with one slot for each tied leaf.

    A slot is the part of the state for one parameter, for example its momentum.

    Args:
        tx: any `optax.GradientTransformation`, including those with extra arguments.
        wrt: filter for the leaves to optimise, as in `sharedtree.grad(f, wrt=...)`: a class, a tag, a function of a
            path and a value or of a leaf, a list of these, or a tree of booleans. All other leaves have no slot in the
            state and no update, whether the gradient has them or not. Weight decay and norms do not see them either.

            The default None selects all leaves but state. State is `BatchStat`, `Cache`, `Intermediate`, `RngState`,
            `MetricState` and `OptState` of NNX with their subclasses, attributes marked by `state_field`, an
            `equinox.nn.State`, the states of optax, and all of Flax's `TrainState` but `params`. Variables of other
            classes of NNX, and plain arrays, are optimised. `...` selects all leaves, including state.

    Returns:
        An `optax.GradientTransformationExtraArgs`, with two functions.

        `init(params)` makes the state. `params` is a model, or any container of modules and arrays. Its inexact traced
        leaves are optimised. Every tree in the state with the shape of the model has the ties of the model. `init`
        raises `ValueError` if `wrt` selects none of the leaves, or if all are state. It warns with
        `UnsaidVariableWarning` of an NNX class of variables that is neither `Param` nor state; only `wrt` can decide
        whether it is optimised.

        `update(updates, state, params=None, **extra)` makes one step. `updates` is a gradient with the sharing of the
        model, as `sharedtree.grad` returns it. Extra arguments with the shape of the model, and functions of a model
        (`value_fn` of `optax.lbfgs`), are translated for optax. `update` returns the updates with the sharing of the
        model, and the new state.

        Both raise `InconsistentSharingError` if `wrt` selects a tied leaf at one of its paths and not at another.
        `update` raises `SharingMismatchError` if a tie of the model is missing in the updates or in the state, or if a
        slot gets no gradient, for example because `grad` had a `wrt` and the optimizer has none. `update` warns with
        `UntiedWarning` if the model has lost a tie since `init`, or lacks a tie of the state. A tie undone by `untie`
        does not count. `Policy(on_untie=...)` makes the warning an `UntiedError`, or turns it off.

    Raises:
        TypeError: if `tx` is no transformation, such as `optax.adam` without a call, or if `wrt` is no filter.
        ImportError: if optax is not installed.

    Cost: each call walks the nodes of the model twice, and those of each tree in the state with the model's shape once.
    With `wrt`, it walks the model two more times, and asks the filter once for each path. Arrays are aliased.

    Example:
        >>> import jax.numpy as jnp, optax, sharedtree as st
        >>> w = jnp.ones(3)
        >>> params = {"embed": w, "head": w}
        >>> tx = st.optimizer(optax.sgd(0.5, momentum=0.9))
        >>> state = tx.init(params)
        >>> gradient = st.grad(lambda d: (d.tree["embed"] * d.tree["head"]).sum())(st.Dag(params)).tree
        >>> updates, state = tx.update(gradient, state, params)
        >>> state[0].trace["embed"] is state[0].trace["head"]
        True
        >>> params = st.apply_updates(params, updates)
        >>> params["head"]
        Array([0., 0., 0.], dtype=float32)
        >>> tx = st.optimizer(optax.sgd(0.5, momentum=0.9), wrt=lambda path, value: path == ("bias",))
        >>> tx.init({"weight": w, "bias": jnp.zeros(1)})[0].trace
        {'bias': Array([0.], dtype=float32), 'weight': None}

    Limitations: functions that optax offers beside a transformation (`optax.contrib.schedule_free_eval_params`) see a
    tied leaf once for each of its paths. Pass them `sharedtree.tree.leaves` of a gradient, or `sharedtree.Dag`s. For
    norms use `sharedtree.tree.norm`.
    """
    # Raises the error with a fix if optax is not installed.
    _optax()
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(
            f"`sharedtree.optimizer` was given {shown(tx)}, but needs an optax transformation, with the methods `init` "
            "and `update`. Call a function of optax that returns one:\n"
            "    tx = sharedtree.optimizer(optax.adam(1e-3))"
        )
    return optimizer_with(tx, wrt, InitialTies(), OF_OPTIMIZERS)


def is_optimizer(tx: Any) -> bool:
    """Returns True for a transformation made by `optimizer`."""
    return bool(_updates_of_optimizers.get(getattr(tx, "update", None)))


_updates_of_optimizers: WeakIdentityDict[bool] = WeakIdentityDict()
"""The functions `update` of the transformations that `optimizer` made. Each is mapped to True."""


def optimizer_with(
    tx: Any, wrt: Any, initial_ties: InitialTies, wording: Wording
) -> "optax.GradientTransformationExtraArgs":
    """Wraps an optax transformation as `optimizer` does. The caller passes the memory of ties and words for messages.

    Args:
        tx: an optax transformation.
        wrt: filter for the leaves to optimise; None for all but state.
        initial_ties: memory of the ties of models at `init`. Several optimizers made of one `tx` can share it.
        wording: words for messages.
    """
    optax = _optax()
    tx = optax.with_extra_args_support(tx)
    # The filter in `wrt`, which can be asked about each leaf.
    selected = None if wrt is None else filter_of(wrt, OF_OPTIMIZER)
    settle(wrt)
    # True if a part of `tx` has a mask or labels, such as `optax.masked`.
    is_labelled = has_labels(tx)

    def inner(models: Models) -> Any:
        """Returns the transformation for cut models. Masks and labels in it are translated, if it has any."""
        return with_labels(tx, models.translated_labels) if is_labelled else tx

    @restores_limit
    def init(params: Any) -> Any:
        """Makes the state for a model: whole, with the ties of the model."""
        require_registered(params)
        refuse_hidden_arrays(pack_alone(params)[1])
        models = Models.of(params, selected)
        if not models.hold_parameters:
            # Raises if the filter could have selected a leaf.
            if selected is not None:
                require_nothing_left([params], is_inexact, wrt, OF_OPTIMIZER)
            # Raises if there are floating-point leaves, but all are state.
            models.require_no_state()
            # `optax.tree_map_params` calls `init` on a placeholder, to find the parameters in the state.
            return tx.init(params)
        models.warn_of_unsaid()
        initial_ties.remember(params)
        cut = models.cut(params, "params")
        return models.whole(_without_aliases(inner(models).init(cut), cut))

    @restores_limit
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Makes one step: cuts all arguments, calls optax, and makes its results whole."""
        model = updates if params is None else params
        # Reports the ties that the model has lost since `init`, and returns them.
        missing = initial_ties.check(model, state)

        # Cut all arguments.
        models = Models.of(model, selected)
        for name, value in extra.items():
            extra[name] = _translated(value, models, name, params)
        cut_updates = models.cut(updates, "updates")
        cut_state = models.cut(state, "state of the optimizer", wording.untied_state)
        cut_params = None if params is None else models.cut(params, "params")

        # Call optax. A parameter may have no gradient if the transformation has no slots, as `optax.sgd` without
        # momentum. Other transformations raise an error that mentions None, or lose the slot.
        try:
            new_updates, new_state = inner(models).update(cut_updates, cut_state, cut_params, **extra)
        except (TypeError, ValueError) as error:
            if "None" in str(error) and (without_gradient := models.missing_in(updates)):
                raise _no_gradient(without_gradient) from error
            # A state from before a tie through a function has a slot in the place of each view.
            if (views := models.paths_of_views) and not _fits(
                cut_state, inner(models), cut_updates if cut_params is None else cut_params
            ):
                raise _state_before_views(views, wording) from error
            raise
        # Some transformations lose the slot without an error: a momentum becomes None if its gradient is None.
        if jtu.tree_structure(new_state) != jtu.tree_structure(cut_state):
            without_gradient = models.missing_in(updates)
            if without_gradient:
                raise _no_gradient(without_gradient)

        # Make the results whole.
        whole_updates, whole_state = models.whole(new_updates), models.whole(new_state)
        # The loss of these ties was reported, or is meant. The note says the same of the slots in the new state.
        if missing:
            note_in_state(model, whole_state, missing)
        return whole_updates, whole_state

    _updates_of_optimizers[update] = True
    return optax.GradientTransformationExtraArgs(init, update)


def _no_gradient(paths: Sequence[str]) -> SharingMismatchError:
    """Returns the error for parameters that have a slot and no gradient. It names their paths."""
    return SharingMismatchError(
        f"The optimizer trains {listed(paths)}, but the gradient has nothing there.\n"
        "`sharedtree.grad(f, wrt=wrt)` differentiates only the leaves that `wrt` selects, and the optimizer needs a "
        "gradient of each leaf that it trains. Give it the same filter, and a new state:\n"
        "    tx = sharedtree.optimizer(tx, wrt=wrt)\n"
        "    state = tx.init(model)",
        paths,
    )


def _fits(state: Any, tx: Any, params: Any) -> bool:
    """Returns True if a state has the structure of a new one.

    Args:
        state: a state for cut models.
        tx: the transformation for cut models.
        params: a cut model.
    """
    try:
        new_state = jax.eval_shape(tx.init, params)
    except Exception:  # noqa: BLE001 -- the error of the update says more
        return True
    return jtu.tree_structure(new_state) == jtu.tree_structure(state)


def _state_before_views(paths: Sequence[str], wording: Wording) -> SharingMismatchError:
    """Returns the error for a state made before the model had these views, or other ones.

    Args:
        paths: paths of the views in the model.
        wording: words for messages.
    """
    return SharingMismatchError(
        f"The optimizer's state does not fit the model, in which {listed(paths)} "
        f"{'is a view' if len(paths) == 1 else 'are views'}.\n"
        f"A view has no slot of its own. Tie the model first, and then make the state:\n{wording.new_state}",
        paths,
    )


def _optax() -> Any:
    """Imports optax. Raises `ImportError` with a fix if it is not installed."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "`sharedtree.optimizer` needs optax. Install it:\n    pip install optax", name=error.name
        ) from error
    return optax


def apply_updates(tree: T, updates: Any) -> T:
    """Adds updates to a model, each tied leaf once, as `optax.apply_updates` does, with ties kept.

    Args:
        tree: the model; it is not changed.
        updates: a tree of the same shape and sharing, with `None` for leaves without an update.

    Returns:
        A model of new nodes with the same ties. Leaves keep their dtypes. Leaves without an update are the same
        objects.

    Raises:
        SharingMismatchError: if the shapes differ, or if the updates lack a tie of the model.

    Cost: two walks over the nodes, and one new array for each updated leaf.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w, u = jnp.ones(2), jnp.ones(2)
        >>> new = st.apply_updates({"a": w, "b": w, "step": 3}, {"a": u, "b": u, "step": None})
        >>> new["a"] is new["b"], new["step"]
        (True, 3)
    """
    # `optax.LookaheadParams`, whose two models have one shape and no ties between them.
    if holds_several_models(tree):
        return type(tree)(*[apply_updates(part, update) for part, update in zip(tree, updates, strict=True)])
    return map_updates(_added, tree, updates, _how_to_update)


def _how_to_update(name: str, like: str, *, in_containers: bool) -> str:
    """Returns advice for updates without the ties of the model.

    The advice is not to tie the updates afterwards, because the parts of a lost tie rarely have equal updates.

    Args:
        name: variable of the updates in the suggested code.
        like: variable of the model in the suggested code.
        in_containers: True if the tied leaf stands in plain containers, so that `grad` needs a policy.
    """
    where = ", in lists and dicts with this policy" if in_containers else ""
    policy = ", policy=sharedtree.Policy(containers=True)" if in_containers else ""
    return (
        "Optax updates each path by itself, even if the gradient is tied. Wrap the transformation, so that a tied leaf "
        "has one slot and one update:\n"
        "    tx = sharedtree.optimizer(tx)\n"
        f"    {name}, state = tx.update(gradient, tx.init({like}), {like})\n"
        f"Without optax, `sharedtree.tree.map` and `sharedtree.grad` keep the tie{where}:\n"
        f"    gradient = sharedtree.grad(loss{policy})({like})\n"
        f"    {name} = sharedtree.tree.map(lambda g: -0.01 * g, gradient)"
    )


def incremental_update(new: T, old: Any, step_size: Any) -> T:
    """Moves the old values of a model towards the new ones, as `optax.incremental_update` does, with ties kept.

    Each floating-point or complex leaf of the result is `step_size * new + (1 - step_size) * old`: a target network
    following its model, or an exponential moving average of parameters, whose decay is `1 - step_size`.

    Args:
        new: the latest model; it is not changed.
        old: the average or target, a tree of the same shape and sharing; it is not changed.
        step_size: the weight of the new values, from 0 (stay) to 1 (the new model); a number or a scalar array.

    Returns:
        A model of new nodes with the ties of `new`. Everything but floating-point and complex leaves is taken from
        `new`: integers such as counters, PRNG keys, static values, and None. Arrays among these are aliased.

    Raises:
        SharingMismatchError: if the shapes of the trees differ; if one of them lacks a tie of the other (a tie that
            `untie` undid in `new` may still be in `old`); or if a floating-point leaf of `new` has another shape in
            `old`, or is no floating-point leaf there. The error is a `ValueError`.

    Cost: two walks over the nodes, and one new array for each averaged leaf.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w, v = jnp.ones(2), jnp.zeros(2)
        >>> new, old = {"embed": w, "head": w, "step": jnp.array(7)}, {"embed": v, "head": v, "step": jnp.array(6)}
        >>> average = st.incremental_update(new, old, 0.25)
        >>> average["embed"], average["embed"] is average["head"], int(average["step"])
        (Array([0.25, 0.25], dtype=float32), True, 7)

    Limitations: dtypes are promoted as by optax. An fp32 average of a bf16 model stays fp32.
    """
    return map_pairs(functools.partial(_averaged, step_size), new, old, _how_to_begin)


def _averaged(step_size: Any, path: Path, new: Any, old: Any) -> Any:
    """Returns the new average of one leaf, for `incremental_update`.

    Args:
        step_size: the weight of the new value, from 0 to 1.
        path: path of the leaf, for errors.
        new: the leaf of the latest model. If it is neither floating point nor complex, it is returned unchanged.
        old: the object at the same path in the old average.

    Raises:
        SharingMismatchError: if `new` is a floating-point or complex leaf and `old` is none, or if their shapes differ.
    """
    if not is_inexact(new):
        return new
    if node_type_of(old) is not None or not _is_inexact_leaf(old):
        difference = (
            f"is a floating-point leaf in `new`, and {shown(old)} in `old`. An average needs floating-point leaves in "
            "both"
        )
    elif jnp.shape(new) != jnp.shape(old):
        difference = (
            f"has the shape {jnp.shape(new)} in `new`, and {jnp.shape(old)} in `old`. An average needs one shape"
        )
    else:
        average = step_size * new + (1.0 - step_size) * old
        # Of arrays without dimensions NumPy makes numbers, which cannot be tied.
        return np.asarray(average) if isinstance(new, np.ndarray) and isinstance(average, np.generic) else average
    text = jtu.keystr(path)
    raise SharingMismatchError(f"`{text}` {difference}.\n{_BEGIN}", (text,))


_BEGIN = "An average of a model begins as a copy of it:\n    old = sharedtree.copy(new)"


def _is_inexact_leaf(obj: Any) -> bool:
    """Returns True for a floating-point or complex leaf."""
    try:
        return is_inexact(obj)
    # A string, or another static value, has no dtype.
    except TypeError:
        return False


def _how_to_begin(name: str, like: str, *, in_containers: bool) -> str:  # noqa: ARG001 -- a `HowToTie`
    """Returns advice for an average without the ties of the model."""
    return (
        "Functions on trees, such as `jax.tree.map`, lose ties.\n"
        f"{_BEGIN}\n"
        "If its values at these paths are equal, put the tie back:\n"
        f"    {name} = sharedtree.retie({name}, like={like})"
    )


def _added(leaf: Any, update: Any) -> Any:
    """Returns the sum of a leaf and its update, in the dtype of the leaf."""
    if update is None:
        return leaf
    return jnp.asarray(leaf + update).astype(jnp.asarray(leaf).dtype)


def _without_aliases(state: Any, params: Any) -> Any:
    """Copies the arrays of a state if they are also parameters or occur twice in it, so that all arrays are different.

    Some states begin as aliases (`optax.contrib.prodigy` keeps the first parameters). If the user donated such a state,
    the parameters would be donated, too. Besides, the aliases end with the first step. So the second step would have
    arguments with other ties, and would be traced anew.

    Args:
        state: the cut state.
        params: the cut model.
    """
    parameters = jtu.tree_leaves(params)
    leaves, treedef = jtu.tree_flatten(state)
    return jtu.tree_unflatten(treedef, with_repeats_copied([*parameters, *leaves])[len(parameters) :])


def _translated(value: Any, models: Models, name: str, params: Any) -> Any:
    """Translates an extra argument of `update` for optax, which works on cut trees.

    Args:
        value: the argument. In a tree, the parts matching a model are cut. A function of models is wrapped, so that
            it gets whole models and its result is cut.
        models: the patterns of the models.
        name: name of the argument, for errors.
        params: the model. Its leaves that are not optimised are put into the models that a function gets. None to leave
            None in their places.
    """
    if node_type_of(value) is not None or not callable(value):
        return models.cut(value, name)

    def on_whole_models(*args: Any, **kwargs: Any) -> Any:
        """Calls the user's function for optax: makes the arguments whole, and cuts the result."""

        def whole(arg: Any) -> Any:
            """Returns an argument with its ties, and with the leaves that are not optimised."""
            arg = models.whole(arg)
            return arg if params is None else models.change(arg, lambda _, model: _filled(model, params))

        result = value(*map(whole, args), **{key: whole(arg) for key, arg in kwargs.items()})
        return models.cut(result, name)

    return on_whole_models


def _filled(model: Any, params: Any) -> Any:
    """Returns a model with the leaves of `params`, static ones included, where it has None."""
    return _map(lambda leaf, parameter: leaf if parameter is None else parameter, params, model)
