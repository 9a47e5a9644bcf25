"""One scenario for each message about files that offers code.

What would need a broken disk, another version of a library or several processes is had from the function that makes the
message.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.serialise import orbax as st_orbax
from sharedtree.serialise.arrays import _dtypes, _orbax_forms, _placing
from sharedtree.serialise.container import _progress, _writing as _container
from sharedtree.serialise.trust import _installed, _trust
from sharedtree.serialise.values import _kinds, _manifest, _nodes
from tests.fixes import Scenario, scenario


def saved(path, tree=None):
    file = path / "model.safetensors"
    st.save(file, {"a": jnp.arange(3.0)} if tree is None else tree)
    return file


def module_with(**classes):
    """A module that can be imported, with classes that say that they are from it."""
    name = "fixes_own_models"
    module = sys.modules[name] = types.ModuleType(name)
    for key, cls in classes.items():
        cls.__module__, cls.__qualname__ = name, key
        setattr(module, key, cls)
    return module


def dataclass_with(fields, **namespace):
    """A registered dataclass `Model`, as a module of its own has it after the next edit."""
    cls = dataclasses.make_dataclass("Model", fields, namespace=namespace)
    jax.tree_util.register_dataclass(cls, [name for name, *_ in fields], [])
    return module_with(Model=cls).Model


def file_of_model(path, **namespace):
    cls = dataclass_with([("weight", object), ("bias", object)], **namespace)
    return saved(path, cls(jnp.ones(2), jnp.zeros(2)))


def load(file, **options):
    return st.load(file, trusted=["fixes_own_models"], **options)


def damaged(path):
    file = saved(path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


@scenario
def a_version_that_is_none(path):
    cls = dataclass_with([("weight", object)], __sharedtree_version__="new")
    return Scenario(lambda: st.to_bytes(cls(jnp.ones(1))), st.SharedTreeError)


@scenario
def a_header_too_long(path):
    arrays = [jnp.ones(1)] * 2

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_container, "MAX_HEADER_BYTES", 10)
            saved(path, arrays)

    return Scenario(provoke, ValueError, {"arrays": arrays})


class Blocking(io.RawIOBase):
    def write(self, data):
        return None


class Pipe:
    """Closed with its last reference: of a file that nobody closes, Python warns whenever it collects garbage."""

    def __init__(self):
        self.ends = os.pipe()

    def fileno(self):
        return self.ends[1]

    def __del__(self):
        for end in self.ends:
            os.close(end)


@scenario
def a_file_that_does_not_block(path):
    return Scenario(lambda: _container._write_all(Blocking(), memoryview(b"a")), BlockingIOError, {"file": Pipe()})


@scenario
def names_that_are_not_trusted(path):
    file = file_of_model(path)
    names = {"path": file, "fixes_own_models": sys.modules["fixes_own_models"]}
    return Scenario(lambda: st.load(file), st.UntrustedTypeError, names)


class Report(Exception):
    """What `audit` prints is no error, but it offers code, too."""


@scenario
def an_audit_that_refuses(path):
    file = file_of_model(path)

    def provoke():
        raise Report(str(st.audit(file)))

    return Scenario(provoke, Report, {"path": file})


@contextlib.contextmanager
def optax_lies_elsewhere():
    """As if nobody had imported optax, and the one on Python's path were in the current directory."""

    def found_elsewhere(module):
        raise _installed.ElsewhereError("optax", "optax.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "optax")
        patch.setattr(_trust, "import_installed", found_elsewhere)
        yield


@scenario
def a_library_that_is_not_installed(path):
    file = saved(path, [optax.TraceState(jnp.ones(1))])

    def provoke():
        with optax_lies_elsewhere():
            st.load(file)

    return Scenario(provoke, st.UntrustedTypeError, {}, lambda _: st.load(file))


@scenario
def an_audit_of_a_library_that_is_not_installed(path):
    file = saved(path, [optax.TraceState(jnp.ones(1))])

    def provoke():
        with optax_lies_elsewhere():
            raise Report(str(st.audit(file)))

    return Scenario(provoke, Report, {}, lambda _: st.load(file))


@scenario
def a_name_that_is_gone(path):
    file = file_of_model(path)
    del sys.modules["fixes_own_models"].Model
    return Scenario(lambda: load(file), st.StructureMismatchError)


@scenario
def a_dtype_of_a_newer_version(path):
    def provoke():
        raise _dtypes._unknown("float77", "float77")

    return Scenario(provoke, st.FormatError)


@scenario
def a_dtype_of_a_newer_ml_dtypes(path):
    def provoke():
        raise _dtypes._unknown("float4_e2m1fn", sorted(_dtypes._ML_NAMES)[0])

    return Scenario(provoke, st.FormatError)


@scenario
def a_long_double_of_another_machine(path):
    def provoke():
        raise _dtypes._unknown("longdouble[9]", "longdouble[9]")

    return Scenario(provoke, st.FormatError, {"array": np.ones(1)})


@scenario
def a_folder_that_is_not_there(path):
    target = path / "new" / "model.safetensors"
    save = lambda *_: st.save(target, [1])
    return Scenario(save, FileNotFoundError, {}, save)


@scenario
def a_target_that_is_no_regular_file(path):
    os.mkfifo(path / "pipe")
    (path / "pipe").chmod(0o600)
    reader = os.open(path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    return Scenario(lambda: st.save(path / "pipe", [1]), OSError, {"reader": reader}, lambda _: os.close(reader))


@scenario
def a_cycle_in_what_is_saved(path):
    loop = [jnp.ones(1)]
    loop.append(loop)
    tree = {"a": loop}
    return Scenario(lambda: st.to_bytes(tree), st.CycleError, {"tree": tree}, lambda _: st.to_bytes(tree))


@scenario
def a_field_that_is_gone(path):
    file = file_of_model(path)
    dataclass_with([("weight", object)])
    return Scenario(
        lambda: load(file), st.StructureMismatchError, {}, lambda names: load(file, renames=names["renames"])
    )


@scenario
def renames_that_are_no_dict(path):
    file = saved(path)
    return Scenario(
        lambda: st.load(file, renames=["a"]), TypeError, {}, lambda names: st.load(file, renames=names["renames"])
    )


@scenario
def renames_of_nothing(path):
    file = saved(path)
    after = lambda names: st.load(file, renames=names["renames"])
    return Scenario(lambda: st.load(file, renames={"no name": "b"}), ValueError, {}, after)


@scenario
def renames_to_no_name(path):
    file = saved(path)
    after = lambda names: st.load(file, renames=names["renames"])
    return Scenario(lambda: st.load(file, renames={"a:B": 1}), TypeError, {}, after)


@scenario
def a_version_without_a_migration(path):
    file = file_of_model(path, __sharedtree_version__=1)
    cls = dataclass_with([("weight", object), ("bias", object)], __sharedtree_version__=2)

    def after(names):
        cls.__sharedtree_migrate__ = names["__sharedtree_migrate__"]
        load(file)

    return Scenario(lambda: load(file), st.StructureMismatchError, {}, after)


@scenario
def a_file_of_another_program(path):
    file = path / "other.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, str(file))

    def after(names):
        assert names["tensors"]["a"].tolist() == [1, 1]

    return Scenario(lambda: st.load(str(file)), st.FormatError, {"safetensors": safetensors, "path": str(file)}, after)


@scenario
def a_template_for_a_file_of_another_program(path):
    file = str(path / "other.safetensors")
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, file)

    def after(names):
        assert names["tensors"]["a"].tolist() == [1, 1]

    return Scenario(lambda: st.load(file, foreign=True, like={"a": 1}), ValueError, {"path": file}, after)


@scenario
def packed_tensors_of_another_program(path):
    entries = {
        "packed": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        "plain": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
    }
    text = json.dumps(entries).encode()
    file = path / "packed.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    names = {"path": file, "is_another": lambda name: name != "packed"}
    return Scenario(lambda: st.load(file, foreign=True), st.FormatError, names)


@scenario
def half_a_character(path):
    text = "\ud800"
    return Scenario(lambda: st.to_bytes([1], metadata={"key": text}), ValueError, {"text": text})


@scenario
def a_newer_format(path):
    reader = lambda: _manifest.parse_manifest('{"format": 99, "library": "sharedtree 9"}')
    return Scenario(reader, st.FormatError)


@scenario
def a_part_that_is_not_there(path):
    file = saved(path)
    return Scenario(lambda: st.load(file, select=".b"), st.StructureMismatchError, {"path": file})


@scenario
def a_mesh_of_more_devices(path):
    count = 10_000
    shown = jax.config.jax_num_cpu_devices
    config = types.SimpleNamespace(update=lambda name, value: getattr(jax.config, name) is shown)
    parts = _nodes.Parts({}, [], [], _nodes.Collisions())
    parts.table = list(range(count))  # of the ids
    return Scenario(
        lambda: _kinds.BUILDERS["mesh"](parts, ["mesh", [count], ["x"], list(range(count)), ["Auto"]]),
        st.StructureMismatchError,
        {"jax": types.SimpleNamespace(config=config)},  # with a backend running it is too late to change it
    )


@scenario
def numbers_of_64_bits(path):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        file = saved(path, [jnp.arange(2)])

    def after(_):
        assert st.load(file)[0].dtype == np.int64
        jax.config.update("jax_enable_x64", False)

    return Scenario(lambda: st.load(file), st.StructureMismatchError, {}, after)


@scenario
def a_sharding_that_does_not_fit(path):
    entry = types.SimpleNamespace(tensor="a", shape=(3,), key=None)

    class Sharding:  # over two devices
        is_fully_replicated = False

        def shard_shape(self, shape):
            raise ValueError("3 is not divisible by 2")

    return Scenario(lambda: _placing._parts(entry, Sharding()), st.StructureMismatchError, {"path": saved(path)})


@scenario
def a_sharding_that_is_none(path):
    file = saved(path)
    return Scenario(lambda: st.load(file, sharding="cpu"), TypeError, {"path": file})


@scenario
def a_dtype_that_jax_has_not(path):
    entry = types.SimpleNamespace(kind="jax", dtype="longdouble", tensor="a", shape=(1,))

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_placing, "_is_dtype_of_jax", lambda name: False)
            _placing.placements_of([entry], lambda _: None)

    return Scenario(provoke, st.FormatError)


