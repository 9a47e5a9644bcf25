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
    """`described` in full, though all objects may be known, and what has become of those that are not in it now."""
    numbers = []
    parts = described(obj, numbers)
    gone = described(tuple(known), numbers)
    places = [next((n for n, each in enumerate(known) if each is obj), None) for obj in numbers]
    return parts, places, gone


# The transforms, each with how often it runs the function -----------------------------------------------------------


@functools.cache
def mesh():
    return jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(f, **options):
    # In `jit`, since else JAX compiles each operation in it by itself.
    return st.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), **options)


def with_models(f):
    """For what wants a number to differentiate: the models beside it."""
    return lambda *args: (jnp.zeros(()), f(*args))


def unchanged(*args):
    return args


def everywhere(args):
    """That all arguments are differentiated."""
    return {"argnums": tuple(range(len(args))), "has_aux": True}


LOOPS = {
    "scan": lambda f, a, **o: st.scan(lambda c, _: (f(*c), None), a, length=3, **o)[0],
    "while_loop": lambda f, a, **o: st.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(*c[1])), (0, a), **o)[1],
    "fori_loop": lambda f, a, **o: st.fori_loop(0, 3, lambda _, c: f(*c), a, **o),
}
BRANCHES = {
    "cond": lambda f, a, **o: st.cond(jnp.array(True), f, unchanged, *a, **o),
    "switch": lambda f, a, **o: st.switch(jnp.array(1), [unchanged, f], *a, **o),
}
IN_PLACE = {
    "jit": lambda f, a, **o: st.jit(f, **o)(*a),
    "grad": lambda f, a, **o: st.grad(with_models(f), **everywhere(a), **o)(*a)[1],
    "value_and_grad": lambda f, a, **o: st.value_and_grad(with_models(f), **everywhere(a), **o)(*a)[0][1],
    "vmap": lambda f, a, **o: st.vmap(f, **o)(*a),
    "checkpoint": lambda f, a, **o: st.checkpoint(f, **o)(*a),
    "shard_map": lambda f, a, **o: st.jit(lambda *a: sharded(f, **o)(*a), **o)(*a),
    "scan, over": lambda f, a, **o: st.scan(lambda n, x: (n, f(*x)), 0, a, **o)[1],
    "map": lambda f, a, **o: st.map(lambda a: f(*a), a, **o),
    **BRANCHES,
    **LOOPS,
}
TREATED_APART = {
    "jacrev": lambda f, a, **o: st.jacrev(with_models(f), **everywhere(a), **o)(*a)[1],
    "jit, placed": lambda f, a, **o: st.jit(f, out_shardings=jax.sharding.NamedSharding(mesh(), P()), **o)(*a),
}
"""What these do to the result they do not do to what was changed."""
AS_VALUES = {
    **IN_PLACE,
    "vjp": lambda f, a: st.vjp(with_models(f), *a, has_aux=True)[2],
    "jvp": lambda f, a: st.jvp(f, a, a)[0],
    "linearize": lambda f, a: st.linearize(f, *a)[0],
}
# Of what is scanned each slice is met once. A branch may not run at all.
NOT_ONCE = [*BRANCHES, *LOOPS]


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


class SharedVariables(Situation):
    """Between two modules, bare, in a list beside them, and twice in a module and a list in it."""

    def make(self):
        v, w = self.variable(), self.variable()
        twice = self.module(a=w, b=w, items=self.kind.sequence([w, self.variable(5), w]))
        return self.module(v=v, n=self.variable(3)), self.module(v=v), v, [v], twice

    def change(self, one, two, bare, items, twice):
        assert bare is one.v is two.v is items[0]
        self.add(one.v, self.value(one.n))
        self.add(two.v, 1)
        self.add(items[0], self.value(bare))
        assert twice.a is twice.b is twice.items[0] is twice.items[2]
        self.add(twice.a, 1)
        self.add(twice.items[1], self.value(twice.b))


class SharedModules(Situation):
    """A diamond, with a value in it that changes places with another; and nodes without arrays."""

    def make(self):
        a, empty, items = self.module(v=self.variable()), self.module(), self.kind.sequence([])
        top = self.module(a=a, b=self.module(a=a), c=self.module(a=a, w=self.variable(1)), e=empty, items=items)
        return top, self.module(e=empty, items=items, v=a.v), empty

    def change(self, top, other, empty):
        assert top.a is top.b.a is top.c.a
        assert top.e is other.e is empty
        assert top.items is other.items
        self.add(top.b.a.v, self.value(top.c.w))
        self.add(top.a.v, 1)
        difference = self.value(top.c.w) - self.value(other.v)
        self.add(other.v, difference)
        self.add(top.c.w, -difference)


