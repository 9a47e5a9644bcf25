"""Packing by walking: cycles, depth, what is interned, what is freed, and threads."""

import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests import strategies
from tests.deep import Link, chain, in_a_thread, lists, room
from tests.kinds import ENDS, Noted, made
from tests.models import Box
from tests.threads import at_once


class Mutable:
    """As users write them: children are the attributes, in the order of their names."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


jax.tree_util.register_pytree_with_keys(
    Mutable,
    lambda m: (tuple((jax.tree_util.GetAttrKey(k), v) for k, v in sorted(vars(m).items())), tuple(sorted(vars(m)))),
    lambda names, children: Mutable(**dict(zip(names, children, strict=True))),
)


# --- cycles --------------------------------------------------------------------------------------------------------


def list_in_itself():
    x = [jnp.ones(2)]
    x.append(x)
    return x, "", "[1]"


def dict_in_a_list_in_itself():
    d = {}
    d["a"] = [1, d]
    return (d,), "[0]", "[0]['a'][1]"


def object_in_itself():
    m = Mutable(weight=jnp.ones(2))
    m.child = Mutable(parent=m)
    return m, "", ".child.parent"


def through_a_module():
    m = Mutable(weight=jnp.ones(2))
    m.box = Box([m])  # made while there is no cycle yet: Equinox flattens what it is given
    return [m], "[0]", "[0].box.content[0]"


def list_through_a_module():
    x = []
    x.append(Link(jnp.ones(()), x))
    return {"x": x}, "['x']", "['x'][0].next"


def list_through_a_module_seen_from_the_module():
    return list_through_a_module()[0], "['x'][0]", "['x'][0].next[0]"


CYCLES = [list_in_itself, dict_in_a_list_in_itself, object_in_itself, through_a_module]
CALLS = {
    "leaves": (st.tree.leaves, ""),
    "map": (lambda x: st.tree.map(lambda y: y, x), ""),
    "ties": (st.ties, ""),
    "Dag": (st.Dag, ""),
    "jit": (lambda x: st.jit(lambda m: 0)(x), "m"),
    "vmap": (lambda x: st.vmap(lambda m: 0)(x), "m"),
    "grad": (lambda x: st.grad(lambda m: 0.0)(x), "m"),
    "vjp": (lambda x: st.vjp(lambda m: 0.0, x), "m"),
}


def cycles_and_calls():
    yield from ((make, call) for make in CYCLES for call in CALLS)
    for call, (_, name) in CALLS.items():  # outside modules a list is a value, so what is named there is the module
        yield (list_through_a_module_seen_from_the_module if name else list_through_a_module), call


def test_a_cycle_is_an_error_with_both_paths():
    for make, call in cycles_and_calls():
        tree, start, back = make()
        function, name = CALLS[call]
        with pytest.raises(st.errors.CycleError) as caught:
            function(tree)
        assert caught.value.paths == (name + start, name + back), (make, call)
        outer = f"at `{name + start}`" if name + start else "at the root"
        assert f"it sits {outer} and again, within itself, at `{name + back}`" in str(caught.value)
        assert "eqx.field(static=True)   # weakref.ref(parent)" in str(caught.value)
        assert isinstance(caught.value, ValueError)


def test_a_cycle_in_a_result_is_an_error():
    @st.jit
    def f(m):
        m.child = m
        return m

    with pytest.raises(st.errors.CycleError) as caught:
        f(Mutable(weight=jnp.ones(2)))
    assert caught.value.paths == ("result", "result.child")


# --- depth ---------------------------------------------------------------------------------------------------------


increment = st.jit(lambda m: st.tree.map(lambda x: x + 1, m))


def unnested(x):
    depth = 0
    while isinstance(x, list):
        (x,) = x
        depth += 1
    return depth, x


def test_a_thousand_modules_or_lists_in_a_module():
    deep = chain(1000, jnp.array(1.0), jnp.array(2.0))

    def calls():
        new, crossed = st.tree.map(lambda x: x + 1, deep), increment(deep)
        assert len(st.tree.leaves(deep)) == len(jax.tree.leaves(jax.jit(lambda d: d)(st.Dag(deep)))) == 2
        assert st.same_sharing(new, deep)
        return new, crossed, increment(Mutable(x=lists(1000, jnp.ones(2)))).x

    *chains, out = in_a_thread(calls)
    for new in chains:
        scales = []
        while new is not None:
            scales.append(new.scale)
            new = new.next
        assert (len(scales), float(scales[0]), float(scales[-1])) == (1000, 2.0, 3.0)
        assert scales[0] is scales[1] is scales[998]
    depth, leaf = unnested(out)
    assert depth == 1000
    np.testing.assert_array_equal(leaf, [2.0, 2.0])


@pytest.mark.slow
def test_plain_lists_outside_modules_of_any_depth():
    same = st.jit(lambda x: x)
    for inner in (jnp.ones(2), Box(jnp.ones(2))):
        for given in (1_000, 5_000):
            depth, found = unnested(in_a_thread(lambda inner=inner, given=given: same(lists(given, inner))))
            assert depth == given
            np.testing.assert_array_equal(getattr(found, "content", found), [1.0, 1.0])
    dag = st.Dag(lists(2000, jnp.ones(2)))
    depth, leaf = unnested(jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(dag).tree)
    assert depth == 2000
    np.testing.assert_array_equal(leaf, [2.0, 2.0])


def test_plain_lists_never_cost_a_thread_its_recursion_limit():
    """Whatever their depth, they work or are an error of ours: JAX on Python 3.11 breaks the thread where it fails."""
    trees = [lists(depth, jnp.ones(2)) for depth in (100, 500, 900, 990, 1000)]

    def call():
        lost = []
        for tree in trees:
            before = room()
            try:
                st.jit(lambda x: 0)(tree)
            except st.errors.DepthError:
                pass
            lost.append(before - room())
        return max(lost)

    assert in_a_thread(call) == 0


@pytest.mark.slow
def test_a_node_that_never_ends_is_an_error():
    class Endless:
        pass

    jax.tree_util.register_pytree_node(Endless, lambda _: ((Endless(),), None), lambda _, children: Endless())
    with pytest.raises(st.errors.DepthError, match="nested more than"):
        st.tree.leaves(Endless())


def test_a_static_value_that_is_too_deep_or_contains_itself():
    deep = ()
    for _ in range(10 * sys.getrecursionlimit()):
        deep = (deep,)

    with pytest.raises(st.errors.DepthError, match="nested too deeply") as caught:
        st.tree.leaves({"m": made(Noted, weight=None, note=deep)})
    assert caught.value.paths == ("['m']",)
    with pytest.raises(st.errors.DepthError):
        st.tree.structure(ENDS["a static list that holds itself"]())
    with pytest.raises(st.errors.DepthError):
        st.jit(lambda m: 0)(ENDS["a static list that holds itself"]())


# --- interning -----------------------------------------------------------------------------------------------------


def test_equal_structures_are_one_object():
    make = lambda: {"a": Box([jnp.ones(2), "x"]), "b": None}
    one, two = st.tree.structure(make()), st.tree.structure(make())
    assert one is two
    assert one == two
    assert repr(one) == f"Structure({len(one.records)} records, 1 leaves)"


def test_structures_are_freed_when_nothing_holds_them_and_do_not_hold_the_tree():
    class Weak:
        pass

    jax.tree_util.register_pytree_node(Weak, lambda _: ((), None), lambda *_: Weak())
    node, array = Weak(), jnp.ones(2)
    refs = weakref.ref(node), weakref.ref(array), weakref.ref(st.tree.structure([Box("only here"), jnp.ones(2)]))
    structure = st.tree.structure([node, array])
    del node, array
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert structure.num_leaves == 1


def is_freed_by_vanilla_jax():
    """Whether this JAX lets go of the auxiliary data of a node that it has traced with."""

    class Aux:
        pass

    class Node:
        def __init__(self, x, aux):
            self.x, self.aux = x, aux

    jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), n.aux), lambda aux, xs: Node(*xs, aux))
    aux = Aux()
    jax.jit(lambda n: Node(n.x + 1, n.aux))(Node(jnp.ones(2), aux))
    ref = weakref.ref(aux)
    del aux
    jax.clear_caches()
    gc.collect()
    return ref() is None


@pytest.mark.slow
def test_structures_of_jitted_calls_are_freed_with_the_function_and_the_caches_of_jax():
    model = Box((jnp.ones(2), "jitted only here"))
    f = st.jit(lambda m: st.tree.map(lambda x: x + 1, m))
    for _ in range(2):
        out = f(model)
    np.testing.assert_array_equal(out.content[0], [2.0, 2.0])
    ref = weakref.ref(st.tree.structure(model))
    gc.collect()
    assert ref() is not None  # needed to recognise the call
    del f
    is_freed = is_freed_by_vanilla_jax()  # which clears the caches, and collects
    assert (ref() is None) is is_freed


def test_threads_intern_one_object_and_meet_its_class_at_once():
    for i in range(20):
        cls = jax.tree_util.register_pytree_node_class(type(f"Met{i}", (strategies.Mutable,), {}))
        structures = at_once(lambda _, i=i, cls=cls: st.tree.structure([Box(f"round {i}"), cls(x=jnp.ones(2), y=[1])]))
        assert len({id(structure) for structure in structures}) == 1  # alive in `structures`
