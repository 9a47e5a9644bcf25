"""The grammar of docs/format_manifest.md from its first line to its last: what each line forbids is refused.

Each case is a file that follows the grammar but for one thing. That the file which it was made of does load is checked
too, so that nothing is refused for another reason.
"""

import base64
import contextlib
import copy
import dataclasses
import enum
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.hostile_texts import Registered

from .containers import file_of
from .drafts import Draft
from .table import NODE_KINDS

TRUSTED = [__name__, Registered]


@dataclasses.dataclass
class Config:
    size: object
    rate: object = 0.5
    __sharedtree_attributes__ = ("more", "ok", "ö", "_x")

    def method(self):
        return self.size


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


def draft_of(tree):
    return Draft(st.to_bytes(tree))


def load(data):
    return st.load(data.file(with_digests=True) if isinstance(data, Draft) else data, trusted=TRUSTED)


def assert_refused(cases):
    """Each file of (what is wrong with it, it) is a `FormatError` to load, and no other error to look at."""
    wrong = []
    for told, case in cases:
        data = case.file(with_digests=True) if isinstance(case, Draft) else case
        try:
            wrong.append(f"{told} was loaded as {load(data)!r}")
        except st.errors.FormatError:
            pass
        except Exception as error:
            wrong.append(f"{told} is refused with {error!r}")
        for look in (st.inspect, st.audit, st.verify):
            with contextlib.suppress(st.SharedTreeError):  # what it did not have to look at
                str(look(data))
    assert not wrong, "\n".join(wrong)


def with_root(root):
    return file_of(root=root)


def b64(data):
    return base64.b64encode(data).decode()


HEADER_TEXTS = {
    "-0 in a shape": ('"shape":[2]', '"shape":[2,-0]'),
    "-0 in an offset": ('"data_offsets":[0,', '"data_offsets":[-0,'),
    "an exponent": ('"shape":[2]', '"shape":[2e0]'),
    "a key twice, once escaped": ('"shape":[2]', '"shape":[2],"\\u0073hape":[2]'),
    "half a pair in a name": ('"w":', '"w\\ud800":'),
    "the other half in a name": ('"w":', '"w\\udc00":'),
    "half a pair in metadata": ('"__metadata__":{', '"__metadata__":{"mine":"\\ud83d",'),
    "halves in the wrong order": ('"__metadata__":{', '"__metadata__":{"mine":"\\ude00\\ud83d",'),
    "metadata twice": ('"__metadata__":{', '"__metadata__":{"mine":"","mine":"",'),
    "a newline as padding": ("}}", "}}\n"),
    "a tab as padding": ("}}", "}}\t"),
    "something after it": ("}}", "}} 1"),
    "a comment": ("}}", "}}/**/"),
}


def header_text_changed(old, new):
    draft = draft_of({"w": np.zeros(2, np.float32)})
    draft.header = {("w" if key == "['w']" else key): value for key, value in draft.header.items()}
    draft.manifest["arrays"][0]["tensor"] = "w"
    assert list(load(draft)) == ["w"]

    def edited(text):
        if "__metadata__" in old:  # behind the bytes that all files begin with
            return text.replace('"sharedtree":', new.partition("{")[2] + '"sharedtree":', 1)
        head, found, tail = text.rpartition(old)
        assert found
        return head + new + tail

    draft.edit_text = edited
    return draft


def test_texts_of_headers():
    assert_refused((name, header_text_changed(*change)) for name, change in HEADER_TEXTS.items())


def test_pairs_and_what_looks_like_a_sign_are_no_fault():
    metadata = {"mine": "\U0001f600 \\ud800 [-0, -0]"}
    tree = {"\U0001f600": -0.0, "\\ud800": "[-0]", ",-0": "\ud800", " -0": "-0"}
    data = st.to_bytes(tree, metadata=metadata)
    assert "\\ud83d" in data.decode()
    assert st.inspect(data).metadata == metadata
    assert repr(st.load(data)) == repr(tree)


