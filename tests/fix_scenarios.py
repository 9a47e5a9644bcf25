"""One scenario for each message of the library that offers code, but for those about files."""

import dataclasses
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.fixes import Scenario, scenario, scenarios
from tests.strategies import Mutable


class Leaf(eqx.Module):
    weight: jax.Array


class Net(eqx.Module):
    embed: Leaf
    head: Leaf


class Selecting(eqx.Module):
    threshold: jax.Array

    def __call__(self, leaf):
        return True


class Scaled(eqx.Module):
    x: jax.Array
    k: int


class Static(eqx.Module):
    x: jax.Array
    k: int = eqx.field(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tally:
    count: jax.Array
    step: jax.Array


def tied():
    leaf = Leaf(jnp.arange(4.0).reshape(2, 2))
    return Net(leaf, leaf)


def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def loss(net):
    return (net.embed.weight * net.head.weight).sum()


MISMATCH, INCONSISTENT = st.SharingMismatchError, st.InconsistentSharingError


def of(provoke, category, after=None, are_alternatives=False, **names):
    """A scenario whose message is about what these names are, which the call is given."""
    return Scenario(lambda: provoke(*names.values()), category, names, after, are_alternatives)


def loose():
    return double(st.untie(tied()))


def what_a_lost_tie_needs():
    model = tied()
    return {
        "model": model,
        "before": tied(),
        "f": lambda x: 2 * x,
        "where": lambda net: net.head.weight,
        "new": jnp.zeros((2, 2)),
        "updates": model,
        "device": jax.devices()[0],
    }


def quiet_now(names):
    st.jit(lambda net: names["model"])(tied())


def lost_in_a_function(on_untie, category):
    def provoke():
        with st.Context(st.Policy(on_untie=on_untie)):
            # Another function each time, which has not been traced before.
            st.jit(lambda net: double(net))(tied())

    return Scenario(provoke, category, what_a_lost_tie_needs(), quiet_now)


@scenario
def lost_between_calls(path):
    f = st.jit(lambda net: net.embed.weight)
    f(tied())
    return Scenario(lambda: f(jax.tree.map(jnp.copy, tied())), st.UntiedWarning, what_a_lost_tie_needs(), quiet_now)


@scenario
def lost_in_front_of_an_optimizer(path):
    tx = st.optimizer(optax.sgd(0.1))
    model = tied()
    state = tx.init(model)
    loose = jax.tree.map(jnp.copy, model)
    return Scenario(
        lambda: tx.update(loose, state, loose),
        st.UntiedWarning,
        {**what_a_lost_tie_needs(), "step": lambda net: net, "optimizer": tx},
        lambda names: tx.update(names["model"], names["state"], names["model"]),
    )


def _gradients_that_were_not_joined(model, loss, gradients, gradient):
    tx = st.optimizer(optax.sgd(0.1))
    state = tx.init(model)
    one, other = gradients
    return Scenario(
        lambda: tx.update(gradient, state, model),
        MISMATCH,
        {"model": model, "loss": loss, "one": one, "other": other},
        lambda names: tx.update(names["updates"], state, model),
        are_alternatives=True,
    )


@scenario
def gradients_in_a_dict_that_were_added_up(path):
    weight = jnp.arange(4.0)
    model, policy = {"embed": weight, "head": weight}, st.Policy(containers=True)
    of_dict = lambda model: (model["embed"] * model["head"]).sum()
    gradients = [st.grad(of_dict, policy=policy)(model) for _ in range(2)]
    return _gradients_that_were_not_joined(model, of_dict, gradients, jax.tree.map(jnp.add, *gradients))


@scenario
def lost_from_a_dict_in_front_of_an_optimizer(path):
    tx = st.optimizer(optax.sgd(0.1))
    weight = jnp.arange(4.0)
    model = {"embed": weight, "head": weight}
    state = tx.init(model)
    loose = {name: jnp.copy(array) for name, array in model.items()}
    return Scenario(
        lambda: tx.update(loose, state, loose),
        st.UntiedWarning,
        {"model": model, "updates": model, "before": model, "step": lambda net: net, "optimizer": tx},
        lambda names: tx.update(names["step"](names["model"]), names["state"], names["model"]),
    )


def _retraced(cls):
    f = st.jit(lambda m: m.x * m.k)

    def provoke():
        for k in range(5):
            f(cls(jnp.ones(2), k))

    return provoke


@scenario
def a_static_number_that_changes(path):
    return Scenario(
        _retraced(Scaled),
        st.RetraceWarning,
        {"m": Scaled(jnp.ones(2), 3)},
        lambda names: st.explain(st.jit(lambda m: m.k), names["m"]).leaves[1].kind == "traced" or 1 / 0,
    )


@scenario
def containers_too_deep(path):
    tree = ()
    for _ in range(2_000):
        tree = (tree,)
    f = st.jit(lambda tree: 1)
    return Scenario(lambda: f((tree, tied())), st.DepthError, {"tree": [tied()]})


@scenario
def a_model_too_deep_for_optax(path):
    def call():
        model = jnp.ones(1)
        for _ in range(9_501):
            model = [model]
        st.optimizer(optax.adam(0.1)).init(model)

    return Scenario(call, st.DepthError, {"model": [jnp.ones(1)], "optax": optax})


class Incomparable:
    __hash__ = object.__hash__

    def __eq__(self, other):
        return np.ones(2)


@scenario
def a_class_that_is_not_registered(path):
    class Own:
        def __init__(self):
            self.weight = jnp.ones(2)

    def unflatten(_, children):
        own = object.__new__(Own)
        (own.weight,) = children
        return own

    names = {"Own": Own, "flatten": lambda obj: ((obj.weight,), None), "unflatten": unflatten}
    again = lambda names: st.Dag(Own())
    return Scenario(lambda: again({}), st.UnregisteredTypeError, names, again, are_alternatives=True)


@scenario
def a_wrapper_without_its_functions(path):
    model = eqx.nn.Shared((jnp.ones(2), jnp.ones(2)), lambda pair: pair[1], lambda pair: pair[0])
    provoke, after = lambda tree, *_: st.unwrap_shared(tree), lambda names: st.unwrap_shared(names["tree"])
    return of(provoke, TypeError, after, tree=eqx.filter(model, eqx.is_array), model=model, equinox=eqx)


@scenario
def map_of_a_tied_and_an_untied_tree(path):
    tree, rest = tied(), [double(tied())]
    return Scenario(
        lambda: st.tree.map(lambda x, y: x, tree, *rest),
        st.SharingMismatchError,
        {"tree": tree, "rest": rest, "loss": loss, "one": tied(), "other": tied()},
        lambda names: st.tree.map(lambda x, y: x, tree, *names["rest"]),
        are_alternatives=True,
    )


@scenario
def a_specification_with_static_values(path):
    model = [tied(), jax.nn.relu]
    after = lambda names: eqx.partition(model, names["filter_spec"])
    spec = st.tree.map(lambda _: False, model)
    return of(st.tree.partition, MISMATCH, after, are_alternatives=True, model=model, filter_spec=spec)


@scenario
def an_optimizer_as_an_argument(path):
    given = tied(), st.optimizer(optax.adam(0.1))
    after = lambda names: names["f"](*given)
    return of(lambda f, _: st.jit(f)(*given), TypeError, after, f=lambda model, tx: tx.init(model), equinox=eqx)


@scenario
def a_model_that_is_not_mapped_and_changes(path):
    def add(model, x):
        model.count = model.count + x

    def add_mean(model, x):
        model.count = model.count + jax.lax.pmean(x, "batch")

    model, xs, in_axes = Mutable(count=jnp.zeros(())), jnp.arange(2.0), (None, 0)

    def after(names):
        stacked = names["model"].count.ndim
        f = st.vmap(add, in_place=True) if stacked else names["f"]
        f(names["model"], xs)
        np.testing.assert_array_equal(names["model"].count, xs if stacked else xs.mean())

    names = {"f": add_mean, "model": model, "in_axes": in_axes, "size": 2}
    provoke = lambda: st.vmap(add, in_axes=in_axes, in_place=True)(model, xs)
    return Scenario(provoke, ValueError, names, after, are_alternatives=True)


@scenario
def a_donated_state_that_the_model_keeps_too(path):
    make_model = lambda: eqx.nn.BatchNorm(2, axis_name="batch", mode="ema")
    step = st.jit(lambda model, state: state, donate_argnums=1)
    model = make_model()
    names = {"model": model, "state": eqx.nn.State(model), "make_model": make_model}
    return Scenario(
        lambda: step(model, names["state"]),
        st.InconsistentSharingError,
        names,
        lambda names: step(names["model"], names["state"]),
        are_alternatives=True,
    )


@scenario
def a_reference_that_would_be_differentiated(path):
    tally = Tally(jax.new_ref(jnp.zeros(())), jnp.ones(2))
    after = lambda names: st.grad(names["f"], wrt=lambda path, value: not isinstance(value, jax.Ref))(tally)
    return of(lambda f: st.grad(f)(tally), TypeError, after, f=lambda tally: (tally.step**2).sum())


@scenario
def two_replacements_for_what_is_tied(path):
    model = tied()
    where = lambda m: (m.embed.weight, m.head.weight)
    new = jnp.zeros((2, 2)), jnp.ones((2, 2))
    again = lambda names: st.tree.at(where, names["model"], new)
    return Scenario(
        lambda: st.tree.at(where, model, new),
        st.InconsistentSharingError,
        {"model": model, "new": new[0]},
        lambda names: "replaced" if names["model"].embed.weight is new[0] else again(names),
        are_alternatives=True,
    )


@scenario
def a_replacement_that_cannot_take_the_place_of_what_was_tied(path):
    weight = jnp.arange(4.0).reshape(2, 2)
    replaced = lambda model: st.tree.at(lambda m: m.embed, model, Leaf(jnp.zeros(3)))
    after = lambda names: replaced(names["model"])
    return of(replaced, st.UntiedWarning, after, model=Net(Leaf(weight), Leaf(weight)))


def tied_dict():
    return st.tie({"embed": jnp.ones(2), "head": jnp.zeros(2)}, lambda p: (p["embed"], p["head"]))


@scenario
def an_array_that_was_tied_and_is_a_value(path):
    identity = st.jit(lambda params: params)

    def after(names):
        with st.Context(names["policy"]):
            identity(tied_dict())
        identity(names["dag"])
        identity(names["params"])

    names = {"f": lambda params: params, "params": tied_dict()}
    return Scenario(lambda: identity(tied_dict()), st.UntiedWarning, names, after)


@scenario
def a_static_argument_that_is_shared(path):
    f = st.jit(lambda model, config: model, static_argnums=1)
    model = dataclasses.make_dataclass("Model", ["weight", "config"], eq=False)
    jax.tree_util.register_dataclass(model, ["weight", "config"], [])

    class Config(tuple):
        __slots__ = ()

    layers = [1]
    jax.tree_util.register_pytree_node(Config, lambda c: (list(c), None), lambda _, c: Config(c))
    made = model(jnp.ones(2), Config([layers]))
    return Scenario(
        lambda: st.preserve_identities(jax.jit, static_argnums=1)(lambda m, c: m.weight)(made, made.config),
        st.InconsistentSharingError,
        {"f": lambda m, c: f, "model": made, "config": made.config},
    )


@scenario
def labels_that_disagree_at_a_tie(path):
    tx = st.optimizer(optax.masked(optax.sgd(0.1), Net(Leaf(True), Leaf(False))))
    return of(tx.init, INCONSISTENT, lambda names: tx.init(names["model"]), model=tied())


@scenario
def mutation_under_a_transform_that_is_not_registered(path):
    policy = st.Policy(in_place=True)
    again = lambda transform: st.preserve_identities(transform, policy=policy)(lambda m: None)(tied())
    return of(again, ValueError, lambda names: again(names["transform"]), transform=lambda f: jax.jit(f))


@scenario
def sharing_under_a_transform_that_is_not_registered(path):
    transform = lambda f, in_axes=0, out_axes=0: jax.vmap(f, in_axes, out_axes)
    model = tied()
    again = lambda names: st.preserve_identities(transform)(lambda a, b: loss(a))(model, model)
    names = {"transform": transform, "a": model, "b": model}
    return Scenario(lambda: again({}), INCONSISTENT, names, are_alternatives=True)


@scenario
def a_gradient_that_lacks_a_part(path):
    weight = jnp.arange(4.0).reshape(2, 2)

    def both_losses(encoder, decoder):
        return (encoder.weight * decoder.embed.weight).sum()

    encoder, decoder = Leaf(weight), Net(Leaf(weight), Leaf(weight + 1))
    names = {"both_losses": both_losses, "encoder": encoder, "decoder": decoder, "equinox": eqx}
    after = lambda names: st.grad(both_losses)(names["encoder"], names["decoder"])
    return Scenario(lambda: after(names), st.UntiedWarning, dict(names), after)


@scenario
def a_tracer_in_a_static_place(path):
    class Own:
        pass

    return Scenario(
        lambda: st.jit(lambda x: Static(x, x))(jnp.ones(2)),
        st.StaticTracerError,
        {"cls": Own, "flatten": lambda own: ((), None), "unflatten": lambda *_: Own()},
    )


def _what_tangents_need():
    return {"value": tied(), "f": jnp.ones_like}


@scenario
def tangents_without_the_ties(path):
    after = lambda names: st.jvp(loss, (names["value"],), (names["tangent"],))
    names = {**_what_tangents_need(), "tangent": st.untie(tied())}
    return Scenario(lambda: after(dict(names)), MISMATCH, names, after)


@scenario
def a_cotangent_of_another_shape(path):
    pullback = st.vjp(lambda net: net, tied())[1]
    after = lambda names: pullback(names["tangent"])
    return Scenario(lambda: pullback(tied().embed), MISMATCH, _what_tangents_need(), after)


def gradient_by_rule(cotangents):
    f = st.custom_vjp(loss)
    f.defvjp(lambda net: (f(net), net), lambda net, y: cotangents(net, y))
    return st.grad(f)(tied())


@scenario
def cotangents_of_two_shapes(path):
    cotangents = lambda leaf, cotangent: gradient_by_rule(lambda net, y: (Net(Leaf(leaf), Leaf(cotangent)),))
    after = lambda names: cotangents(names["leaf"], names["cotangent"])
    return of(cotangents, MISMATCH, after, leaf=jnp.ones((2, 2)), cotangent=jnp.array(1.0))


@scenario
def two_tangents_of_one_leaf(path):
    f = st.custom_jvp(lambda net: net)
    f.defjvp(lambda primals, tangents: (f(*primals), double(st.untie(tangents[0]))))
    gradient = jax.grad(loss)(tied())
    return Scenario(
        lambda: st.grad(lambda net: loss(f(net)))(tied()),
        st.SharingMismatchError,
        {**_what_tangents_need(), "tangent": gradient},
    )


@scenario
def rules_in_place(path):
    def ruled(f):
        f.defjvp(lambda primals, tangents: (loss(*primals), tangents[0].embed.weight.sum()))
        return f

    def after(names):
        with st.Context(st.Policy(in_place=True)):
            assert st.grad(ruled(names["f"]), in_place=False)(tied()).embed.weight.tolist() == [[1, 1], [1, 1]]

    return Scenario(lambda: ruled(st.custom_jvp(loss, in_place=True))(tied()), ValueError, {"f": loss}, after)


def counting(f):
    """A function under rules that changes its argument."""
    made = st.custom_vjp(f, in_place=True)
    made.defvjp(lambda model: (made(model), None), lambda _, y: (None,))
    return made


@scenario
def a_gradient_through_what_rules_changed(path):
    @counting
    def count(model):
        model.count = model.count + model.step
        return model.step

    def gradient(before_use):
        def scaled(model):
            count(model)
            before_use(model)
            return model.step * model.count

        return st.grad(scaled, in_place=True)(Tally(jnp.ones(()), jnp.ones(())))

    def stop(model):
        model.count = jax.lax.stop_gradient(model.count)

    names = {"model": Tally(jnp.ones(()), jnp.ones(())), "jax": jax}
    return Scenario(
        lambda: gradient(lambda model: None),
        st.StateGradientError,
        names,
        lambda _: np.testing.assert_array_equal(gradient(stop).step, 2),
    )


@scenario
def an_argument_in_a_result_of_rules(path):
    @counting
    def count(model):
        model.count = model.count + 1
        return model

    return Scenario(
        lambda: count(Tally(1.0, 1.0)), st.InconsistentSharingError, {"model": Tally(jnp.ones(()), jnp.ones(()))}
    )


@scenario
def a_rule_that_changes_something_else(path):
    def count(model):
        model.count = model.count + 1
        return model.step

    def ruled(fwd):
        f = st.custom_vjp(count, in_place=True)
        f.defvjp(lambda model: (fwd(f, model), None), lambda _, y: (Tally(None, y),))
        return st.grad(st.jit(lambda model: f(model), in_place=True), in_place=True)

    model = Tally(jnp.zeros(()), jnp.ones(()))

    def after(names):
        ruled(lambda f, model: f(model))(model)
        assert float(model.count) == 1

    return Scenario(
        lambda: ruled(lambda f, model: model.step)(model),
        st.SharingMismatchError,
        {"count": count, "args": (Tally(0, 1),)},
        after,
    )


@scenario
def rules_with_symbolic_zeros_in_place(path):
    count = st.custom_vjp(lambda model: model.step, in_place=True)
    count.__name__ = "count"
    fwd, bwd = lambda model: (model.step, None), lambda _, y: (Tally(None, y),)
    count.defvjp(fwd, bwd, symbolic_zeros=True)
    model = Tally(jnp.zeros(()), jnp.ones(()))
    after = lambda names: float(st.grad(count)(model).step) == 1 or 1 / 0
    return of(lambda count, *_: count(model), ValueError, after, count=count, fwd=fwd, bwd=bwd)


def _made_for_another(make, call):
    f = st.jit(lambda net: net.x * net.k)
    one, two = Static(jnp.ones(2), 1), Static(jnp.ones(2), 2)
    program = make(f, one)

    def after(names):
        assert call(names["program"], two).tolist() == [2, 2]

    return Scenario(lambda: call(program, two), st.SharingMismatchError, {"f": f, "args": (two,)}, after)


@scenario
def options_inside_a_module_of_a_transform_that_is_not_known(path):
    transform = lambda f, in_axes, out_axes=0: jax.vmap(f, in_axes, out_axes)
    again = lambda names: st.preserve_identities(transform)(loss, in_axes=(Net(0, 0),))
    return Scenario(lambda: again({}), TypeError, {"transform": transform}, lambda names: again(names)(tied()))


@scenario
def in_place_without_in_specs(path):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    model = jax.device_put(tied(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    mapped = st.shard_map(mesh=mesh, out_specs=jax.sharding.PartitionSpec(), policy=st.Policy(in_place=True))
    after = lambda names: mapped(loss, in_specs=names["in_specs"])(model)
    return of(lambda jax: mapped(loss)(model), ValueError, after, jax=jax)


@scenario
def a_reference_in_a_branch_in_place(path):
    model = Mutable(count=jax.new_ref(jnp.zeros(())))

    def add_one(model):
        model.count[...] += 1

    def after(_):
        # The code makes a transform; this is how it is called.
        st.cond(True, add_one, lambda model: None, model, in_place=False)
        assert float(model.count[...]) == 1

    return Scenario(lambda: st.cond(True, add_one, lambda m: None, model, in_place=True), ValueError, {}, after)


@scenario
def integers_without_a_value_in_a_transpose(path):
    f = lambda model: model.x * model.k[0]
    model = Scaled(jnp.ones(2), [jnp.arange(2)])

    def after(names):
        assert st.linear_transpose(f, names["abstract"])(jnp.ones(2))[0].x.tolist() == [0, 1]

    return Scenario(lambda: st.linear_transpose(f, jax.eval_shape(lambda: model)), TypeError, {"model": model}, after)


@scenario
def a_list_that_a_loop_parts_in_place(path):
    def body(model, _):
        if model.first is model.second:
            model.second = list(model.second)
        model.first[0], model.second[0] = model.first[0] + 1, model.second[0] + 2
        return model, None

    def make():
        shared = [jnp.zeros(())]
        return Mutable(first=shared, second=shared)

    policy = st.Policy(in_place=True, on_untie="ignore")
    return Scenario(
        lambda: st.scan(body, make(), length=2, policy=policy),
        st.InconsistentSharingError,
        {"model": make()},
        lambda names: st.scan(body, names["model"], length=2, policy=policy),
    )


@scenario
def a_layer_that_a_loop_replaces_in_place(path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        layer: Leaf

    def body(model, x):
        model.layer = Leaf(model.layer.weight + x)
        return model, None

    model = Model(Leaf(jnp.ones(2)))
    return Scenario(
        lambda: st.scan(body, model, jnp.ones(2), in_place=True),
        st.SharingMismatchError,
        {"layer": Mutable(weight=0), "new": jnp.ones(2)},
    )


@scenario
def an_optimizer_without_optax(path):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "optax", None)
            st.optimizer(None)

    return Scenario(provoke, ImportError)


def _takes_operands(wrong):
    transform = lambda f, x: f(x)
    names = {"transform": transform, "adapter": lambda crossing, f, x: x}
    return Scenario(
        lambda: st.register_transform(transform, wrong, takes_operands=True),
        TypeError,
        names,
        lambda _: st.preserve_identities(transform)(loss, tied()),
    )


@scenario
def a_branch_that_loses_a_tie_of_modules(path):
    model = tied()
    loosened = lambda net: Net(Leaf(net.embed.weight), Leaf(net.head.weight))
    return Scenario(
        lambda: st.cond(True, lambda net: net, loosened, model),
        st.SharingMismatchError,
        {"model": double(model), "before": model, "f": lambda x: 2 * x},
        lambda names: st.cond(True, lambda net: net, loosened, names["model"]),
    )


def _state(model, state, check):
    def after(names):
        if "report" not in names:  # the other fix
            assert check(st.load_state(names["model"], names["state"]))

    return of(st.load_state, MISMATCH, after, are_alternatives=True, model=model, state=state)


@scenario
def a_state_that_lacks_a_tie(path):
    state = {"embed": {"weight": jnp.zeros((2, 2))}, "head": {"weight": jnp.ones((2, 2))}}
    return _state(tied(), state, lambda loaded: loaded.head.weight is state["embed"]["weight"])


@scenario
def a_class_with_functions_for_its_state(path):
    class Layer:
        pass

    st.register_state(Layer, vars, lambda layer, _: layer)
    return of(st.register_state, ValueError, Layer=Layer, to_state=vars, from_state=lambda layer, _: layer)


def of_head(net):
    return net.head.weight.sum()


def _selected_at_one_path(category, loss=loss, **model):
    gradient = lambda model, wrt: st.grad(loss, wrt=wrt)(model)
    (name,) = model
    after = lambda names: gradient(names[name], names["wrt"])
    return of(gradient, category, after, are_alternatives=True, **model, wrt=lambda path, value: path[0] == "head")


@scenario
def a_filter_of_nnx_for_one_argument(path):
    nnx = pytest.importorskip("flax.nnx")
    return of(lambda f, nnx: st.grad(f, argnums=nnx.DiffState(0, nnx.Param)), TypeError, f=of_head, nnx=nnx)


# --- mutable modules -----------------------------------------------------------------------------------------------


class Free(st.Module):
    """A module whose attributes a scenario assigns."""


def _assigning(value, better=None, before=None):
    module = Free()
    module.attribute = before
    names = {"module": module, "value": value if better is None else better}
    return Scenario(lambda: setattr(module, "attribute", value), st.UnregisteredTypeError, names)


@scenario
def an_attribute_that_cannot_be_seen(path):
    class Opaque:
        def __init__(self):
            self.weight = jnp.ones(2)

    names = {"flatten": lambda opaque: ((opaque.weight,), None), "unflatten": lambda *_: Opaque(), "Opaque": Opaque}
    return dataclasses.replace(_assigning(Opaque()), names=names, are_alternatives=True)


@scenario
def a_mark_past_the_assignment(path):
    module = Free()
    vars(module)["weight"] = st.parameter(jnp.ones(2))
    return Scenario(lambda: jax.tree.leaves(module), st.UnregisteredTypeError, {})


@scenario
def parameters_of_another_module(path):
    module, other = Free(), Free()
    module.layer, other.layer = Free(), [Free()]
    return of(lambda module, _: module.merge(other), MISMATCH, module=module, update=lambda x: x)


# --- those that are said in a line or two ---------------------------------------------------------------------------


def _same_sharing(a, b):
    return of(st.assert_same_sharing, MISMATCH, lambda names: st.assert_same_sharing(a, names["b"]), a=a, b=b)


def _cycle():
    loop = [jnp.ones(1)]
    loop.append(loop)
    return loop


def _flattened():
    with st.Context():
        return [st.tree.flatten({name: [jnp.ones(2)]}) for name in "ab"]


def _untied_arrays():
    weight = jnp.arange(4.0).reshape(2, 2)
    return Net(Leaf(weight), Leaf(weight))


scenarios(
    {
        "lost_in_a_function": lambda: lost_in_a_function("warn", st.UntiedWarning),
        "lost_in_a_function_as_an_error": lambda: lost_in_a_function("error", st.UntiedError),
        "one_gradient_for_each_path": lambda: _gradients_that_were_not_joined(
            tied(), loss, (tied(), tied()), jax.grad(loss)(tied())
        ),
        "the_state_of_an_untied_model": lambda: of(
            lambda model, tx: tx.update(model, optax.adam(0.1).init(tied()), model),
            MISMATCH,
            lambda names: names["optimizer"].update(names["model"], names["state"], names["model"]),
            model=tied(),
            optimizer=st.optimizer(optax.adam(0.1)),
        ),
        "no_wrapper_to_unwrap": lambda: of(
            st.unwrap_shared,
            TypeError,
            lambda names: st.assert_same_sharing(names["model"].embed, names["model"].head),
            model=double(tied()),
        ),
        "a_wrapper_that_computes": lambda: of(
            lambda x, model: st.unwrap_shared(
                eqx.nn.Shared((jnp.ones((2, 2)), jnp.ones((2, 2))), lambda pair: pair[1], lambda pair: pair[0].T)
            ),
            MISMATCH,
            x=jnp.ones((1, 2)),
            model=tied(),
        ),
        "a_filter_that_disagrees": lambda: of(
            lambda spec: st.tree.filter(_untied_arrays(), spec),
            INCONSISTENT,
            lambda names: st.tree.filter(_untied_arrays(), names["spec"]),
            spec=Net(Leaf(True), Leaf(False)),
        ),
        "structures_out_of_order": lambda: of(
            lambda each: st.tree.unflatten(*reversed(each[1])), st.ContextMismatchError, flattened=_flattened()
        ),
        "a_cycle": lambda: Scenario(lambda: st.Dag(_cycle()), st.CycleError, {"Callable": Callable}),
        "a_node_and_a_part_of_it_replaced": lambda: of(
            lambda model, inner, outer: st.tree.at(lambda m: (m.embed, m.embed.weight), model, (outer, inner)),
            MISMATCH,
            model=tied(),
            inner=jnp.zeros((2, 2)),
            outer=Leaf(jnp.ones((2, 2))),
        ),
        "operands_without_an_adapter": lambda: of(
            lambda f, model: st.preserve_identities(lambda f, operand: f(operand))(f, model),
            TypeError,
            f=loss,
            model=tied(),
        ),
        "a_solver_without_aux": lambda: of(
            lambda x: st.preserve_identities(jax.lax.custom_root)(
                lambda x: x, x, lambda f, x: x, lambda f, x: x, has_aux=True
            ),
            TypeError,
            solution=tied(),
        ),
        "options_of_rules_without_an_adapter": lambda: of(
            lambda f: st.preserve_identities(jax.custom_gradient)(f, with_logs=True),
            TypeError,
            f=lambda net: (loss(net), lambda cotangent: (cotangent * net.head.weight,)),
        ),
        "a_program_in_place": lambda: of(
            lambda f, model: st.export(st.jit(f, in_place=True))(model),
            ValueError,
            lambda names: names["exported"].call(tied()) == loss(tied()) or 1 / 0,
            f=loss,
            model=tied(),
        ),
        "a_part_of_what_belongs_together": lambda: of(
            lambda model, shared: st.preserve_identities(lambda f: lambda *args: f(*args)[-1])(
                lambda net: (net.head, [net.head])
            )(model),
            MISMATCH,
            model=tied(),
            shared=tied().head,
        ),
        "a_state_with_a_tie_that_the_model_lacks": lambda: _state(st.untie(tied()), st.state(tied()), st.ties),
        "an_array_that_is_selected_at_one_path": lambda: _selected_at_one_path(st.UntiedWarning, net=_untied_arrays()),
        "a_layer_that_is_selected_at_one_path": lambda: _selected_at_one_path(INCONSISTENT, net=tied()),
        "a_leaf_of_a_dag_that_is_selected_at_one_path": lambda: _selected_at_one_path(
            INCONSISTENT, lambda dag: loss(dag.tree), dag=st.Dag(tied())
        ),
        "a_marked_attribute_that_gets_a_text": lambda: _assigning("text", "text", before=st.parameter(jnp.ones(2))),
        "a_static_field_that_changes": lambda: Scenario(_retraced(Static), st.RetraceWarning),
        "ties_of_the_first_only": lambda: _same_sharing(tied(), double(tied())),
        "ties_of_the_second_only": lambda: _same_sharing(double(tied()), tied()),
        "a_static_value_that_cannot_be_compared": lambda: Scenario(
            lambda: st.tree.structure(Scaled(jnp.ones(1), Incomparable())), st.StaticComparisonError
        ),
        "trees_of_two_shapes": lambda: of(
            lambda a, b: st.retie(a, like=[b]), MISMATCH, a=tied(), b=Net(Leaf(jnp.ones(2)), 1)
        ),
        "a_tie_of_one": lambda: of(lambda model: st.tie(model, lambda m: m.embed), MISMATCH, model=loose()),
        "a_tie_of_two_shapes": lambda: of(
            lambda model, x: st.tie(model, lambda m: (m.embed.weight, m.head.weight)),
            MISMATCH,
            model=Net(Leaf(jnp.ones((2, 3))), Leaf(jnp.ones((3, 2)))),
            x=jnp.ones((1, 3)),
        ),
        "a_prefix_that_does_not_fit": lambda: of(
            lambda model, value: st.tree.partition(model, (True, False)),
            MISMATCH,
            lambda names: st.tree.partition(names["model"], names["filter_spec"]),
            model=tied(),
            value=True,
        ),
        "a_filter_that_is_a_module": lambda: of(
            lambda spec: st.tree.filter({"a": jnp.ones(2)}, {"a": spec}),
            MISMATCH,
            lambda names: st.tree.filter({"a": jnp.ones(2)}, names["filter_spec"]),
            spec=Selecting(jnp.ones(2)),
        ),
        "one_object_with_two_treatments": lambda: of(
            st.grad(lambda a, b: loss(a)),
            INCONSISTENT,
            lambda names: st.grad(lambda a, b: loss(a))(names["a"], names["b"]),
            a=(model := tied()),
            b=model,
        ),
        "explain_of_what_is_not_wrapped": lambda: of(st.explain, TypeError, f=loss, model=tied()),
        "an_in_place_for_each_argument": lambda: of(lambda f: st.jit(f, in_place=(True, False)), TypeError, f=loss),
        "a_policy_of_another_library": lambda: of(
            lambda preserve_identities, f: preserve_identities(
                jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
            ),
            TypeError,
            preserve_identities=st.preserve_identities,
            f=loss,
        ),
        "other_cotangents_than_operands": lambda: of(
            lambda cotangent: gradient_by_rule(lambda net, y: ()), TypeError, cotangent=tied()
        ),
        "a_compiled_program_for_other_static_values": lambda: _made_for_another(
            lambda f, one: f.lower(one).compile(), lambda program, net: program(net)
        ),
        "an_exported_program_for_other_static_values": lambda: _made_for_another(
            lambda f, one: st.export(f)(one), lambda program, net: program.call(net)
        ),
        "derivatives_in_place": lambda: of(lambda: st.vjp(lambda x: x, jnp.ones(2), in_place=True), ValueError),
        "an_optimizer_by_name": lambda: of(
            lambda optax: st.optimizer("adam"), TypeError, lambda names: names["tx"].init(tied()), optax=optax
        ),
        "a_where_that_computes": lambda: of(
            lambda where: st.tree.at(lambda m: [m.embed.weight, m.head.weight.T], tied(), [0, 0]), MISMATCH, where=None
        ),
        "a_tie_in_the_wrong_order": lambda: of(
            lambda model: st.tie(lambda m: (m.embed, m.head), model),
            TypeError,
            lambda names: st.ties(names["model"]) or 1 / 0,
            model=loose(),
        ),
        "an_untie_in_the_wrong_order": lambda: of(
            lambda model: st.untie(lambda m: m.head, model),
            TypeError,
            lambda names: st.ties(names["model"]) and 1 / 0,
            model=tied(),
        ),
        "a_replacement_in_the_wrong_order": lambda: of(
            lambda model, new: st.tree.at(model, lambda m: m.head.weight, new),
            TypeError,
            lambda names: names["model"].embed.weight is names["new"] or 1 / 0,
            model=tied(),
            new=jnp.zeros((2, 2)),
        ),
        "preserve_identities_of_a_plain_function": lambda: of(
            lambda f: st.preserve_identities(f)(tied()), TypeError, lambda names: names["f"](tied()), f=loss
        ),
        "preserve_identities_of_no_function": lambda: of(lambda: st.preserve_identities(tied()), TypeError),
        "operands_without_an_adapter_for_them": lambda: _takes_operands(None),
        "operands_like_those_of_a_transform_that_takes_none": lambda: _takes_operands(jax.jit),
        "a_branch_with_another_static_value": lambda: of(
            lambda: st.cond(True, lambda x: Static(x, "a"), lambda x: Static(x, "b"), jnp.ones(2)), MISMATCH
        ),
        "a_state_of_other_names": lambda: of(st.load_state, st.StructureMismatchError, model={"a": 1}, state={"b": 1}),
        "a_position_for_a_filter": lambda: of(lambda f: st.grad(f, wrt=1), TypeError, f=of_head),
        "what_is_no_filter": lambda: of(lambda f: st.grad(f, wrt={}), TypeError, f=of_head),
        "a_filter_of_a_value_only": lambda: of(
            lambda f, is_inexact_array: st.grad(f, wrt=is_inexact_array),
            TypeError,
            f=of_head,
            is_inexact_array=eqx.is_inexact_array,
        ),
        "a_filter_that_looks_at_what_an_array_holds": lambda: of(
            lambda f: st.grad(f, wrt=lambda path, value: value > 0)(tied()), TypeError, f=of_head
        ),
        "a_filter_that_selects_nothing": lambda: of(
            lambda f: st.grad(f, wrt=eqx.nn.Linear)(tied()), ValueError, f=of_head
        ),
        "an_attribute_that_is_a_method": lambda: _assigning(Free().parameters, None),
        "an_attribute_that_is_used_up": lambda: _assigning(x for x in "ab"),
        "an_attribute_without_order": lambda: _assigning({Free()}),
        "a_mark_in_a_container": lambda: _assigning([st.parameter(jnp.ones(2))], [jnp.ones(2)]),
        "a_mark_of_the_class": lambda: of(
            lambda: type("Net", (st.Module,), {"weight": st.parameter(jnp.ones(2))}), TypeError
        ),
    }
)