@scenario
def a_bar_without_tqdm(path):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "tqdm", None)
            patch.setitem(sys.modules, "tqdm.auto", None)
            with _progress.showing(True, "saving"):
                pass

    return Scenario(provoke, ImportError)


@scenario
def a_program_without_flatbuffers(path):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "flatbuffers", None)
            st.Exported.deserialize(b"")

    return Scenario(provoke, ImportError)


@scenario
def a_damaged_file(path):
    file = damaged(path)
    return Scenario(lambda: st.load(file), st.CorruptFileError, {"path": file})


@scenario
def a_damaged_file_that_is_verified(path):
    file = damaged(path)
    return Scenario(lambda: st.verify(file), st.CorruptFileError, {"path": file})


@scenario
def arguments_of_save_in_the_wrong_order(path):
    os.chdir(path)
    model = [jnp.ones(1)]
    return Scenario(lambda: st.save(model, "model.safetensors"), TypeError, {"model": model})


@scenario
def arrays_of_other_processes(path):
    array = jnp.ones(2)
    manager = ocp.CheckpointManager(path)

    class Elsewhere:
        is_fully_addressable = False

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            encoded = types.SimpleNamespace(names=["a"], arrays=[Elsewhere()])
            # The package has the function under the name of the module.
            patch.setattr(sys.modules["sharedtree.serialise.save"], "encode", lambda tree: encoded)
            st.to_bytes([array])

    return Scenario(provoke, st.UnserialisableError, {"manager": manager, "step": 1, "tree": [array]})


