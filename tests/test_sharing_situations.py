"""Situations in which objects are shared, under each transform, with plain classes and with those of Flax NNX.

The oracle of each is Python: the same function, called on a model of its own as often as the transform would run it.
What may not be done in a loop or by a branch, and what a transform would treat in two ways, is refused, by all alike.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Mutable

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")

P = jax.sharding.PartitionSpec


def start(n=0.0):
    # An axis for what maps, so that all transforms take the same models.
    return jnp.array([float(n), n + 1.0])


class Plain:
    """Models of a class that was written by hand."""

    module = Mutable
    sequence = list

    @staticmethod
    def variable(value):
        return Mutable(value=value)

    @staticmethod
    def add(variable, n):
        variable.value = variable.value + n

    @staticmethod
    def value(variable):
        return variable.value


class AnyModule(nnx.Module):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


class Nnx:
    module = AnyModule
    sequence = nnx.List

    @staticmethod
    def variable(value):
        return nnx.Param(value)

    @staticmethod
    def add(variable, n):
        variable[...] += n

    @staticmethod
    def value(variable):
        return variable[...]


KINDS = {"plain": Plain, "nnx": Nnx}


def children(obj):
    if isinstance(obj, (list, tuple, nnx.List)):
        return list(enumerate(obj))
    if isinstance(obj, nnx.Variable):
        return [("value", obj[...])]
    if isinstance(obj, (Mutable, nnx.Module)):
        # In the order of their names, for so does NNX build its own.
        return [(name, each) for name, each in sorted(vars(obj).items()) if not name.startswith("_")]
    return []


def objects(obj, found=None):
    """All modules, variables and lists, in the order in which they are met; they hold each other's ids."""
    found = [] if found is None else found
    if not isinstance(obj, jax.Array) and children(obj) and not any(obj is each for each in found):
        if not isinstance(obj, tuple):
            found.append(obj)
        for _, child in children(obj):
            objects(child, found)
    return found


def described(obj, known):
    """What is where: each object by its number in `known`, to which new ones are added, and each value."""
    if isinstance(obj, (jax.Array, np.ndarray)):
        return np.asarray(obj).tolist()
    if isinstance(obj, tuple):
        return tuple(described(each, known) for each in obj)
    if not (isinstance(obj, (Mutable, nnx.Module, nnx.Variable, nnx.List, list))):
        return obj
    for number, each in enumerate(known):
        if each is obj:
            return number
    known.append(obj)
    return len(known) - 1, type(obj), [(name, described(child, known)) for name, child in children(obj)]


def whole(obj, known):
    """`described` in full, though all objects may be known."""
    numbers = []
    parts = described(obj, numbers)
    places = [next((n for n, each in enumerate(known) if each is obj), None) for obj in numbers]
    return parts, places


# The transforms, each with how often it runs the function -----------------------------------------------------------


@functools.cache
def mesh():
    return jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def nothing(*args):
    return jnp.zeros(())


def sharded(f, **options):
    # In `jit`, since else JAX compiles each operation in it by itself.
    return st.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), **options)


IN_PLACE = {
    "jit": (1, lambda f, a, **o: st.jit(f, **o)(*a)),
    "grad": (1, lambda f, a, **o: st.grad(f, argnums=tuple(range(len(a))), **o)(*a)),
    "value_and_grad": (1, lambda f, a, **o: st.value_and_grad(f, argnums=tuple(range(len(a))), **o)(*a)),
    "vmap": (1, lambda f, a, **o: st.vmap(f, **o)(*a)),
    "checkpoint": (1, lambda f, a, **o: st.checkpoint(f, **o)(*a)),
    "shard_map": (1, lambda f, a, **o: st.jit(lambda *a: sharded(f, **o)(*a), **o)(*a)),
    "cond": (1, lambda f, a, **o: st.cond(jnp.array(True), f, nothing, *a, **o)),
    "switch": (1, lambda f, a, **o: st.switch(jnp.array(1), [nothing, f], *a, **o)),
    "scan": (3, lambda f, a, **o: st.scan(lambda c, _: (c, f(*c)), a, length=3, **o)),
    "scan, over": (1, lambda f, a, **o: st.scan(lambda n, x: (n, f(*x)), 0, a, **o)),
    "map": (1, lambda f, a, **o: st.map(lambda a: f(*a), a, **o)),
    "while_loop": (
        3,
        lambda f, a, **o: st.while_loop(lambda c: c[0] < 3, lambda c: (f(*c[1]), (c[0] + 1, c[1]))[1], (0, a), **o),
    ),
    "fori_loop": (3, lambda f, a, **o: st.fori_loop(0, 3, lambda _, c: (f(*c), c)[1], a, **o)),
}

