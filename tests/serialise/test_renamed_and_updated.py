"""What is offered after `renames=` keeps those renames; for a library's classes another version is offered."""

import dataclasses
import importlib.metadata
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.serialise.trust._resolved_names import renames_as_code
from sharedtree.serialise.values import _changed_classes, _decoding

from .drafts import Draft


def dataclass_of(*fields):
    cls = dataclasses.make_dataclass("Model", fields)
    jax.tree_util.register_dataclass(cls, list(fields), [])
    return cls


@pytest.fixture
def module(monkeypatch):
    """A module that can be imported, in which classes are put under a name."""
    module = types.ModuleType("renaming")
    monkeypatch.setitem(sys.modules, "renaming", module)

    def put(name, cls):
        cls.__module__, cls.__qualname__ = "renaming", name
        setattr(module, name, cls)
        return cls

    module.put = put
    return module


@pytest.fixture
def file(module, tmp_path):
    """A file of a class `Old`, which is not there any more, in a class `Other`, which nobody has renamed."""
    old, other = module.put("Old", dataclass_of("a", "b")), module.put("Other", dataclass_of("inner"))
    st.save(tmp_path / "model", [other(old(jnp.ones(2), 3))])
    del module.Old
    return tmp_path / "model"


def run_until_loaded(module, file, call, **names):
    """Runs what each error offers, until what is offered loads the file. Returns what was said."""
    names |= {"sharedtree": st, "path": file, "renaming": module}
    said = []
    for _ in range(4):
        try:
            return eval(call, names), said
        except st.SharedTreeError as error:
            said.append(str(error))
        code = [line.strip() for line in said[-1].splitlines() if line.startswith("    ") and "`" not in line]
        # A field may have got a new name, which nobody offers, or be gone: the last line.
        code = code[-1:] if '"new_name"' in code[0] else code
        if code[0].startswith("renames="):
            start = call.index("renames={") if "renames={" in call else -1
            call = call[:start] + code[0] + ")" if start >= 0 else call[:-1] + f", {code[0]})"
        else:
            call = code[0].removeprefix("model = ").removeprefix("model, report = ")
    pytest.fail("\n\n".join(said))


def test_trust_is_asked_for_the_new_name_and_renames_are_kept(module, file):
    new = module.put("New", dataclass_of("a", "b"))
    call = 'sharedtree.load(path, renames={"renaming:Old": "renaming:New"})'
    (loaded,), said = run_until_loaded(module, file, call)
    assert type(loaded.inner) is new
    assert len(said) == 1
    assert "`renaming:Old`, a class that is called `renaming:New` now" in said[0]


@pytest.mark.parametrize("value", ['"renaming:New"', "renaming.New"])
def test_one_rename_more(module, file, value):
    """A field that is gone, too: what is offered renames the class as well, by its name or as itself."""
    new = module.put("New", dataclass_of("a"))
    call = f'sharedtree.load(path, trusted=["renaming"], renames={{"renaming:Old": {value}}})'
    (loaded,), said = run_until_loaded(module, file, call)
    assert vars(loaded.inner).keys() == {"a"}
    assert type(loaded.inner) is new
    assert f'renames={{"renaming:Old": {value}, "renaming:Old.b": None}}' in said[0]


def test_another_name_that_is_not_there(module, file):
    module.put("New", dataclass_of("a", "b"))
    del module.Other
    with pytest.raises(st.errors.StructureMismatchError, match="nothing of that name") as raised:
        st.load(file, trusted=["renaming"], renames={"renaming:Old": "renaming:New"})
    offered = 'renames={"renaming:Old": "renaming:New", "renaming:Other": "new_module:NewName"}'
    assert offered in str(raised.value)


def test_an_added_field(module, file):
    module.put("New", dataclass_of("a", "b", "c"))
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(file, trusted=["renaming"], renames={"renaming:Old": "renaming:New"})
    offered = 'renames={"renaming:Old": "renaming:New", "renaming:Old.<its old name>": "c"}'
    assert offered in str(raised.value)


