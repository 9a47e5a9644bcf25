"""Texts of a file that a terminal would obey: no entry point and no command prints them as they are.

A file is made that has hostile texts wherever the format has a text. It is damaged in each way that leads to an error
which names one of them, and given to everything that takes a file.
"""

import contextlib
import dataclasses
import enum
import json
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.__main__ import main
from sharedtree.core._printing import printable, printable_lines, shown
from tests.hostile_texts import EVERYTHING, TEXTS, Registered, assert_safe, is_safe
from tests.serialise.drafts import Draft


@dataclasses.dataclass
class Config:
    size: object
    rate: object = 0.5


class Colour(enum.Enum):
    RED = 1


class Net(eqx.Module):
    weight: jax.Array
    kind: object


def tree(text):
    return {
        text: np.arange(2.0, dtype=np.float32),
        "flags": np.ones(3, bool),
        "long": jnp.zeros(3, jnp.float32),
        "config": Config(text, [text]),
        "net": Net(jnp.ones(2), text),
        "colour": Colour.RED,
        "registered": Registered(1, 2),
        "key": jax.random.key(0),
        (text, 1): {text: {text}},
        "spec": jax.P(text),
        "function": jax.nn.relu,
        "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
    }


def hostile(text):
    """The file with the text wherever a writer would not put it, too: names of tensors and steps, and who wrote it."""
    draft = Draft(st.to_bytes(tree(text), metadata={text: text}))
    names = {}
    for number, name in enumerate(draft.header):
        names[name] = name if name == "__metadata__" else f"{number}{text}"
    draft.header = {names[name]: entry for name, entry in draft.header.items()}
    for entry in draft.manifest["arrays"]:
        entry["tensor"] = names[entry["tensor"]]
    draft.manifest["library"] = text
    for node in draft.manifest["nodes"]:
        if node[0] == "registered":
            node[4] = [f".a{text}", f"[{text}]"]
    return draft


def config_of(draft):
    return next(entry for entry in draft.manifest["types"] if entry["name"].endswith(":Config"))


def node_of(draft, kind):
    return next(node for node in draft.manifest["nodes"] if node[0] == kind)


def array_of(draft, dtype):
    return next(entry for entry in draft.manifest["arrays"] if entry["dtype"] == dtype)


def tensor_of(draft):
    return draft.header[next(name for name in draft.header if name != "__metadata__")]


FORGERIES = {
    "nothing": lambda draft, text: None,
    "a field": lambda draft, text: config_of(draft).update(fields=["size", f"rate{text}"]),
    "an attribute": lambda draft, text: config_of(draft).update(fields=["size"], extra=[text]),
    "a version": lambda draft, text: config_of(draft).update(version=3),
    "a class": lambda draft, text: config_of(draft).update(name=f"{__name__}:{text}"),
    "another class": lambda draft, text: config_of(draft).update(name="os:system"),
    "a member": lambda draft, text: node_of(draft, "enum").__setitem__(2, f"BLUE{text}"),
    "children": lambda draft, text: node_of(draft, "registered").__setitem__(3, [text, text]),
    "a kind": lambda draft, text: draft.manifest["nodes"].append([text]),
    "a method": lambda draft, text: draft.manifest["nodes"].append(["method", ["class", "builtins:int"], text]),
    "a device": lambda draft, text: draft.manifest["nodes"].append(["device", text, ["int", "0"]]),
    "a path": lambda draft, text: draft.manifest["nodes"].append(["path", text, text]),
    "a dtype": lambda draft, text: array_of(draft, "float32").update(dtype=text),
    "a long double": lambda draft, text: array_of(draft, "float32").update(dtype=f"longdouble[{text}]"),
    "a key": lambda draft, text: array_of(draft, "uint32").update(key=text),
    "keys": lambda draft, text: draft.manifest["nodes"].append(["key_dtype", text]),
    "shape": lambda draft, text: array_of(draft, "float32").update(shape=[7]),
    "a tensor": lambda draft, text: array_of(draft, "float32").update(tensor=f"other{text}"),
    "an atom": lambda draft, text: draft.manifest["nodes"].append(["tuple", [["int", text]]]),
    "a function": lambda draft, text: draft.manifest["nodes"].append(["tuple", [["function", f"a:{text}"]]]),
    "another function": lambda draft, text: draft.manifest["nodes"].append(["tuple", [["function", "os:system"]]]),
    "a number": lambda draft, text: draft.manifest.update(root=1.5),
    "a key twice": lambda draft, text: setattr(
        draft, "edit_text", lambda t: f"{t[:-1]},{json.dumps(text)}:1,{json.dumps(text)}:1}}"
    ),
    "metadata": lambda draft, text: draft.header["__metadata__"].update({f"sharedtree{text}": text}),
    "a stored dtype": lambda draft, text: tensor_of(draft).update(dtype=text),
    "offsets": lambda draft, text: tensor_of(draft).update(data_offsets=[1, 2]),
    "a hole": lambda draft, text: tensor_of(draft)["data_offsets"].__setitem__(0, 1),
    "entries": lambda draft, text: draft.header.update({text: {"dtype": "U8"}}),
    "a tensor more": lambda draft, text: draft.header.update(
        {text: {"dtype": "U8", "shape": [0], "data_offsets": [len(draft.data)] * 2}}
    ),
    "booleans": lambda draft, text: draft.data.__setitem__(slice(None), b"\x07" * len(draft.data)),
    "64 bits": lambda draft, text: (array_of(draft, "float32").update(dtype="datetime64[s]", shape=[1], kind="jax"),),
}