AS_VALUES = {
    "jit": (1, lambda f, a: st.jit(f)(*a)),
    "grad": (1, lambda f, a: st.grad(lambda a: (jnp.zeros(()), f(*a)), has_aux=True)(a)[1]),
    "vjp": (1, lambda f, a: st.vjp(lambda *a: (jnp.zeros(()), f(*a)), *a, has_aux=True)[2]),
    "jvp": (1, lambda f, a: st.jvp(f, a, a)[0]),
    "linearize": (1, lambda f, a: st.linearize(f, *a)[0]),
    "vmap": (1, lambda f, a: st.vmap(f)(*a)),
    "checkpoint": (1, lambda f, a: st.checkpoint(f)(*a)),
    "shard_map": (1, lambda f, a: st.jit(lambda *a: sharded(f)(*a))(*a)),
    "cond": (1, lambda f, a: st.cond(jnp.array(True), f, lambda *a: a, *a)),
    "switch": (1, lambda f, a: st.switch(jnp.array(1), [lambda *a: a, f], *a)),
    "scan": (3, lambda f, a: st.scan(lambda c, _: (f(*c), None), a, length=3)[0]),
    "scan, over": (1, lambda f, a: st.scan(lambda n, x: (n, f(*x)), 0, a)[1]),
    "map": (1, lambda f, a: st.map(lambda a: f(*a), a)),
    "while_loop": (3, lambda f, a: st.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(*c[1])), (0, a))[1]),
    "fori_loop": (3, lambda f, a: st.fori_loop(0, 3, lambda _, c: f(*c), a)),
}


# The situations: what is given, and what is done to it --------------------------------------------------------------


class Situation:
    """Makes models of a kind and changes them, any number of times; each object stays in its place, or comes back."""

    def __init__(self, kind):
        self.kind, self.module = kind, kind.module
        self.add, self.value = kind.add, kind.value

    def variable(self, n=0):
        return self.kind.variable(start(n))

    def another(self, variable, n):
        """One more, of the shape that this one has here."""
        return self.kind.variable(self.value(variable) * 0 + n)


class OneVariableInTwoModules(Situation):
    def make(self):
        v = self.variable()
        return self.module(v=v, n=self.variable(3)), self.module(v=v)

    def change(self, one, two):
        assert one.v is two.v
        self.add(one.v, self.value(one.n))
        self.add(two.v, 1)


class BareVariables(Situation):
    def make(self):
        v = self.variable()
        return v, self.module(v=v), [v]

    def change(self, one, two, three):
        assert one is two.v is three[0]
        self.add(one, 1)
        self.add(three[0], self.value(two.v))


class OneVariableTwiceInAModule(Situation):
    def make(self):
        v = self.variable()
        return (self.module(a=v, b=v, items=self.kind.sequence([v, self.variable(5), v])),)

    def change(self, model):
        assert model.a is model.b is model.items[0] is model.items[2]
        self.add(model.a, 1)
        self.add(model.items[1], self.value(model.b))


class Diamond(Situation):
    def make(self):
        a = self.module(v=self.variable())
        return (self.module(a=a, b=self.module(a=a), c=self.module(a=a, w=self.variable(1))),)

    def change(self, top):
        assert top.a is top.b.a is top.c.a
        self.add(top.b.a.v, self.value(top.c.w))
        self.add(top.a.v, 1)


class ValuesSwapped(Situation):
    def make(self):
        a = self.variable(1)
        return self.module(a=a, b=self.variable(7), again=a), a

    def change(self, model, a):
        difference = self.value(model.b) - self.value(model.a)
        self.add(a, difference)
        self.add(model.b, -difference)
        assert model.again is a


