"""`export`: programs that take and give models with sharing, in this process and in another one."""

import dataclasses
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree import _export
from sharedtree._packed import Packed
from sharedtree.transforms._crossed import Names, packed_in
from sharedtree.transforms._packing import pack_call, unpack_call
from tests.serialise.containers import forged, split
from tests.strategies import Layer, Pair, arguments, dags, partition


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


def test_what_jax_has_jitted_can_be_exported():
    w = jnp.ones(2)
    result = st.export(jax.jit(lambda d: d))(st.Dag([w, w])).call(st.Dag([2 * w] * 2)).tree
    assert result[0] is result[1]


def test_gradients_of_a_program():
    def loss(m):
        return (m.first.weight * m.second["weight"]).sum()

    exported = st.export(st.jit(loss))(tied())
    gradient = st.grad(exported.call)(tied(3.0))
    assert gradient.first is gradient.second["again"]
    np.testing.assert_allclose(gradient.first.weight, st.grad(loss)(tied(3.0)).first.weight)
    np.testing.assert_allclose(gradient.first.weight, 6 * np.arange(2.0))  # of w², by hand


def test_dags_are_written_too():
    pytest.importorskip("flatbuffers")
    w = jnp.ones(2)
    dag = st.Dag({"a": w, "b": w, "in": [st.Dag([w, tied()])]})
    exported = st.export(st.jit(lambda d: st.Dag([d.tree["a"] + d.tree["b"], d.tree["in"][0]] * 2)))(dag)
    with pytest.raises(st.UntrustedTypeError, match="tests.strategies:Layer"):
        st.Exported.deserialize(exported.serialize())
    exported = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies")
    result = exported.call(dag).tree
    assert result[0] is result[2]
    assert result[1] is result[3]
    np.testing.assert_allclose(result[0], [2, 2])
    check(result[1].tree[1], 1.0)
    with pytest.raises(st.SharingMismatchError):
        exported.call(st.Dag({"a": w, "b": 2 * w, "in": dag.tree["in"]}))
    for one in structures((dag, [dag.tree["in"]], st.Dag(st.untie(tied())), st.tree.map(jnp.sum, dag)))[1]:
        assert _export.structure_of(_export.bytes_of(one)) is one


def test_dags_are_read_by_the_name_that_their_class_had():
    names = "sharedtree._export:WrittenDag", "sharedtree.serialise._export:WrittenDag"
    w = jnp.ones(2)
    for one in structures((st.Dag([w, w, tied()]), [st.Dag(w)]))[1]:
        text, data = split(_export.bytes_of(one))
        old = forged(text.replace(*names), data)
        assert names[1] in [request.name for request in st.audit(old, trusted="tests.strategies").requests]
        assert st.audit(old, trusted="tests.strategies").refused == ()
        assert _export.structure_of(old) is one


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
        st.SharingMismatchError,
        match=r"(?s)`doubled` was exported .*`args.0..first` and `args.0..second..again..` were one",
    ):
        exported.call(st.untie(tied()))
    with pytest.raises(st.SharingMismatchError, match="`args.0.` was a `Pair`.*, and is a `Layer`"):
        exported.call(tied().first)
    with pytest.raises(ValueError):
        exported.call(tied(), 1.0)
    exported = st.export(st.jit(doubled))(st.untie(tied()))
    with pytest.raises(st.SharingMismatchError, match="were two objects, and are one"):
        exported.call(tied())
    assert exported.call(st.untie(tied())).first.width == 5


def structures(args):
    call = pack_call(args, {}, (), st.Policy().rules, Names(len))
    return call, [argument.structure for position, value in call.items() for argument in packed_in(value, position)]


@given(args=arguments())
def test_structures_survive_as_bytes(args):
    """Those of later arguments, which refer to earlier ones, too; each by itself."""
    _, found = structures(args)
    for structure in found:
        assert _export.structure_of(_export.bytes_of(structure)) is structure


@given(tree=dags())
def test_what_is_built_from_bytes_has_the_same_sharing(tree):
    call, found = structures((tree, tree))
    data = [_export.bytes_of(structure) for structure in found]
    del found
    for (_, value), one in zip(call.items(), data, strict=True):
        value.structure = _export.structure_of(one)
    one, two = unpack_call(call.args, {}, ()).args
    assert one is two
    assert partition(one) == partition(tree)


def test_what_cannot_be_written():
    model = Pair(jnp.ones(2), lambda x: x)
    exported = st.export(st.jit(lambda m: m.first))(model)
    np.testing.assert_allclose(exported.call(model), [1, 1])
    with pytest.raises(st.UnserialisableError, match="lambda"):
        _export.bytes_of(structures((model,))[1][0])


FORGED = {
    "nothing": lambda: None,
    "too short": lambda: (1, 2),
    "base": lambda: (Pair(S, S), (), "0", (), ()),
    "a negative base": lambda: (Pair(S, S), (), -1, (), ()),
    "earlier objects that are none": lambda: (Pair(S, S), ("text",), 3, (), ()),
    "an earlier object that comes later": lambda: (Pair(Q, S), (Q,), 2, (), ()),
    "a mark of no leaf": lambda: (Pair(S, S), (), 0, (1,), ()),
    "a mark that is no number": lambda: (Pair(S, S), (), 0, ("0",), ()),
    "marks that are none": lambda: (Pair(S, S), (), 0, [], ()),
    "a Dag whose structure is no bytes": lambda: (_export.WrittenDag([S], "text"), (), 0, (), ()),
    "a Dag with too many leaves": lambda: (_export.WrittenDag([S, Q], LEAF), (), 0, (), ()),
    "a Dag that refers to what is before it": lambda: (_export.WrittenDag([S], LATER), (), 0, (), ()),
    "a Dag in a Dag": lambda: (
        _export.WrittenDag([], st.to_bytes((_export.WrittenDag([], LEAF), (), 0, (), ()))),
        (),
        0,
        (),
        (),
    ),
}
S = jax.ShapeDtypeStruct((), bool)
Q = jax.ShapeDtypeStruct((5,), "int8")
LEAF, LATER = (st.to_bytes((S, (), base, (), ())) for base in (0, 3))


