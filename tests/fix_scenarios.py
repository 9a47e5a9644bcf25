"""One scenario for each message of the library that offers code, but for those about files."""

import concurrent.futures
import dataclasses
import functools
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from tests import vanilla_transforms
from tests.deep import lists
from tests.fixes import Scenario, scenario, scenarios
from tests.kinds import Free, Noted
from tests.models import Leaf, Net
from tests.strategies import Mutable, tower


class Selecting(eqx.Module):
    threshold: jax.Array

    def __call__(self, leaf):
        return True


class Tree(eqx.Module):
    a: jax.Array
    b: jax.Array | None


class Scaled(eqx.Module):
    x: jax.Array
    k: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tally:
    count: jax.Array
    step: jax.Array


class Counter(st.Module):
    def __init__(self):
        self.w = st.parameter(jnp.ones(()))
        self.count = st.state_field(jnp.zeros(()))

    def __call__(self, x):
        self.count = self.count + 1
        return self.w * x


class Kernel(nnx.Variable):
    """A class of variables of which nobody says what it is."""


def tied():
    leaf = Leaf(jnp.arange(4.0).reshape(2, 2))
    return Net(leaf, leaf)


def of_the_second(f):
    return lambda models: f(models[1])


st.register_transform(of_the_second)


def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def loss(net):
    return (net.embed.weight * net.head.weight).sum()


ADAM = st.optimizer(optax.adam(0.1))
MISMATCH, INCONSISTENT, UNREGISTERED = (
    st.errors.SharingMismatchError,
    st.errors.InconsistentSharingError,
    st.errors.UnregisteredTypeError,
)


def called_with(f, names):
    """Calls a function with those of the names that its parameters have."""
    return f(*[names[name] for name in inspect.signature(f).parameters])


def of(call, category, after=None, are_alternatives=False, **names):
    """A scenario whose message is about what these names are. The functions get those that are their parameters.

    The message may also name what most programs have: models with a tie, values, a loss, and the libraries.
    """
    usual = {name: tied() for name in ("model", "before", "value", "a", "b", "one", "other", "shared")}
    usual |= {"f": loss, "loss": loss, "new": jnp.zeros((2, 2)), "x": jnp.ones((1, 2)), "equinox": eqx, "optax": optax}
    names = {**usual, **names}
    then = after and (lambda left: called_with(after, left))
    return Scenario(lambda: called_with(call, names), category, names, then, are_alternatives)


def again(call, category, are_alternatives=False, **names):
    """A scenario in which the very call, with what the code has made of the names, is right."""
    return of(call, category, call, are_alternatives, **names)


def assert_one(a, b):
    assert a is b


def loose():
    return double(st.untie(tied()))


def untied_arrays():
    weight = jnp.arange(4.0).reshape(2, 2)
    return Net(Leaf(weight), Leaf(weight))


def tied_dict():
    return st.tie({"embed": jnp.ones(2), "head": jnp.zeros(2)}, lambda p: (p["embed"], p["head"]))


def own_class():
    """A class that is not registered, and the functions with which it could be."""

    class Own:
        def __init__(self):
            self.weight = jnp.ones(2)

    def unflatten(_, children):
        own = object.__new__(Own)
        (own.weight,) = children
        return own

    return {"Own": Own, "flatten": lambda own: ((own.weight,), None), "unflatten": unflatten}


def callable_class():
    """The same with a class whose objects can be called."""
    names = own_class()
    names["Own"].__call__ = lambda self, x: self.weight * x
    return names


def lost(provoke, category=st.UntiedWarning, after=lambda model: st.jit(lambda net: model)(tied()), **more):
    """A tie was lost, and there are many ways to keep it."""
    names = {"f": lambda x: 2 * x, "where": lambda net: net.head.weight, "updates": tied()}
    return of(provoke, category, after, **{**names, **more})


LOSING = {
    "tree_map": double,
    "tree_map_with_path": lambda net: jax.tree.map_with_path(lambda path, x: 2 * x, net),
    "apply_updates": lambda net: optax.apply_updates(net, net),
    "apply_updates_of_equinox": lambda net: eqx.apply_updates(net, net),
    "replacement": lambda net: eqx.tree_at(lambda net: net.head.weight, net, replace_fn=lambda x: x + 1),
    "replacement_by_value": lambda net: eqx.tree_at(lambda net: net.head.weight, net, net.head.weight + 1),
    "average": lambda net: optax.incremental_update(net, net, 0.1),
    "hand": lambda net: Net(Leaf(net.embed.weight + 1), Leaf(net.head.weight + 1)),
    "evaluation": lambda net: optax.contrib.schedule_free_eval_params(schedule_free_state(net), net),
    "update": lambda net: optax.sgd(0.1).update(net, optax.sgd(0.1).init(net))[0],
}


def schedule_free_state(net):
    return optax.contrib.schedule_free(optax.sgd(0.1), 0.1).init(net)


def lost_in_a_function(name, category=st.UntiedWarning):
    model = untied_arrays()
    more = {"target": tied(), "step_size": 0.1, "optimizer": optax.sgd(0.1), "model": model}
    more |= {"f": (lambda path, x: 2 * x) if name == "tree_map_with_path" else lambda x: 2 * x, "updates": model}
    more |= {"state": schedule_free_state(model), "new": jnp.zeros((2, 2)), "before": model}

    def provoke():
        with st.Context(st.Policy(on_untie="warn" if category is st.UntiedWarning else "error")):
            # Another function each time, which has not been traced before.
            st.jit(lambda net: LOSING[name](net))(model)

    return lost(provoke, category, **more)


def losing(name):
    return lambda: lost_in_a_function(name)


def tied_training_state(cls, tx):
    return cls.create(apply_fn=None, params=tied_dict(), tx=tx)


def loss_of_dict(params):
    return (params["embed"] * params["head"]).sum()


def step_of_dict(state):
    grads = st.grad(loss_of_dict, policy=st.Policy(containers=True))(state.params)
    return state.apply_gradients(grads=grads)


def assert_trains_as_one(state):
    """After a step under `st.jit`."""
    state = st.jit(lambda state: step_of_dict(state))(state)
    assert_one(state.params["embed"], state.params["head"])


@scenario
def lost_in_a_training_state_of_flax(path):
    from flax.training.train_state import TrainState

    made = tied_training_state(TrainState, optax.adam(0.1))
    names = {"apply_fn": made.apply_fn, "params": made.params, "tx": made.tx}
    return of(lambda: st.jit(lambda state: step_of_dict(state))(made), st.UntiedWarning, assert_trains_as_one, **names)


def lost_around_a_training_state(jit):
    from sharedtree.linen import TrainState

    before = tied_training_state(TrainState, optax.adam(0.1))
    loose = jax.tree.map(jnp.copy, before)
    step = lambda state: step_of_dict(state)

    def after(step, state):
        new = step(before)
        assert_one(new.params["embed"], new.params["head"])
        step(state)  # that its ties are lost has been said

    names = {"state": loose, "before": before, "step": step, "f": lambda x: x}
    return of(lambda: jit(step)(loose), st.UntiedWarning, after, are_alternatives=True, **names)


@scenario
def half_a_gradient_for_a_training_state(path):
    from sharedtree.linen import TrainState

    state = tied_training_state(TrainState, optax.sgd(0.1))
    provoke = lambda: state.apply_gradients(grads=jax.grad(loss_of_dict)(state.params))
    after = lambda state, grads: assert_trains_as_one(state.apply_gradients(grads=grads))
    return of(provoke, MISMATCH, after, state=state, loss_fn=loss_of_dict, f=lambda x: 2 * x)


@scenario
def half_a_gradient_for_a_training_state_of_modules(path):
    from sharedtree.linen import TrainState

    state = TrainState.create(apply_fn=None, params=tied(), tx=optax.sgd(0.1))
    provoke = lambda: state.apply_gradients(grads=jax.grad(loss)(state.params))
    after = lambda state, grads: state.apply_gradients(grads=grads)
    return of(provoke, MISMATCH, after, state=state, loss_fn=loss, f=lambda x: 2 * x)