@scenario
def metadata_that_is_no_text(path):
    return Scenario(
        lambda: st.save(path / "a", [1], metadata={"rate": 0.1}),
        ValueError,
        {"path": path / "a", "model": [1], "config": {"rate": 0.1}},
    )


@scenario
def a_source_that_is_none(path):
    return Scenario(lambda: st.load(io.StringIO()), TypeError, {"path": saved(path)})


@scenario
def a_template_that_does_not_fit(path):
    file = saved(path)
    template = {"a": jnp.ones(4)}
    return Scenario(
        lambda: st.load(file, like=template), st.StructureMismatchError, {"path": file, "template": template}
    )


@scenario
def all_of_the_standard_library(path):
    file = saved(path)
    after = lambda names: st.load(file, trusted=names["trusted"])
    return Scenario(lambda: st.load(file, trusted=["os"]), ValueError, {}, after)


def manager_with_a_step(path):
    manager = ocp.CheckpointManager(path)
    st.orbax.save(manager, 1, [jnp.ones(2)])
    manager.wait_until_finished()
    return manager


@scenario
def a_checkpoint_that_orbax_saved_alone(path):
    manager = ocp.CheckpointManager(path)
    manager.save(1, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
    manager.wait_until_finished()
    again = ocp.CheckpointManager(path)
    return Scenario(
        lambda: st.orbax.restore(again, 1),
        st.FormatError,
        {"manager": manager, "step": 1, "template": {"a": jnp.zeros(2)}, "orbax": sys.modules["orbax"]},
    )


@scenario
def an_item_by_the_name_of_ours(path):
    manager = ocp.CheckpointManager(path)
    items = {"sharedtree_arrays": ocp.args.JsonSave({}), "arrays": ocp.args.JsonSave({})}
    taken = next(name for name in (st_orbax._ARRAYS, st_orbax._MANIFEST) if name in items)
    items = {taken: items[taken]}
    return Scenario(
        lambda: st.orbax.save(manager, 1, [jnp.ones(1)], items=items),
        ValueError,
        {"manager": manager, "step": 1, "tree": [jnp.ones(1)], "items": items},
    )


@scenario
def without_orbax(path):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "orbax.checkpoint", None)
            st_orbax._orbax()

    return Scenario(provoke, ImportError)


