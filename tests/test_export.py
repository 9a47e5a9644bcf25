"""`export`: programs that take and give models with sharing, in this process and in another one."""

import dataclasses
import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.serialise import _export
from sharedtree.transforms._leaf_groups import LeafGroup, LeafSelection
from tests.processes import program
from tests.strategies import Layer, Pair, arguments, dags, is_array, partition


@pytest.fixture(scope="module", autouse=True)
def trusting():
    """As `Exported.deserialize(trusted=...)` does."""
    token = _export._trusted.set("tests.strategies")
    yield
    _export._trusted.reset(token)


def tied(scale=1.0):
    layer = Layer(scale * jnp.arange(2.0), jax.nn.relu, [jnp.ones(2)], width=5)
    return Pair(layer, {"again": layer, "weight": layer.weight})


def doubled(model, x=0.0):
    return st.tree.map(lambda leaf: 2 * leaf + x, model)


def check(result, scale=2.0):
    assert type(result) is Pair
    assert result.first is result.second["again"]
    assert result.first.weight is result.second["weight"]
    np.testing.assert_allclose(result.first.weight, scale * np.arange(2.0))
    assert (result.first.activation, result.first.width) == (jax.nn.relu, 5)


def test_a_program_takes_and_gives_models_with_ties():
    exported = st.export(st.jit(doubled))(tied())
    assert isinstance(exported, st.Exported)
    assert [aval.shape for aval in exported.in_avals] == [(2,), (2,)]
    assert [aval.shape for aval in exported.out_avals] == [(2,), (2,)]
    assert exported.fun_name == "doubled"
    assert "doubled" in repr(exported)
    check(exported.call(tied()))
    check(exported.call(tied(3.0)), 6.0)
    check(st.jit(lambda m: exported.call(exported.call(m)))(tied()), 4.0)


@pytest.mark.parametrize("function", [doubled, st.jit(doubled), st.preserve_identities(eqx.filter_jit)(doubled)])
def test_what_can_be_exported(function):
    check(st.export(function)(st.eval_shape(lambda m: m, tied())).call(tied()))
    check(st.preserve_identities(jax.export.export)(function, platforms=["cpu"])(tied(), x=0.0).call(tied(), x=0.0))
    w = jnp.ones(2)
    result = st.export(jax.jit(lambda d: d))(st.Dag([w, w])).call(st.Dag([2 * w] * 2)).tree
    assert result[0] is result[1]


def test_dags_are_written_too():
    pytest.importorskip("flatbuffers")
    w = jnp.ones(2)
    dag = st.Dag({"a": w, "b": w, "in": [st.Dag([w, tied()])]})
    exported = st.export(st.jit(lambda d: st.Dag([d.tree["a"] + d.tree["b"], d.tree["in"][0]] * 2)))(dag)
    with pytest.raises(st.errors.UntrustedTypeError, match="tests.strategies:Layer"):
        st.Exported.deserialize(exported.serialize())
    exported = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies")
    result = exported.call(dag).tree
    assert result[0] is result[2]
    assert result[1] is result[3]
    np.testing.assert_allclose(result[0], [2, 2])
    check(result[1].tree[1], 1.0)
    with pytest.raises(st.errors.SharingMismatchError):
        exported.call(st.Dag({"a": w, "b": 2 * w, "in": dag.tree["in"]}))
    for one in structures(dag, [dag.tree["in"]], st.Dag(st.untie(tied())), st.tree.map(jnp.sum, dag)):
        assert _export.structure_of(_export.bytes_of(one)) is one


def test_what_is_returned_unchanged_is_an_output_and_static_arguments_stay_behind():
    model = tied()
    result = st.export(st.jit(lambda m: m))(tied()).call(model)
    assert result is not model
    check(result, 1.0)
    exported = st.export(st.jit(lambda n, m: doubled(m, n), static_argnums=0))(3, tied())
    np.testing.assert_allclose(exported.call(tied()).first.weight, 2 * np.arange(2.0) + 3)