class AListInAnotherOrderForAMoment(Situation):
    def make(self):
        items = self.kind.sequence([self.module(v=self.variable(n)) for n in range(3)])
        return self.module(items=items, last=items[2]), self.module(items=items)

    def change(self, one, two):
        a, b, c = one.items
        one.items[0], one.items[1], one.items[2] = c, a, b
        assert two.items[0] is one.last
        self.add(two.items[0].v, self.value(two.items[1].v))
        two.items[0], two.items[1], two.items[2] = a, b, c


class AListThatGrowsForAMoment(Situation):
    def make(self):
        v = self.variable()
        items = self.kind.sequence([v])
        return self.module(items=items, v=v), self.module(items=items)

    def change(self, one, two):
        one.items.append(one.v)
        two.items.append(self.another(one.v, 4))
        assert len(one.items) == len(two.items) == 3
        for each in one.items:
            self.add(each, 1)
        self.add(one.v, self.value(one.items[2]))
        one.items.pop()
        two.items.pop()


class AnAttributeForAMoment(Situation):
    def make(self):
        model = self.module(v=self.variable())
        return model, self.module(inner=model)

    def change(self, model, outer):
        model.last = self.another(model.v, 2)
        self.add(outer.inner.v, self.value(outer.inner.last))
        del model.last


class ALayerIsTakenOutForAMoment(Situation):
    def make(self):
        layer = self.module(v=self.variable())
        return (self.module(a=layer, b=layer, c=self.module(v=self.variable(9))),)

    def change(self, model):
        layer, model.b = model.b, model.c
        self.add(model.b.v, self.value(layer.v))
        model.b = layer
        self.add(model.a.v, 1)


class NodesWithoutArrays(Situation):
    def make(self):
        empty = self.module()
        items = self.kind.sequence([])
        return self.module(v=self.variable(), e=empty, f=empty, items=items), self.module(e=empty, items=items), empty

    def change(self, one, two, empty):
        assert one.e is one.f is two.e is empty
        assert one.items is two.items
        self.add(one.v, 1)


SITUATIONS = {each.__name__: each for each in Situation.__subclasses__()}


class Several:
    """Situations that are met in one call, each with its own of the arguments: one program instead of many."""

    def __init__(self, each):
        self.each = each

    def make(self):
        given = [situation.make() for situation in self.each]
        self.counts = [len(args) for args in given]
        return tuple(arg for args in given for arg in args)

    def change(self, *args):
        for situation, count in zip(self.each, self.counts, strict=True):
            situation.change(*args[:count])
            args = args[count:]


@functools.cache
def made(kind, names):
    """The situation with this name, or several in one."""
    if isinstance(names, tuple):
        return Several([made(kind, name) for name in names])
    return (SITUATIONS | MOVES)[names](KINDS[kind])


def require_each(kind, names, check):
    """All in one call, and if that is wrong each in its own, to say which of them are."""
    try:
        return check(made(kind, tuple(names)))
    except Exception as together:
        wrong = {}
        for name in names:
            try:
                check(made(kind, name))
            except Exception as error:
                wrong[name] = repr(error)
        raise AssertionError(wrong or "only all together") from together


@functools.cache
def by_python(situation, times):
    """What a call leaves behind, and where each of the objects is that were there before."""
    args = situation.make()
    known = objects(args)
    for _ in range(times):
        situation.change(*args)
    return whole(args, known)


def require_in_place(transform):
    times, call = IN_PLACE[transform]

    def check(situation):
        args = situation.make()
        known = objects(args)

        def f(*args):
            situation.change(*args)
            return jnp.zeros(())

        call(f, args, in_place=True)
        assert whole(args, known) == by_python(situation, times)

    return check


def require_as_values(transform):
    times, call = AS_VALUES[transform]

    def check(situation):
        args = situation.make()
        known = objects(args)

        def f(*args):
            situation.change(*args)
            return args

        result = call(f, args)
        assert whole(args, known) == by_python(situation, 0)
        assert whole(result, [])[0] == by_python(situation, times)[0]

    return check


@pytest.mark.parametrize("transform", IN_PLACE)
@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind, transform):
    require_each(kind, SITUATIONS, require_in_place(transform))