@scenario
def an_untied_state_of_the_optimizer_of_a_training_state(path):
    from sharedtree.linen import TrainState

    state = tied_training_state(TrainState, optax.adam(0.1))
    loose = state.replace(opt_state=optax.adam(0.1).init(state.params))
    return of(lambda: step_of_dict(loose), MISMATCH, assert_trains_as_one, state=loose)


scenarios(
    lost_around_a_training_state=lambda: lost_around_a_training_state(st.jit),
    lost_in_an_eager_loop_of_a_training_state=lambda: lost_around_a_training_state(lambda f: f),
    a_training_state_without_a_transformation=lambda: of(
        lambda: tied_training_state(st.linen.TrainState, optax.adam),
        TypeError,
        lambda tx: tied_training_state(st.linen.TrainState, tx),
    ),
)


@scenario
def a_target_that_begins_as_the_model(path):
    @st.jit
    def step(state):
        return Net(st.tree.map(lambda x: x + 1, state.embed), state.head)

    def after(params, target):
        step(Net(params, target))
        assert_one(target.embed.weight, target.head[0].weight)

    shared = jnp.ones(2)
    params = Net(Leaf(shared), [Leaf(shared), Leaf(jnp.zeros(2))])
    return of(lambda: step(Net(params, params)), st.UntiedWarning, after, params=params)


@scenario
def lost_between_calls(path):
    f = st.jit(lambda net: net.embed.weight)
    return lost(lambda: [f(net) for net in (tied(), jax.tree.map(jnp.copy, tied()))])


def lost_in_front_of_an_optimizer(model, around=lambda f: f):
    tx, loose = st.optimizer(optax.sgd(0.1)), jax.tree.map(jnp.copy, model)
    state = tx.init(model)
    after = lambda step, model, state: tx.update(step(model), state, model)
    names = {"model": model, "updates": model, "before": model, "step": lambda net: net, "optimizer": tx}
    names["state"] = state
    return lost(lambda: around(tx.update)(loose, state, loose), after=after, **names)


def gradients_that_were_not_joined(model, loss, gradients, gradient):
    tx = st.optimizer(optax.sgd(0.1))
    state, (one, other) = tx.init(model), gradients
    after = lambda updates: tx.update(updates, state, model)
    names = {"model": model, "loss": loss, "one": one, "other": other}
    return of(lambda: tx.update(gradient, state, model), MISMATCH, after, are_alternatives=True, **names)


@scenario
def gradients_in_a_dict_that_were_added_up(path):
    weight = jnp.arange(4.0)
    model, policy = {"embed": weight, "head": weight}, st.Policy(containers=True)
    of_dict = lambda model: (model["embed"] * model["head"]).sum()
    gradients = [st.grad(of_dict, policy=policy)(model) for _ in range(2)]
    return gradients_that_were_not_joined(model, of_dict, gradients, jax.tree.map(jnp.add, *gradients))


@scenario
def an_array_that_was_tied_and_is_a_value(path):
    identity = st.jit(lambda params: params)

    def after(policy, dag, params):
        with st.Context(policy):
            identity(tied_dict())
        identity(dag)
        identity(params)

    names = {"f": lambda params: params, "params": tied_dict()}
    return of(lambda: identity(tied_dict()), st.UntiedWarning, after, **names)


def _retraced(cls, function=None):
    # A function of its own each time: one that was traced before would not be traced again.
    f = st.jit(function or (lambda m: m.x * m.k))

    def provoke():
        for k in range(5):
            f(cls(jnp.ones(2), k))

    return provoke


def _retraced_by(make):
    f = st.jit(lambda m: m.x)

    def provoke():
        kept = [Scaled(jnp.ones(2), make()) for _ in range(5)]
        for m in kept:
            f(m)

    return provoke


class WithoutEquality:
    """Two of these are equal only if they are one."""


class Incomparable:
    __hash__ = object.__hash__

    def __eq__(self, other):
        return np.ones(2)


@scenario
def a_model_that_is_not_mapped_and_changes(path):
    def add(model, x):
        model.count = model.count + x

    def add_mean(model, x):
        model.count = model.count + jax.lax.pmean(x, "batch")

    xs, in_axes = jnp.arange(2.0), (None, 0)

    def after(f, model):
        stacked = model.count.ndim
        f = st.vmap(add, in_place=True) if stacked else f
        f(model, xs)
        np.testing.assert_array_equal(model.count, xs if stacked else xs.mean())

    provoke = lambda model: st.vmap(add, in_axes=in_axes, in_place=True)(model, xs)
    names = {"f": add_mean, "model": Mutable(count=jnp.zeros(())), "in_axes": in_axes, "size": 2}
    return of(provoke, ValueError, after, are_alternatives=True, **names)


@scenario
def a_donated_state_that_the_model_keeps_too(path):
    make_model = lambda: eqx.nn.BatchNorm(2, axis_name="batch", mode="ema")
    step = st.jit(lambda model, state: state, donate_argnums=1)
    model = make_model()
    names = {"model": model, "state": eqx.nn.State(model), "make_model": make_model}
    return again(lambda model, state: step(model, state), INCONSISTENT, are_alternatives=True, **names)


@scenario
def a_reference_that_would_be_differentiated(path):
    tally = Tally(jax.new_ref(jnp.zeros(())), jnp.ones(2))
    after = lambda f: st.grad(f, wrt=lambda path, value: not isinstance(value, jax.Ref))(tally)
    return of(lambda f: st.grad(f)(tally), TypeError, after, f=lambda tally: (tally.step**2).sum())


@scenario
def a_static_argument_that_is_shared(path):
    f = st.jit(lambda model, config: model, static_argnums=1)
    model = dataclasses.make_dataclass("Model", ["weight", "config"], eq=False)
    jax.tree_util.register_dataclass(model, ["weight", "config"], [])

    class Config(tuple):
        __slots__ = ()

    jax.tree_util.register_pytree_node(Config, lambda c: (list(c), None), lambda _, c: Config(c))
    made = model(jnp.ones(2), Config([Mutable(x=1)]))
    static = st.preserve_identities(jax.jit, static_argnums=1)(lambda m, c: m.weight)
    names = {"f": lambda m, c: f, "model": made, "config": made.config}
    return of(lambda model, config: static(model, config), INCONSISTENT, **names)


@scenario
def sharing_under_a_transform_that_is_not_registered(path):
    transform = lambda f, in_axes=0, out_axes=0: jax.vmap(f, in_axes, out_axes)
    provoke = lambda a, b: st.preserve_identities(transform)(lambda a, b: loss(a))(a, b)
    return of(provoke, INCONSISTENT, are_alternatives=True, transform=transform, a=(model := tied()), b=model)


@scenario
def a_gradient_that_lacks_a_part(path):
    def both_losses(encoder, decoder):
        return (encoder.weight * decoder.embed.weight).sum()

    decoder = untied_arrays()
    names = {"both_losses": both_losses, "encoder": Leaf(decoder.embed.weight), "decoder": decoder, "equinox": eqx}
    return again(lambda encoder, decoder: st.grad(both_losses)(encoder, decoder), st.UntiedWarning, **names)


@scenario
def a_model_used_twice_of_which_one_is_differentiated(path):
    both_losses = lambda model, target: (model.embed.weight * target.head.weight).sum()
    call = lambda model, target: st.grad(both_losses)(model, target)
    model = tied()
    names = {"both_losses": both_losses, "model": model, "target": model}
    return again(call, st.UntiedWarning, **names)


LOST = st.errors.LostChangeWarning


def counted():
    """A function that counts its calls in a module."""

    def loss(counter, x=1.0):
        counter.count = counter.count + 1
        return counter.w * x

    return loss