def test_symbolic_shapes():
    (n,) = jax.export.symbolic_shape("n")
    weight = jax.ShapeDtypeStruct((n,), jnp.float32)
    exported = st.export(st.jit(lambda m: Pair(y := m.first * m.second, y)))(Pair(weight, weight))
    w = jnp.arange(4.0)
    result = exported.call(Pair(w, w))
    assert result.first is result.second
    np.testing.assert_allclose(result.first, w**2)


def test_other_sharing_is_an_error():
    exported = st.export(st.jit(doubled))(tied())
    with pytest.raises(
        st.errors.SharingMismatchError,
        match=r"(?s)`doubled` was exported .*`model.first` and `model.second..again..` are one",
    ):
        exported.call(st.untie(tied()))
    with pytest.raises(st.errors.SharingMismatchError, match="at `model`: .* a `Pair` with 2 .* a `Layer` with 3"):
        exported.call(tied().first)
    with pytest.raises(ValueError):
        exported.call(tied(), 1.0)
    exported = st.export(st.jit(doubled))(st.untie(tied()))
    with pytest.raises(
        st.errors.SharingMismatchError, match="are one `Layer` in the new ones, but two in the original ones"
    ):
        exported.call(tied())
    assert exported.call(st.untie(tied())).first.width == 5


def structures(*args):
    """The structures of arguments in a program that takes them."""
    exported = st.export(lambda *args: 0)(*args)
    leaves = jax.tree.leaves(exported.in_tree.unflatten([None] * len(exported.in_avals)), is_leaf=is_hand)
    return [leaf.structure for leaf in leaves if is_hand(leaf)]


def is_hand(obj):
    return isinstance(obj, LeafGroup)


@given(args=arguments())
def test_structures_survive_as_bytes(args):
    """Those of later arguments, which refer to earlier ones, too; each by itself."""
    for structure in structures(*args):
        assert _export.structure_of(_export.bytes_of(structure)) is structure


@given(tree=dags())
def test_what_a_program_that_was_read_returns_has_the_same_sharing(tree):
    pytest.importorskip("flatbuffers")
    tree = st.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree)
    exported = st.export(st.jit(lambda one, two: (one, two)))(tree, tree)
    blob = exported.serialize()
    del exported
    one, two = st.Exported.deserialize(blob, trusted="tests.strategies").call(tree, tree)
    assert one is two
    assert partition(one) == partition(tree)


def test_what_cannot_be_written():
    model = Pair(jnp.ones(2), lambda x: x)
    exported = st.export(st.jit(lambda m: m.first))(model)
    np.testing.assert_allclose(exported.call(model), [1, 1])
    with pytest.raises(st.errors.UnserialisableError, match="lambda"):
        _export.bytes_of(structures(model)[0])


FORGED = {
    "nothing": lambda: None,
    "a tuple": lambda: (Pair(S, S), None, "jax", (), ()),
    "too short": lambda: [1, 2],
    "a convention that there is not": lambda: written(Pair(S, S), convention="vanilla"),
    "names that are none": lambda: written([S], names=("x",)),
    "names of other arguments": lambda: written([S], names=(("x", "y"), (), ())),
    "a mark of no leaf": lambda: written(Pair(S, S), (1,)),
    "a mark that is no number": lambda: written(Pair(S, S), ("0",)),
    "marks that are none": lambda: written(Pair(S, S), []),
    "a Dag whose structure is no bytes": lambda: written(_export.WrittenDag([S], "text")),
    "a Dag with too many leaves": lambda: written(_export.WrittenDag([S, Q], LEAF)),
    "a Dag in a Dag": lambda: written(_export.WrittenDag([], IN_A_DAG)),
}


def written(tree, noted=(), *, names=None, convention="jax"):
    return [tree, names, convention, noted, ()]


S = jax.ShapeDtypeStruct((), bool)
Q = jax.ShapeDtypeStruct((5,), "int8")
LEAF = st.to_bytes(written(S))
IN_A_DAG = st.to_bytes(written(_export.WrittenDag([], LEAF)))


def test_forged_bytes():
    for name, make in FORGED.items():
        with pytest.raises(st.errors.FormatError, match="of an exported program is malformed"):
            pytest.fail(f"{name}: {_export.structure_of(st.to_bytes(make()))}")
    with pytest.raises(st.SharedTreeError):
        _export.structure_of(b"no file")