@pytest.mark.parametrize(
    ("kind", "transform"),
    # What is a value goes the same way for both kinds.
    [*(("plain", name) for name in AS_VALUES), *(("nnx", name) for name in ("jit", "vjp", "scan", "cond"))],
)
def test_as_values(kind, transform):
    require_each(kind, SITUATIONS, require_as_values(transform))


@pytest.mark.parametrize("name", SITUATIONS)
def test_alone(name):
    """Each situation by itself, with some transform."""
    i = [*SITUATIONS].index(name)
    for kind in KINDS:
        require_in_place([*IN_PLACE][i % len(IN_PLACE)])(made(kind, name))
    require_as_values([*AS_VALUES][i % len(AS_VALUES)])(made("plain", name))


# What moves objects: as in Python where the function runs once, else refused ----------------------------------------


class VariablesSwapped(Situation):
    def make(self):
        a = self.variable(1)
        return self.module(a=a, b=self.variable(7)), self.module(a=a)

    def change(self, one, two):
        one.a, one.b = one.b, one.a
        self.add(one.a, 1)
        assert two.a is one.b


class ANewVariableInTwoPlaces(Situation):
    def make(self):
        return self.module(v=self.variable(2)), self.module(v=self.variable(3))

    def change(self, one, two):
        one.v = two.v = self.another(one.v, 5)
        self.add(two.v, 1)


class ALayerIsMoved(Situation):
    def make(self):
        layer = self.module(v=self.variable(2))
        return self.module(a=layer, b=layer, w=self.variable(1)), self.module(w=self.variable(3))

    def change(self, one, two):
        two.a = one.b
        del one.a
        self.add(two.a.v, self.value(one.w))


class AListGrows(Situation):
    def make(self):
        v = self.variable(2)
        items = self.kind.sequence([v])
        return self.module(items=items), self.module(items=items, v=v)

    def change(self, one, two):
        one.items.append(two.v)
        one.items.append(self.another(two.v, 4))
        self.add(two.items[1], 1)


class OneOfTwoBecomesTheOther(Situation):
    def make(self):
        return (self.module(a=self.module(v=self.variable(1)), b=self.module(v=self.variable(2))),)

    def change(self, model):
        model.a = model.b
        self.add(model.a.v, 1)


class ANodeWithoutArraysChanges(Situation):
    """Its text is a part of the structure, which a loop and a branch give back as it was."""

    def make(self):
        empty = self.module(state="begun")
        return self.module(v=self.variable(), e=empty), self.module(e=empty)

    def change(self, one, two):
        one.e.state = "done"
        assert two.e.state == "done"
        self.add(one.v, 1)


MOVES = {each.__name__: each for each in Situation.__subclasses__() if each.__name__ not in SITUATIONS}
# Of what is scanned each slice is met once. A branch may not run at all.
NOT_ONCE = ("scan", "while_loop", "fori_loop", "cond", "switch")


@pytest.mark.parametrize("transform", [name for name in IN_PLACE if name not in NOT_ONCE])
@pytest.mark.parametrize("kind", KINDS)
def test_moves_in_place(kind, transform):
    require_each(kind, MOVES, require_in_place(transform))


@pytest.mark.parametrize("transform", NOT_ONCE)
@pytest.mark.parametrize("kind", KINDS)
def test_moves_that_cannot_be_repeated(kind, transform):
    for name in MOVES:
        situation = made(kind, name)
        args = situation.make()
        known = objects(args)

        def f(*args):
            situation.change(*args)
            return jnp.zeros(())

        try:
            IN_PLACE[transform][1](f, args, in_place=True)
        except st.SharingMismatchError:
            assert whole(args, known) == by_python(situation, 0), name
        else:
            pytest.fail(f"{name} is not refused")


# One object, two treatments -----------------------------------------------------------------------------------------


def one_module(situation):
    model = situation.module(v=situation.variable())
    return model, model


def a_shared_layer(situation):
    layer = situation.module(v=situation.variable())
    return situation.module(a=layer), situation.module(a=layer)


def one_variable(situation):
    v = situation.variable()
    return v, v


ALIASES = (one_module, a_shared_layer, one_variable)


def placed(spec):
    return jax.sharding.NamedSharding(mesh(), spec)