def not_lost(call):
    """A call without a warning; the module that it was given is as it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


@scenario
def a_change_that_an_inner_transform_loses(path):
    loss = counted()
    after = lambda inner: not_lost(lambda: st.jit(lambda counter: inner(counter), in_place=True)(Counter()))
    outer = lambda: st.jit(lambda counter: st.grad(loss)(counter), in_place=True)(Counter())
    return of(outer, LOST, after, are_alternatives=True, f=counted())


@scenario
def a_change_that_a_branch_loses(path):
    loss = counted()

    def after(inner):
        own = counted()
        not_lost(lambda: st.jit(lambda counter: inner(True, own, own, counter), in_place=True)(Counter()))

    outer = lambda: st.jit(lambda counter: st.cond(True, loss, loss, counter), in_place=True)(Counter())
    return of(outer, LOST, after, are_alternatives=True, functools=functools)


@scenario
def a_change_of_scratch_that_an_inner_transform_loses(path):
    def loss(tally):
        tally.count = tally.count + 1
        return tally.step**2

    def returning(tally):
        tally.count = tally.count + 1
        return tally.step**2, tally

    def after(inner):
        not_lost(lambda: st.jit(lambda tally: inner(tally), in_place=True)(Tally(jnp.ones(()), jnp.ones(()))))

    outer = lambda: st.jit(lambda tally: st.grad(loss)(tally), in_place=True)(Tally(jnp.ones(()), jnp.ones(())))
    names = {
        "f": loss,
        "result": 0.0,
        "tally": Tally(jnp.ones(()), jnp.ones(())),
        "inner": st.grad(returning, has_aux=True),
    }
    return of(outer, LOST, after, are_alternatives=True, **names)


@scenario
def a_mask_of_the_shape_of_a_state(path):
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    mask = jax.tree.map(lambda _: True, nnx.state(model, nnx.Param))
    provoke = lambda mask: st.optimizer(optax.masked(optax.sgd(0.1), mask)).init(model)
    return again(provoke, st.errors.SharingMismatchError, model=model, mask=mask, nnx=nnx)


@scenario
def a_change_that_a_step_loses(path):
    loss = counted()
    after = lambda f: not_lost(lambda: f(Counter()))
    return of(lambda: st.jit(loss)(Counter()), LOST, after, are_alternatives=True, loss=counted())


@scenario
def a_change_that_a_transform_of_a_transform_loses(path):
    loss = counted()
    after = lambda f: not_lost(lambda: f(Counter()))
    return of(lambda: st.jit(st.grad(loss))(Counter()), LOST, after, loss=counted())


@scenario
def a_change_of_an_object_for_all_elements(path):
    loss = counted()
    after = lambda f: not_lost(lambda: f(Counter(), jnp.ones(2)))
    call = lambda: st.vmap(loss, in_axes=(None, 0))(Counter(), jnp.ones(2))
    return of(call, LOST, after, loss=counted())


@scenario
def a_change_in_the_condition_of_a_loop(path):
    def condition(value):
        value[0].count = value[0].count + 1
        return value[1] < 2

    def loop(condition):
        st.while_loop(condition, lambda value: (value[0], value[1] + 1), (Counter(), 0))

    return of(lambda: loop(condition), LOST, lambda f: not_lost(lambda: loop(f)), condition=condition)


@scenario
def a_change_in_a_decorated_method(path):
    class Own(Counter):
        @st.jit
        def bump(self, x):
            self.count = self.count + x

    after = lambda f: not_lost(lambda: f(Own(), 1.0))
    return of(lambda: Own().bump(1.0), LOST, after, are_alternatives=True, Own=Own)


@scenario
def a_change_of_a_module_that_is_called(path):
    after = lambda f: not_lost(lambda: f(Counter(), 1.0))
    return of(lambda: st.jit(Counter())(1.0), LOST, after)


def parameters_unsaid():
    model = nnx.Dict(kernel=Kernel(jnp.ones(2)), bias=nnx.Param(jnp.ones(2)))
    provoke = lambda: st.optimizer(optax.sgd(0.1)).init(model)
    after = lambda tx: not_lost(lambda: tx.init(model))
    names = {"tx": optax.sgd(0.1), "nnx": nnx, "Kernel": Kernel}
    return of(provoke, st.errors.UnsaidVariableWarning, after, are_alternatives=True, **names)


def step_of(tx, model, wrt):
    gradient = st.grad(lambda m: m["a"].sum(), wrt=wrt)(model)
    return tx.update(gradient, tx.init(model), model)


def only_state():
    model = nnx.Dict(mean=nnx.BatchStat(jnp.ones(2)))
    provoke = lambda: st.optimizer(optax.sgd(0.1)).init(model)
    return of(provoke, ValueError, lambda tx: tx.init(model), tx=optax.sgd(0.1))


def closed_over(hold):
    """The function has the module that is differentiated; `hold` makes it of one."""

    def scenario():
        model = Leaf(jnp.ones((2, 2)))
        f = hold(model)
        call = lambda f: not_lost(lambda: st.grad(f)(model))
        return of(lambda: st.grad(f)(model), st.UntiedWarning, call, f=f, argument=model, held=model)

    return scenario


def held_by_closure():
    model = Leaf(jnp.ones((2, 2)))

    def after(held):
        not_lost(lambda: st.grad(lambda argument: (argument.weight * held.weight).sum())(model))

    call = lambda held: st.grad(lambda argument: (argument.weight * held.weight).sum())(held)
    return of(call, st.UntiedWarning, after, held=model, argument=model)


def product(argument, held):
    return (argument.weight * held.weight).sum()


class Squared(Leaf):
    def square(self, argument):
        return (self.weight * argument.weight).sum()

    __call__ = square


def bound(take):
    def scenario():
        model = Squared(jnp.ones((2, 2)))
        call = lambda f: not_lost(lambda: st.grad(f)(model))
        return of(lambda: st.grad(take(model))(model), st.UntiedWarning, call, argument=model)

    return scenario


scenarios(
    variables_that_may_be_state=parameters_unsaid,
    an_optimizer_of_state=only_state,
    held_by_a_closure=held_by_closure,
    held_by_a_partial=closed_over(lambda model: functools.partial(product, model)),
    held_by_a_partial_by_name=closed_over(lambda model: functools.partial(product, held=model)),
    held_by_a_default=closed_over(lambda model: lambda argument, held=model: product(argument, held)),
    held_by_a_method=bound(lambda model: model.square),
    held_as_the_function=bound(lambda model: model),
)


@scenario
def a_method_in_place(path):
    class Counter(st.Module):
        def __init__(self):
            self.count = jnp.zeros(())

        def add(self, x):
            self.count = self.count + x

    def after(f):
        st.jit(f, in_place=True)(model, 2.0)
        assert model.count == 2

    model = Counter()
    return of(lambda: st.jit(model.add, in_place=True), TypeError, after)


@scenario
def two_replacements_for_what_is_tied(path):
    where = lambda m: (m.embed.weight, m.head.weight)
    both = jnp.zeros((2, 2)), jnp.ones((2, 2))

    def after(model):
        return "replaced" if model.embed.weight is both[0] else st.tree.at(where, model, both)

    provoke = lambda model: st.tree.at(where, model, both)
    return of(provoke, INCONSISTENT, after, are_alternatives=True, model=tied(), new=both[0])


@scenario
def a_cotangent_of_another_shape(path):
    pullback = st.vjp(lambda net: net, tied())[1]
    after = lambda cotangent: pullback(cotangent)
    return of(lambda: pullback(tied().embed), MISMATCH, after, result=tied())


def gradient_by_rule(cotangents):
    f = st.custom_vjp(loss)
    f.defvjp(lambda net: (f(net), net), lambda net, y: cotangents(net, y))
    return st.grad(f)(tied())


@scenario
def rules_of_which_nobody_knows_what_they_are_handed(path):
    class OfNewerJax(jax.custom_vjp):
        def defremat(self, rule):
            raise AssertionError

    st.register_transform(OfNewerJax, jax.custom_vjp)
    return of(lambda: st.preserve_identities(OfNewerJax)(loss).defremat, TypeError, f=loss, model=tied())


def on_host(dag):
    return jax.tree.map(lambda w: 2 * np.asarray(w), dag)


def solved(function, b):
    return jax.tree.map(jnp.divide, b, function(jax.tree.map(jnp.ones_like, b)))


ON_DAGS = {
    jax.lax.custom_root: {"f": lambda dag: dag, "solve": lambda f, dag: dag, "tangent_solve": solved, "guess": tied()},
    jax.lax.custom_linear_solve: {"matvec": lambda dag: double(dag), "b": tied(), "solve": solved},
    **{transform: {"f": double} for transform in (jax.closure_convert, eqx.filter_closure_convert)},
    **{
        transform: {"host": on_host, "shapes": st.eval_shape(tied)}
        for transform in (jax.pure_callback, jax.experimental.io_callback, eqx.filter_pure_callback)
    },
    jax.debug.callback: {"host": on_host},
}


def on_a_dag(transform, names):
    afters = {
        jax.closure_convert: lambda converted, constants, model: assert_doubles(
            lambda dag: converted(dag, *constants), model
        ),
        eqx.filter_closure_convert: lambda converted, model: assert_doubles(converted, model),
        jax.debug.callback: None,
    }

    def assert_doubles(f, model):
        assert loss(f(st.Dag(model)).tree) == 4 * loss(model)

    def assert_is_tied(result):
        assert result.embed is result.head

    after = afters.get(transform, assert_is_tied)
    return lambda: of(lambda: st.preserve_identities(transform), TypeError, after, jax=jax, **names)


scenarios(
    **{
        f"{transform.__module__.partition('.')[0]}_{transform.__name__}_on_a_dag": on_a_dag(transform, names)
        for transform, names in ON_DAGS.items()
    }
)


@scenario
def two_tangents_of_one_leaf(path):
    f = st.custom_jvp(lambda net: net)
    f.defjvp(lambda primals, tangents: (f(*primals), double(st.untie(tangents[0]))))
    provoke = lambda: st.grad(lambda net: loss(f(net)))(tied())
    return of(provoke, MISMATCH, f=jnp.ones_like, tangent=jax.grad(loss)(tied()))


@scenario
def rules_in_place(path):
    def ruled(f):
        f.defjvp(lambda primals, tangents: (loss(*primals), tangents[0].embed.weight.sum()))
        return f

    def after(f):
        with st.Context(st.Policy(in_place=True)):
            assert st.grad(ruled(f), in_place=False)(tied()).embed.weight.tolist() == [[1, 1], [1, 1]]

    return of(lambda f: ruled(st.custom_jvp(f, in_place=True))(tied()), ValueError, after, f=loss)


@scenario
def one_array_for_two_paths(path):
    def gradient(say):
        f = st.custom_vjp(loss)
        f.defvjp(lambda m: (loss(m), m), lambda m, y: (say(Net(m.head, m.head), m),))
        return st.grad(lambda m: f(m))(tied())

    def around(run, names):
        def say(g, m):
            names.update(cotangent=g, model=m)
            run()
            return names["cotangent"]

        assert gradient(say).embed is not None

    made = of(gradient, MISMATCH, are_alternatives=True, say=lambda g, m: g)
    return dataclasses.replace(made, around=around)


@scenario
def integers_without_a_value_in_a_transpose(path):
    f = lambda model: model.x * model.k[0]

    def after(abstract):
        assert st.linear_transpose(f, abstract)(jnp.ones(2))[0].x.tolist() == [0, 1]

    provoke = lambda model: st.linear_transpose(f, jax.eval_shape(lambda: model))
    with pytest.raises(TypeError, match=r"`jax.ShapeDtypeStruct` at `model\.k\[0\]`, but"):
        provoke(Scaled(jnp.ones(2), [jnp.arange(2)]))
    return of(provoke, TypeError, after, model=Scaled(jnp.ones(2), [jnp.arange(2)]))


def of_head(net):
    return net.head.weight.sum()


def _selected_at_one_path(category, loss=loss, **model):
    gradient = lambda model, wrt: st.grad(loss, wrt=wrt)(model)
    ((name, value),) = model.items()
    at_one = lambda path, value: path[0] == "head"
    after = lambda names: gradient(names[name], names["wrt"])
    return Scenario(lambda: gradient(value, at_one), category, {**model, "wrt": at_one}, after, are_alternatives=True)


@scenario
def a_filter_of_nnx_for_one_argument(path):
    nnx = pytest.importorskip("flax.nnx")
    return of(lambda f: st.grad(f, argnums=nnx.DiffState(0, nnx.Param)), TypeError, f=of_head, nnx=nnx)


def _made_for_another(make, call):
    f = st.jit(lambda net: net.weight * net.note)
    one, two = Noted(jnp.ones(2), 1), Noted(jnp.ones(2), 2)
    made = make(f, one)

    def after(program):
        assert call(program, two).tolist() == [2, 2]

    return of(lambda: call(made, two), MISMATCH, after, f=f, args=(two,))


@scenario
def options_inside_a_module_of_a_transform_that_is_not_known(path):
    transform = lambda f, in_axes, out_axes=0: jax.vmap(f, in_axes, out_axes)
    again = lambda: st.preserve_identities(transform)(loss, in_axes=(Net(0, 0),))
    return of(again, TypeError, lambda: again()(tied()), transform=transform)


@scenario
def in_place_without_in_specs(path):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    model = jax.device_put(tied(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    mapped = st.shard_map(mesh=mesh, out_specs=jax.sharding.PartitionSpec(), policy=st.Policy(in_place=True))
    after = lambda in_specs: mapped(loss, in_specs=in_specs)(model)
    return of(lambda: mapped(loss)(model), ValueError, after, jax=jax)


def _two_places(call):
    """A scenario in which rules by name send a tied array to a place and to none."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rule = lambda path, leaf: place if "embed" in jax.tree_util.keystr(path) else None
    names = {"rule": rule, "shardings": Net(Leaf(place), Leaf(None)), "net": (model := untied_arrays())}
    return again(call, INCONSISTENT, are_alternatives=True, **names, model=model, result=model)