class AListIsAnotherForAMoment(Situation):
    """In its order, and longer."""

    def make(self):
        items = self.kind.sequence([self.module(v=self.variable(n)) for n in range(3)])
        return self.module(items=items, last=items[2]), self.module(items=items)

    def change(self, one, two):
        a, b, c = one.items
        one.items[0], one.items[1], one.items[2] = c, a, b
        assert two.items[0] is one.last
        self.add(two.items[0].v, self.value(two.items[1].v))
        two.items[0], two.items[1], two.items[2] = a, b, c
        one.items.append(one.last)
        two.items.append(self.module(v=self.another(a.v, 4)))
        assert len(one.items) == len(two.items) == 5
        for each in one.items:
            self.add(each.v, 1)
        self.add(a.v, self.value(one.items[4].v))
        one.items.pop()
        two.items.pop()


class AnAttributeIsAnotherForAMoment(Situation):
    """One more, and another layer in the place of a shared one."""

    def make(self):
        layer = self.module(v=self.variable())
        model = self.module(a=layer, b=layer, c=self.module(v=self.variable(9)))
        return model, self.module(inner=model)

    def change(self, model, outer):
        model.last = self.another(model.a.v, 2)
        self.add(outer.inner.a.v, self.value(outer.inner.last))
        del model.last
        layer, model.b = model.b, model.c
        self.add(outer.inner.b.v, self.value(layer.v))
        model.b = layer
        self.add(model.a.v, 1)


SITUATIONS = {each.__name__: each for each in Situation.__subclasses__()}


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


class WhatWasChangedIsTakenOut(Situation):
    """Whoever holds it sees what became of it."""

    def make(self):
        layer = self.module(v=self.variable(2), inner=self.module(v=self.variable(4)))
        return self.module(a=layer, b=layer, items=self.kind.sequence([layer])), self.module(w=self.variable(1))

    def change(self, one, two):
        self.add(one.a.v, 1)
        self.add(one.b.inner.v, self.value(two.w))
        one.items.append(self.another(two.w, 6))
        one.items = self.kind.sequence([])
        one.a = one.b = self.module(v=self.another(two.w, 5))


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
def made(kind, *names):
    return Several([(SITUATIONS | MOVES)[name](KINDS[kind]) for name in names])


@functools.cache
def by_python(situation, times):
    """What is left after so many calls, and where each of the objects is that were there before."""
    args = situation.make()
    known = objects(args)
    for _ in range(times):
        situation.change(*args)
    return whole(args, known)


def require_as_in_python(situation, transform, **options):
    """What is given, and what is returned of it. Where the function may not be run so, nothing has changed."""
    args = situation.make()
    known = objects(args)

    def f(*args):
        situation.change(*args)
        return args

    times = 3 if transform in LOOPS else 1
    try:
        result = (AS_VALUES | TREATED_APART)[transform](f, args, **options)
    except st.errors.SharingMismatchError:
        assert whole(args, known) == by_python(situation, 0)
        raise
    assert whole(result, [])[0] == by_python(situation, times)[0]
    assert whole(args, known) == by_python(situation, times if options else 0)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("transform", [*IN_PLACE, *TREATED_APART])
@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind, transform):
    names = [*SITUATIONS] if transform in NOT_ONCE else [*SITUATIONS, *MOVES]
    require_as_in_python(made(kind, *names), transform, in_place=True)


@pytest.mark.parametrize("transform", NOT_ONCE)
@pytest.mark.parametrize("kind", KINDS)
def test_moves_that_cannot_be_repeated(kind, transform):
    for name in MOVES:
        with pytest.raises(st.errors.SharingMismatchError):
            require_as_in_python(made(kind, name), transform, in_place=True)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("kind", "transform"),
    # What is a value goes the same way for both kinds.
    [*(("plain", name) for name in AS_VALUES), *(("nnx", name) for name in ("jit", "vjp", "scan", "cond"))],
)
def test_as_values(kind, transform):
    require_as_in_python(made(kind, *SITUATIONS), transform)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_moment_is_no_new_trace(kind, name):
    """Nor is what stays as it is, each situation by itself."""
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


# One object, two treatments -----------------------------------------------------------------------------------------


