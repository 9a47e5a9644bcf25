"""`in_place=` and `policy=` as options of every transform, with the function or before it, in every `Context`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharedtree as st
from tests.strategies import Mutable, Pair

IN_PLACE, APART = st.Policy(in_place=True), st.Policy(in_place=False)


def fresh():
    return Mutable(x=jnp.ones((2, 3)), count=jnp.zeros(2))


def count_up(model):
    model.count = model.count + 1
    return model.x.sum()


TRANSFORMS = {
    "jit": st.jit,
    "grad": st.grad,
    "value_and_grad": st.value_and_grad,
    "vmap": st.vmap,
    "checkpoint": st.checkpoint,
    "filter_jit": st.preserve_identities(eqx.filter_jit),
    "filter_grad": st.preserve_identities(eqx.filter_grad),
    "filter_vmap": st.preserve_identities(eqx.filter_vmap),
    "filter_checkpoint": st.preserve_identities(eqx.filter_checkpoint),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_option_of_every_transform(name):
    transform = TRANSFORMS[name]
    for f, changes in (
        (transform(count_up), False),
        (transform(count_up, in_place=None), False),
        (transform(count_up, in_place=False), False),
        (transform(count_up, in_place=True), True),
        (transform(in_place=True)(count_up), True),
        (transform(count_up, policy=IN_PLACE), True),
        (transform(count_up, policy=IN_PLACE, in_place=None), True),
        (transform(count_up, policy=IN_PLACE, in_place=False), False),
        (transform(count_up, policy=APART, in_place=True), True),
    ):
        model = fresh()
        before = model.count
        f(model)
        np.testing.assert_array_equal(model.count, [1, 1] if changes else [0, 0])
        assert (model.count is before) is not changes


@pytest.mark.parametrize(
    "transform",
    [
        st.preserve_identities(jax.jit, in_place=True),
        st.preserve_identities(jax.jit, policy=APART, in_place=True),
        st.preserve_identities(jax.jit, policy=APART)(in_place=True),
        st.preserve_identities(functools.partial(jax.jit, in_place=True)),
    ],
)
def test_bound_before_the_function(transform):
    model = fresh()
    # What is given with the function replaces what was bound, but a policy does not: `in_place` wins.
    for options, count in (({}, 1), ({"in_place": False}, 1), ({"policy": APART}, 2)):
        transform(count_up, **options)(model)
        assert model.count[0] == count


def test_the_rest_is_what_the_context_says_at_the_call():
    w = jnp.ones(2)

    def lose(model):
        return jax.tree.map(lambda x: 2 * x, model)

    for in_place in (True, False):
        f = st.jit(lose, in_place=in_place)
        for on_untie in ("error", "ignore"):
            with st.Context(st.Policy(on_untie=on_untie, in_place=not in_place)):
                if on_untie == "error":
                    with pytest.raises(st.errors.UntiedError):
                        f(Pair(w, w))
                else:
                    assert f(Pair(w, w)).first[0] == 2
    up = st.jit(count_up, in_place=False)
    model = fresh()
    with st.Context(IN_PLACE):
        up(model)
        assert model.count[0] == 0
        st.jit(count_up)(model)
        assert model.count[0] == 1


def test_a_policy_of_jax_stays_with_jax():
    for policy in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable):
        model = fresh()
        f = st.checkpoint(count_up, policy=policy, in_place=True)
        st.grad(f, in_place=True)(model)
        assert model.count[0] == 1
        assert f.options["policy"] is policy


def test_one_trace_for_each_policy_however_it_was_said():
    traces = 0

    def f(model):
        nonlocal traces
        traces += 1
        return count_up(model)

    ways = [{"in_place": True}, {"policy": IN_PLACE}, {"policy": APART, "in_place": True}]
    for wrapped in [st.jit(f, **way) for way in ways for _ in range(2)]:
        wrapped(fresh())
        wrapped(fresh())
    with st.Context(IN_PLACE):
        st.jit(f)(fresh())
        st.jit(f, in_place=True)(fresh())
    assert traces == 1
    st.jit(f, in_place=False)(fresh())
    st.jit(f, policy=st.Policy(in_place=False))(fresh())
    assert traces == 2
    # What was told nothing has a trace of its own, which may have to say what is lost in it.
    st.jit(f)(fresh())
    st.jit(f, policy=APART)(fresh())
    assert traces == 3


def test_shardings_of_the_result_are_not_those_of_the_state():
    where = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))

    def split(model):
        count_up(model)
        model.steps = model.steps + 1  # no axis that could be split
        return model.x + 1

    def by_hand(x, count, steps):
        return (x, count + 1, steps + 1), x + 1

    for given in ({"in_place": True}, {"policy": IN_PLACE}):
        f = st.jit(split, out_shardings=where, **given)
        for step in (1, 2):
            model = Mutable(x=jnp.ones((2, 3)), count=jnp.zeros(2), steps=jnp.array(step - 1))
            (_, count, steps), expected = jax.jit(by_hand, out_shardings=(None, where))(**vars(model))
            result = f(model)
            np.testing.assert_array_equal(result, expected)
            assert result.sharding == expected.sharding == where
            assert (model.steps, model.steps.sharding) == (step, steps.sharding)
            np.testing.assert_array_equal(model.count, count)
    with pytest.raises(ValueError, match="rank"):
        st.jit(split, out_shardings=where, in_place=False)(Mutable(x=jnp.array(1.0), count=jnp.zeros(2), steps=0))


def test_methods_and_modules():
    class Layer(Mutable):
        @st.jit(in_place=True)
        def up(self):
            self.count = self.count + 1

    jax.tree_util.register_pytree_node_class(Layer)
    layer = Layer(count=jnp.zeros(2))
    layer.up()
    assert layer.count[0] == 1
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    transform = st.preserve_identities(eqx.filter_jit)
    one, two, other = (jax.tree.structure(transform(module, in_place=each)) for each in (True, True, False))
    assert one == two != other


class Counter(st.Module):
    def __init__(self):
        self.count = jnp.zeros(())

    def __call__(self, x):
        self.count = self.count + 1
        return (x * self.count).sum()

    def again(self, x):
        return self(x)


class NNXCounter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return (x * self.count[...]).sum()

    def again(self, x):
        return self(x)


OF_BOUND = {
    **{name: lambda f, t=transform: t(f, in_place=True)(jnp.ones(2)) for name, transform in TRANSFORMS.items()},
    "by the context": lambda f: st.jit(f)(jnp.ones(2)),
    "cond": lambda f: st.cond(True, f, f, jnp.ones(2), in_place=True),
    "map": lambda f: st.map(f, jnp.ones(2), in_place=True),
}


@pytest.mark.parametrize("name", OF_BOUND)
@pytest.mark.parametrize("cls", [Counter, NNXCounter])
@pytest.mark.sampled(every=3)
def test_what_is_bound_to_a_model_is_refused_before_it_is_traced(cls, name):
    model = cls()
    for function in (model, model.again, functools.partial(model.again), functools.partial(model, x=jnp.ones(2))):
        with (
            pytest.raises(TypeError, match=r"because the `(NNX)?Counter` that it changes is not an argument") as error,
            st.Context(IN_PLACE),
        ):
            OF_BOUND[name](function)
        assert "lambda model, *args, **kwargs: model" in str(error.value)
    assert float(jnp.asarray(model.count)) == 0
    # A method that takes its model, and a model that nobody can change, are no such thing.
    st.jit(cls.again, in_place=True)(model, jnp.ones(2))
    assert float(jnp.asarray(model.count)) == 1
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    np.testing.assert_allclose(st.jit(linear, in_place=True)(jnp.ones(2)), linear(jnp.ones(2)), rtol=1e-6)


def test_nothing_changes_if_the_function_raises():
    def fails(model):
        count_up(model)
        raise RuntimeError("no")

    def scan(f, **options):
        return lambda model: st.scan(lambda model, _: (model, f(model)), model, length=1, **options)

    def cond(f, **options):
        return lambda model: st.cond(True, f, f, model, **options)

    for transform in (st.jit, st.grad, st.vmap, st.checkpoint, scan, cond):
        model = fresh()
        f = transform(fails, in_place=True)
        with pytest.raises(RuntimeError):
            f(model)
        assert model.count[0] == 0
        transform(count_up, in_place=True)(model)
        assert model.count[0] == 1


class Stack(list):
    """A list with attributes: an array, which is a child, and a static one."""

    def __init__(self, items, scale, note):
        super().__init__(items)
        self.scale, self.note = scale, note


class Table(dict):
    __slots__ = ("note", "scale")

    def __init__(self, items, scale, note):
        super().__init__(items)
        self.scale, self.note = scale, note


jax.tree_util.register_pytree_node(
    Stack, lambda s: ((list(s), s.scale), s.note), lambda note, children: Stack(*children, note)
)
jax.tree_util.register_pytree_node(
    Table, lambda t: ((dict(t), t.scale), t.note), lambda note, children: Table(*children, note)
)


@pytest.mark.parametrize("make", [lambda x: Stack([x], x + 1, "old"), lambda x: Table({0: x}, x + 1, "old")])
def test_subclasses_of_containers_have_items_and_attributes(make):
    obj = make(jnp.zeros(2))

    def change(obj, x):
        obj[0], obj.scale, obj.note = obj[0] + x, obj.scale * 5, "new"
        if x.ndim:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        st.jit(change, in_place=True)(obj, jnp.ones(2))
    assert (obj[0].tolist(), obj.scale.tolist(), obj.note) == ([0, 0], [1, 1], "old")
    st.jit(change, in_place=True)(obj, jnp.float32(3))
    assert (obj[0].tolist(), obj.scale.tolist(), obj.note) == ([3, 3], [5, 5], "new")


@pytest.mark.parametrize("value", [1, 0, "yes", (True,), np.True_, jnp.array(True)])
def test_it_is_a_bool(value):
    for wrap in (
        lambda value: st.jit(count_up, in_place=value),
        lambda value: st.grad(in_place=value)(count_up),
        lambda value: st.preserve_identities(jax.jit, in_place=value),
        lambda value: st.preserve_identities(jax.lax.map)(count_up, jnp.ones(2), in_place=value),
    ):
        with pytest.raises(TypeError, match="`in_place` must be True, False or None"):
            wrap(value)


def test_transforms_that_take_operands():
    over = functools.partial(st.preserve_identities, jax.lax.map)
    for context in (None, IN_PLACE):
        for wrapped, options, changes in (
            (over(), {}, context is not None),
            (over(), {"in_place": True}, True),
            (over(policy=APART, in_place=True), {}, True),
            (over(policy=APART, in_place=True), {"in_place": False}, False),
        ):
            model = fresh()
            with st.Context(context):
                wrapped(count_up, model, **options)
            np.testing.assert_array_equal(model.count, [1, 1] if changes else [0, 0])


def test_an_unregistered_transform_refuses():
    with pytest.raises(ValueError, match=r"(?s)cannot be used with `in_place=True`.*register_transform"):
        st.preserve_identities(lambda f: jax.jit(f), in_place=True)(count_up)(fresh())


class ReadOnly(list):
    """A list that refuses to be written to, once it is made."""

    def __setitem__(self, index, value):
        raise RuntimeError("read only")


jax.tree_util.register_pytree_node(ReadOnly, lambda s: (tuple(s), None), lambda _, children: ReadOnly(children))


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


jax.tree_util.register_pytree_node(
    Holder,
    lambda h: (tuple(vars(h).values()), tuple(vars(h))),
    lambda names, children: Holder(**dict(zip(names, children, strict=True))),
)


def test_what_was_written_before_a_refusal_is_taken_back():
    first, refusing = Holder(w=jnp.zeros(1)), ReadOnly([jnp.zeros(1)])

    def change(first, refusing):
        first.w, first.extra = first.w + 1, first.w
        list.__setitem__(refusing, 0, refusing[0] + 1)

    with pytest.raises(RuntimeError, match="read only"):
        st.jit(change, in_place=True)(first, refusing)
    assert {name: value.tolist() for name, value in vars(first).items()} == {"w": [0]}
    assert refusing[0].tolist() == [0]
