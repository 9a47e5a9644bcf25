"""Generated code agrees with the walk, or gives up: on random DAGs, and on DAGs mutated since the plan was made."""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst
from jax.tree_util import tree_structure

import sharedtree as st
from sharedtree._graph import Rules
from sharedtree.transforms._crossing import Call, Names, pack_call, packed_in, unpack_result
from sharedtree.transforms._plans import CallPlan, can_be_planned
from sharedtree.transforms._result_plans import NOT_BUILT, ResultPlan, can_be_built
from tests.strategies import STATICS, Layer, Mutable, Pair, Record, arguments, copy_dag, is_array, partition, paths

NAMES = Names(lambda *args: None)


def walk(args, kwargs=None):
    return pack_call(args, kwargs or {}, (), Rules(), NAMES)


def agrees(plan: CallPlan, args, kwargs=None) -> bool:
    """Whether a plan packed the arguments; if so, exactly as the walk does."""
    packing = plan.pack(args, kwargs or {})
    if packing is None:
        return False
    call: Call = walk(args, kwargs)
    assert tree_structure(packing[:2]) == tree_structure((call.args, call.kwargs))
    ours, theirs = jax.tree.leaves(packing[:2]), jax.tree.leaves((call.args, call.kwargs))
    assert len(ours) == len(theirs)
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    for number, obj in enumerate(call.tags.objects):
        if call.tags.number_of(obj) == number:
            assert plan.object_of(number, args, kwargs or {}) is obj
    return True


@given(args=arguments())
def test_a_plan_packs_what_it_was_made_for(args):
    call = walk(args)
    if can_be_planned(call, ()):
        plan = CallPlan(call, ())
        assert agrees(plan, args)
        assert agrees(plan, copy_dag(args))
        assert not agrees(plan, (*args, 1))
        assert not agrees(plan, args, {"more": 1})


def mutate(draw, tree):
    """Changes one thing somewhere, in place."""
    found = [(path, obj) for path, obj, _ in paths(tree) if isinstance(obj, (Pair, Layer, Mutable, Record, list, dict))]
    _, obj = found[draw(hst.integers(0, len(found) - 1))]
    _, other = found[draw(hst.integers(0, len(found) - 1))]
    everything = [x for _, x, _ in paths(tree) if not _contains(x, obj)]
    pool = [*everything, jnp.ones(3), np.float32(2), 3, 2.5, True, None, "text", [], (), jnp.tanh]
    new = pool[draw(hst.integers(0, len(pool) - 1))]
    match obj:
        case list():
            action = draw(hst.sampled_from(["append", "pop", "replace"]))
            if action == "append" or not obj:
                obj.append(new)
            elif action == "pop":
                obj.pop()
            else:
                obj[0] = new
        case dict():
            if obj and draw(hst.booleans()):
                obj[next(iter(obj))] = new
            else:
                obj[draw(hst.sampled_from(["a", "b", "c"]))] = new
        case Layer():
            name = draw(hst.sampled_from(["weight", "activation", "parts", "width", "extra", "__doc__"]))
            value = draw(hst.sampled_from(STATICS)) if name == "activation" else new
            object.__setattr__(obj, name, 7 if name == "width" else value)
        case Record(name=_) if draw(hst.booleans()):
            obj.name = "other"
        case Mutable() if draw(hst.booleans()):
            vars(obj)["new"] = new
        case _:
            names = list(vars(obj))
            if names:
                object.__setattr__(obj, names[draw(hst.integers(0, len(names) - 1))], new)
    del other


def _contains(x, obj):
    """Whether putting `x` into `obj` would close a cycle."""
    return any(inner is obj for _, inner, _ in paths(x))


@given(args=arguments(), data=hst.data())
def test_a_stale_plan_never_wins(args, data):
    args = copy_dag(args)
    call = walk(args)
    if not can_be_planned(call, ()):
        return
    plan = CallPlan(call, ())
    for _ in range(6):
        mutable = [arg for arg in args if isinstance(arg, (Pair, Layer, Mutable, Record, list, dict))]
        if not mutable:
            return
        mutate(data.draw, mutable[data.draw(hst.integers(0, len(mutable) - 1))])
        agrees(plan, args)  # or gives up
        call = walk(args)
        if can_be_planned(call, ()):
            assert agrees(CallPlan(call, ()), args)


@given(args=arguments())
def test_a_plan_builds_what_the_walk_builds(args):
    call = walk(args)
    result = call.args
    if not can_be_built(result):
        return
    plan = ResultPlan(result, [])
    built = plan.build(result, None)
    leaves = [leaf for argument in packed_in(result, 0) for leaf in argument.packed.leaves]
    if len(set(map(id, leaves))) < len(leaves):  # alive in `leaves`; a number at two places, which JAX never returns
        assert built is NOT_BUILT
        return
    walked = unpack_result(result, lambda _: None)
    assert partition(list(built)) == partition(list(walked))
    for (path, x, _), (other, y, _) in zip(paths(built), paths(walked), strict=True):
        assert path == other
        assert type(x) is type(y)
        if is_array(x):
            assert x is y
        if isinstance(x, (Layer, Record)):
            assert {k: v for k, v in vars(x).items() if k in ("width", "name")} == {
                k: v for k, v in vars(y).items() if k in ("width", "name")
            }