def test_a_manifest_in_a_tensor_has_one_axis():
    draft = draft_of([np.zeros(2)])
    text = json.dumps(draft.manifest)
    start = len(draft.data)
    draft.data += text.encode()
    draft.header["sharedtree.manifest"] = {"dtype": "U8", "shape": [len(text)]}
    draft.header["sharedtree.manifest"]["data_offsets"] = [start, len(draft.data)]
    draft.manifest_text = "tensor"
    assert load(draft)[0].tolist() == [0, 0]
    for told, change in (("two axes", {"shape": [len(text), 1]}), ("signed", {"dtype": "I8", "shape": [len(text)]})):
        draft.header["sharedtree.manifest"] |= change
        assert_refused([(told, draft)])


def test_digests_must_be_there():
    draft = draft_of([])
    assert load(draft) == []
    del draft.header["__metadata__"]["sharedtree.digests"]
    with pytest.raises(st.errors.FormatError):
        st.load(draft.file(with_digests=False))


MANIFEST_TEXTS = {
    "-0 as the root": ('"root":1', '"root":-0'),
    "-0 as a child": ('["list",[0', '["list",[-0'),
    "-1": ('["list",[0', '["list",[-1'),
    "0.0": ('["list",[0', '["list",[0.0'),
    "0e0": ('["list",[0', '["list",[0e0'),
    "the format as a text": ('"format":1', '"format":"1"'),
    "the format as a flag": ('"format":1', '"format":true'),
    "format 0": ('"format":1', '"format":0'),
    "a key twice": ('"root":1', '"root":1,"root":1'),
    "a key more": ('"root":1', '"root":1,"more":1'),
    "a key less": (',"root":1', ""),
    "a key of an array twice": ('"kind":"numpy"', '"kind":"numpy","kind":"numpy"'),
    "half a pair in a text": ('"text"', '"te\\ud800xt"'),
    "the other half": ('"text"', '"te\\udfffxt"'),
    "half a pair as the writer": ('"library":"', '"library":"\\ud800'),
    "capital escapes": ('"text"', '"te\\uD800xt"'),
    "infinity": ('"root":1', '"root":Infinity'),
    "a number of 5,000 digits": ('"root":1', '"root":' + "1" * 5000),
}


def manifest_text_changed(old, new):
    draft = draft_of([np.zeros(2), "text"])
    text = json.dumps(draft.manifest, separators=(",", ":"))
    assert old in text
    draft.manifest_text = text.replace(old, new)
    return draft


def test_texts_of_manifests():
    assert load(manifest_text_changed("text", "text"))[1] == "text"
    assert_refused((name, manifest_text_changed(*change)) for name, change in MANIFEST_TEXTS.items())
    with pytest.raises(st.errors.FormatError, match="nested too deeply"):
        load(manifest_text_changed('"root":1', '"root":' + "[" * 100_000))


KIND = {"name": "a:b", "kind": "module", "fields": ["x"]}
WORDS = [
    (with_root([]), "`root` is neither"), (with_root(["eval", "1"]), "not a value"),
    (file_of(root=0, arrays={}), "not a list"), (file_of(format=True), "no format version"),
    (file_of(format=0), "version"), (file_of(library=3), "writer"), (file_of(more=1), "keys"),
    (file_of([[]]), "kind"), (file_of([["what"]]), "unknown kind"), (file_of([["list"]]), "operands"),
    (file_of([["list", [0]]]), "operand 1"), (file_of([["dict", ["a"], []]]), "1 of one and 0"),
    (file_of([["object", 0, []]], types=[KIND]), "0 values for the 1"),
    (file_of([["registered", 0, None, [], []]], types=[KIND]), "is a module"),
    (file_of(types=[{**KIND, "fields": ["x", "x"]}]), "two fields"),
    (file_of(types=[{**KIND, "fields": "x"}]), "list its fields"), (file_of(types=[3]), "kind"),
    (file_of(types=[{**KIND, "name": "no name"}]), "name"), (file_of(types=[{**KIND, "version": -1}]), "version"),
]  # fmt: skip


