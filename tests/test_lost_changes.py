"""Changes of arguments that are lost: said where a library writes state back, with fixes that run; silent elsewhere."""

import dataclasses
import functools
import textwrap
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from sharedtree.transforms.checks import _returned_changes

LOST = st.errors.LostChangeWarning
X = jnp.array([[1.0, 2.0, 3.0], [2.0, 1.0, 5.0]])


class WithBatchNorm(nnx.Module):
    def __init__(self):
        self.layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)

    def seen(self):
        return self.layer.mean[...]


class WithDropout(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)

    def seen(self):
        return self.layer.rngs.count[...]


class WithCache(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.last = nnx.Cache(jnp.zeros((2, 3)))

    def __call__(self, x):
        self.last[...] = x + jnp.zeros((2, 3))
        return x

    def seen(self):
        return self.last[...]


class WithMetric(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.metric = nnx.metrics.Average()

    def __call__(self, x):
        self.metric.update(values=x)
        return x

    def seen(self):
        return self.metric.total[...]


class WithCount(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.count = nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.count[...] += 1
        return self.w * x

    def seen(self):
        return self.count[...]


class Counter(st.Module):
    def __init__(self):
        self.w = st.parameter(jnp.ones(3))
        self.count = st.state_field(jnp.zeros(()))

    def __call__(self, x):
        self.count = self.count + 1
        return self.w * x

    def seen(self):
        return self.count


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scratch:
    """No library writes this back."""

    count: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros(()))

    def __call__(self, x):
        self.count = self.count + 1
        return x

    def seen(self):
        return self.count


STATE = {
    "BatchNorm": WithBatchNorm,
    "Dropout": WithDropout,
    "Cache": WithCache,
    "Metric": WithMetric,
    "counter": WithCount,
    "Module": Counter,
}


def sized(model, size):
    """A model with so many elements, each with a stream of its own."""
    return st.tree.map(lambda leaf: jnp.stack([leaf] * size), model)


TRANSFORMS = {
    "jit": st.jit,
    "grad": st.grad,
    "vmap along 0": functools.partial(st.vmap, in_axes=0),
    "vmap along None": functools.partial(st.vmap, in_axes=(None, 0)),
    "checkpoint": st.checkpoint,
    "cond": lambda f: st.cond,
    "scan": lambda f: st.scan,
}


def run(how, made, model, f):
    """Calls what a transform has made of a function; returns the model whose state counts."""
    if how in ("vmap along 0", "scan"):
        model = sized(model, 2)
    if how == "cond":
        made(True, f, f, model, X)
    elif how == "scan":
        made(f, 0.0, model)
    else:
        made(model, X if "vmap" not in how else jnp.stack([X, X]))
    return model


def function_for(how):
    """A new function, which nobody has traced."""

    def loss(model, x):
        return model(x).sum()

    def body(carry, model):
        return carry, model(X).sum()

    return body if how == "scan" else loss


def caught(call):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    return [w for w in record if w.category is LOST]


def message_of(call):
    (warning,) = caught(call)
    return str(warning.message)


def fixes_in(message):
    """The pieces of code in a message: what is between two lines of prose."""
    pieces = [[]]
    for line in message.split("\n"):
        if line.startswith("    ") and not line.startswith("    `"):
            pieces[-1].append(line)
        elif pieces[-1]:
            pieces.append([])
    return [textwrap.dedent("\n".join(piece)) for piece in pieces if piece]


def fixed(code, **names):
    """What a fix makes."""
    names |= {"sharedtree": st, "functools": functools}
    exec(code, names)
    return names["f"]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_each_offered_fix_runs_and_does_what_it_says(how, kind):
    f = function_for(how)
    before = run(how, lambda *_: None, STATE[kind](), f).seen()
    message = message_of(lambda: run(how, TRANSFORMS[how](f), STATE[kind](), f))
    codes = fixes_in(message)
    assert [code.count("in_place=True") for code in codes] == ([0] if how == "vmap along None" else [1, 0])
    for code in codes:
        own = function_for(how)
        made = fixed(code, **{f.__name__: own})
        models = []
        assert not caught(lambda: models.append(run(how, made, STATE[kind](), own)))  # noqa: B023
        assert np.array_equal(before, models[0].seen()) == ("in_place=False" in code)


@pytest.mark.parametrize("how", TRANSFORMS)
def test_scratch_of_other_classes_is_said_under_a_transform_in_place_only(how):
    def outer(**told):
        f = function_for(how)
        return caught(lambda: st.jit(lambda model: run(how, TRANSFORMS[how](f), model, f).seen(), **told)(Scratch()))

    assert not outer()
    assert not outer(in_place=False)
    if how in ("vmap along 0", "scan"):  # what is changed there is another object, made on the way
        return
    (warning,) = outer(in_place=True)
    returned, meant = fixes_in(str(warning.message))
    assert returned == f"return result, {'operands' if how == 'cond' else 'model'}"
    assert "in_place=False" in meant


def test_a_function_that_nobody_told_is_said_with_what_is_inside_it():
    """The outermost one gets the warning, and the code tells all of them."""

    def loss(model, x):
        return model(x).sum()

    def step(model, x):
        model.layer.scale[...] -= st.grad(loss, wrt=nnx.Param)(model, x).layer.scale[...]

    message = message_of(lambda: st.jit(step)(WithBatchNorm(), X))
    assert message.startswith(f"`{step.__qualname__}` ({__file__}:{step.__code__.co_firstlineno}) changes `model")
    assert f"    `{loss.__qualname__}` under `jax.grad` changes `model.layer.mean` and `model.layer.var`\n" in message
    write, meant = fixes_in(message)
    assert write == ("inner = sharedtree.grad(loss, wrt=wrt, in_place=True)\nf = sharedtree.jit(step, in_place=True)")
    assert meant == "f = sharedtree.jit(step, in_place=False)"
    assert not caught(lambda: fixed(meant, step=step)(WithBatchNorm(), X))


NESTS = {
    "jit of grad": lambda loss, **told: st.jit(st.grad(loss, **told), **told),
    "jit of checkpoint of grad": lambda loss, **told: st.jit(st.checkpoint(st.grad(loss, **told), **told), **told),
    "vmap of grad": lambda loss, **told: st.vmap(st.grad(loss, **told), in_axes=(0, None), **told),
}


@pytest.mark.parametrize("nest", NESTS)
def test_transforms_of_transforms_are_told_one_by_one(nest):
    def loss(model, x):
        return model(x).sum()

    model = sized(Counter(), 2) if "vmap" in nest else Counter()
    write, meant = fixes_in(message_of(lambda: NESTS[nest](loss)(model, X)))
    assert write.count("in_place=True") == write.count("\n") + 1 == nest.count(" of ") + 1
    for code, count in ((meant, 0), (write, 1)):
        made = fixed(code, loss=lambda model, x: model(x).sum())
        assert not caught(lambda: made(model, X))  # noqa: B023
        np.testing.assert_array_equal(model.count, jnp.full(model.count.shape, count))


def test_a_function_that_a_rule_calls_is_listed_once():
    def f(model, x):
        return model(x).sum()

    ruled = st.custom_vjp(f)
    ruled.defvjp(lambda model, x: (ruled(model, x), None), lambda _, cotangent: (None, None))
    message = message_of(lambda: st.grad(ruled, argnums=1)(Counter(), X))
    assert message.count("under `jax.custom_vjp`") == 1
    assert fixes_in(message)[0].count("custom_vjp") == 1


@pytest.mark.parametrize("residual", [lambda model: model, lambda model: (model, 1), lambda model: model.count])
def test_a_residual_is_not_returned_to_anybody(residual):
    ruled = st.custom_vjp(lambda model, x: model(x).sum())
    ruled.defvjp(lambda model, x: (model(x).sum(), residual(model)), lambda _, cotangent: (None, jnp.ones_like(X)))
    assert "changes `model.count`" in message_of(lambda: st.grad(lambda x, model: ruled(model, x))(X, Counter()))


def test_a_transform_without_a_name_is_called_so_in_code():
    message = message_of(lambda: st.preserve_identities(lambda f: jax.jit(f))(loss_of_counter())(Counter(), X))
    assert fixes_in(message) == ["f = sharedtree.preserve_identities(transform, in_place=False)(loss)"]


def test_an_object_that_is_one_for_all_elements_is_left_and_the_rest_is_written():
    def each(model, x):
        return model(x).sum()

    def step(model, x):
        st.vmap(each, in_axes=(None, 0))(model, jnp.stack([x, x]))
        return model(x)

    message = message_of(lambda: st.jit(step)(Counter(), X))
    write, _ = fixes_in(message)
    assert "`in_axes` is None for it, so there is one object for all elements" in message
    assert write == (
        "inner = sharedtree.vmap(each, in_axes=(None, 0), in_place=False)\nf = sharedtree.jit(step, in_place=True)"
    )


BOUND = {
    "module": lambda model: model,
    "method": lambda model: model.__call__,
    "partial": lambda model: functools.partial(model.__call__),
}


@pytest.mark.parametrize("bound", BOUND)
def test_a_module_that_the_function_is_bound_to(bound):
    (write,) = fixes_in(message_of(lambda: st.jit(BOUND[bound](Counter()))(X)))
    model = Counter()
    assert not caught(lambda: fixed(write)(model, X))
    assert model.count == 1


def test_a_module_that_is_the_function_of_a_transform_of_equinoxs():
    write, meant = fixes_in(message_of(lambda: st.filter_jit(Counter())(X)))
    model = Counter()
    assert not caught(lambda: fixed(write)(model, X))
    assert model.count == 1
    assert not caught(lambda: fixed(meant, f=Counter())(X))


def test_a_decorated_method_is_a_function_of_self():
    class Own(Counter):
        @st.jit
        def forward(self, x):
            return self(x)

    assert "`self.count`" in message_of(lambda: Own().forward(X))


# What was told, and how


def loss_of_counter():
    def loss(model, x):
        return model(x).sum()

    return loss


TOLD = {
    "option": lambda f, told: st.jit(f, in_place=told),
    "policy": lambda f, told: st.jit(f, policy=st.Policy(in_place=told)),
    "another policy": lambda f, told: st.jit(f, policy=st.Policy(arrays=False), in_place=told),
}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("how", TOLD)
def test_what_was_told_is_silent(how, told):
    model = Counter()
    assert not caught(lambda: TOLD[how](loss_of_counter(), told)(model, X))
    assert model.count == told


@pytest.mark.parametrize("policy", [st.Policy(), st.Policy(arrays=False), st.Policy(containers=True)])
def test_a_policy_for_another_reason_tells_nothing(policy):
    assert message_of(lambda: st.jit(loss_of_counter(), policy=policy)(Counter(), X))
    with st.Context(policy):
        assert message_of(lambda: st.jit(loss_of_counter())(Counter(), X))
    with st.Context(st.Policy(in_place=False)):
        assert not caught(lambda: st.jit(loss_of_counter())(Counter(), X))


def test_what_one_wrapper_was_told_another_was_not():
    """Both are of one function, and share what JAX keeps of it."""
    f = loss_of_counter()
    assert not caught(lambda: st.jit(f, in_place=False)(Counter(), X))
    assert message_of(lambda: st.jit(f)(Counter(), X))
    assert not caught(lambda: st.jit(f, in_place=False)(Counter(), X))


def test_a_cached_call_says_nothing_and_another_trace_does():
    f = st.jit(loss_of_counter())
    assert message_of(lambda: f(Counter(), X))
    assert not caught(lambda: f(Counter(), X))
    assert message_of(lambda: f(Counter(), X[:1]))


def test_python_shows_it_once_for_a_definition():
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        f = loss_of_counter()
        for _ in range(3):
            st.grad(f)(Counter(), X)
        st.grad(loss_of_counter())(Counter(), X)  # of the same code
    assert len(record) == 1


# What does not run

ONLY_TRACED = {
    "eval_shape": lambda f: st.eval_shape(f, Counter(), X),
    "make_jaxpr": lambda f: st.make_jaxpr(f)(Counter(), X),
    "filter_eval_shape": lambda f: st.filter_eval_shape(f, Counter(), X),
    "filter_make_jaxpr": lambda f: st.preserve_identities(eqx.filter_make_jaxpr)(f)(Counter(), X),
    "lower": lambda f: f.lower(Counter(), X),
    "trace": lambda f: f.trace(Counter(), X),
    "its own eval_shape": lambda f: f.eval_shape(Counter(), X),
    "explain": lambda f: st.explain(f, Counter(), X),
    "export": lambda f: st.export(f)(Counter(), X),
}


@pytest.mark.parametrize("how", ONLY_TRACED)
def test_what_is_only_traced_is_silent_until_it_runs(how):
    f = st.jit(loss_of_counter())
    assert not caught(lambda: ONLY_TRACED[how](f))
    assert message_of(lambda: f(Counter(), X))
    assert not caught(lambda: f(Counter(), X))


@pytest.mark.parametrize("how", ["eval_shape", "make_jaxpr", "filter_eval_shape"])
def test_a_trace_that_was_kept_from_inside_is_said_when_it_runs(how):
    f = st.jit(loss_of_counter())
    assert not caught(lambda: ONLY_TRACED[how](lambda model, x: f(model, x)))
    assert message_of(lambda: st.jit(lambda model, x: f(model, x))(Counter(), X))


# What loses nothing


def evaluates(model, x):
    return model(x).sum()


def returns_model(model, x):
    model(x)
    return model


def returns_state(model, x):
    model(x)
    return nnx.state(model)


def returns_split(model, x):
    model(x)
    return nnx.split(model)[1]


def restores(model, x):
    before = jax.tree.map(lambda leaf: leaf, nnx.state(model))  # new variables
    y = model(x)
    nnx.update(model, before)
    return y


def pops(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.sow(nnx.Intermediate, "sown", x)
    return nnx.pop(model, nnx.Intermediate)


def sows(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.sow(nnx.Intermediate, "sown", x.sum(), reduce_fn=lambda a, b: a + b, init_fn=lambda: jnp.zeros(()))
    return x.sum()


def with_scratch(model, x):
    model.scratch = x
    model.name = "settings are no traced leaves"
    return x.sum()


def captures(model, x):
    @nnx.capture(nnx.Intermediate)
    def forward(model, x):
        model.sow(nnx.Intermediate, "sown", x)
        return x

    return forward(model, x)


@pytest.mark.parametrize("f", [returns_model, returns_state, returns_split, restores, pops, sows, captures])
@pytest.mark.parametrize("kind", [WithBatchNorm, WithDropout, WithCache, WithMetric])
@pytest.mark.sampled(every=3)
def test_what_loses_nothing_is_silent(f, kind):
    assert not caught(lambda: st.jit(f)(kind(), X))


def test_evaluation_is_silent():
    for model in (WithBatchNorm(), WithDropout()):
        model.eval()
        assert not caught(lambda: st.jit(evaluates)(model, X))  # noqa: B023
        assert not caught(lambda: st.jit(lambda model, x: model.eval() or model(x))(WithDropout(), X))


def test_scratch_attributes_and_settings_are_silent():
    assert not caught(lambda: st.jit(with_scratch)(Counter(), X))
    assert not caught(lambda: st.jit(with_scratch)(Scratch(), X))


def test_what_was_sown_before_is_replaced_in_silence():
    model = WithCache()
    sows(model, X)
    assert not caught(lambda: st.jit(sows)(model, X))


def test_equinox_and_values_are_silent():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    f = st.filter_vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    assert not caught(lambda: f(X, state))
    assert not caught(lambda: st.jit(lambda d: d.update(x=2 * d["x"]) or d["x"])({"x": X}))


# What is returned as another object


def again(leaf):
    """The same values, as another array; of PRNG keys, too."""
    return jnp.stack([leaf])[0]


def carried(model):
    (model, _), _ = st.scan(lambda carry, _: ((carry[0], carry[1] + 1), None), (model, 0.0), length=2)
    return model


def trained(model):
    """Two steps, of which the second changes a model that the first has made."""
    tx = st.optimizer(optax.sgd(0.1), wrt=nnx.Param)
    state = tx.init(model)
    for _ in range(2):
        gradient = st.grad(lambda model: jnp.sum(model(X)), wrt=nnx.Param, in_place=True, allow_int=True)(model)
        updates, state = tx.update(gradient, state, model)
        model = st.apply_updates(model, updates)
    return model, state


def replicated():
    return jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec()
    )


WAYS = {
    "with_sharding_constraint": lambda model: st.with_sharding_constraint(model, replicated()),
    "filter_shard": lambda model: eqx.filter_shard(model, replicated()),
    "copy": st.copy,
    "st.tree.map": lambda model: st.tree.map(again, model),
    "jax.tree.map": lambda model: jax.tree.map(again, model),
    "stop_gradient": jax.lax.stop_gradient,
    "a layer each": lambda model: [st.tree.map(again, part) for part in vars(model).values() if is_part(part)],
    "in a new model": lambda model: {"models": [st.tree.map(again, model)], "step": 1},
    "scan": carried,
    "jit": lambda model: st.jit(carried)(model),
    "checkpoint": lambda model: st.checkpoint(carried)(model),
    "trained": trained,
    "state": lambda model: jax.tree.map(again, nnx.state(model)),
    "states": lambda model: jax.tree.map(again, nnx.split(model, nnx.Param, ...)[1:]),
    "pmean": lambda model: jax.tree.map(lambda x: x, jax.lax.pmean(nnx.state(model, inexact), "b")),
}


def is_part(value):
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def inexact(path, value):
    return jnp.issubdtype(value[...].dtype, jnp.inexact) if isinstance(value, nnx.Variable) else False


def returned_under_jit(way, model):
    st.jit(lambda model, x: (model(x), way(model)))(model, X)


def returned_as_aux(way, model):
    st.grad(lambda model, x: (jnp.sum(model(x)), way(model)), has_aux=True, allow_int=True)(model, X)


def returned_under_vmap(way, model):
    st.vmap(lambda model: (model(X), way(model)), axis_name="b")(sized(model, 2))


def returned_by_an_iteration(way, model):
    st.scan(lambda carry, model: (carry + 1, (model(X), way(model))), 0, sized(model, 2))


def returned_under_checkpoint(way, model):
    st.checkpoint(lambda model, x: (model(x), way(model)))(model, X)


RETURNING = {
    "jit": returned_under_jit,
    "grad": returned_as_aux,
    "vmap": returned_under_vmap,
    "scan": returned_by_an_iteration,
    "checkpoint": returned_under_checkpoint,
}


def one_of(kinds):
    """The first of some kinds daily, the others in CI."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (i > 0)) for i, kind in enumerate(kinds)]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("kind", one_of(STATE))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", RETURNING)
@pytest.mark.sampled(every=3)
def test_what_is_returned_as_another_object_is_not_lost(how, way, kind):
    if kind == "Module" and way in ("state", "states", "pmean", "a layer each", "trained"):
        pytest.skip("a `State`, a layer and `nnx.Param` are NNX's")
    if way == "pmean" and (how != "vmap" or kind in ("Dropout", "Metric", "counter")):
        pytest.skip("there is no axis, or the mean of what changes is none")
    if way == "trained" and how == "scan":
        pytest.skip("the same as under vmap")
    assert not caught(lambda: RETURNING[how](WAYS[way], STATE[kind]()))


class Pair(nnx.Module):
    def __init__(self, kind):
        self.a, self.b = kind(), kind()

    def __call__(self, x):
        return self.a(x) + self.b(x)


def gradient_of(model, **options):
    return st.grad(lambda model: jnp.sum(model(X) ** 2), allow_int=True, in_place=True, **options)(model)


NOT_RETURNED = {
    "nothing": lambda before, model: None,
    "None": lambda before, model: [None, 0, ()],
    "what it was before": lambda before, model: before,
    "a copy of what it was before": lambda before, model: jax.tree.map(again, before),
    "its parameters": lambda before, model: jax.tree.map(again, nnx.state(model, nnx.Param)),
    "another model": lambda before, model: st.tree.map(again, type(model)()),
    "a gradient": lambda before, model: gradient_of(model),
    "a gradient of the parameters": lambda before, model: gradient_of(model, wrt=nnx.Param),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kind", one_of(["BatchNorm", "Dropout", "Cache", "Metric", "counter"]))
@pytest.mark.parametrize("what", NOT_RETURNED)
@pytest.mark.parametrize("how", ["jit", "checkpoint", "vmap"])
@pytest.mark.sampled(every=3)
def test_what_is_not_returned_is_lost_whatever_else_is(how, what, kind):
    def f(model):
        before = nnx.clone(model)
        model(X)
        return NOT_RETURNED[what](before, model)

    if how == "vmap" and what in ("another model", "what it was before", "a copy of what it was before"):
        pytest.skip("the values are concrete, so nobody can tell")
    model = STATE[kind]() if how != "vmap" else sized(STATE[kind](), 2)
    assert caught(lambda: getattr(st, how)(f)(model))


@pytest.mark.parametrize("kind", ["BatchNorm", "Cache", "Metric"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.sampled(every=3)
def test_of_two_models_the_one_that_is_not_returned_is_lost(first, kind):
    def f(one, other):
        one(X), other(X)
        return jax.tree.map(again, one if first else other)

    for how in (st.jit, st.checkpoint):
        (lost,) = [str(w.message) for w in caught(lambda: how(f)(STATE[kind](), STATE[kind]()))]  # noqa: B023
        assert "`other." in lost if first else "`one." in lost
        assert "`one." not in lost if first else "`other." not in lost
    model = sized(STATE[kind](), 2)
    assert caught(lambda: st.vmap(f)(model, st.copy(model)))


def test_models_that_are_computed_from_each_other_are_all_returned():
    """The teacher is a mean of both, so it is computed from what was changed in the student, too."""

    def f(student, teacher):
        student(X), teacher(X)
        teacher = st.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, student)
        return teacher, st.tree.map(again, student)

    for swap in (False, True):
        own = (lambda a, b: f(b, a)) if swap else (lambda a, b: f(a, b))
        assert not caught(lambda: st.jit(own)(WithBatchNorm(), WithBatchNorm()))  # noqa: B023


def test_a_layer_that_is_returned_alone_is_returned_and_the_other_one_is_lost():
    def f(model):
        model(X)
        return st.tree.map(again, model.a)

    message = message_of(lambda: st.jit(f)(Pair(WithBatchNorm)))
    assert "`model.b.layer.mean`" in message
    assert "`model.a." not in message


def test_a_model_that_is_put_together_again_is_returned():
    def f(model):
        model(X)
        model = nnx.clone(model)
        model.count = nnx.Variable(jnp.zeros((), int))
        return model

    assert not caught(lambda: st.jit(f)(WithCount()))


def test_a_mapped_dictionary_of_the_state_is_returned():
    def f(model):
        model(X)
        return jax.tree.map(again, nnx.to_pure_dict(nnx.state(model)))

    assert not caught(lambda: st.jit(f)(Pair(WithBatchNorm)))


class ManyLayers(nnx.Module):
    def __init__(self, number):
        self.layers = nnx.List([WithCount() for _ in range(number)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mapped_layers(before, model):
    return [st.tree.map(again, layer) for layer in model.layers]


@pytest.mark.parametrize("how", ["jit", "vmap"])
@pytest.mark.parametrize(
    ("what", "loses"),
    [
        (NOT_RETURNED["a gradient"], True),
        (NOT_RETURNED["what it was before"], True),
        (lambda before, model: st.tree.map(again, model), False),
        (mapped_layers, False),
        (lambda before, model: mapped_layers(before, model)[::-1], False),
        (lambda before, model: mapped_layers(before, model)[1:], True),
    ],
    ids=["a gradient", "what it was", "the model", "its layers", "its layers in reverse", "all layers but one"],
)
@pytest.mark.slow
def test_what_is_looked_at_grows_with_the_model_and_not_with_its_square(monkeypatch, what, loses, how):
    """Counts how often a change is looked for in a result, in a model and in one with four times as many layers."""
    looks = []
    original = _returned_changes._Returned._has
    monkeypatch.setattr(_returned_changes._Returned, "_has", lambda *args: (looks.append(args[1]), original(*args))[1])

    def looks_at(number):
        def f(model):
            before = nnx.clone(model)
            model(X)
            return what(before, model)

        model = ManyLayers(number)
        looks.clear()
        lost = caught(lambda: getattr(st, how)(f)(model if how == "jit" else sized(model, 2)))
        # Under vmap the values are concrete, and any other value may be what was changed.
        assert bool(lost) == loses or how == "vmap"
        return len(looks)

    assert looks_at(32) <= 4 * looks_at(8) + 32


# What is new, and what is gone


class WithLayers(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(0))])
        self.attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))


def appends(model):
    model.layers.append(nnx.Linear(3, 3, rngs=nnx.Rngs(1)))


def deletes(model):
    del model.layer


def counts_and_adds(model):
    model.w[...] += 1
    model.extra = nnx.Param(jnp.ones(3))


ADDITIONS = {
    "a cache": (lambda model: model.attention.init_cache((1, 5, 4)), "adds `model.attention.cache_index`"),
    "an item": (appends, "adds `model.layers[1]`"),
    "a variable": (lambda model: setattr(model, "extra", nnx.Param(jnp.ones(3))), "adds `model.extra`"),
    "a deletion": (deletes, "removes `model.layer`"),
    "both": (counts_and_adds, "changes `model.w` and adds `model.extra`"),
}
GROWING = {
    "jit": lambda f, **told: st.jit(lambda model: f(model), **told),
    "grad": lambda f, **told: st.grad(lambda model: [f(model), jnp.sum(model.w[...])][1], **told),
    "checkpoint": lambda f, **told: st.checkpoint(lambda model: f(model), **told),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("change", ADDITIONS)
@pytest.mark.parametrize("how", GROWING)
def test_what_is_added_and_removed_is_said_and_written_in_place_as_nnx_does(how, change):
    f, told = ADDITIONS[change]
    message = message_of(lambda: GROWING[how](f)(WithLayers()))
    assert told in message.split("\n")[0]
    assert [code.count("in_place=True") for code in fixes_in(message)] == [1, 0]
    ours, nnxs = WithLayers(), WithLayers()
    assert not caught(lambda: GROWING[how](f, in_place=True)(ours))
    assert not caught(lambda: GROWING[how](f, in_place=False)(WithLayers()))
    nnx.jit(lambda model: f(model))(nnxs)
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(nnxs))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(nnxs))


@pytest.mark.parametrize("change", ADDITIONS)
def test_a_branch_cannot_add_so_in_place_is_not_offered(change):
    f = ADDITIONS[change][0]
    message = message_of(lambda: st.cond(True, f, f, WithLayers()))
    assert [code.count("in_place=True") for code in fixes_in(message)] == [0]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("change", ADDITIONS)
@pytest.mark.parametrize("way", [lambda model: model, st.copy, lambda model: st.tree.map(again, model)])
def test_what_is_added_and_returned_is_not_lost(way, change):
    assert not caught(lambda: st.jit(lambda model: [ADDITIONS[change][0](model), way(model)][1])(WithLayers()))


def sets_and_deletes(model):
    model.scratch = nnx.Cache(jnp.ones(3))
    del model.scratch


SILENT = {
    "scratch": sets_and_deletes,
    "eval": lambda model: model.eval(),
    "a static value": lambda model: setattr(model, "name", "model"),
    "sown": lambda model: setattr(model, "sown", nnx.Intermediate(jnp.ones(3))),
}


@pytest.mark.parametrize("change", SILENT)
def test_what_is_not_kept_is_silent(change):
    assert not caught(lambda: st.jit(SILENT[change])(WithLayers()))


# What can be written back


def along_none(lib, **told):
    mapped = {"st": st.vmap, "nnx": nnx.vmap}[lib]
    return lambda model: mapped(lambda model, x: model(x), in_axes=(None, 0), axis_name="d", **told)(model, X[:, None])


class WithMeanOfAll(nnx.Module):
    def __init__(self):
        self.layer = nnx.BatchNorm(3, axis_name="d", rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)

    def seen(self):
        return self.layer.mean[...]


@pytest.mark.parametrize("kind", [WithMeanOfAll, WithDropout, WithCount])
def test_what_is_one_for_all_elements_is_said_to_be_written_in_place_as_nnx_writes_it(kind):
    message = message_of(lambda: along_none("st")(kind()))
    assert "The new value is the same for all elements, so `in_place=True` would keep it" in message
    ours, nnxs = kind(), kind()
    assert not caught(lambda: along_none("st", in_place=True)(ours))
    along_none("nnx")(nnxs)
    np.testing.assert_allclose(ours.seen(), nnxs.seen(), rtol=1e-6)


@pytest.mark.parametrize("kind", [WithDropout, WithCount, WithMetric])
@pytest.mark.slow
def test_pmap_writes_what_the_first_device_has_as_nnx_does_and_says_so(kind):
    """On several devices, where their values differ, in `on_eight_devices.py`."""

    def mapped(library, **told):
        return library.pmap(lambda model, x: model(x), in_axes=(None, 0), **told)

    message = message_of(lambda: mapped(st)(kind(), X[None]))
    assert "one object for all devices. `in_place=True` would write the value of the first device" in message
    assert [code.count("in_place=True") for code in fixes_in(message)] == [0]
    ours, nnxs = kind(), kind()
    assert not caught(lambda: mapped(st, in_place=True)(ours, X[None]))
    mapped(nnx)(nnxs, X[None])
    np.testing.assert_allclose(ours.seen(), nnxs.seen(), rtol=1e-6)


@pytest.mark.parametrize("kind", [WithBatchNorm, WithMeanOfAll])
def test_what_differs_between_devices_is_not_offered_in_place(kind):
    spec = jax.sharding.PartitionSpec

    def step(model, x):
        return model(x)

    def sharded(**told):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        f = st.shard_map(step, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec("d"), **told)
        return lambda model: st.jit(lambda model, x: f(model, x), **told)(model, X)

    message = message_of(lambda: sharded()(kind()))
    if kind is WithMeanOfAll:
        model = kind()
        assert not caught(lambda: sharded(in_place=True)(model))
        assert message.count("in_place=True") > 0
        assert np.any(model.seen() != kind().seen())
    else:
        assert "in_place=True" not in message
        with pytest.raises(ValueError, match="out_specs"):
            sharded(in_place=True)(kind())


@pytest.mark.parametrize("told", [{}, {"in_place": True}])
def test_a_condition_keeps_nothing(told):
    def condition(value):
        value[0](X)
        return value[1] < 2

    def loop(condition):
        model = Counter()
        st.while_loop(condition, lambda value: (value[0], value[1] + 1), (model, 0), **told)

    message = message_of(lambda: loop(condition))
    assert "in_place=True" not in message
    (code,) = fixes_in(message)
    f = fixed(code, condition=condition)
    assert not caught(lambda: loop(f))


def test_a_partial_is_printed():
    def step(model, x, train):
        return model(x).sum() if train else x.sum()

    message = message_of(lambda: st.jit(functools.partial(step, train=True))(Counter(), X))
    write, meant = fixes_in(message)
    assert write == "f = sharedtree.jit(functools.partial(step, train=True), in_place=True)"
    model = Counter()
    assert not caught(lambda: fixed(write, step=step)(model, X))
    assert model.count == 1
    assert not caught(lambda: fixed(meant, step=step)(Counter(), X))


def test_a_method_of_a_class_is_printed():
    write, _ = fixes_in(message_of(lambda: st.jit(WithCount.__call__)(WithCount(), X)))
    assert write == "f = sharedtree.jit(WithCount.__call__, in_place=True)"
    model = WithCount()
    assert not caught(lambda: fixed(write, WithCount=WithCount)(model, X))
    assert model.seen() == 1


def test_a_decorated_method_is_decorated_with_what_is_meant():
    class Own(Counter):
        @st.jit
        def forward(self, x):
            return self(x)

    write, meant = fixes_in(message_of(lambda: Own().forward(X)))
    assert write == "f = sharedtree.jit(Own.forward.__wrapped__, in_place=True)"
    model = Own()
    assert not caught(lambda: fixed(write, Own=Own)(model, X))
    assert model.count == 1
    assert not caught(lambda: fixed(meant, Own=Own)(Own(), X))


# What is a change


class Holding(st.Module):
    """State in plain containers, too."""

    def __init__(self):
        self.w = st.parameter(jnp.ones(3))
        self.moments = (jnp.zeros(3), jnp.zeros(3))
        self.table = {"a": jnp.zeros(3), "b": [jnp.zeros(3)]}
        self.child = Counter()


CHANGES = {
    "a tuple": (lambda m: setattr(m, "moments", (m.moments[0] + 1, m.moments[1])), ".moments[0]"),
    "a dict": (lambda m: m.table.update(a=m.w), ".table['a']"),
    "a list in a dict": (lambda m: m.table["b"].__setitem__(0, m.w), ".table['b'][0]"),
    "another dict": (lambda m: setattr(m, "table", {**m.table, "a": m.w}), ".table['a']"),
    "another module": (lambda m: setattr(m, "child", st.tree.map(lambda x: x + 1, m.child)), ".child.count"),
    "the same again": (lambda m: setattr(m, "table", {**m.table}), None),
    "a new key": (lambda m: m.table.update(c=m.w), None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_a_change_is(change):
    def f(model):
        CHANGES[change][0](model)

    path = CHANGES[change][1]
    if path is None:
        assert not caught(lambda: st.jit(f)(Holding()))
    else:
        assert f"`model{path}`" in message_of(lambda: st.jit(f)(Holding()))


def test_what_in_place_would_write_beside_is_named():
    def step(model, batch):
        batch.count = batch.count / 255
        return model(batch.count)

    message = message_of(lambda: st.jit(step)(Counter(), Scratch()))
    assert "That writes `batch.count` back, too" in message


@pytest.mark.slow
def test_nnx_and_optax_train_with_the_fix_as_with_flax():
    """The program that says nothing in Flax: the fix makes it what `nnx.jit` makes of it."""

    def train(jit, value_and_grad):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def loss(model, x):
            return (model(x) ** 2).mean()

        def step(model, optimizer, x):
            value, gradient = value_and_grad(loss)(model, x)
            optimizer.update(model, gradient)
            return value

        step = jit(step)
        return [float(step(model, optimizer, X)) for _ in range(3)]

    (warning,) = caught(lambda: train(st.jit, st.value_and_grad))
    write, _ = fixes_in(str(warning.message))
    assert write == "f = sharedtree.jit(step, in_place=True)"
    ours = train(lambda step: fixed(write, step=step), st.value_and_grad)
    np.testing.assert_allclose(ours, train(nnx.jit, nnx.value_and_grad), rtol=1e-6)


@pytest.mark.parametrize("transform", [st.vjp, st.linearize, lambda f, *args: st.jvp(f, args, args)])
def test_transforms_that_hand_back_results_only(transform):
    message = message_of(lambda: transform(lambda model: model(X).sum(), Counter()))
    (meant,) = fixes_in(message)
    assert "in_place=False" in meant