@scenario
def axes_that_differ_at_a_tie(path):
    call = lambda net: st.vmap(loss, in_axes=(Net(Leaf(0), Leaf(1)),))(net)
    return again(call, st.UntiedWarning, net=untied_arrays())


@scenario
def a_layer_that_is_stacked_with_itself(path):
    stack = lambda *leaves: jnp.stack(leaves)
    trees = [Net(Leaf(jnp.ones(2) * i), layer) for i, layer in enumerate([Leaf(jnp.ones(2))] * 3)]
    call = lambda trees: st.tree.map(stack, *trees)
    return again(call, st.UntiedWarning, trees=trees, shared=None, f=stack)


@scenario
def a_reference_in_a_branch_in_place(path):
    count = jax.new_ref(jnp.zeros(()))
    model = Mutable(a=count, b=count, c=jnp.zeros(()))

    def add_one(model):
        model.a[...] += 1

    def branch(model, in_place):
        st.cond(True, add_one, lambda model: None, model, in_place=in_place)

    jitted = st.jit(branch, static_argnames="in_place")

    def after():
        # The code makes a transform; this is how it is called.
        branch(model, in_place=False)
        jitted(model, in_place=False)
        assert float(count[...]) == 2
        assert model.a is model.b is count

    with pytest.raises(ValueError, match="`operands.*is a `jax.Ref`"):
        branch(model, in_place=True)
    return of(lambda: jitted(model, in_place=True), ValueError, after)


@scenario
def a_list_that_a_loop_parts_in_place(path):
    def body(model, _):
        if model.first is model.second:
            model.second = list(model.second)
        model.first[0], model.second[0] = model.first[0] + 1, model.second[0] + 2
        return model, None

    shared = [jnp.zeros(())]
    policy = st.Policy(in_place=True, on_untie="ignore")
    scan = lambda init: st.scan(body, init, length=2, policy=policy)
    return again(scan, INCONSISTENT, init=Mutable(first=shared, second=shared))


@scenario
def a_layer_that_a_loop_replaces_in_place(path):
    def body(tally, x):
        tally.count = Leaf(tally.count.weight + x)
        return tally, None

    provoke = lambda: st.scan(body, Tally(Leaf(jnp.ones(2)), None), jnp.ones(2), in_place=True)
    return of(provoke, MISMATCH, layer=Mutable(weight=0), new=jnp.ones(2))