def looks(data, path):
    """Everything that reads a file, each with what it may be told besides."""
    like = tree("other") | {"more": jnp.ones(1)}
    everything = {"trusted": [__name__]}
    yield "load", lambda: st.load(data, **everything)
    yield "load, like", lambda: st.load(data, like=like, **everything)
    yield "load, not strict", lambda: str(st.load(data, like=like, strict=False, **everything)[1])
    yield "load, untrusted", lambda: st.load(data)
    yield "load, a part", lambda: st.load(data, select=".nothing", **everything)
    yield "load, a part of it", lambda: st.load(data, select="['registered'].nothing", **everything)
    yield "load, renamed", lambda: st.load(data, renames={f"{__name__}:Config": f"{__name__}:Other"}, **everything)
    yield "load, sharded", lambda: st.load(data, sharding=sharding(), **everything)
    yield "load, mapped", lambda: st.load(path, mmap=True, verify=False, **everything)
    yield "audit", lambda: str(st.audit(data))
    yield "audit's repr", lambda: repr(st.audit(data))
    yield "inspect", lambda: str(st.inspect(data))
    yield "inspect's repr", lambda: repr(st.inspect(data))
    yield "repr of lines", lambda: "\n".join(map(repr, st.inspect(data).lines))
    yield "verify", lambda: repr(st.verify(data))


def sharding():
    return jax.NamedSharding(jax.sharding.AbstractMesh((5,), ("d",)), jax.P("d"))


