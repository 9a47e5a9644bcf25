"""Static values that are equal without one being able to stand for the other, and auxiliary data in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree import _comparisons, _node_types

IN_PLACE = st.Policy(in_place=True)


class Opaque:
    """Equal to whatever holds a value of the same type, as treeo's are."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Opaque) and type(self.value) is type(other.value)

    __hash__ = None


@pytest.fixture
def model_of(monkeypatch):
    """Makes modules that hold a weight and, not looked at, a value, with statics in the order of their attributes."""

    class Model:
        def __init__(self, weight, log, **more):
            self.__dict__.update(weight=weight, log=log, **more)

    def flatten(model):
        statics = {name: value for name, value in vars(model).items() if name != "weight"}
        return ({"weight": model.weight},), {**statics, "log": Opaque(model.log)}

    def unflatten(statics, children):
        model = object.__new__(Model)
        log = statics["log"]
        vars(model).update(children[0], **{**statics, "log": log.value if isinstance(log, Opaque) else log})
        return model

    monkeypatch.setitem(_comparisons.LOOSE, Opaque, lambda opaque: opaque.value)
    jax.tree_util.register_pytree_node(Model, flatten, unflatten)
    return Model


def add(model):
    model.weight = model.weight + 1
    return model


def test_vanilla_and_sharedtree_trace_once(model_of):
    traces = {jax.jit: 0, st.jit: 0}
    for jit in traces:

        def run(model, jit=jit):
            traces[jit] += 1
            return add(model)

        run = jit(run)
        # The second time around, every structure has been seen.
        for _ in range(2):
            logs = [run(model_of(jnp.ones(2), log)).log for log in ["a", "b", 1]]
            assert logs == ["a", "a", 1]
    assert traces == {jax.jit: 2, st.jit: 2}


def test_other_statics_still_retrace(model_of):
    traces = []
    run = st.jit(lambda model: traces.append(None) or model.weight)
    for width in [1, 2, True, 1]:
        run(model_of(jnp.ones(2), "log", width=width))
    assert len(traces) == 3


def test_structures_keep_their_own(model_of):
    logs = [object(), object()]
    structures = [st.tree.structure(model_of(jnp.ones(2), log)) for log in logs]
    assert structures[0] is not structures[1]
    assert [st.tree.unflatten(structure, [jnp.zeros(2)]).log for structure in structures] == logs
    assert st.tree.structure(model_of(jnp.ones(2), logs[0])) is structures[0]


def test_a_large_static_value_keeps_its_own(model_of):
    """More than 200 parts are compared by rows."""
    many = list(range(300))
    models = [model_of(jnp.ones(2), log, many=many) for log in ["a", "b"]]
    structures = [st.tree.structure(model) for model in models]
    assert [st.tree.unflatten(structure, [jnp.zeros(2)]).log for structure in structures] == ["a", "b"]
    traces = []
    run = st.jit(lambda model: traces.append(None) or model.weight)
    for model in models:
        run(model)
    assert len(traces) == 1


def test_in_place_only_what_was_assigned_is_written(model_of):
    def run(model):
        add(model)
        model.more = "new"

    step = st.jit(run, policy=IN_PLACE)
    models = [model_of(jnp.ones(2), log, more="old") for log in ["a", "b"]]
    for model in models:
        step(model)
    assert [model.log for model in models] == ["a", "b"]
    assert [model.more for model in models] == ["new", "new"]
    st.jit(lambda model: setattr(model, "log", "c"), policy=IN_PLACE)(models[1])
    assert [model.log for model in models] == ["a", "c"]


@pytest.mark.parametrize("transform", [st.grad, lambda f: st.jit(st.grad(f))], ids=["grad", "jit of grad"])
def test_gradients(transform, model_of):
    run = transform(lambda model: (model.weight**2).sum())
    for log in ["a", "b"]:
        np.testing.assert_array_equal(run(model_of(jnp.ones(2), log)).weight, np.full(2, 2))


def test_what_is_opaque_is_neither_compared_nor_copied(model_of):
    class Refuses:
        def __eq__(self, other):
            raise AssertionError

        def __deepcopy__(self, memo):
            raise AssertionError

    log = Refuses()
    model = model_of(jnp.ones(2), log)
    assert st.jit(add)(model).log is log
    assert st.copy(model).log is log


def test_dag_and_pass_through(model_of):
    traces = []

    @jax.jit
    def run(dag):
        traces.append(None)
        return dag

    models = [model_of(jnp.ones(2), log) for log in ["a", "b"]]
    for model in models:
        run(st.Dag(model))
    assert len(traces) == 1
    same = st.jit(lambda model: model)
    assert [same(model) is model for model in models] == [True, True]


def test_auxiliary_data_in_one_order(monkeypatch):
    class Base:
        pass

    monkeypatch.setitem(_node_types.AUX_IN_ORDER, Base, lambda aux: dict(sorted(aux.items())))

    @jax.tree_util.register_pytree_node_class
    class Model(Base):
        def __init__(self, **fields):
            vars(self).update(fields)

        def tree_flatten(self):
            return (self.weight,), {name: value for name, value in vars(self).items() if name != "weight"}

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(weight=children[0], **aux)

    one, other = Model(weight=jnp.ones(2), a=1, b=2), Model(b=2, a=1, weight=jnp.ones(2))
    assert st.tree.structure(one) is st.tree.structure(other)
    assert st.tree.structure(one) is not st.tree.structure(Model(weight=jnp.ones(2), a=2, b=1))