def without(module, call, imported_anew=()):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            for name in imported_anew:
                patch.delitem(sys.modules, name, raising=False)
            call()

    return of(provoke, ImportError)


@scenario
def a_training_state_without_flax(path):
    name = "sharedtree.linen"
    return without("flax.linen.fp8_ops", lambda: importlib.import_module(name), imported_anew=[name])


@scenario
def a_file_to_look_at(path):
    st.save(path / "model.safetensors", {"a": jnp.ones(2)})
    names = {"path": path / "model.safetensors"}
    return Scenario(lambda: st.summary("model.safetensors"), UNREGISTERED, names)


@scenario
def an_adapter_that_is_no_function(path):
    transform = lambda f, x: f(x)
    provoke = lambda: st.register_transform(transform, 3)
    return of(provoke, TypeError, transform=transform, adapter=jax.jit)


def _takes_operands(wrong):
    transform = lambda f, x: f(x)
    provoke = lambda: st.register_transform(transform, wrong, takes_operands=True)
    after = lambda: st.preserve_identities(transform)(loss, tied())
    return of(provoke, TypeError, after, transform=transform, adapter=lambda call, f, x: x)


@scenario
def a_branch_that_loses_a_tie_of_modules(path):
    loosened = lambda net: Net(Leaf(net.embed.weight), Leaf(net.head.weight))
    branch = lambda model: st.cond(True, lambda net: net, loosened, model)

    def after(model, result):
        branch(model)
        assert result.embed is not result.head

    return of(lambda: branch(tied()), MISMATCH, after, model=st.untie(tied()), f=lambda x: 2 * x, result=tied())


@scenario
def a_carry_of_two_models_that_begin_as_one(path):
    """The fix must leave the ties inside each model."""

    def body(state, _):
        online = st.tree.map(lambda w: w + 1, state["online"])
        return {"online": online, "target": st.tree.map(lambda w: 2 * w, state["target"])}, None

    def after(init):
        assert init["target"].embed is init["target"].head
        assert init["online"].embed is init["online"].head
        state, _ = st.scan(body, init, length=2)
        assert state["target"].embed is state["target"].head
        assert state["online"].embed is state["online"].head

    begin = lambda init: st.scan(body, init, length=2)
    return of(begin, MISMATCH, after, init=dict.fromkeys(("online", "target"), tied()), f=lambda x: 2 * x)


def _state(model, state, check):
    def after(names):
        if "report" not in names:  # the other fix
            assert check(st.load_state(names["model"], names["state"]))

    names = {"model": model, "state": state}
    return Scenario(lambda: st.load_state(model, state), MISMATCH, names, after, are_alternatives=True)


@scenario
def a_state_that_lacks_a_tie(path):
    state = {"embed": {"weight": jnp.zeros((2, 2))}, "head": {"weight": jnp.ones((2, 2))}}
    return _state(tied(), state, lambda loaded: loaded.head.weight is state["embed"]["weight"])


@scenario
def a_class_with_functions_for_its_state(path):
    class Layer:
        pass

    register = lambda Layer: st.register_state(Layer, vars, lambda layer, _: layer)
    register(Layer)
    return of(register, ValueError, Layer=Layer, to_state=vars, from_state=lambda layer, _: layer)


def _assigning(value, better=None, before=None):
    module = Free()
    module.attribute = before
    names = {"module": module, "value": value if better is None else better}
    return of(lambda: setattr(module, "attribute", value), UNREGISTERED, **names)


@scenario
def a_mark_past_the_assignment(path):
    module = Free()
    vars(module)["weight"] = st.parameter(jnp.ones(2))
    return of(lambda: jax.tree.leaves(module), UNREGISTERED)


@scenario
def parameters_of_another_module(path):
    module, other = Free(), Free()
    module.layer, other.layer = Free(), [Free()]
    return of(lambda module: module.merge(other), MISMATCH, module=module, update=lambda x: x)


def _cycle():
    loop = [jnp.ones(1)]
    loop.append(loop)
    return loop


def _flattened_by_two_threads(model):
    """Flattens in another thread while a flatten function runs in this one."""
    context = st.Context()

    def flatten():
        with context:
            st.tree.flatten(model)

    class Flattening:
        pass

    def parts(_):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(flatten).result()
        return (), None

    st.register_node(Flattening, parts, lambda *_: Flattening())
    with context:
        st.tree.flatten([Flattening()])


def _flattened():
    with st.Context():
        return [st.tree.flatten({name: [jnp.ones(2)]}) for name in "ab"]