def test_results_of_another_structure_are_not_built():
    one, two = walk((Pair(jnp.ones(2), 1),)).args, walk((Pair(jnp.ones(2), 2),)).args
    plan = ResultPlan(one, [])
    assert plan.build(two, None) is NOT_BUILT
    assert plan.build([*one], None) is NOT_BUILT
    shared = jnp.ones(2)
    pair = walk((Pair(jnp.ones(2), jnp.zeros(2)),)).args
    plan = ResultPlan(pair, [])
    pair[0].leaves = [shared, shared]
    assert plan.build(pair, None) is NOT_BUILT  # two leaves that JAX returned as one object


def planned(f):
    (site,) = f._sites.values()
    return site.plans


def test_plans_are_made_on_the_second_call_and_kept_for_several_structures():
    traces = []
    f = st.jit(lambda m, x: traces.append(1) or (st.tree.map(lambda v: v + x, m), x))
    w = jnp.ones(2)
    one, two = Pair(w, [w]), Pair(w, [w, jnp.zeros(2)])
    for _ in range(4):
        for model in (one, two):
            new, _ = f(model, 1.0)
            assert new.first is new.second[0]
    assert len(traces) == 2
    assert len(planned(f)) == 2
    assert all(plan.known[0] for plan in planned(f))


def test_pass_through_and_committedness_with_a_plan():
    model = Pair(eqx.nn.Lambda(jnp.tanh), [jnp.ones(2)])
    traces = []
    f = st.jit(lambda m, x: traces.append(1) or (m, Pair(m.first, [x])))
    for x in (jnp.ones(2),) * 4:
        same, new = f(model, x)
        assert same is model
        assert new.first is model.first
    committed = jax.device_put(jnp.ones(2), jax.devices()[0])
    for _ in range(3):
        same, new = f(model, committed)
        assert same.second[0].committed  # as of vanilla JAX, since the committed array is used
        assert same.first is new.first
        assert new.second[0].committed
        assert f(model, jnp.ones(2))[0] is model
    assert len(traces) == 1


@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: np.ones(2, np.float32)])
def test_other_kinds_of_arrays_do_not_retrace(make):
    traces = []
    f = st.jit(lambda m: traces.append(1) or st.tree.map(lambda v: v + 1, m))
    for _ in range(4):
        f(Pair(make(), [make()]))
        f(Pair(jnp.ones(2), [jnp.ones(2)]))
    assert len(traces) == 1


def test_objects_that_lie():
    class Lying(eqx.Module):
        weight: jax.Array

        def __getattribute__(self, name):
            if name == "weight":
                return None
            return super().__getattribute__(name)

    @jax.tree_util.register_pytree_node_class
    class Slotted:
        __slots__ = ("a", "b")

        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten(self):
            return (self.a, self.b), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children)

    w = jnp.ones(2)
    lying = Lying(w)
    f = st.jit(lambda m: st.tree.map(lambda x: x + 1, m))
    for i in range(4):
        slotted = Slotted(w, w if i % 2 else w + 1)
        result = f(slotted)
        assert (result.a is result.b) == bool(i % 2)
        result = f(lying)
        assert object.__getattribute__(result, "weight")[0] == 2

    changing = Pair(w, Layer(w, None, None))
    for _ in range(3):
        f(changing)
    object.__setattr__(changing, "__dict__", {"first": w + 5, "second": 3})
    result = f(changing)
    assert result.first[0] == 7
    assert result.second == 3
    object.__setattr__(changing, "second", changing.first)
    assert f(changing).second[0] == 7


def test_a_class_that_is_defined_again():
    def define(value):
        class Net(eqx.Module):
            weight: jax.Array
            kind: str = eqx.field(static=True, default="net")

            def which(self):
                return value

        return Net

    f = st.jit(lambda m: m.weight * m.which())
    for value in (1, 2, 3):
        cls = define(value)
        for _ in range(3):
            assert f(cls(jnp.ones(()))) == value
        del cls
        gc.collect()


def test_mutable_statics_are_compared_by_content():
    class Config(eqx.Module):
        weight: jax.Array
        options: dict = eqx.field(static=True)

    options = {"scale": 2}
    model = Config(jnp.ones(()), options)
    f = st.jit(lambda m: m.weight * m.options["scale"])
    for _ in range(3):
        assert f(model) == 2
    options["scale"] = 3
    assert f(model) == 3


def test_any_keyword_names():
    f = st.jit(lambda m, **options: st.tree.map(lambda x: x + 1, m), donate_argnums=0)
    model = Pair(jnp.zeros(2), None)
    for _ in range(4):
        model = f(model, **{"x-1": 2.0, "class": 1.0})
    assert model.first[0] == 4
    assert planned(f)


def test_a_plan_that_cannot_be_made_loses_nothing(monkeypatch):
    def broken(*args):
        raise RuntimeError("no plan")

    monkeypatch.setattr("sharedtree._compiled._faults.raise_faults", False)
    monkeypatch.setattr("sharedtree.transforms._sites.CallPlan", broken)
    f = st.jit(lambda m: st.tree.map(lambda x: x + 1, m), donate_argnums=0)
    model = Pair(jnp.zeros(2), None)
    for _ in range(4):
        model = f(model)
    assert model.first[0] == 4


def test_registered_classes_with_fields_of_their_own():
    @jax.tree_util.register_pytree_node_class
    class Query:
        _fields = ("x",)

        def __init__(self, x, kind):
            self.x, self.kind = x, kind

        def tree_flatten(self):
            return (self.x,), self.kind

        @classmethod
        def tree_unflatten(cls, kind, children):
            return cls(*children, kind)

    f = st.jit(lambda q: Query(q.x + 1, q.kind))
    query = Query(jnp.zeros(2), "kind")
    for _ in range(4):
        query = f(query)
    assert (query.kind, query.x[0]) == ("kind", 4)
    assert planned(f)