def test_what_is_said_of_them():
    for data, words in WORDS:
        with pytest.raises(st.errors.FormatError, match=words):
            load(data)
    with pytest.raises(st.errors.FormatError, match=r"version 4(.|\n)*pip install --upgrade sharedtree"):
        load(file_of(format=4, something="new"))


GOOD_ATOMS = [
    None, True, "", "text", ["int", "0"], ["int", "-7f"], ["float", "0x0.0p+0"], ["float", "-0x0.0p+0"],
    ["float", "inf"], ["float", "nan:7ff8000000000000"], ["float", "0x1.8000000000000p+1"],
    ["float", "0x0.0000000000001p-1022"], ["complex", "inf", "-inf"], ["bytes", ""], ["bytes", "YWI="], ["..."],
    ["NotImplemented"], ["dtype", "float32"], ["dtype", "str_[0]"], ["dtype", "datetime64[10us]"],
    ["dtype", "datetime64"], ["dtype", ">float32"], ["scalar", "bool", "01"], ["scalar", "str_[1]", "61000000"],
    ["scalar", "int4", "0f"], ["str", b64("\ud800".encode("utf-8", "surrogatepass"))], ["class", "builtins:int"],
    ["function", "jax.nn:relu"],
]  # fmt: skip

BAD_ATOMS = [
    1.0, -1, {}, [], [[]], ["list"], ["int"], ["int", 7], ["int", "7", "7"], ["int", ""], ["int", "-0"], ["int", "00"],
    ["int", "07"], ["int", "+7"], ["int", "0x7"], ["int", "7F"], ["int", " 7"], ["int", "7_7"], ["int", "\u0667"],
    ["int", "--7"], ["float", 1], ["float", "1.0"], ["float", "nan"], ["float", "NaN"], ["float", "Inf"],
    ["float", "infinity"], ["float", "+inf"], ["float", "-0x0.0p0"], ["float", "0x1p+0"], ["float", "0x1.8p+1"],
    ["float", "0X1.8000000000000P+1"], ["float", "0x1.8000000000000p1"], ["float", "0x2.0000000000000p+0"],
    ["float", "0x1.0000000000000p+1024"], ["float", "nan:7ff0000000000000"], ["float", "nan:3ff0000000000000"],
    ["float", "nan:7FF8000000000000"], ["float", "nan:7ff8"], ["complex", "inf"], ["complex", "inf", "1"],
    ["bytes", "YWI"], ["bytes", "YWI=="], ["bytes", "YWJ="], ["bytes", "YW I="], ["bytes", "YWI=\n"], ["bytes", "_-8="],
    ["bytes", "YQ==YQ=="], ["bytes", "="], ["str", b64(b"plain")], ["str", b64(b"\xff")], ["str", ""], ["str", "7aC="],
    ["...", ""], ["NotImplemented", ""], ["dtype", "f4"], ["dtype", "<float32"], ["dtype", "=float32"],
    ["dtype", "float32 "], ["dtype", "Float32"], ["dtype", "int"], ["dtype", "object"], ["dtype", "str_"],
    ["dtype", "str_[01]"], ["dtype", "str_[-1]"], ["dtype", ">str_[1]"], ["dtype", "void[1]"], ["dtype", ">int8"],
    ["dtype", ">bool"], ["dtype", ">bfloat16"], ["dtype", ">>float32"], ["dtype", "datetime64[1us]"],
    ["dtype", "datetime64[01us]"], ["dtype", "datetime64[0us]"], ["dtype", "datetime64[generic]"],
    ["dtype", "datetime64[]"], ["dtype", "datetime64[us/3]"], ["dtype", "M8[us]"], ["dtype", "timedelta64[1s]"],
    ["scalar", "bool", "02"], ["scalar", "bool", "0"], ["scalar", "bool", "0001"], ["scalar", "float32", "0000803F"],
    ["scalar", "float32", "0000 803f"], ["scalar", "str_[1]", "ffffffff"], ["scalar", "int4", "ff"],
    ["scalar", "int4", "1f"], ["scalar", "float4_e2m1fn", "f2"], ["scalar", "float0", ""], ["class", ""],
    ["class", "int"], ["class", "builtins:"], ["class", ":int"], ["class", "builtins:int:int"],
    ["class", "builtins.:int"], ["class", "builtins: int"], ["class", "builtins:int\n"], ["class", "builtins:int[int]"],
    ["function", "a b:c"], ["method", "builtins:int"], ["nothing", ""],
]  # fmt: skip


