"""Optimizers of Flax NNX: filters by path that they ask about another path, and slots from before a tie.

Filters
-------

    model.head.kernel        View(transpose, w)        NNX asks the filter about      head.kernel.of[0]
    model.tokens.embedding   w                         `sharedtree.grad` asks about   tokens.embedding

NNX lists a variable at the first of its paths in the order of names, also if this path leads through a view. This
library takes the variable's own path. If a filter answers differently at the two, `nnx.Optimizer` trains other
variables than `sharedtree.grad` differentiates. A weight then stays as it is, and nothing fails. So we warn where we
see the filter: in `wrt` of a gradient, and in an `nnx.Optimizer` among the arguments of a function that is traced.

We cannot know which optimizer gets a gradient. So there is no warning if `sharedtree.optimizer` got the same filter.

Slots
-----

An optimizer has a *slot* for each variable that the model had when the optimizer was made. If the model is tied later,
two slots are left for one variable, and `update` fails with an error about the structure of states. That error gets a
note if the optimizer is an argument of a function that we trace.

A *record* is the number of an object in a flat DAG.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._errors import definition_of, report_untied
from ...core._node_types import name_in
from ...core._structure import FlatDag, Path
from ...libraries._nnx import is_object_of_nnx, is_optimizer_of_nnx, is_variable
from ...optim._wrt import OF_GRAD, is_settled, settle
from ...ties._policy_and_context import Policy
from ...tree._asking_filters import step_of_path
from ...tree._filters import AnyFilter, Filter, FilterPrefix, LeafPlace, filter_of


class _TwoPaths(NamedTuple):
    """A variable with its own path, and the path at which NNX lists it.

    Attributes:
        variable: the variable. Or an array that a module of NNX holds without one.
        own_keys: the first path outside views.
        nnx_keys: the first path in the order of names, through a view.
    """

    variable: Any
    own_keys: Path
    nnx_keys: Path


class _Disagreement(NamedTuple):
    """Two answers of a filter about one variable.

    Attributes:
        paths: where the variable is.
        is_selected: the answer at its own path. NNX gets the opposite.
    """

    paths: _TwoPaths
    is_selected: bool


def report_filter_of_gradient(
    function: Callable[..., Any], models: Sequence[FlatDag], wrt: Any, spec: AnyFilter, policy: Policy
) -> None:
    """Warns of a gradient's filter that answers differently where NNX would ask it.

    Args:
        function: the user's function.
        models: the differentiated arguments.
        wrt: the filter, as the user wrote it.
        spec: the filter.
        policy: its `on_untie` makes the warning an error, or suppresses it.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.

    Cost: a walk over each model that has views, if the filter looks at paths and is not settled.
    """
    if not is_settled(wrt):
        _report(function, models, wrt, spec, policy)


def report_filters_of_optimizers(function: Callable[..., Any], arguments: FlatDag, policy: Policy) -> None:
    """Warns of each `nnx.Optimizer` in the arguments whose filter answers differently at a variable's own path.

    Args:
        function: the user's function, which is about to be traced.
        arguments: its arguments.
        policy: its `on_untie` makes the warning an error, or suppresses it.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if _has_views(arguments):
        models, optimizers = _models_and_optimizers(arguments)
        for optimizer in optimizers:
            wrt = optimizer.objects[optimizer.root].wrt
            # NNX may take a filter that this library does not. Nobody has asked us about it.
            with contextlib.suppress(TypeError):
                _report(function, models, wrt, filter_of(wrt, OF_GRAD), policy)


