"""Optimizers on DAGs: any optax transformation, with one slot for each tied leaf.

The transformation never sees a tie. It gets the parameters as a *stripped* tree: the model itself, in which a tied
leaf stands at its first path only and every other place, like every leaf that is not a parameter, holds `None`. So
masks, labels and everything else that optax does by tree structure or by path work on it as on any Equinox model.
What comes back, updates and states, is *spread*: wherever a tree of the parameters' shape turns up in it, the ties are
put back, so that `state[0].mu.embed.weight` can be read at every path of the weight.

Ties between the entries of `optax.LookaheadParams` do not count: it begins with fast and slow weights that are one
object, and must not stay so.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax.numpy as jnp
from jax import tree_util as jtu

from ._context import rules_here
from ._distinct import distinct
from ._errors import SharingMismatchError
from ._graph import Tags, walk
from ._jax_internals import make_room
from ._node_types import node_type_of, require_registered
from ._statics import Static
from ._structure import LEAF, Node, Path, Record, depth_of
from ._ties import is_inexact
from .tree import map as _map

T = TypeVar("T")


class _Parameters(NamedTuple):
    """The parameters of a model as a pattern that other trees can be matched with.

    Attributes:
        records: of the model.
        root: the model itself.
        is_parameter: for each record, whether it is a traced leaf that is optimised.
    """

    records: Sequence[Record]
    root: int
    is_parameter: Sequence[bool]

    @classmethod
    def of(cls, model: Any) -> "_Parameters":
        tags = Tags()
        _, records, root = walk(model, tags, rules_here())
        make_room(depth_of(records))  # optax flattens the model as a tree
        chosen = [op is LEAF and is_inexact(tags.objects[i]) for i, (op, _) in enumerate(records)]
        return cls(records, root, chosen)


def optimizer(tx: Any) -> Any:
    """An optax transformation that works on models with ties, with one slot for each tied leaf.

    Args:
        tx: any `optax.GradientTransformation`, extra arguments included.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

        `init(params)`: `params` is a model, or any container of modules and arrays; its inexact traced leaves are
        optimised. Returns the state, in which every tree of the shape of the model is such a model, with its ties.

        `update(updates, state, params=None, **extra)`: `updates` is a gradient with the sharing of the model, as
        `sharedtree.grad` returns it. Extra arguments of the shape of the model, and functions of a model among them
        (`value_fn` of `optax.lbfgs`), are translated. Returns the updates, with the sharing of the model, and the
        state.

        Both raise `SharingMismatchError` if what is tied in the model is not tied in the updates or in the state.

    Cost: two walks over the nodes of the model, and one over those of each model in the state, for each call.
    Arrays are aliased.

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

    Limitations: functions that optax offers beside a transformation (`optax.global_norm`,
    `optax.contrib.schedule_free_eval_params`) see a tie as often as it has paths; give them `sharedtree.tree.leaves`
    of a gradient, or `sharedtree.Dag`s.
    """
    import optax

    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        require_registered(params)
        scopes = _scopes(params)
        stripped = _stripped(params, scopes, "params")
        return _spread(_without_aliases(tx.init(stripped), stripped), scopes)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        scopes = _scopes(updates if params is None else params)
        for name, value in extra.items():
            extra[name] = _translated(value, scopes, name, params)
        new_updates, new_state = tx.update(
            _stripped(updates, scopes, "updates"),
            _stripped(state, scopes, "state"),
            None if params is None else _stripped(params, scopes, "params"),
            **extra,
        )
        return _spread(new_updates, scopes), _spread(new_state, scopes)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(tree: T, updates: Any) -> T:
    """Adds updates to a model, each tied leaf once. `optax.apply_updates`, with ties kept.

    Args:
        tree: the model; it is not changed.
        updates: a tree of the same shape and sharing, `None` where nothing is to be added.

    Returns:
        A model of new nodes with the same ties; leaves keep their dtypes, and those without an update are the same
        objects.

    Raises:
        SharingMismatchError: if the shapes differ, or what is tied in the model is not tied in the updates.

    Cost: two walks over the nodes, one new array for each updated leaf.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w, u = jnp.ones(2), jnp.ones(2)
        >>> new = st.apply_updates({"a": w, "b": w, "step": 3}, {"a": u, "b": u, "step": None})
        >>> new["a"] is new["b"], new["step"]
        (True, 3)
    """
    if _holds_several_models(tree):
        return type(tree)(*[apply_updates(part, update) for part, update in zip(tree, updates, strict=True)])
    return _map(_added, tree, updates)


def _added(leaf: Any, update: Any) -> Any:
    if update is None:
        return leaf
    return jnp.asarray(leaf + update).astype(jnp.asarray(leaf).dtype)


def _without_aliases(state: Any, params: Any) -> Any:
    """A state whose arrays are not those of the parameters, nor of each other.

    Some states begin as aliases (`optax.contrib.prodigy` keeps the first parameters). Donating the one would then
    donate the other, and the second step, on which they part, would be traced anew.
    """
    given = jtu.tree_leaves(params)
    leaves, treedef = jtu.tree_flatten(state)
    return jtu.tree_unflatten(treedef, distinct([*given, *leaves])[len(given) :])


def _holds_several_models(params: Any) -> TypeGuard[tuple[Any, ...]]:
    optax = sys.modules.get("optax")  # without which there are none
    return optax is not None and isinstance(params, optax.LookaheadParams)


def _scopes(params: Any) -> list[_Parameters]:
    """The parts of the parameters within which ties count; all of them, unless optax says otherwise."""
    if _holds_several_models(params):
        return [scope for entry in params for scope in _scopes(entry)]
    return [_Parameters.of(params)]


def _stripped(tree: Any, scopes: Sequence[_Parameters], name: str) -> Any:
    """A tree in which every tied leaf stands at its first path only, and None where there is no parameter."""
    return _at_models(tree, scopes, lambda found, scope: _strip(found, scope, name))


def _spread(tree: Any, scopes: Sequence[_Parameters]) -> Any:
    """The inverse of `_stripped`."""
    return _at_models(tree, scopes, _share)


def _translated(value: Any, scopes: Sequence[_Parameters], name: str, params: Any) -> Any:
    """An extra argument: a model is stripped, and a function of a model gets the whole model when it is called."""
    if node_type_of(value) is not None or not callable(value):
        return _stripped(value, scopes, name)

    def on_whole_models(*args: Any, **kwargs: Any) -> Any:
        def whole(arg: Any) -> Any:
            spread = _spread(arg, scopes)
            return (
                _at_models(spread, scopes, lambda found, scope: _filled(found, params))
                if params is not None
                else spread
            )

        result = value(*map(whole, args), **{key: whole(arg) for key, arg in kwargs.items()})
        return _stripped(result, scopes, name)

    return on_whole_models


def _filled(model: Any, params: Any) -> Any:
    """A model of parameters with the other leaves of `params`, static ones included."""
    return _map(lambda leaf, parameter: leaf if parameter is None else parameter, params, model)


def _at_models(tree: Any, scopes: Sequence[_Parameters], change: Callable[[Any, _Parameters], Any]) -> Any:
    """Changes every part of a tree that has the shape of the model."""
    for scope in scopes:
        if len(scope.records) > 1 and _matches(tree, scope):
            return change(tree, scope)
    node_type = node_type_of(tree)
    if node_type is None:
        return tree
    children, aux = node_type.take_apart(tree)
    changed = [_at_models(child, scopes, change) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return tree
    return node_type.put_together(aux, changed)


def _matches(tree: Any, scope: _Parameters) -> bool:
    """Whether a tree has the nodes of the model, and a leaf or nothing where the model has a parameter."""
    stack: list[tuple[int, Any]] = [(scope.root, tree)]
    seen: set[tuple[int, int]] = set()
    alive: list[Any] = []  # whatever has its id in `seen`
    while stack:
        number, obj = stack.pop()
        op, children = scope.records[number]
        if scope.is_parameter[number] and node_type_of(obj) is not None and not _holds_nothing(obj):
            return False  # the state of a chain can look like a tuple of parameters
        if type(op) is not Node or (number, id(obj)) in seen:  # in `alive`
            continue
        node_type = node_type_of(obj)
        if node_type is None or node_type.cls is not op.type.cls:
            return False
        parts, aux = node_type.take_apart(obj)
        if len(parts) != len(children) or (op.type.is_plain and Static(aux) != op.aux):
            return False
        stack.extend(zip(children, parts, strict=True))
        if node_type.carries_identity:
            alive.append(obj)
            seen.add((number, id(obj)))  # in `alive`
    return True


def _strip(tree: Any, scope: _Parameters, name: str) -> Any:
    first: dict[int, tuple[Any, Path]] = {}

    def leaf(number: int, obj: Any, path: Path) -> Any:
        if not scope.is_parameter[number]:
            return obj if _holds_nothing(obj) else None
        if number not in first:
            first[number] = (obj, path)
            return obj
        before, where = first[number]
        if _holds_nothing(before) and _holds_nothing(obj):
            return obj
        if before is not obj:
            one, two = jtu.keystr(where), jtu.keystr(path)
            raise SharingMismatchError(
                f"`{one}` and `{two}` are one parameter of the model, but two objects in the {name}.\n"
                "A tied parameter has one gradient and one slot. Take gradients with `sharedtree.grad`, which sums "
                "over the paths, keep states with `sharedtree.tree.map`, and if the two are equal put the tie back:\n"
                f"    {name} = sharedtree.retie({name}, like=model)",
                (one, two),
            )
        return None

    return _rebuilt(tree, scope, leaf)


def _holds_nothing(obj: Any) -> bool:
    """Whether there is no leaf in an object, as in `None` and in `optax.MaskedNode()`."""
    return not jtu.tree_leaves(obj)


def _share(tree: Any, scope: _Parameters) -> Any:
    first: dict[int, Any] = {}

    def leaf(number: int, obj: Any, _: Path) -> Any:
        if not scope.is_parameter[number]:
            return obj
        before = first.setdefault(number, obj)
        return obj if _holds_nothing(before) else before

    return _rebuilt(tree, scope, leaf, share=True)


def _rebuilt(tree: Any, scope: _Parameters, leaf: Callable[[int, Any, Path], Any], *, share: bool = False) -> Any:
    """A tree of the model's shape, new from the root, with each occurrence of a leaf replaced, in flatten order.

    With `share`, nodes that are one in the model are one in the result; otherwise all are new.
    """
    made: dict[int, Any] = {}
    finished: list[Any] = []
    stack: list[tuple[int, Any, Path, bool]] = [(scope.root, tree, (), False)]
    while stack:
        number, obj, path, is_complete = stack.pop()
        op, children = scope.records[number]
        if type(op) is not Node:
            finished.append(leaf(number, obj, path))
            continue
        shared = share and op.type.carries_identity
        if shared and number in made:
            finished.append(made[number])
            continue
        parts, aux = op.type.take_apart(obj)
        if not is_complete:
            stack.append((number, obj, path, True))
            steps = tuple(zip(op.keys, children, parts, strict=True))
            stack.extend((n, part, (*path, key), False) for key, n, part in reversed(steps))
            continue
        start = len(finished) - len(parts)
        node = op.type.put_together(aux, finished[start:])
        del finished[start:]
        finished.append(node)
        if shared:
            made[number] = node
    return finished[0]