def test_atoms():
    for atom in GOOD_ATOMS:
        assert st.to_bytes([load(with_root(atom))]) == st.to_bytes([load(file_of([["tuple", [atom]]]))[0]]), atom
    makers = (with_root, lambda atom: file_of([["tuple", [atom]]]), lambda atom: file_of([["dict", ["key"], [atom]]]))
    assert_refused((atom, make(atom)) for atom in BAD_ATOMS for make in makers)


def test_the_padding_of_a_scalar_is_zero():
    draft = draft_of([np.longdouble(1) / 3])
    atom = draft.manifest["nodes"][-1][1][0]
    if "[x87]" not in atom[1]:
        pytest.skip("long doubles have no padding here")
    assert atom[2].endswith("0" * 12)
    atom[2] = atom[2][:-2] + "01"
    assert_refused([(atom, draft)])


NAME = f"{__name__}:Config"
TYPE = {"name": NAME, "kind": "dataclass", "fields": ["size", "rate"]}

BAD_TYPES = [
    3, [], {}, {**TYPE, "kind": "class"}, {**TYPE, "kind": 3}, {**TYPE, "more": 1}, {**TYPE, "name": "Config"},
    {**TYPE, "name": 3}, {**TYPE, "name": f"{__name__}:"}, {**TYPE, "name": f"{NAME} "}, {**TYPE, "fields": "size"},
    {**TYPE, "fields": ["size", "size"]}, {**TYPE, "fields": ["size", 3]}, {**TYPE, "fields": ["size", None]},
    {**TYPE, "missing": ["rate"]}, {**TYPE, "missing": "x"}, {**TYPE, "extra": ["size"]}, {**TYPE, "extra": ["a", "a"]},
    {**TYPE, "version": -1}, {**TYPE, "version": True}, {**TYPE, "version": "0"}, {**TYPE, "version": None},
    {"name": NAME, "kind": "dataclass"}, {"name": NAME, "kind": "enum", "fields": []},
    {"name": NAME, "kind": "attributes"}, {"name": NAME, "kind": "attributes", "fields": ["size"], "extra": ["size"]},
    {"name": NAME, "kind": "registered", "fields": ["size", "rate"]}, {"kind": "dataclass", "fields": ["size", "rate"]},
]  # fmt: skip

BAD_EXTRAS = ["a b", "", "1", "class", "a.b", "__class__", "__dict__", "__x__", "method", "a\n", "\u202ea", "a\x00"]


def with_type(entry, *values):
    return file_of([["object", 0, list(values)]], types=[entry])


def test_a_type():
    for kind in ("dataclass", "attributes", "namedtuple"):  # these may turn into one another
        assert load(with_type({**TYPE, "kind": kind}, True, "a")) == Config(True, "a")
    assert vars(load(with_type({**TYPE, "extra": ["more"]}, None, "a", "b")))["more"] == "b"
    assert_refused((entry, with_type(entry, None, None)) for entry in BAD_TYPES)
    # Names that no attribute may have.
    assert_refused((name, with_type({**TYPE, "extra": [name]}, None, None, None)) for name in BAD_EXTRAS)


OTHER_NAMES = ["ok", "ö", "_x", "__x", "__doc__", 3, (1,), "\ud800", "\u3164"]