def test_a_template_that_does_not_fit(module, file):
    """The template has one of the classes only, so the other one is to be trusted again."""
    new = module.put("New", dataclass_of("a", "b"))
    options = {"trusted": ["renaming"], "renames": {"renaming:Old": "renaming:New"}}
    template = [new(jnp.ones(3), 3)]
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(file, like=template, **options)
    calls = [line.strip() for line in str(raised.value).splitlines() if "sharedtree.load(" in line]
    assert len(calls) == 2
    for call in calls:
        names = {"sharedtree": st, "path": file, "renaming": module, "template": template}
        exec(call, names)
        assert "model" in names


def test_what_was_left_out(module, tmp_path):
    old = module.put("Old", dataclass_of("a", "b"))
    st.save(tmp_path / "model", [old(jnp.ones(2), print)], leave_out="b")
    del module.Old
    new = module.put("New", dataclass_of("a", "b"))
    template = [new(jnp.zeros(2), print)]
    call = 'sharedtree.load(path, trusted=["renaming"], renames={"renaming:Old": "renaming:New"})'
    (loaded,), said = run_until_loaded(module, tmp_path / "model", call, template=template)
    assert (type(loaded), loaded.b, len(said)) == (new, print, 1)


def test_of_the_program_a_rename_is_said_once():
    """What it defines has two names in `renames`, of which one was given."""
    given = {"__main__:Old": "renaming:New"}
    assert renames_as_code({"train:Old": "renaming:New", **given}, {"x:Y": None}) == (
        '"__main__:Old": "renaming:New", "x:Y": None'
    )
    assert "train:Old" in renames_as_code({"train:Old": "renaming:Other", **given}, {})


EQUINOX = importlib.metadata.version("equinox")


def of_a_library(obj, change, **options):
    """What is said of a file of which something was changed, as another version of the library would have it."""
    draft = Draft(st.to_bytes(obj))
    change(draft.manifest)
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(draft.file(with_digests=True), **options)
    return str(raised.value)


def test_a_field_that_the_installed_library_lacks():
    def change(manifest):
        manifest["types"][0]["fields"].append("newer")
        manifest["nodes"][-1][2].append(False)

    said = of_a_library(eqx.nn.Dropout(0.5), change)
    assert f"The file was written with another version of equinox than {EQUINOX}" in said
    assert "\n    pip install --upgrade equinox\n" in said
    assert '\n    renames={"equinox.nn:Dropout.newer": None}' in said


def test_a_field_that_the_file_of_a_library_lacks():
    def change(manifest):
        del manifest["types"][0]["fields"][0]
        del manifest["nodes"][-1][2][0]

    said = of_a_library(eqx.nn.Linear(2, 2, key=jax.random.key(0)), change)
    assert f"\n    pip install 'equinox<{EQUINOX}'\n" in said
    assert "= ..." not in said  # nobody edits the class of a library


def test_a_class_that_the_installed_library_lacks():
    def change(manifest):
        manifest["types"][0]["name"] = "equinox.nn:Newer"

    said = of_a_library(eqx.nn.Dropout(0.5), change)
    assert f"than is installed, equinox {EQUINOX}" in said
    assert said.endswith("\n    pip install --upgrade equinox")


def test_objects_of_nnx_made_in_another_way(monkeypatch):
    """The oldest flax of whose objects there are files is named."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    fix = "\n    pip install --upgrade 'flax>=0.12.1'"
    assert of_a_library(layer, lambda m: m["types"][-1].update(name="flax.nnx:Newer"), trusted="flax").endswith(fix)
    # As in a flax whose objects are not taken apart by attributes.
    for where in (_decoding, _changed_classes):
        monkeypatch.setattr(where, "kind_of", lambda cls: None)
    said = of_a_library(layer, lambda m: None, trusted="flax")
    assert said.endswith(fix)
    assert "Another version of flax wrote it than is installed" in said