COMMANDS = [
    ["show", "A"], ["show", "--arrays", "A"], ["show", "--json", "A"], ["audit", "A"], ["audit", "--json", "A"],
    ["verify", "A"], ["verify", "--json", "A"],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.sampled(every=4)
def test_no_entry_point_and_no_command_passes_them_on(forgery, tmp_path, capsys):
    draft = hostile(EVERYTHING)
    FORGERIES[forgery](draft, EVERYTHING)
    data = draft.file(with_digests=True)
    damaged = bytearray(data)
    damaged[-1] ^= 1
    plain = tmp_path / "plain"
    plain.write_bytes(st.to_bytes(tree("plain")))
    for each in (data, bytes(damaged)) if forgery == "nothing" else (data,):
        path = tmp_path / f"a{EVERYTHING.replace(chr(0), '').replace('/', '')}"[:60]
        path.write_bytes(each)
        for name, look in looks(each, path):
            try:
                told = look()
                assert_safe(told if type(told) is str else "", name)
            except (st.SharedTreeError, ValueError, TypeError, OSError) as error:
                if isinstance(error, st.SharedTreeError):
                    assert_safe(str(error), name)
        for command in COMMANDS:
            arguments = [{"A": str(path), "B": str(plain)}.get(word, word) for word in command]
            main(arguments)
            out, err = capsys.readouterr()
            assert_safe(out, command)
            assert_safe(err, command)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_each_text_in_a_tree_that_is_shown_and_in_one_that_is_refused(text):
    data = hostile(text).file(with_digests=True)
    assert_safe(str(st.inspect(data)), text)
    config = Config(jnp.ones(1))
    vars(config)[text] = lambda: 0
    cyclic: dict = {text: {}}
    cyclic[text][text] = cyclic
    for refused in ({text: lambda: 0}, config, cyclic):
        with pytest.raises(st.SharedTreeError) as error:
            st.to_bytes(refused)
        assert_safe(str(error.value), text)


def test_names_of_files(tmp_path, capsys):
    name = tmp_path / "a\nREAD ME\x1b[2J\u202e"
    assert main(["show", str(name)]) == 2
    assert_safe(capsys.readouterr().err, "missing")
    name.mkdir()
    for act in (lambda: st.save(name, [1]), lambda: st.load(name), lambda: st.save(name / "b\nREAD ME" / "c", [1])):
        with pytest.raises(OSError) as error:  # noqa: PT011 -- several kinds
            act()
        assert_safe(str(error.value), "a folder")
    (name / "x").write_bytes(b"no file of ours")
    for command in ("show", "verify", "audit"):
        assert main([command, str(name / "x")]) == 2
        assert_safe(capsys.readouterr().err, command)
    with pytest.raises(SystemExit):
        main(["show", "x", "--a\nREAD\x1b"])
    assert_safe(capsys.readouterr().err, "an argument")


def test_what_is_printable_is_left_alone():
    for text in ("", "plain", "ü 中 é \U0001f600 `x` \\n", "a  b"):
        assert printable(text) == text == printable_lines(text)
    assert printable("a\n\x1b\ud800\u202e\u3164") == "a\\n\\x1b\\ud800\\u202e\\u3164"
    assert printable_lines("a\nb\r") == "a\nb\\r"
    for number in (*range(0x3200), *range(0xD700, 0x10000), *range(0xE0000, 0xE0200)):
        char = chr(number)
        if not is_safe(char) or char == "\n":
            assert is_safe(printable(char)), hex(number)
            assert printable(char) != char


def test_every_error_of_ours_is_safe_whoever_raises_it():
    with contextlib.suppress(st.SharedTreeError):
        raise st.errors.CycleError("a\x1b[2J\nb")
    assert str(st.errors.CycleError("a\x1b[2J\nb")) == "a\\x1b[2J\nb"
    assert str(st.errors.CorruptFileError("\x9b", ("\x9b",), 1)) == "\\x9b"
    assert st.errors.CorruptFileError("\x9b", ("\x9b",), 1).tensor == "\x9b"  # for programs, as it is
    assert str(st.UntiedWarning("a\x1b[2J\nb")) == "a\\x1b[2J\nb"


def of_this_module(x):
    return x


NAMES = [
    (jax.nn.relu, "jax.nn.relu"),
    (jax.nn.gelu, "jax.nn.gelu"),
    (jnp.tanh, "jax.numpy.tanh"),
    (jax.lax.add, "jax.lax.add"),
    (np.add, "numpy.add"),
    (print, "print"),
    (of_this_module, f"{__name__}.of_this_module"),
    ([jax.nn.relu, {"a": jax.nn.silu}], "[jax.nn.relu, {'a': jax.nn.silu}]"),
]


@pytest.mark.parametrize(("value", "name"), NAMES, ids=[name for _, name in NAMES])
def test_functions_have_the_names_by_which_they_are_imported(value, name):
    """By which they are found again, too: no address, and no private module."""
    assert shown(value) == name
    if not isinstance(value, list) and value is not print:
        module, _, attribute = name.rpartition(".")
        assert getattr(sys.modules[module], attribute) is value


def test_what_no_name_leads_to_prints_itself():
    class Lying:
        __qualname__ = __name__ = "relu"
        __module__ = "jax.nn"

        def __call__(self):
            pass

        def __repr__(self):
            return "lying"

    class Raising(Lying):
        def __getattribute__(self, name):
            if name == "__qualname__":
                raise ZeroDivisionError
            return super().__getattribute__(name)

    assert (shown(Lying()), shown(Raising())) == ("lying", "lying")
    assert "<lambda>" in shown(lambda: 0)


class WithFunction(eqx.Module):
    weight: jax.Array
    function: Any


def test_messages_name_static_functions():
    one, two = WithFunction(jnp.ones(2), jax.nn.relu), WithFunction(jnp.ones(2), jax.nn.gelu)
    for call in (
        lambda: st.cond(True, lambda: one, lambda: two),
        lambda: st.tie([one, two], lambda pair: (pair[0], pair[1])),
        lambda: st.load(st.to_bytes(one), like=two),
        lambda: st.scan(lambda carry, _: (two, None), one, length=2),
    ):
        with pytest.raises(st.SharedTreeError) as raised:
            call()
        assert "jax.nn.relu" in str(raised.value)
        assert "jax.nn.gelu" in str(raised.value)
        assert " at 0x" not in str(raised.value)
    assert "jax.nn.relu" in str(st.Dag(one))