WITH_OPTIONS = {
    "differentiated and not": lambda f, a, **o: st.grad(f, **o)(*a),
    "value, differentiated and not": lambda f, a, **o: st.value_and_grad(f, argnums=1, **o)(*a),
    "mapped and not": lambda f, a, **o: st.vmap(f, in_axes=(0, None), **o)(*a),
    "two shardings": lambda f, a, **o: st.jit(f, in_shardings=(placed(P()), placed(P("x"))), **o)(*a),
    "two specifications": lambda f, a, **o: st.shard_map(f, mesh=mesh(), in_specs=(P(), P("x")), out_specs=P(), **o)(
        *a
    ),
    "carried and scanned": lambda f, a, **o: st.scan(lambda c, x: (c, f(c, x)), *a, **o),
}
TWO_TREATMENTS = {
    **WITH_OPTIONS,
    **{f"{name}, in place": functools.partial(call, in_place=True) for name, call in WITH_OPTIONS.items()},
    "donated and not": lambda f, a: st.jit(f, donate_argnums=0)(*a),
}


@pytest.mark.parametrize("treatments", TWO_TREATMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_treatments(kind, treatments):
    situation = Situation(KINDS[kind])
    for alias in ALIASES:
        args = alias(situation)
        known = objects(args)
        before = whole(args, known)

        def f(one, two):
            raise AssertionError("the function is not even called")

        with pytest.raises(st.InconsistentSharingError) as caught:
            TWO_TREATMENTS[treatments](f, args)
        assert len(caught.value.paths) >= 2, alias
        for path in caught.value.paths:
            assert path in str(caught.value), alias
        assert whole(args, known) == before, alias
    # Each with objects of its own, the same call works.
    one, two = (tuple(alias(situation)[0] for alias in ALIASES) for _ in range(2))
    TWO_TREATMENTS[treatments](nothing, (one, two))


# What holds no array is treated in no way ---------------------------------------------------------------------------


def carried_and_scanned(f, a, **options):
    return st.scan(lambda c, x: (c, f(*c, *x)), a[:1], a[1:], **options)


DIFFERENTLY = {
    **{name: call for name, call in TWO_TREATMENTS.items() if not name.startswith(("value", "donated"))},
    "carried and scanned": carried_and_scanned,
    "carried and scanned, in place": functools.partial(carried_and_scanned, in_place=True),
}


@pytest.mark.parametrize("treatments", DIFFERENTLY)
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_without_arrays_may_be_treated_in_two_ways(kind, treatments):
    situation = Situation(KINDS[kind])
    empty = situation.module(items=situation.kind.sequence([]))
    one = situation.module(v=situation.variable(), e=empty), situation.module(v=situation.variable(1), e=empty)
    known = objects(one)
    before = whole(one, known)
    seen = []

    def f(a, b):
        seen.append(a.e is b.e and a.e.items is b.e.items)
        return jnp.zeros(())

    DIFFERENTLY[treatments](f, one)
    assert whole(one, known) == before
    assert set(seen) == {True}


# Carries that hold one model twice ----------------------------------------------------------------------------------

DOUBLE_CARRIES = {
    "scan": lambda f, a, **o: st.scan(lambda c, _: (f(*c), None), a, length=2, **o)[0],
    "while_loop": lambda f, a, **o: st.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(*c[1])), (0, a), **o)[1],
    "fori_loop": lambda f, a, **o: st.fori_loop(0, 2, lambda _, c: f(*c), a, **o),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("loop", DOUBLE_CARRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_double_carries(kind, loop, in_place):
    situation = Situation(KINDS[kind])
    model = situation.module(v=situation.variable(1))

    def exchanged(one, two):
        assert one is two
        situation.add(one.v, 1)
        return two, one

    for _ in range(2):
        one, two = DOUBLE_CARRIES[loop](exchanged, (model, model), in_place=in_place)
        assert one is two
        assert (one is model) == in_place
        np.testing.assert_array_equal(situation.value(one.v), situation.value(model.v) + (0 if in_place else 2))
    np.testing.assert_array_equal(situation.value(model.v), [5, 6] if in_place else [1, 2])

    def parted(one, two):
        return one, situation.module(v=situation.another(two.v, 1))

    v = model.v
    with pytest.raises(st.SharingMismatchError):
        DOUBLE_CARRIES[loop](parted, (model, model), in_place=in_place)
    assert model.v is v
    np.testing.assert_array_equal(situation.value(v), [5, 6] if in_place else [1, 2])


@pytest.mark.parametrize("loop", DOUBLE_CARRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_models_change_places_in_a_carry(kind, loop):
    """As values they may; in place they may not, since the caller's would have to."""
    situation = Situation(KINDS[kind])
    shared = situation.variable(5)
    models = tuple(situation.module(v=situation.variable(n), w=shared) for n in (1, 2))

    def exchanged(one, two):
        assert one.w is two.w
        situation.add(one.v, 10)
        return two, one

    one, two = DOUBLE_CARRIES[loop](exchanged, models)
    assert one.w is two.w
    assert [situation.value(each.v)[0] for each in (*models, one, two)] == [1, 2, 11, 12]
    with pytest.raises(st.SharingMismatchError):
        DOUBLE_CARRIES[loop](exchanged, models, in_place=True)
    assert [situation.value(each.v)[0] for each in models] == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_variable_is_carried(kind):
    situation = Situation(KINDS[kind])
    v = situation.variable(0)

    def renewed(v, x):
        return situation.another(v, 1), situation.value(v).sum()

    def changed_and_renewed(v, x):
        situation.add(v, 1)
        return renewed(v, x)

    # In place, too: what is left as it was need not be written.
    for in_place in (False, True):
        last, ys = st.scan(renewed, v, length=2, in_place=in_place)
        assert last is not v
        assert (situation.value(last).tolist(), ys.tolist()) == ([1, 1], [1, 2])
    with pytest.raises(st.SharingMismatchError):
        st.scan(changed_and_renewed, v, length=2, in_place=True)
    assert situation.value(v).tolist() == [0, 1]


# State from the inner transforms to the outer ones ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_up_through_all_that_write_it(kind):
    situation = Situation(KINDS[kind])
    layer = situation.module(v=situation.variable(), calls=situation.variable())
    model = situation.module(first=layer, rest=situation.module(layers=situation.kind.sequence([layer, layer])))

    def call(layer):
        situation.add(layer.calls, 1)
        return (situation.value(layer.v) ** 2).sum()

    def in_all(model, *, in_place):
        assert model.first is model.rest.layers[0] is model.rest.layers[1]
        total = st.checkpoint(call, in_place=in_place)(model.first)
        total += st.scan(lambda c, _: (c, call(c)), model.rest.layers[1], length=3, in_place=in_place)[1].sum()
        total += st.cond(total > 0, call, lambda layer: call(layer) + call(layer), model.first, in_place=in_place)
        return total + st.vmap(call, in_place=in_place)(model.rest.layers[0]).sum()

    def outer(model, *, inner, middle):
        f = lambda model: in_all(model, in_place=inner)
        return st.value_and_grad(st.jit(f, in_place=middle), in_place=True)(model)[0]

    calls = layer.calls
    # The first is called with 1 + 3 + 1 + 1, and whoever does not write keeps all of it to itself.
    for inner, middle, count in ((True, True, 6), (False, True, 6), (True, False, 6), (True, True, 12)):
        y = st.jit(lambda model, i=inner, m=middle: outer(model, inner=i, middle=m), in_place=True)(model)
        np.testing.assert_array_equal(situation.value(layer.calls), [count, count + 1])
        assert y == 6
        assert layer.calls is calls
        assert model.first is model.rest.layers[0] is model.rest.layers[1] is layer


# A structure that is another one for a moment is none for JAX -------------------------------------------------------


@pytest.mark.parametrize("name", ["AListThatGrowsForAMoment", "AnAttributeForAMoment", "ALayerIsTakenOutForAMoment"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_moment_is_no_new_trace(kind, name):
    situation = made(kind, name)
    args = situation.make()
    traces = []

    @st.jit(in_place=True)
    def f(*args):
        traces.append(None)
        situation.change(*args)

    for times in (1, 2, 3):
        f(*args)
        assert whole(args, [])[0] == by_python(situation, times)[0]
    assert len(traces) == 1
