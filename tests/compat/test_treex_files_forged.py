"""Files of somebody's making that ask for classes of treex and treeo: nothing of theirs runs, and nothing else does."""

import importlib.util
import random
import sys

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.serialise.trust import _allow_list
from tests.serialise.containers import file_of, naming
from tests.serialise.drafts import Draft
from tests.serialise.forgeries import make_case
from tests.serialise.good_files import Good

# `importorskip` would import it without what JAX no longer has, and fail.
if importlib.util.find_spec("treex") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

from sharedtree.compat import treeo as to, treex as tx
from tests.compat.treex_models import LAYERS, Block, Pair, X, assert_same, model_of


def load(draft):
    return st.load(draft.file(with_digests=True), trusted=[Pair])


def forged(tree=None):
    """A file of a tree that has metadata of its own, and the places in it that are worth a change."""
    tree = Pair(1, 2).update_field_metadata("left", node=False) if tree is None else tree
    draft = Draft(st.to_bytes(tree))
    kinds = [
        draft.manifest["types"][node[1]]["name"] if node[0] == "object" else node[0] for node in draft.manifest["nodes"]
    ]
    return draft, kinds


def with_node(draft, node):
    """Puts a node before all others. What leads to it is the index 0, and to the others one more than before."""
    moved = lambda child: child + 1 if type(child) is int else child
    nodes = []
    for kind, *operands in draft.manifest["nodes"]:
        if kind == "object":
            operands = [operands[0], [moved(child) for child in operands[1]]]
        else:
            assert kind == "dict"
            operands = [[moved(child) for child in each] for each in operands]
        nodes.append([kind, *operands])
    draft.manifest["nodes"] = [node, *nodes]
    draft.manifest["root"] += 1


BAD_METADATA = {
    "node a number": (0, ["int", "1"]),
    "node nothing": (0, None),
    "kind a text": (1, "int"),
    "kind a function": (1, ["function", "jax.nn:relu"]),
    "kind nothing": (1, None),
    "opaque a text": (2, "yes"),
    "opaque a class": (2, ["class", "builtins:int"]),
    "opaque compiled": (2, ["function", "jax.numpy:add"]),
    "opaque nothing": (2, None),
    "opaque a partial": (2, ["partial", ["function", "jax.nn:relu"], [], [], [], None]),
    "opaque a Partial": (2, ["Partial", ["function", "jax.nn:relu"], [], [], []]),
    "opaque a list": (2, ["list", []]),
}


def test_metadata_that_is_none():
    for name, (place, value) in BAD_METADATA.items():
        draft, kinds = forged()
        assert not load(draft).field_metadata["left"].node
        if type(value) is list and value[0] in ("partial", "Partial", "list"):
            with_node(draft, value)
            value, kinds = 0, ["", *kinds]
        draft.manifest["nodes"][kinds.index("treeo:FieldMetadata")][2][place] = value
        with pytest.raises(st.errors.FormatError, match="metadata"):
            pytest.fail(f"{name}: {load(draft)}")
    for node in (["list", []], ["dict", ["left"], [None]], ["dict", [["int", "1"]], [True]], ["OrderedDict", [], []]):
        draft, kinds = forged()
        draft.manifest["nodes"][kinds.index("dict")] = node
        with pytest.raises(st.errors.FormatError, match="metadata"):
            load(draft)
    draft, _ = forged()
    draft.manifest["nodes"][-1][2] = [None if type(c) is int else c for c in draft.manifest["nodes"][-1][2]]
    with pytest.raises(st.errors.FormatError, match="metadata"):
        load(draft)


def test_metadata_that_names_what_is_not_allowed():
    for name in ("os:system", "subprocess:Popen", "treeo:map", "treex:sequence", "treex.utils:Key"):
        for place, tag in ((1, "class"), (2, "function")):
            draft, kinds = forged()
            draft.manifest["nodes"][kinds.index("treeo:FieldMetadata")][2][place] = [tag, name]
            with pytest.raises(st.errors.UntrustedTypeError) as refused:
                load(draft)
            assert refused.value.names == (name,)