def test_keywords_in_any_order():
    pytest.importorskip("flatbuffers")
    exported = st.export(st.jit(lambda x, a, b: a is b and x + a.first.weight))(1.0, b=(model := tied()), a=model)
    exported = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies")
    model = tied(2.0)
    np.testing.assert_allclose(exported.call(1.0, b=model, a=model), 1 + 2 * np.arange(2.0))


def hand(leaves, model):
    return LeafGroup(leaves, LeafSelection(_export.structure_of(st.to_bytes(written(model)))))


UNSOUND = {
    "too few leaves": lambda x: (hand([x], Pair(S, Q)),),
    "no leaves": lambda x: (hand([], Pair(S, Q)),),
    "too many leaves": lambda x: (hand([x] * 2, Pair(S, None)),),
    "two structures": lambda x: (hand([x], Pair(S, None)), hand([], Pair(None, None))),
}


@pytest.mark.parametrize("exporting", [(jax.export.export, jax.jit), (st.export, st.jit)], ids=["JAX", "ours"])
@pytest.mark.parametrize(
    ("f", "args", "kwargs"),
    [
        (lambda: 3.0, (), {}),
        (lambda *, x, y: x - 2 * y, (), {"y": 2.0, "x": 1.0}),
        (lambda a, *, x, y: a * x - y, (7.0,), {"y": 2.0, "x": 1.0}),
    ],
    ids=["no arguments", "keywords alone", "both"],
)
def test_programs_with_keywords_alone(exporting, f, args, kwargs):
    pytest.importorskip("flatbuffers")
    export, jit = exporting
    program = st.Exported.deserialize(export(jit(f))(*args, **kwargs).serialize())
    assert program.call(*args, **kwargs) == f(*args, **kwargs)


def test_forged_programs():
    pytest.importorskip("flatbuffers")
    x = jnp.ones(2)
    exported = st.export(lambda m: m)(Pair(x, x))
    for (name, make), tree in itertools.product(UNSOUND.items(), ("in_tree", "out_tree")):
        forged = jax.tree.structure((make(x), {}) if tree == "in_tree" else make(x))
        blob = jax.export.Exported.serialize(dataclasses.replace(exported._exported, **{tree: forged}))
        with pytest.raises(st.errors.FormatError, match="of an exported program is malformed"):
            pytest.fail(f"{name}: {st.Exported.deserialize(blob, trusted='tests.strategies')}")
    again = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies").call(Pair(x, x))
    assert again.first is again.second


class Unknown(eqx.Module):
    weight: jax.Array


def test_classes_are_trusted_or_refused():
    data = _export.bytes_of(structures(Unknown(jnp.ones(2)))[0])
    with pytest.raises(st.errors.UntrustedTypeError, match=r"sharedtree.trust\(tests.test_export.Unknown\)") as error:
        _export.structure_of(data)
    assert error.value.names == ("tests.test_export:Unknown",)


def twice_as_much(pair, other, x):
    assert pair is other["net"]
    assert pair.first is pair.second[0]
    return st.tree.map(lambda w: 2 * w + x, pair), other


READING = program("call_exported")


def test_another_process_reads_the_program(python, tmp_path):
    pytest.importorskip("flatbuffers")
    w = jnp.arange(3.0)
    pair = Pair(w, [w, jax.nn.relu])
    program = st.export(st.jit(twice_as_much))(pair, {"net": pair}, 0.5).serialize(vjp_order=1)
    (tmp_path / "program").write_bytes(program)
    (tmp_path / "dag").write_bytes(jax.export.export(jax.jit(lambda d: d))(st.Dag(pair)).serialize())
    python(tmp_path, "-c", READING, "program", "dag")


def test_without_flatbuffers(monkeypatch):
    exported = st.export(st.jit(doubled))(tied())
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for run in (exported.serialize, lambda: st.Exported.deserialize(b"")):
        with pytest.raises(ImportError, match=r"(?s)not installed.*pip install flatbuffers\n.*sharedtree\[export\]"):
            run()