def add_note_of_slots(error: Exception, arguments: FlatDag) -> None:
    """Adds a note to an error if an `nnx.Optimizer` in the arguments was made before a model there was tied.

    Args:
        error: the error of the user's function.
        arguments: the arguments of the function.
    """
    models, optimizers = _models_and_optimizers(arguments)
    if not models or not optimizers:
        return
    # Path of a variable or view, as a filter gets it → its text, if the path had a slot of its own before the tie. That
    # holds for the further paths of variables, and for views. The first path of a variable has None.
    stale_texts: dict[tuple[Any, ...], str | None] = {}
    for model in models:
        visited: set[int] = set()
        for number, keys, _ in _edges_in_order_of_names(model):
            node = model.node(number)
            is_view = node is not None and node.type.is_view
            if is_view or is_variable(model.objects[number]):
                is_stale = is_view or number in visited
                stale_texts.setdefault(_path_of_filter(keys), jtu.keystr(keys) if is_stale else None)
            visited.add(number)
    for optimizer in optimizers:
        node = optimizer.node(optimizer.root)
        names = [] if node is None else [name_in(key) for key in node.keys]
        # A user may have replaced the state by a static value.
        if "opt_state" not in names:
            continue
        slots = optimizer.child(names.index("opt_state"))
        for number, keys, _ in _edges_in_order_of_names(slots):
            # For example `[0].mu['head']['kernel']`, a slot of `.head.kernel`. The longest path at the end counts:
            # `.kernel` may be another place.
            path = _path_of_filter(keys) if is_variable(optimizer.objects[number]) else ()
            paths = [path[start:] for start in range(len(path)) if path[start:] in stale_texts]
            text = stale_texts[paths[0]] if paths else None
            if text is not None:
                error.add_note(
                    f"The optimizer has a slot for `{text}` from before the model was tied. Tie the model first, and "
                    "then make the optimizer:\n"
                    "    optimizer = nnx.Optimizer(model, tx, wrt=wrt)"
                )
                return


def _models_and_optimizers(arguments: FlatDag) -> tuple[list[FlatDag], list[FlatDag]]:
    """Returns the outermost modules of NNX in the arguments, and the optimizers. A model may be in an optimizer."""
    models: list[FlatDag] = []
    optimizers: list[FlatDag] = []
    stack, visited = [arguments.root], set[int]()
    while stack:
        number = stack.pop()
        if number in visited:
            continue
        visited.add(number)
        obj = arguments.objects[number]
        if is_optimizer_of_nnx(obj):
            optimizers.append(arguments.below(number))
        elif is_object_of_nnx(obj):
            models.append(arguments.below(number))
            continue
        stack.extend(reversed(arguments.records[number][1]))
    return models, optimizers


def _edges_in_order_of_names(model: FlatDag) -> Iterator[tuple[int, Path, bool]]:
    """Yields the edges of a tree in the order in which NNX meets them, which is flatten order.

    Yields:
        The number of a record, its path, and True if that path leads through a view. The children of a record are
        visited once, at its first path.
    """
    visited: set[int] = set()
    stack: list[tuple[int, Path, bool]] = [(model.root, (), False)]
    while stack:
        number, keys, is_below_view = stack.pop()
        yield number, keys, is_below_view
        node = model.node(number)
        if number in visited or node is None:
            continue
        visited.add(number)
        # The array in a variable has no path of its own.
        if not is_variable(model.objects[number]):
            steps = zip(node.keys, model.records[number][1], strict=True)
            is_in_view = is_below_view or node.type.is_view
            stack.extend(reversed([(child, (*keys, key), is_in_view) for key, child in steps]))