def test_attributes_in_the_place_of_what_the_class_defines():
    names = ["init", "tree_flatten", "tree_unflatten", "__call__", "__dict__", "module", "field_metadata", "copy"]
    for name in (*names, "a b"):
        draft, _ = forged(model_of(*LAYERS["Linear"]))
        entry = draft.manifest["types"][-1]
        entry["extra"][entry["extra"].index("axis_name")] = name
        with pytest.raises(st.errors.FormatError):
            load(draft)


def test_classes_functions_and_methods_of_treex_that_no_file_may_name():
    names = "treex:FlaxModule treex:Optimizer treex:Module treeo:Tree treeo:Opaque treex.types:Inputs"
    for name in names.split():
        data = file_of([["object", 0, []]], types=[{"name": name, "kind": "attributes", "fields": []}])
        with pytest.raises(st.errors.UntrustedTypeError, match="one by one|neither a registered"):
            st.from_bytes(data)
    for name in ("treex:sequence", "treex:next_key", "treex.utils:Key", "treeo:merge", "treex:Linear.init"):
        with pytest.raises(st.errors.UntrustedTypeError):
            st.from_bytes(naming(["function", name]))
    draft, _ = forged(model_of(*LAYERS["Linear"]))
    nodes = draft.manifest["nodes"]
    nodes.append(["method", len(nodes) - 1, "init"])
    draft.manifest["root"] = len(nodes) - 1
    with pytest.raises(st.errors.UntrustedTypeError):
        load(draft)
    for kind in ("registered", "enum", "nothing"):
        node = ["enum", 0, "RED"] if kind == "enum" else ["registered", 0, None, [], []]
        with pytest.raises(st.SharedTreeError):
            st.from_bytes(file_of([node], types=[{"name": "treex:Linear", "kind": kind}]))
    # What a file may name is there.
    for name in _allow_list.INSTANCES | _allow_list.CLASSES:
        module, _, cls = name.partition(":")
        if module.partition(".")[0] in ("treex", "treeo"):
            assert isinstance(vars(sys.modules[module])[cls], type), name


def test_loading_calls_nothing_of_treeo(monkeypatch):
    tree = [model_of(*LAYERS["Sequential"]), Block().init(0, X), Pair(1, 2).update_field_metadata("left", node=False)]
    data, called = st.to_bytes(tree), []

    def noted(name):
        def call(*_, **__):
            called.append(name)
            raise AssertionError(name)

        return call

    for name in ("tree_flatten", "__init__", "_update_local_metadata", "__setattr__", "__init_subclass__"):
        monkeypatch.setattr(to.Tree, name, noted(name), raising=False)
    for cls, name in ((to.FieldMetadata, "__init__"), (to.Hashable, "__init__"), (to.Opaque, "__eq__")):
        monkeypatch.setattr(cls, name, noted(name))
    loaded = st.from_bytes(data, trusted=[Block, Pair])
    assert not called
    monkeypatch.undo()
    assert_same(tree, loaded)


def test_damaged_and_forged_files():
    trees = [
        Pair(Pair(1, jnp.ones(1)).update_field_metadata("left", node=False, kind=tx.BatchStat), to.Hashable((1,))),
        to.NOTHING,
        model_of(*LAYERS["MLP"]),
        Block().init(0, X),
        tx.metrics.Mean(),
        tx.Named("a", tx.Lambda(jax.nn.relu)),
    ]
    files = [Good(tree, st.to_bytes(tree)) for tree in trees]
    for number in range(100):
        for ways in ("any", "swapped"):
            case = make_case(random.Random(number).randrange(10**6, 10**7), 0, files, ways)
            try:
                loaded = st.from_bytes(case.data, trusted=[Block, Pair])
            except st.SharedTreeError:
                continue
            data = st.to_bytes(loaded)
            assert st.to_bytes(st.from_bytes(data, trusted=[Block, Pair])) == data