def test_what_is_saved_can_be_loaded_whatever_attributes_are_called():
    for name in [*BAD_EXTRAS, *OTHER_NAMES]:
        config = Config(jnp.ones(2))
        vars(config)[name] = 3
        try:
            data = st.to_bytes(config)
        except st.errors.UnserialisableError:
            assert name not in Config.__sharedtree_attributes__
        else:
            assert vars(st.load(data, trusted=TRUSTED))[name] == 3, name


def test_the_name_of_a_method_can_be_read_again():
    def odd(self):
        return self

    odd.__name__ = odd.__qualname__ = "a b"
    setattr(Config, "a b", odd)
    try:
        with pytest.raises(st.errors.UnserialisableError, match="bound method"):
            st.to_bytes([getattr(Config(1), "a b")])
    finally:
        delattr(Config, "a b")


BAD_ARRAYS = [
    {"weak": False}, {"weak": None}, {"weak": 1}, {"weak": "true"}, {"kind": "numpy", "weak": True},
    {"kind": "numpy", "key": "threefry2x32"}, {"key": "threefry2x32", "weak": True}, {"key": 3}, {"key": None},
    {"key": "threefry"}, {"key": "mine"}, {"key": "rbg"}, {"key": "unsafe_rbg"}, {"key": "threefry2x32\n"},
    {"kind": "torch"}, {"kind": None}, {"kind": "JAX"}, {"dtype": "f4"}, {"dtype": "uint32 "}, {"dtype": 3},
    {"dtype": "float0"}, {"dtype": ">uint32"}, {"dtype": "datetime64[1s]"}, {"shape": [2, 1]}, {"shape": [3]},
    {"shape": "2"}, {"shape": [2.0]}, {"shape": [True, 2]}, {"shape": [-2]}, {"shape": [1] * 64 + [2]}, {"shape": None},
    {"tensor": "other"}, {"tensor": 3}, {"tensor": None}, {"more": 1},
]  # fmt: skip


def draft_of_an_array():
    return draft_of([jnp.zeros(2, jnp.uint32)])


def changed_array(changes, without=None):
    draft = draft_of_an_array()
    draft.manifest["arrays"][0] |= changes
    draft.manifest["arrays"][0].pop(without, None)
    return draft


def test_an_array():
    assert load(draft_of_an_array())[0].tolist() == [0, 0]
    assert load(changed_array({"weak": True}))[0].weak_type
    assert jnp.issubdtype(load(changed_array({"key": "threefry2x32"}))[0].dtype, jax.dtypes.prng_key)
    assert_refused((changes, changed_array(changes)) for changes in BAD_ARRAYS)
    assert_refused((key, changed_array({}, without=key)) for key in ("tensor", "dtype", "shape", "kind"))