def _report(function: Callable[..., Any], models: Sequence[FlatDag], wrt: Any, spec: AnyFilter, policy: Policy) -> None:
    """Warns of a filter that has two answers about a variable of one of the models. Settles the filter.

    The parameters are those of `report_filter_of_gradient`.
    """
    # A tree of filters is no filter of NNX.
    if policy.on_untie == "ignore" or not spec.asks_for_path or isinstance(spec, FilterPrefix):
        return
    disagreements = [disagreement for model in models for disagreement in _disagreements(model, spec)]
    if not disagreements:
        return
    settle(wrt)
    first = disagreements[0]
    own_path, nnx_path = jtu.keystr(first.paths.own_keys), jtu.keystr(first.paths.nnx_keys)
    explanation = (
        f"`{own_path}` and `{nnx_path}` are one variable. `wrt` answers {first.is_selected} at the first path, where "
        f"this library asks, and {not first.is_selected} at the second, where Flax NNX asks. So an `nnx.Optimizer` "
        f"with this filter {'does not train it' if first.is_selected else 'expects a gradient of it'}."
    )
    # The paths at which the filter has to change its answer, in the form in which it gets them.
    selected = [_path_of_filter(item.paths.nnx_keys) for item in disagreements if item.is_selected]
    unselected = [_path_of_filter(item.paths.nnx_keys) for item in disagreements if not item.is_selected]
    lines = ["NNX takes the first path in the order of names, also through a view. Let both answers agree:"]
    if selected:
        lines.append(f"    wrt = [wrt, lambda path, value: path in {selected}]")
    if unselected:
        lines.append(f"    wrt = nnx.All(wrt, lambda path, value: path not in {unselected})")
    lines += [
        "    optimizer = nnx.Optimizer(model, tx, wrt=wrt)",
        "or take an optimizer that asks at the own path:",
        "    tx = sharedtree.optimizer(tx, wrt=wrt)",
    ]
    paths = [jtu.keystr(keys) for item in disagreements for keys in (item.paths.own_keys, item.paths.nnx_keys)]
    report_untied(policy.on_untie, definition_of(function), explanation, "\n".join(lines), paths, verb="passed over")


def _has_views(tree: FlatDag) -> bool:
    """Returns True if a tree has a view."""
    return any(node is not None and node.type.is_view for node in map(tree.node, range(len(tree.records))))


def _disagreements(model: FlatDag, spec: Filter) -> list[_Disagreement]:
    """Asks a filter about each variable that NNX lists at a path through a view. Returns those with two answers.

    Args:
        model: the model, with its objects.
        spec: the filter.
    """
    disagreements: list[_Disagreement] = []
    for paths in _listed_through_views(model):
        # NNX passes the variable, or an array that is in none.
        variable = paths.variable if is_variable(paths.variable) else None
        place = LeafPlace((), paths.variable if variable is None else variable.get_value(), variable, variable)
        try:
            is_selected = spec.selects(place._replace(path=_path_of_filter(paths.own_keys)))
            is_selected_by_nnx = spec.selects(place._replace(path=_path_of_filter(paths.nnx_keys)))
        # Nobody but this check asks about both paths. A function may fail at a path for which it was not written.
        except Exception:  # noqa: BLE001 -- whoever asks about that path gets the error
            continue
        if is_selected != is_selected_by_nnx:
            disagreements.append(_Disagreement(paths, is_selected))
    return disagreements


def _listed_through_views(model: FlatDag) -> list[_TwoPaths]:
    """Finds the variables that NNX lists at a path through a view, although they have a path of their own.

    Args:
        model: the model, with its objects. Of one that is no object of NNX, only variables are found.
    """
    if not _has_views(model):
        return []
    has_arrays = is_object_of_nnx(model.objects[model.root])
    # Record → the first path in the order of names, if this leads through a view, and then its own path.
    nnx_keys_of: dict[int, Path] = {}
    own_keys_of: dict[int, Path] = {}
    visited: set[int] = set()
    for number, keys, is_below_view in _edges_in_order_of_names(model):
        if number in nnx_keys_of and not is_below_view:
            own_keys_of.setdefault(number, keys)
        is_array = has_arrays and model.node(number) is None
        if number not in visited and is_below_view and (is_array or is_variable(model.objects[number])):
            nnx_keys_of[number] = keys
        visited.add(number)
    return [_TwoPaths(model.objects[number], keys, nnx_keys_of[number]) for number, keys in own_keys_of.items()]


def _path_of_filter(keys: Path) -> tuple[Any, ...]:
    """Returns a path as a filter gets it: attribute names, keys and indices."""
    return tuple(map(step_of_path, keys))