def test_forged_bytes():
    for name, make in FORGED.items():
        with pytest.raises(st.FormatError, match="of an exported program is malformed"):
            pytest.fail(f"{name}: {_export.structure_of(st.to_bytes(make()))}")
    with pytest.raises(st.SharedTreeError):
        _export.structure_of(b"no file")


def test_keywords_in_any_order():
    pytest.importorskip("flatbuffers")
    exported = st.export(st.jit(lambda x, a, b: a is b and x + a.first.weight))(1.0, b=(model := tied()), a=model)
    exported = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies")
    model = tied(2.0)
    np.testing.assert_allclose(exported.call(1.0, b=model, a=model), 1 + 2 * np.arange(2.0))


def of(model, base=0):
    return _export.structure_of(st.to_bytes((model, (), base, (), ())))


UNSOUND = {
    "from a number that is not there": lambda x: (Packed([x], of(Pair(S, None), 5)),),
    "too few leaves": lambda x: (Packed([x], of(Pair(S, Q))),),
    "no leaves": lambda x: (Packed([], of(Pair(S, Q))),),
    "too many leaves": lambda x: (Packed([x] * 2, of(Pair(S, None))),),
    "the second of two": lambda x: (Packed([x], of(Pair(S, None))), Packed([], of(Pair(None, None)))),
}


def test_forged_programs():
    pytest.importorskip("flatbuffers")
    x = jnp.ones(2)
    exported = st.export(lambda m: m)(Pair(x, x))
    for name, make in UNSOUND.items():
        for tree in ("in_tree", "out_tree"):
            forged = jax.tree.structure((make(x), {}) if tree == "in_tree" else make(x))
            blob = jax.export.Exported.serialize(dataclasses.replace(exported._exported, **{tree: forged}))
            with pytest.raises(st.FormatError, match="of an exported program is malformed"):
                pytest.fail(f"{name}: {st.Exported.deserialize(blob, trusted='tests.strategies')}")
    again = st.Exported.deserialize(exported.serialize(), trusted="tests.strategies").call(Pair(x, x))
    assert again.first is again.second


def test_classes_are_trusted_or_refused(tmp_path):
    class Unknown(eqx.Module):
        weight: jax.Array

    Unknown.__qualname__ = "Unknown"
    globals()["Unknown"] = Unknown
    try:
        data = _export.bytes_of(structures((Unknown(jnp.ones(2)),))[1][0])
        with pytest.raises(st.UntrustedTypeError, match=r"sharedtree.trust\(tests.test_export.Unknown\)") as error:
            _export.structure_of(data)
        assert error.value.names == ("tests.test_export:Unknown",)
    finally:
        del globals()["Unknown"]


PROGRAM = """
    import sys
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np
    import sharedtree as st

    class Net(eqx.Module):
        embed: jax.Array
        head: jax.Array
        act: object

    def f(net, other, x):
        assert net is other["net"] and net.embed is net.head
        return st.tree.map(lambda w: 2 * w + x, net), other

    w = jnp.arange(3.0)
    net = Net(w, w, jax.nn.relu)
    if sys.argv[1] == "write":
        exported = st.export(st.jit(f))(net, {"net": net}, 0.5)
        open(sys.argv[2], "wb").write(exported.serialize(vjp_order=1))
        open(sys.argv[2] + ".dag", "wb").write(jax.export.export(jax.jit(lambda d: d))(st.Dag(net)).serialize())
    else:
        blob = open(sys.argv[2], "rb").read()
        try:
            st.Exported.deserialize(blob)
        except st.UntrustedTypeError as error:
            assert "__main__:Net" in error.names
        else:
            raise AssertionError
        exported = st.Exported.deserialize(blob, trusted=[Net])
        new, other = exported.call(net, {"net": net}, 0.5)
        assert new.embed is new.head and other["net"].embed is other["net"].head and new.act is jax.nn.relu
        np.testing.assert_allclose(new.head, 2 * w + 0.5)
        gradient = st.grad(lambda n: exported.call(n, {"net": n}, 0.5)[0].head.sum())(net)
        assert gradient.embed is gradient.head
        np.testing.assert_allclose(gradient.head, [2, 2, 2])
        st.trust(Net)
        dag = jax.export.deserialize(bytearray(open(sys.argv[2] + ".dag", "rb").read())).call(st.Dag(net))
        assert dag.tree.embed is dag.tree.head
"""


def test_another_process_reads_the_program(tmp_path):
    pytest.importorskip("flatbuffers")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    for what in ("write", "read"):
        command = [sys.executable, str(tmp_path / "program.py"), what, str(tmp_path / "blob")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_without_flatbuffers(monkeypatch):
    exported = st.export(st.jit(doubled))(tied())
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for run in (exported.serialize, lambda: st.Exported.deserialize(b"")):
        with pytest.raises(ImportError, match=r"(?s)not installed.*pip install 'sharedtree\[export\]'"):
            run()