scenarios(
    two_places_of_an_argument=lambda: _two_places(
        lambda net, shardings: st.jit(lambda net: loss(net), in_shardings=(shardings,))(net)
    ),
    two_places_of_a_result=lambda: _two_places(
        lambda result, shardings: st.jit(lambda: st.tree.map(jnp.sin, result), out_shardings=shardings)()
    ),
    an_optimizer_as_an_argument=lambda: of(
        lambda f: st.jit(f)(tied(), ADAM), TypeError, lambda f: f(tied(), ADAM), f=lambda model, tx: tx.init(model)
    ),
    lost_in_front_of_an_optimizer=lambda: lost_in_front_of_an_optimizer(tied()),
    lost_from_a_dict=lambda: lost_in_front_of_an_optimizer(dict.fromkeys(("embed", "head"), jnp.arange(4.0))),
    a_static_number_that_changes=lambda: of(
        _retraced(Scaled),
        st.RetraceWarning,
        lambda m: st.explain(st.jit(lambda m: m.k), m).leaves[1].kind == "traced" or 1 / 0,
        m=Scaled(jnp.ones(2), 3),
    ),
    a_model_too_deep_for_optax=lambda: of(
        lambda: st.optimizer(optax.adam(0.1)).init(lists(9_500, jnp.ones(1))), st.errors.DepthError
    ),
    an_unregistered_class=lambda: again(lambda Own: st.Dag(Own()), UNREGISTERED, are_alternatives=True, **own_class()),
    an_update_of_a_static_leaf=lambda: again(
        lambda model, updates: st.apply_updates(model, updates),
        MISMATCH,
        model=Scaled(jnp.ones(2), 3),
        updates=Scaled(jnp.ones(2), 1),
        eqx=eqx,
    ),
    an_unregistered_class_that_can_be_called=lambda: again(
        lambda Own: st.Dag([Own()]), UNREGISTERED, are_alternatives=True, **callable_class()
    ),
    a_partial_that_holds_arrays=lambda: of(
        lambda partial: st.ties([partial]), UNREGISTERED, partial=functools.partial(jnp.dot, jnp.ones(2))
    ),
    a_method_of_a_module=lambda: of(
        lambda method: st.ties([method]), UNREGISTERED, method=types.MethodType(lambda net: net, tied())
    ),
    an_attribute_that_cannot_be_seen=lambda: of(
        lambda Own: setattr(Free(), "attribute", Own()), UNREGISTERED, are_alternatives=True, **own_class()
    ),
    a_tracer_in_a_static_place=lambda: of(
        lambda: st.jit(lambda x: Noted(x, x))(jnp.ones(2)),
        st.errors.StaticTracerError,
        cls=(own := own_class()).pop("Own"),
        **own,
    ),
    a_wrapper_without_its_functions=lambda: again(
        lambda tree: st.unwrap_shared(tree),
        TypeError,
        model=(model := eqx.nn.Shared((jnp.ones(2), jnp.ones(2)), lambda pair: pair[1], lambda pair: pair[0])),
        tree=eqx.filter(model, eqx.is_array),
    ),
    map_of_a_tied_and_an_untied_tree=lambda: again(
        lambda first_tree, second_tree: st.tree.map(lambda x, y: x, first_tree, second_tree),
        MISMATCH,
        are_alternatives=True,
        first_tree=tied(),
        second_tree=double(tied()),
    ),
    updates_that_optax_itself_made=lambda: again(
        lambda model, updates: st.apply_updates(model, updates),
        MISMATCH,
        tx=(tx := optax.adam(0.1)),
        state=(state := tx.init(tied())),
        gradient=(gradient := st.grad(loss)(tied())),
        updates=tx.update(gradient, state)[0],
    ),
    updates_in_a_dict_that_were_mapped=lambda: again(
        lambda model, updates: st.apply_updates(model, updates),
        MISMATCH,
        tx=optax.sgd(0.1),
        loss=lambda p: (p["embed"] * p["head"]).sum(),
        model=(model := tied_dict()),
        gradient=st.tree.map(jnp.ones_like, model),
        updates=jax.tree.map(jnp.ones_like, model),
    ),
    layers_of_two_classes=lambda: of(
        lambda model: st.tie(model, lambda m: (m[0], m[1])),
        MISMATCH,
        lambda model: assert_one(model[0].weight, model[1].weight),
        model=[eqx.nn.Embedding(4, 2, key=jax.random.key(0)), eqx.nn.Linear(2, 4, key=jax.random.key(0))],
    ),
    a_cast_to_integers=lambda: of(
        lambda model: st.tree.cast(model, jnp.int32),
        TypeError,
        lambda model: assert_one(model.embed, model.head),
        are_alternatives=True,
        dtype=jnp.int32,
    ),
    a_cast_of_a_reference=lambda: of(
        lambda ref: st.tree.cast([ref], jnp.bfloat16), TypeError, ref=jax.new_ref(jnp.ones(2)), dtype=jnp.bfloat16
    ),
    an_average_of_another_shape=lambda: again(
        lambda new, old: st.incremental_update(new, old, 0.1), MISMATCH, new=[jnp.ones(2)], old=[jnp.ones(3)]
    ),
    an_average_without_the_ties=lambda: again(
        lambda new, old: st.incremental_update(new, old, 0.1),
        MISMATCH,
        are_alternatives=True,
        new=tied_dict(),
        old=st.untie(tied_dict()),
    ),
    a_specification_with_static_values=lambda: of(
        lambda model, filter_spec: st.tree.partition(model, filter_spec),
        MISMATCH,
        lambda model, filter_spec: eqx.partition(model, filter_spec),
        are_alternatives=True,
        model=(model := [tied(), jax.nn.relu]),
        filter_spec=st.tree.map(lambda _: False, model),
    ),
    a_replacement_that_cannot_take_the_place_of_what_was_tied=lambda: again(
        lambda model: st.tree.at(lambda m: m.embed, model, Leaf(jnp.zeros(3))), st.UntiedWarning, model=untied_arrays()
    ),
    a_gradient_of_what_another_filter_selects=lambda: of(
        lambda model, wrt: step_of(st.optimizer(optax.adam(0.1)), model, wrt),
        MISMATCH,
        lambda tx, state, model, wrt: tx.update(st.grad(lambda m: m["a"].sum(), wrt=wrt)(model), state, model),
        model={"a": jnp.ones(2), "b": jnp.ones(3)},
        tx=optax.adam(0.1),
        wrt=lambda path, value: path == ("a",),
    ),
    a_tag_in_a_tree_of_filters=lambda: again(
        lambda filter_spec: st.tree.partition({"a": nnx.Param(jnp.ones(2), tag="t"), "b": 1}, filter_spec),
        MISMATCH,
        filter_spec={"a": "t", "b": False},
    ),
    a_filter_that_looks_at_too_many_paths=lambda: again(
        lambda model, filter_spec: st.tree.partition(model, filter_spec),
        ValueError,
        model=tower(40, jnp.ones(2)),
        filter_spec=lambda path, value: True,
    ),
    a_leaf_that_a_state_keeps_at_one_path=lambda: again(
        lambda model: st.state(model, keep=lambda path, value: path == ("embed",)),
        INCONSISTENT,
        model=tied_dict(),
    ),
    labels_that_disagree_at_a_tie=lambda: again(
        lambda model: st.optimizer(optax.masked(optax.sgd(0.1), Net(Leaf(True), Leaf(False)))).init(model), INCONSISTENT
    ),
    mutation_under_a_transform_that_is_not_registered=lambda: again(
        lambda transform: st.preserve_identities(transform, policy=st.Policy(in_place=True))(lambda m: None)(tied()),
        ValueError,
        transform=lambda f: jax.jit(f),
    ),
    tangents_without_the_ties=lambda: again(
        lambda value, tangent: st.jvp(loss, (value,), (tangent,)), MISMATCH, f=jnp.ones_like, tangent=st.untie(tied())
    ),
    a_tangent_of_a_static_number=lambda: again(
        lambda value, tangent: st.linearize(lambda net: net.x * net.k, value)[1](tangent),
        MISMATCH,
        value=Scaled(jnp.ones(2), 2.5),
        argument=Scaled(jnp.ones(2), 2.5),
        tangent=Scaled(jnp.ones(2), 2.5),
    ),
    cotangents_of_two_shapes=lambda: again(
        lambda leaf, cotangent: gradient_by_rule(lambda net, y: (Net(Leaf(leaf), Leaf(cotangent)),)),
        MISMATCH,
        leaf=jnp.ones((2, 2)),
        cotangent=jnp.array(1.0),
    ),
    lost_under_a_vanilla_jit=lambda: lost_in_front_of_an_optimizer(tied(), jax.jit),
    lost_in_a_function_as_an_error=lambda: lost_in_a_function("tree_map", st.errors.UntiedError),
    **{f"lost_by_{name}": losing(name) for name in LOSING},
    gradients_by_path=lambda: gradients_that_were_not_joined(tied(), loss, (tied(), tied()), jax.grad(loss)(tied())),
    the_state_of_an_untied_model=lambda: of(
        lambda model: ADAM.update(model, optax.adam(0.1).init(tied()), model),
        MISMATCH,
        lambda model, state: ADAM.update(model, state, model),
        optimizer=ADAM,
    ),
    no_wrapper_to_unwrap=lambda: of(
        lambda model: st.unwrap_shared(model),
        TypeError,
        lambda model: st.assert_same_sharing(model.embed, model.head),
        model=double(tied()),
    ),
    a_wrapper_that_computes=lambda: of(
        lambda: st.unwrap_shared(
            eqx.nn.Shared((jnp.ones((2, 2)), jnp.ones((2, 2))), lambda pair: pair[1], lambda pair: pair[0].T)
        ),
        MISMATCH,
        are_alternatives=True,
        model=loose(),
    ),
    a_filter_that_disagrees=lambda: again(
        lambda spec: st.tree.filter(untied_arrays(), spec), INCONSISTENT, spec=Net(Leaf(True), Leaf(False))
    ),
    structures_out_of_order=lambda: of(
        lambda flattened: st.tree.unflatten(*reversed(flattened[1])),
        st.errors.ContextMismatchError,
        flattened=_flattened(),
    ),
    one_context_in_two_threads=lambda: of(
        _flattened_by_two_threads,
        st.errors.ContextMismatchError,
        lambda leaves, structure, model: st.ties(st.tree.unflatten(structure, leaves)) == st.ties(model) or 1 / 0,
    ),
    a_cycle=lambda: of(lambda: st.Dag(_cycle()), st.errors.CycleError, Callable=Callable),
    a_node_and_a_part_of_it_replaced=lambda: of(
        lambda model, inner, outer: st.tree.at(lambda m: (m.embed, m.embed.weight), model, (outer, inner)),
        MISMATCH,
        inner=jnp.zeros((2, 2)),
        outer=Leaf(jnp.ones((2, 2))),
    ),
    operands_without_an_adapter=lambda: of(
        lambda f, model: st.preserve_identities(lambda f, operand: f(operand))(f, model), TypeError
    ),
    a_program_in_place=lambda: of(
        lambda f, model: st.export(st.jit(f, in_place=True))(model),
        ValueError,
        lambda exported: exported.call(tied()) == loss(tied()) or 1 / 0,
    ),
    a_part_of_what_belongs_together=lambda: of(
        lambda model: st.preserve_identities(lambda f: lambda *args: f(*args)[-1])(lambda net: (net.head, [net.head]))(
            model
        ),
        MISMATCH,
    ),
    a_part_of_the_arguments=lambda: of(
        lambda model: st.preserve_identities(lambda f: lambda models: f(models[1]))(loss)([model, model]),
        MISMATCH,
        f=st.preserve_identities(lambda f: lambda *args: f(args[-1]))(lambda dag: dag.tree),
    ),
    a_part_of_the_arguments_in_place=lambda: of(
        lambda transform: st.preserve_identities(transform, in_place=True)(loss)([tied(), tied()]),
        MISMATCH,
        lambda f: f([tied(), tied()]) == loss(tied()) or 1 / 0,
        transform=of_the_second,
    ),
    a_state_with_a_tie_that_the_model_lacks=lambda: _state(st.untie(tied()), st.state(tied()), st.ties),
    an_array_that_is_selected_at_one_path=lambda: _selected_at_one_path(st.UntiedWarning, net=untied_arrays()),
    a_layer_that_is_selected_at_one_path=lambda: _selected_at_one_path(INCONSISTENT, net=tied()),
    a_leaf_of_a_dag_that_is_selected_at_one_path=lambda: _selected_at_one_path(
        INCONSISTENT, lambda dag: loss(dag.tree), dag=st.Dag(tied())
    ),
    a_marked_attribute_that_gets_a_text=lambda: _assigning("text", "text", before=st.parameter(jnp.ones(2))),
    a_static_field_that_changes=lambda: of(_retraced(Noted, lambda m: m.weight * m.note), st.RetraceWarning),
    a_function_that_is_made_anew=lambda: of(
        _retraced_by(lambda: lambda x: x),
        st.RetraceWarning,
        lambda act: (st.tree.structure(Scaled(jnp.ones(2), act)) and act(-1.0) == -0.1) or 1 / 0,
        functools=functools,
        leaky_relu=lambda x, negative_slope: x * negative_slope,
    ),
    an_object_that_is_made_anew=lambda: of(_retraced_by(WithoutEquality), st.RetraceWarning),
    ties_of_the_first_only=lambda: again(lambda a, b: st.assert_same_sharing(a, b), MISMATCH, b=double(tied())),
    ties_of_the_second_only=lambda: again(lambda a, b: st.assert_same_sharing(a, b), MISMATCH, a=double(tied())),
    a_static_value_that_cannot_be_compared=lambda: of(
        lambda: st.tree.structure(Scaled(jnp.ones(1), Incomparable())), st.errors.StaticComparisonError
    ),
    trees_of_two_shapes=lambda: of(lambda a, b: st.retie(a, like=[b]), MISMATCH, b=Net(Leaf(jnp.ones(2)), 1)),
    two_replacements_of_one_place=lambda: of(
        lambda model: st.tree.at(lambda m: (m.embed.weight, m.embed.weight), model, (jnp.zeros(4), jnp.ones(4))),
        INCONSISTENT,
        model=loose(),
        new=jnp.zeros(4),
    ),
    a_tie_of_one=lambda: of(lambda model: st.tie(model, lambda m: m.embed), MISMATCH, model=loose()),
    a_tie_of_two_shapes=lambda: of(
        lambda model: st.tie(model, lambda m: (m.embed.weight, m.head.weight)),
        MISMATCH,
        model=Net(Leaf(jnp.ones((2, 3))), Leaf(jnp.ones((3, 2)))),
        x=jnp.ones((1, 3)),
    ),
    a_prefix_that_does_not_fit=lambda: of(
        lambda model: st.tree.partition(model, (True, False)),
        MISMATCH,
        lambda model, filter_spec: st.tree.partition(model, filter_spec),
        value=True,
    ),
    a_filter_that_is_a_module=lambda: of(
        lambda spec: st.tree.filter({"a": jnp.ones(2)}, {"a": spec}),
        MISMATCH,
        lambda filter_spec: st.tree.filter({"a": jnp.ones(2)}, filter_spec),
        spec=(spec := Selecting(jnp.ones(2))),
        filter_spec={"a": spec},
        equinox=eqx,
    ),
    one_object_with_two_treatments=lambda: again(
        lambda a, b: st.vmap(lambda a, b: loss(a), (0, None))(a, b), INCONSISTENT, a=(model := tied()), b=model
    ),
    explain_of_what_is_not_wrapped=lambda: of(lambda f, model: st.explain(f, model), TypeError),
    an_in_place_for_each_argument=lambda: of(lambda f: st.jit(f, in_place=(True, False)), TypeError),
    a_policy_of_another_library=lambda: of(
        lambda: st.preserve_identities(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
        TypeError,
        preserve_identities=st.preserve_identities,
    ),
    other_cotangents_than_operands=lambda: of(lambda: gradient_by_rule(lambda net, y: ()), MISMATCH, cotangent=tied()),
    a_compiled_program_for_other_static_values=lambda: _made_for_another(
        lambda f, one: f.lower(one).compile(), lambda program, net: program(net)
    ),
    an_exported_program_for_other_static_values=lambda: _made_for_another(
        lambda f, one: st.export(f)(one), lambda program, net: program.call(net)
    ),
    derivatives_in_place=lambda: of(lambda: st.vjp(lambda x: x, jnp.ones(2), in_place=True), ValueError),
    an_optimizer_by_name=lambda: of(lambda: st.optimizer("adam"), TypeError, lambda tx: tx.init(tied())),
    a_where_that_computes=lambda: of(
        lambda: st.tree.at(lambda m: [m.embed.weight, m.head.weight.T], tied(), [0, 0]), MISMATCH, where=None
    ),
    a_where_that_looks_at_leaves=lambda: again(
        lambda model, where: st.tree.at(where, model, replace_fn=lambda x: x),
        MISMATCH,
        where=lambda m: [leaf for leaf in jax.tree.leaves(m) if isinstance(leaf, jax.Array)],
    ),
    a_none_that_cannot_be_told=lambda: of(
        lambda model: st.tree.at(lambda m: m.b if m.b is None else m.a, model, 0),
        MISMATCH,
        lambda model, new: model.b is new or 1 / 0,
        model=Tree(jnp.ones(2), None),
    ),
    a_replacement_of_no_node=lambda: of(
        lambda model, where: st.tree.at(where, model, replace_fn=lambda x: 2 * x),
        MISMATCH,
        lambda model, before: model is before or 1 / 0,
        where=lambda m: [],
        replace_fn=lambda x: 2 * x,
        model=(unchanged := tied()),
        before=unchanged,
    ),
    an_untie_of_no_node=lambda: of(
        lambda model: st.untie(model, lambda m: []), MISMATCH, lambda model: st.ties(model) and 1 / 0
    ),
    a_tie_in_the_wrong_order=lambda: of(
        lambda model: st.tie(lambda m: (m.embed, m.head), model),
        TypeError,
        lambda model: st.ties(model) or 1 / 0,
        model=loose(),
    ),
    an_untie_in_the_wrong_order=lambda: of(
        lambda model: st.untie(lambda m: m.head, model), TypeError, lambda model: st.ties(model) and 1 / 0
    ),
    a_replacement_in_the_wrong_order=lambda: of(
        lambda model, new: st.tree.at(model, lambda m: m.head.weight, new),
        TypeError,
        lambda model, new: model.embed.weight is new or 1 / 0,
    ),
    preserve_identities_of_a_plain_function=lambda: of(
        lambda f: st.preserve_identities(f)(tied()), TypeError, lambda f: f(tied())
    ),
    an_optimizer_without_optax=lambda: without("optax", lambda: st.optimizer(None)),
    a_drawing_without_its_libraries=lambda: without("igraph", lambda: st.draw({"a": jnp.ones(2)})),
    marks_without_treescope=lambda: without("treescope", st.show.register),
    a_set_to_look_at=lambda: Scenario(lambda: st.summary({1.0, 2.0}), UNREGISTERED, {"tree": {1.0, 2.0}}),
    a_class_to_look_at=lambda: Scenario(lambda: st.summary(Net), UNREGISTERED, {"Net": lambda _: tied()}),
    preserve_identities_of_no_function=lambda: of(lambda: st.preserve_identities(tied()), TypeError),
    operands_without_an_adapter_for_them=lambda: _takes_operands(None),
    operands_like_those_of_a_transform_that_takes_none=lambda: _takes_operands(jax.jit),
    a_branch_with_another_static_value=lambda: of(
        lambda: st.cond(True, lambda x: Noted(x, "a"), lambda x: Noted(x, "b"), jnp.ones(2)), MISMATCH
    ),
    a_state_of_other_names=lambda: of(
        lambda model, state: st.load_state(model, state),
        st.errors.StructureMismatchError,
        model={"a": 1},
        state={"b": 1},
    ),
    a_position_for_a_filter=lambda: of(lambda f: st.grad(f, wrt=1), TypeError, f=of_head),
    what_is_no_filter=lambda: of(lambda f: st.grad(f, wrt={}), TypeError, f=of_head),
    a_filter_of_three=lambda: of(lambda f: st.grad(f, wrt=lambda path, value, more: True), TypeError, f=of_head),
    a_filter_of_none_for_a_tree=lambda: of(lambda model: st.tree.partition(model, lambda: True), TypeError),
    what_is_no_filter_among_several=lambda: of(
        lambda model: st.tree.partition(model, (1, lambda path, value: True)), TypeError
    ),
    an_answer_that_is_no_boolean=lambda: of(
        lambda model: st.tree.partition(model, lambda path, value: value > 0), TypeError
    ),
    a_string_for_a_path=lambda: of(lambda f: st.grad(f, wrt="head")(tied()), ValueError, f=of_head),
    a_string_for_a_path_that_is_not_there=lambda: of(
        lambda f: st.optimizer(optax.sgd(0.1), wrt="decoder").init(tied()), ValueError, tx=optax.sgd(0.1), f=of_head
    ),
    a_string_for_a_path_of_a_tree=lambda: of(
        lambda model: st.tree.partition(model, "embed"), ValueError, model=loose()
    ),
    a_filter_of_paths_that_disagrees=lambda: again(
        lambda model, filter_spec: st.tree.partition(model, filter_spec),
        INCONSISTENT,
        are_alternatives=True,
        filter_spec=lambda path, value: path[0] == "head",
    ),
    a_filter_of_paths_that_disagrees_in_a_dag=lambda: again(
        lambda dag, filter_spec: st.tree.partition(dag, filter_spec),
        INCONSISTENT,
        are_alternatives=True,
        dag=st.Dag(tied()),
        filter_spec=lambda path, value: path[0] == "head",
    ),
    a_filter_that_looks_at_what_an_array_holds=lambda: of(
        lambda f: st.grad(f, wrt=lambda path, value: value > 0)(tied()), TypeError, f=of_head
    ),
    a_filter_that_selects_nothing=lambda: of(lambda f: st.grad(f, wrt=eqx.nn.Linear)(tied()), ValueError, f=of_head),
    an_attribute_that_is_a_method=lambda: _assigning(Free().parameters, None),
    an_attribute_that_is_used_up=lambda: _assigning(x for x in "ab"),
    an_attribute_without_order=lambda: _assigning({Free()}),
    a_mark_in_a_container=lambda: _assigning([st.parameter(jnp.ones(2))], [jnp.ones(2)]),
    a_mark_of_the_class=lambda: of(lambda: type("Net", (st.Module,), {"weight": st.parameter(jnp.ones(2))}), TypeError),
)


VANILLA = {
    "jax.lax.scan": {"f": lambda m, _: (vanilla_transforms.double(m), None), "init": tied(), "xs": jnp.ones(2)},
    "jax.lax.map": {"f": vanilla_transforms.double, "xs": tied()},
    "jax.lax.while_loop": {"cond_fun": lambda m: m.embed.weight[0, 1] < 10, "body_fun": vanilla_transforms.double},
    "jax.lax.fori_loop": {"lower": 0, "upper": 2, "body_fun": lambda _, m: vanilla_transforms.double(m)},
    "jax.lax.cond": {"pred": jnp.array(True), "true_fun": vanilla_transforms.double, "false_fun": lambda m: m},
    "jax.lax.switch": {"index": jnp.array(0), "branches": [vanilla_transforms.double, lambda m: m]},
    "jax.jit": {"f": vanilla_transforms.double},
    "jax.checkpoint": {"f": vanilla_transforms.double},
    "jax.vmap": {"f": vanilla_transforms.double},
    "jax.grad": {},
    "jax.value_and_grad": {},
    "jax.vjp": {},
    "jax.jvp": {"f": vanilla_transforms.double, "tangent": tied()},
    "equinox.filter_jit": {"f": vanilla_transforms.double},
    "equinox.filter_checkpoint": {"f": vanilla_transforms.double},
    "equinox.filter_vmap": {"f": vanilla_transforms.double},
    "equinox.filter_grad": {},
    "equinox.filter_value_and_grad": {},
}
"""A transform that unties → what is called as the code for it says."""


def untied_by(title):
    """A function unties its model by a vanilla transform. With ours the model keeps its tie."""
    before = vanilla_transforms.tied()

    def after(names):
        results = [names[name] for name in ("carry", "ys", "gradient", "tangent") if name in names]
        if "vjp" in names:
            results += names["vjp"](1.0)
        if names.get("f") not in (None, loss, VANILLA[title].get("f")):
            results.append(names["f"](before))
        kept = [model for model in (*results, names["model"]) if isinstance(model, Net) and st.ties(model)]
        # The other code says that the model is meant to have no ties.
        assert len(kept) > 1 or names["model"] is not before

    names = {"model": before, "before": before, **VANILLA[title]}
    # A function that is new each time, which JAX has to trace again.
    provoke = lambda: st.jit(lambda model: vanilla_transforms.VANILLA[title](model))(before)
    scenario = of(provoke, st.UntiedWarning, are_alternatives=True, **names)
    scenario.after = after
    return scenario


scenarios(
    **{f"untied_by_{title.replace('.', '_')}": functools.partial(untied_by, title) for title in VANILLA},
)


def mapped_over_shards(f, params):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec()
    transform = f if f is not loss else st.shard_map
    return transform(lambda params: params["embed"], mesh=mesh, in_specs=spec, out_specs=spec)(params)


scenarios(
    a_tied_dict_under_a_transform_with_options=lambda: of(
        lambda f, params: mapped_over_shards(f, params),
        st.UntiedWarning,
        lambda inner, params: mapped_over_shards(inner, params),
        are_alternatives=False,
        params=tied_dict(),
        functools=functools,
    ),
    an_average_of_a_model_that_has_lost_a_tie=lambda: again(
        lambda new, old: st.incremental_update(new, old, 0.5),
        MISMATCH,
        are_alternatives=True,
        new=double(tied()),
        old=tied(),
    ),
    a_refused_transform_that_is_registered=lambda: of(
        lambda: st.register_transform(eqx.filter_pmap), TypeError, f=lambda x: x
    ),
)


def beside_a_constant(f):
    return lambda *args: (f(*args), f(*args))


def gradients_by_pair(f):
    return lambda *args: list(zip(jax.grad(f, argnums=(0, 1))(*args), args, strict=True))


st.register_transform(beside_a_constant)
st.register_transform(gradients_by_pair)

scenarios(
    a_result_that_comes_back_twice_in_place=lambda: of(
        lambda transform: st.preserve_identities(transform, in_place=True)(loss)(tied()),
        MISMATCH,
        lambda f: f(tied())[0] == loss(tied()) or 1 / 0,
        transform=beside_a_constant,
    ),
    gradients_and_parameters_by_pair=lambda: of(
        lambda model: st.preserve_identities(gradients_by_pair)(lambda one, two: loss(one) + loss(two))(model, model),
        MISMATCH,
        f=st.preserve_identities(lambda f: lambda dag: [(jax.grad(f)(dag), dag)])(lambda dag: loss(dag.tree[0])),
    ),
)