@scenario
def a_manifest_beside_orbax_that_was_changed(path):
    manager = manager_with_a_step(path)

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(st_orbax, "_crc", lambda text: "00000000")
            st.orbax.restore(manager, 1)

    return Scenario(provoke, st.CorruptFileError, {"manager": manager, "step": 1})


def orbax_says(path, text):
    manager = manager_with_a_step(path)

    class Failing:
        directory = path

        def restore(self, step, args):
            if st_orbax._MANIFEST in args.keys():  # noqa: SIM118  a Composite is no mapping
                return manager.restore(step, args=args)
            raise ValueError(text)

    return Scenario(
        lambda: st.orbax.restore(Failing(), 1),
        st.CorruptFileError if "LOSS" in text else st.FormatError,
        {"manager": manager, "step": 1},
    )


@scenario
def arrays_that_orbax_finds_damaged(path):
    return orbax_says(path, "DATA_LOSS")


@scenario
def arrays_that_orbax_cannot_read(path):
    return orbax_says(path, "no such array")


@scenario
def arrays_of_another_checkpoint(path):
    manager = manager_with_a_step(path)

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_orbax_forms, "stored_as", lambda entry: (np.dtype("int8"), (7,)))
            st.orbax.restore(manager, 1)

    return Scenario(provoke, st.FormatError, {"manager": manager, "step": 1})


@scenario
def arrays_for_which_there_is_no_memory(path):
    manager = manager_with_a_step(path)

    def no_memory(*_):
        raise MemoryError

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_orbax_forms, "np", types.SimpleNamespace(**{**vars(np), "empty": no_memory}))
            st.orbax.restore(manager, 1)

    return Scenario(provoke, st.StructureMismatchError, {"manager": manager, "step": 1})


@scenario
def a_file_of_equinox_without_the_tie_of_the_template(path):
    tied = [jnp.arange(3.0)] * 2
    eqx.tree_serialise_leaves(path / "tree.eqx", [tied[0], tied[0] + 1])
    names = {"source": path / "tree.eqx", "template": tied}
    return Scenario(
        lambda: st.convert(path / "tree.eqx", like=tied), st.StructureMismatchError, names, are_alternatives=True
    )


@scenario
def a_file_of_equinox_without_a_template(path):
    def make_model(key):
        return eqx.nn.Linear(2, 2, key=key)

    source, key = path / "tree.eqx", jax.random.key(0)
    eqx.tree_serialise_leaves(source, make_model(key))
    names = {"source": source, "equinox": eqx, "make_model": make_model, "key": key}
    return Scenario(lambda: st.convert(source), ValueError, names)


@scenario
def a_file_of_equinox_with_numbers_of_64_bits(path):
    eqx.tree_serialise_leaves(path / "tree.eqx", [np.arange(2)])
    like = [jax.ShapeDtypeStruct((2,), np.int64)]

    def after(_):
        assert st.convert(path / "tree.eqx", like=like).tree[0].dtype == np.int64
        jax.config.update("jax_enable_x64", False)

    return Scenario(lambda: st.convert(path / "tree.eqx", like=like), st.StructureMismatchError, {}, after)


@scenario
def a_file_of_flax_without_flax(path):
    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "flax.serialization", None)
            st.convert(b"\x80")

    return Scenario(provoke, st.CompatibilityError)