def aliases(situation):
    """One module, one layer in two modules, and one variable: as two arguments."""
    model, v = situation.module(v=situation.variable()), situation.variable()
    layer = situation.module(v=situation.variable())
    return (model, model), (situation.module(a=layer), situation.module(a=layer)), (v, v)


def placed(spec):
    return jax.sharding.NamedSharding(mesh(), spec)


TWO_SPECIFICATIONS = {"in_specs": (P(), P("x")), "out_specs": P()}
WITH_OPTIONS = {
    # At another path: at the same one, in place or not, it is cut (`test_used_twice`).
    "differentiated and not": lambda f, a, **o: st.grad(lambda x, y: f(x, *y), **o)(a[0], a[1:]),
    "value, differentiated and not": lambda f, a, **o: st.value_and_grad(lambda x, y: f(*x, y), argnums=1, **o)(
        a[:1], a[1]
    ),
    "mapped and not": lambda f, a, **o: st.vmap(f, in_axes=(0, None), **o)(*a),
    "two shardings": lambda f, a, **o: st.jit(f, in_shardings=(placed(P()), placed(P("x"))), **o)(*a),
    "two specifications": lambda f, a, **o: st.shard_map(f, mesh=mesh(), **TWO_SPECIFICATIONS, **o)(*a),
    "carried and scanned": lambda f, a, **o: st.scan(lambda c, x: (c, f(*c, *x)), a[:1], a[1:], **o),
}
TWO_TREATMENTS = {
    **WITH_OPTIONS,
    **{f"{name}, in place": functools.partial(call, in_place=True) for name, call in WITH_OPTIONS.items()},
    "donated and not": lambda f, a: st.jit(f, donate_argnums=0)(*a),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("treatments", TWO_TREATMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_treatments(kind, treatments):
    situation, treat = Situation(KINDS[kind]), TWO_TREATMENTS[treatments]
    for args in aliases(situation):
        known = objects(args)
        before = whole(args, known)
        with pytest.raises(st.errors.InconsistentSharingError) as caught:
            treat(lambda *_: pytest.fail("the function is not even called"), args)
        assert len(caught.value.paths) >= 2
        for path in caught.value.paths:
            assert path in str(caught.value)
        assert whole(args, known) == before
    # Each with objects of its own, the same call works; and what holds no array is treated in no way.
    empty = situation.module(items=situation.kind.sequence([]))
    one, two = (situation.module(v=situation.variable(n), e=empty, own=aliases(situation)[1][0]) for n in range(2))
    known = objects([one, two])
    before = whole((one, two), known)
    seen = []

    def f(a, b):
        seen.append(a.e is b.e and a.e.items is b.e.items)
        return jnp.zeros(())

    treat(f, (one, two))
    assert set(seen) == {True}
    if "donated" not in treatments:
        assert whole((one, two), known) == before


# Carries that hold one model twice ----------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_models_change_places_in_a_carry(kind, loop):
    """One that is there twice may; two may as values and not in place, since the caller's would have to."""
    situation = Situation(KINDS[kind])
    shared = situation.variable(5)
    model, other = models = tuple(situation.module(v=situation.variable(n), w=shared) for n in (1, 2))
    v = model.v
    first_values = lambda *models: [situation.value(each.v)[0] for each in models]

    def exchanged(one, two):
        assert (one is two, one.w is two.w) == (is_twice, True)
        situation.add(one.v, 10)
        return two, one

    def parted(one, two):
        return one, situation.module(v=situation.another(two.v, 1), w=two.w)

    is_twice = False
    one, two = LOOPS[loop](exchanged, models)
    assert one.w is two.w
    assert first_values(*models, one, two) == [1, 2, 12, 21]
    with pytest.raises(st.errors.SharingMismatchError):
        LOOPS[loop](exchanged, models, in_place=True)
    assert first_values(*models) == [1, 2]

    is_twice = True
    for in_place, left, given in ((False, 1, 31), (False, 1, 31), (True, 31, 31), (True, 61, 61)):
        one, two = LOOPS[loop](exchanged, (model, model), in_place=in_place)
        assert one is two
        assert (one is model) == in_place
        assert first_values(model, one) == [left, given]
        with pytest.raises(st.errors.SharingMismatchError):
            LOOPS[loop](parted, (model, model), in_place=in_place)
        assert model.v is v
        assert first_values(model, other) == [left, 2]


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
    with pytest.raises(st.errors.SharingMismatchError):
        st.scan(changed_and_renewed, v, length=2, in_place=True)
    assert situation.value(v).tolist() == [0, 1]


# State from the inner transforms to the outer ones ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
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