def test_arrays_nodes_and_tensors_are_as_many():
    for change in (
        lambda m: m["nodes"].insert(0, ["array", 0]) or m["nodes"][-1].__setitem__(1, [1]) or m.update(root=2),
        lambda m: m["nodes"].__setitem__(0, ["marker"]),
        lambda m: m["arrays"].append(dict(m["arrays"][0])),
        lambda m: m["arrays"].clear(),
    ):
        draft = draft_of_an_array()
        change(draft.manifest)
        assert_refused([("a number", draft)])
    draft = draft_of_an_array()
    draft.header["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(draft.data)] * 2}
    assert_refused([("a tensor more", draft)])


ONE, TWO = ["int", "1"], ["int", "2"]
ENUM, FLAG = ({"name": f"{__name__}:{name}", "kind": "enum"} for name in ("Colour", "Access"))
ADD, INT = ["function", "jax.numpy:add"], ["class", "builtins:int"]

# Beside the samples of each kind in `dags.py`.
GOOD_NODES = [
    [["list", []]], [["set", [ONE, TWO]]], [["frozenset", []]], [["OrderedDict", [ONE, TWO], [ONE, ONE]]],
    [["defaultdict", None, [], []]], [["defaultdict", INT, ["a"], [ONE]]], [["deque", ONE, [ONE]]],
    [["enum", 1, "RED"]], [["enum", 2, ["int", "3"]]], [["key_dtype", "rbg"]],
    [["leaf"], ["tuple", [0, None]], ["treedef", 1]], [["dict", ["a"], [ONE]], ["partial", ADD, [], [], [], 0]],
    [["Partial", ADD, [ONE], [], []]], [["object", 0, [ONE, TWO]], ["method", 0, "method"]],
    [["slice", None, ONE, "a"]], [["range", ONE, TWO, ONE]], [["spec", [None, "x"], None, None]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", ["x"], None, None], ["named_sharding", 0, 1, None]],
]  # fmt: skip

BAD_NODES = [
    # The form of a node, and of children.
    [[]], [["nothing"]], [[3]], ["tuple"], [{}], [["tuple"]], [["tuple", [], []]], [["tuple", "1"]], [["tuple", [0]]],
    [["tuple", [1]], ["marker"]], [["tuple", [True, 1]]], [["tuple", [-1]]], [["tuple", [0.0]]], [["marker", None]],
    # Containers.
    [["set", [ONE, ONE]]], [["set", [ONE, True]]], [["set", [ONE, ["float", "0x1.0000000000000p+0"]]]],
    [["frozenset", ["a", "a"]]], [["list", []], ["set", [0]]], [["dict", ["a"], []]], [["dict", [], [ONE]]],
    [["dict", ["a", "a"], [ONE, ONE]]], [["dict", [ONE, True], [ONE, ONE]]], [["OrderedDict", ["a", "a"], [ONE, ONE]]],
    [["defaultdict", ONE, [], []]], [["defaultdict", "int", [], []]], [["defaultdict", None, ["a", "a"], [ONE, ONE]]],
    [["defaultdict", ["dtype", "float32"], [], []]], [["defaultdict", ["..."], [], []]],
    [["list", []], ["defaultdict", 0, [], []]], [["deque", "1", []]], [["deque", True, []]],
    [["deque", ["int", "-1"], []]], [["deque", ["float", "0x1.0000000000000p+0"], []]],
    [["deque", ["scalar", "int8", "01"], []]], [["deque", ONE, [ONE, TWO]]],
    # Instances.
    [["object", 0, [ONE]]], [["object", 0, [ONE, ONE, ONE]]], [["object", 9, []]], [["object", -1, []]],
    [["object", "0", [ONE, TWO]]], [["object", None, []]], [["object", 1, []]], [["enum", 0, "RED"]],
    [["wrapper", 0, [ONE, TWO], "size"]], [["registered", 0, None, [], []]], [["enum", 1, ONE]], [["enum", 1, None]],
    [["enum", 1, True]], [["enum", 1, ["..."]]], [["enum", 2, ["int", "100"]]], [["enum", 2, True]],
    [["enum", 2, ["scalar", "int8", "03"]]],
    # Descriptions of arrays.
    [["struct", [2], None, False, None]], [["struct", [2], "float32", False, None]],
    [["struct", [2], INT, False, None]], [["struct", [-2], ["dtype", "float32"], False, None]],
    [["struct", 2, ["dtype", "float32"], False, None]], [["struct", [2], ["dtype", "float32"], None, None]],
    [["struct", [2], ["dtype", "float32"], 0, None]], [["struct", [2], ["dtype", "float32"], False, "cpu"]],
    [["marker"], ["struct", [2], ["dtype", "float32"], False, 0]],
    [["struct", [1] * 65, ["dtype", "float32"], False, None]],
    [["struct", [2], ["scalar", "float32", "00000000"], False, None]], [["key_dtype", "mine"]], [["key_dtype", None]],
    [["key_dtype", "threefry2x32\n"]],
    # Leaves of treedefs.
    [["leaf"]], [["leaf"], ["tuple", [0]]], [["leaf"], ["treedef", 0], ["tuple", [0, 1]]], [["leaf"], ["marker"]],
    [["leaf"], ["tuple", [0]], ["marker"]], [["leaf"], ["dict", ["a"], [0]], ["tuple", []]],
    # What is called.
    [["partial", ONE, [], [], [], None]], [["partial", "a", [], [], [], None]],
    [["partial", ADD, [], [ONE], [ONE], None]], [["partial", ADD, [], ["x", "x"], [ONE, ONE], None]],
    [["partial", ADD, [], ["x"], [], None]], [["partial", ADD, [], [], [], ONE]],
    [["list", []], ["partial", ADD, [], [], [], 0]], [["dict", ["__get__"], [ONE]], ["partial", ADD, [], [], [], 0]],
    [["dict", [ONE], [ONE]], ["partial", ADD, [], [], [], 0]], [["Partial", ONE, [], [], []]],
    [["Partial", ADD, [], [None], [ONE]]], [["Partial", ADD, [], ["x", "x"], [ONE, TWO]]],
    [["method", "text", "upper"]], [["list", []], ["method", 0, "append"]],
    [["object", 0, [ONE, TWO]], ["method", 0, "method "]], [["object", 0, [ONE, TWO]], ["method", 0, ""]],
    [["object", 0, [ONE, TWO]], ["bound", 0, "method"]], [["object", 0, [ONE, TWO]], ["method", 0, None]],
    # Values.
    [["bytearray", "YWJ="]], [["bytearray", "YWI"]], [["bytearray", None]], [["range", ONE, TWO, ["int", "0"]]],
    [["range", None, ONE, ONE]], [["range", True, ONE, ONE]], [["range", ONE, ONE, ["float", "0x1.0000000000000p+0"]]],
    [["path", "Path", "a"]], [["path", "PurePath", "a"]], [["path", "PurePosixPath", ONE]],
    [["path", "PurePosixPath", None]], [["path", None, "a"]], [["path", "PurePosixPath", ["bytes", "YWI="]]],
    [["path", "os", "x"]], [["list", []], ["dict", [0], [None]]], [["deque", ["int", "f" * 40], []]],
    # Shardings, and devices, which no file has.
    [["mesh", [2**40], ["x"], [], ["Auto"]]], [["spec", [["int", "1"]], ["int", "2"], None]],
    [["device", "cpu", ["int", "0"]]],
    [["mesh", [1], ["x"], [True], ["Auto"]]], [["mesh", [1], ["x"], ["0"], ["Auto"]]],
    [["mesh", [1], ["x"], [["int", "0"]], ["auto"]]], [["mesh", [1], ["x"], [["int", "0"]], [ONE]]],
    [["mesh", [1], ["x"], [], ["Auto"]]], [["mesh", [1], [], [["int", "0"]], ["Auto"]]],
    [["mesh", [2], ["x"], [["int", "0"], ["int", "0"]], ["Auto"]]], [["mesh", [-1], ["x"], [], ["Auto"]]],
    [["mesh", [1, 1], ["x", "x"], [["int", "0"]], ["Auto", "Auto"]]], [["abstract_mesh", [2], ["x"], ["nothing"]]],
    [["abstract_mesh", [2], [], ["Auto"]]], [["abstract_mesh", [2.0], ["x"], ["Auto"]]], [["spec", [], ONE, None]],
    [["spec", [], "x", None]], [["set", ["x"]], ["spec", [], 0, None]], [["tuple", ["x"]], ["spec", [], None, 0]],
    [["named_sharding", None, None, None]], [["marker"], ["spec", [], None, None], ["named_sharding", 0, 1, None]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["named_sharding", 0, 0, None]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", [], None, None], ["named_sharding", 0, 1, "host"]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", [], None, None], ["named_sharding", 0, 1, ONE]],
]  # fmt: skip


def with_types(nodes):
    return file_of(copy.deepcopy(nodes), types=[TYPE, ENUM, FLAG])


def test_nodes():
    for nodes in GOOD_NODES:
        load(with_types(nodes))
    assert_refused((nodes, with_types(nodes)) for nodes in BAD_NODES)


BAD_STEPS = [
    [".a"], [".a", ".b", ".c"], [".a", ".a"], ["a", ".b"], [".", ".b"], ["", ".b"], [".a", 3], [".a", None], ".a", None,
    [".a", "[" + "x" * 400], ["." + "\ud800" * 2, ".b"],
]  # fmt: skip


def with_steps(steps):
    draft = draft_of(Registered(1, 2))
    draft.manifest["nodes"][-1][4] = steps
    return draft


def test_what_are_no_steps():
    assert load(with_steps([".a", ".b"])).parts == (1, 2)
    assert_refused((steps, with_steps(steps)) for steps in BAD_STEPS)


FORMAT_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "format_manifest.md"
TEXTS = {"text", "base64"}


def what_the_page_asks_for(operand):
    """What may stand in a place that the page's table of nodes calls by this name, as it says above the table."""
    single = {"text": TEXTS, "type": {"type"}, "index": {"array"}, "weak": {"flag"}}
    lists = {"[size*]": {"sizes"}, "[step*]": {"steps"}, "keys": {"children"}, "values": {"children"}}
    if operand in lists:
        return lists[operand]
    return {"children"} if operand.endswith("*") else single.get(operand, {"child"})


def test_the_table_of_kinds_is_that_of_the_page():
    table = FORMAT_PAGE.read_text().partition("## Nodes\n")[2].partition("\n13. ")[0]
    cells = re.findall(r"^\| (`\[.*?) \|", table, re.MULTILINE)
    forms = [form for cell in cells for form in re.findall(r'`\["(.*?)\]`', cell)]
    found = {}
    for form in forms:
        kind, *operands = re.sub(r'"', "", form).split(", ")
        found[kind] = operands
    assert len(found) == len(forms)
    assert set(found) == set(NODE_KINDS)
    for kind, operands in found.items():
        assert len(operands) == len(NODE_KINDS[kind]), kind
        for operand, place in zip(operands, NODE_KINDS[kind], strict=True):
            assert place in what_the_page_asks_for(operand), (kind, operand, place)


@pytest.mark.parametrize(
    "node",
    [
        ["struct", [2**62, 2**62], ["dtype", "float32"], False, None],
        ["struct", [2] * 63, ["dtype", "float32"], False, None],
        ["abstract_mesh", [2**62, 2**62], ["a", "b"], ["Auto", "Auto"]],
    ],
)
def test_impossible_shapes(node):
    for operation in (st.from_bytes, st.inspect, st.audit):
        with pytest.raises(st.errors.FormatError, match=r"operand 1 .* \(sizes\)"):
            operation(file_of([node]))


def test_impossible_shapes_are_not_written():
    mesh = jax.sharding.AbstractMesh((2**62, 2**62), ("a", "b"))
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(2**63,), (2**62, 2**62), (1,) * 65]]
    for value in (mesh, *structs):
        with pytest.raises(st.errors.UnserialisableError, match="impossible shape"):
            st.to_bytes([value])
    possible = jax.ShapeDtypeStruct((2**62, 1, 0), np.float32)
    assert st.from_bytes(st.to_bytes([possible])) == [possible]


@pytest.mark.parametrize(("number", "told"), [(2, "2"), (7, "7"), (-1, "-1"), (2**200, "a number that is too large")])
def test_references_to_no_earlier_node(number, told):
    for node, place in (
        (["list", ["a", number]], 1),
        (["defaultdict", number, [], []], 1),
        (["slice", 0, 0, number], 3),
    ):
        data = file_of([["list", []], ["list", []], node, ["list", [2]]])
        words = f"operand {place} of node 2, a `{node[0]}`, refers to node {told}, which is no earlier node"
        with pytest.raises(st.errors.FormatError, match=words):
            st.inspect(data)
    with pytest.raises(st.errors.FormatError, match="`root` refers to a node that is not there"):
        st.inspect(file_of([["list", []]], root=number))
