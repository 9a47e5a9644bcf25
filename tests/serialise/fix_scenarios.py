"""One scenario for each message about files that offers code.

What would need a broken disk, another version of a library or several processes is had from the function that makes the
message.
"""

import dataclasses
import errno
import io
import json
import os
import sys
import types
import zipfile

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
from sharedtree.serialise.container import _byte_sources, _mapped_files, _writing as _container
from sharedtree.serialise.values import _all_kinds_of_nodes, _manifest, _nodes
from tests.fixes import Scenario, scenario, scenarios
from tests.serialise.drafts import Draft


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


def refused(file, category, after=None, **options):
    """A file that is not loaded with these options."""
    return Scenario(lambda: st.load(file, **options), category, {"path": file}, after)


def raising(make, *args):
    """Raises what a function makes."""

    def provoke():
        raise make(*args)

    return provoke


def under(call, *changes):
    """Calls while attributes are others: (object, name, value)."""

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            for change in changes:
                patch.setattr(*change)
            call()

    return provoke


def without(call, *modules):
    """Calls as if modules were not installed."""

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                patch.setitem(sys.modules, module, None)
            call()

    return provoke


def state_of(apply_fn, tx):
    cls = dataclass_with([("apply_fn", object), ("tx", object)])
    return cls(apply_fn, tx)


@scenario
def what_was_left_out(path):
    template, file = state_of(jax.nn.relu, print), path / "model.safetensors"
    st.save(file, template, leave_out="tx")

    def after(names):
        assert names["model"].tx is print

    return Scenario(lambda: load(file), st.errors.StructureMismatchError, {"path": file, "template": template}, after)


@scenario
def what_a_library_made(path):
    model, path = {"w": jnp.arange(3.0), "tx": optax.sgd(0.1)}, path / "model.safetensors"

    def after(names):
        assert names["model"]["tx"] == model["tx"]
        assert names["model"]["w"].tolist() == [0, 1, 2]

    names = {"path": path, "model": model}
    return Scenario(lambda: st.save(path, model), st.errors.UnserialisableError, names, after)


def leaving_out(path, *entries):
    tree, path = state_of(jax.nn.relu, jax.nn.relu), path / "model.safetensors"
    return Scenario(lambda: st.save(path, tree, leave_out=entries), ValueError, {"path": path, "tree": tree})


@scenario
def a_header_too_long(path):
    arrays = [jnp.ones(1)] * 2
    provoke = under(lambda: saved(path, arrays), (_container, "MAX_HEADER_BYTES", 10))
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
def a_folder_that_is_not_there(path):
    save = lambda *_: st.save(path / "new" / "model.safetensors", [1])
    return Scenario(save, FileNotFoundError, {}, save)


@scenario
def a_target_that_is_no_regular_file(path):
    os.mkfifo(path / "pipe")
    (path / "pipe").chmod(0o600)
    reader = os.open(path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    return Scenario(lambda: st.save(path / "pipe", [1]), OSError, {"reader": reader}, lambda _: os.close(reader))


@scenario
def a_file_that_has_no_name(path):
    file = open(path / "model", "w+b")  # noqa: SIM115  closed afterwards
    os.unlink(path / "model")

    def after(names):
        assert st.load(f"/dev/fd/{file.fileno()}") == [7]
        file.close()

    return Scenario(
        lambda: st.save(f"/dev/fd/{file.fileno()}", [1]), OSError, {"model": [7], "open": open, "file": file}, after
    )


@scenario
def a_folder_that_may_not_be_entered(path):
    real = os.stat

    def refuse(name, **options):
        if str(name).startswith(str(path / "closed")):
            raise PermissionError(errno.EACCES, "no", name)
        return real(name, **options)

    provoke = under(lambda: st.save(path / "closed" / "model", [1]), (os, "stat", refuse))
    after = lambda _: st.load(path / "model")
    return Scenario(provoke, PermissionError, {"model": [7]}, after, around=at_home(path))


@scenario
def a_path_as_long_as_the_system_takes(path):
    os.chdir(path)
    folder = str(path)
    while len(folder) < 4_060:
        folder = os.path.join(folder, "d" * max(1, min(200, 4_060 - len(folder) - 1)))
        os.mkdir(os.path.basename(folder))
        os.chdir(os.path.basename(folder))
    os.chdir(path)

    def after(_):
        assert st.load("model") == [7]
        os.chdir(path)

    names = {"model": [7]}
    return Scenario(lambda: st.save(os.path.join(folder, "model"), [1]), OSError, names, after)


def at_home(home):
    """Runs code as if a folder were the user's own."""

    def around(run, names):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(home))
            run()

    return around


@scenario
def a_save_beside_a_donation(path):
    model = [jnp.zeros((512, 512)), jnp.ones((512, 512))]
    other = st.copy(model)
    provoke = lambda: st.save(path / "model", model, progress=lambda *_: model[1].delete())
    names = {"path": path / "model", "model": other}
    return Scenario(provoke, st.errors.UnserialisableError, names, lambda _: st.load(path / "model"))


@scenario
def an_archive_instead_of_a_model(path):
    np.savez(path / "arrays.npz", a=np.ones(2))
    names = {"path": path / "arrays.npz", "zipfile": zipfile}
    return Scenario(lambda: st.load(path / "arrays.npz"), st.errors.FormatError, names)


@scenario
def a_home_folder_as_shells_call_it(path):
    def after(names):
        assert names["path"] == str(path / "model")

    scenario = Scenario(lambda: st.load("~/model"), FileNotFoundError, {}, after)
    return dataclasses.replace(scenario, around=at_home(path))


def a_folder_that_takes_no_file(path, *, is_there):
    file, opened = path / "folder" / "model", os.open
    file.parent.mkdir()
    if is_there:
        st.save(file, [1] * 1000)

    def refuse(name, *args, **options):
        if str(name).endswith(_container._SUFFIX):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return opened(name, *args, **options)

    def after(_):
        assert st.load(file if is_there else path / "model") == [7]

    names = {"model": [7], "open": open}
    provoke = under(lambda: st.save(file, [1]), (os, "open", refuse))
    return Scenario(provoke, OSError, names, after, around=at_home(path))


def a_pipe_that_does_not_block():
    pipe = Pipe()
    os.set_blocking(pipe.ends[0], False)
    file = open(pipe.ends[0], "rb", buffering=0, closefd=False)  # noqa: SIM115  it holds nothing

    def after(_):
        assert pipe
        assert os.get_blocking(file.fileno())

    return Scenario(lambda: st.load(file), BlockingIOError, {"file": file}, after)


def a_file_that_is_mapped(path, *, by_numpy):
    file = saved(path, [np.arange(1000.0)])
    if by_numpy:
        model = [np.memmap(file, np.uint8, "r")]
        changes = []
    else:
        model = st.load(file, mmap=True)
        refuse = raising(OSError, errno.ENOMEM, "no memory")
        changes = [(_mapped_files, "_turn_into_memory", lambda mapping: refuse())]
    expected = np.array(model[0])
    opened = open(file, "r+b")  # noqa: SIM115  closed afterwards
    names = {"model": model, "file": opened}
    del model

    def after(names):
        opened.close()
        assert (st.load(file)[0] == expected).all()

    provoke = under(lambda: st.save(opened, names["model"]), *changes)
    return Scenario(provoke, OSError, names, after)


@scenario
def a_cycle_in_what_is_saved(path):
    loop = [jnp.ones(1)]
    loop.append(loop)
    tree = {"a": loop}
    return Scenario(lambda: st.to_bytes(tree), st.errors.CycleError, {"tree": tree}, lambda _: st.to_bytes(tree))


@scenario
def arguments_of_save_in_the_wrong_order(path):
    os.chdir(path)
    model = [jnp.ones(1)]
    return Scenario(lambda: st.save(model, "model.safetensors"), TypeError, {"model": model})


@scenario
def arrays_of_other_processes(path):
    array = jnp.ones(2)
    encoded = types.SimpleNamespace(names=["a"], arrays=[types.SimpleNamespace(is_fully_addressable=False)])
    # The package has the function under the name of the module.
    change = (sys.modules["sharedtree.serialise.save"], "encode", lambda *_: encoded)
    names = {"manager": ocp.CheckpointManager(path), "step": 1, "tree": [array]}
    return Scenario(under(lambda: st.to_bytes([array]), change), st.errors.UnserialisableError, names)


@scenario
def metadata_that_is_no_text(path):
    provoke = lambda: st.save(path / "a", [1], metadata={"rate": 0.1})
    return Scenario(provoke, ValueError, {"path": path / "a", "model": [1], "config": {"rate": 0.1}})


class Report(Exception):
    """What `audit` prints is no error, but it offers code, too."""


def audited(file):
    raise Report(str(st.audit(file)))


def untrusted(path, look, category):
    file = file_of_model(path)
    names = {"path": file, "fixes_own_models": sys.modules["fixes_own_models"]}
    return Scenario(lambda: look(file), category, names)


def changed_since(path, change, after=None):
    """A file of a class of which the next edit made another one."""
    file = file_of_model(path)
    change()
    return Scenario(
        lambda: load(file), st.errors.StructureMismatchError, {}, after and (lambda names: after(file, names))
    )


def of_optax(path, look, category):
    """As if nobody had imported optax."""
    file = saved(path, [optax.TraceState(jnp.ones(1))])

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, "optax")
            look(file)

    return Scenario(provoke, category, {}, lambda _: st.load(file))


def wrong_renames(path, renames, category):
    return refused(saved(path), category, lambda names: with_renames(names["path"], names), renames=renames)


@scenario
def a_version_without_a_migration(path):
    file = file_of_model(path, __sharedtree_version__=1)
    cls = dataclass_with([("weight", object), ("bias", object)], __sharedtree_version__=2)

    def after(names):
        cls.__sharedtree_migrate__ = names["__sharedtree_migrate__"]
        load(file)

    return Scenario(lambda: load(file), st.errors.StructureMismatchError, {}, after)


def of_another_program(path, category, names=None, **options):
    file = str(path / "other.safetensors")
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, file)

    def after(names):
        assert names["tensors"]["a"].tolist() == [1, 1]

    return Scenario(lambda: st.load(file, **options), category, {"path": file, **(names or {})}, after)


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
    return Scenario(lambda: st.load(file, foreign=True), st.errors.FormatError, names)


@scenario
def a_template_that_does_not_fit(path):
    file, template = saved(path), {"a": jnp.ones(4)}
    names = {"path": file, "template": template}
    return Scenario(lambda: st.load(file, like=template), st.errors.StructureMismatchError, names)


class Tied(eqx.Module):
    embed: jax.Array
    head: jax.Array


def template_with_other_ties(path, *, tied):
    """The file and the template have one class, which is nobody's but ours, and one of them has the tie."""
    made = lambda weight, is_tied: Tied(weight, weight if is_tied else weight + 1)
    file, template = saved(path, made(jnp.arange(3.0), tied)), made(jnp.zeros(3), not tied)
    names = {"path": file, "template": template, "tests": sys.modules["tests"]}

    def after(left):
        model = left["model"] if "model" in left else st.load(file, like=left["template"])
        assert type(model) is Tied
        # What only fits has the ties of the template.
        assert (model.embed is model.head) is (tied if "report" not in left else not tied)

    load = lambda: st.load(file, like=template)
    return Scenario(load, st.errors.StructureMismatchError, names, after, are_alternatives=True)


def damaged(path, look):
    file = saved(path, {"mask": np.ones(8, bool)})
    data = bytearray(file.read_bytes())
    data[-1] ^= 2
    file.write_bytes(data)
    return Scenario(lambda: look(file), st.errors.CorruptFileError, {"path": file})


def booleans_of_another_byte(path, *, is_foreign):
    file = path / "masks"
    safetensors.numpy.save_file({"mask": np.array([0, 255], np.uint8).view(bool)}, file)
    if not is_foreign:
        draft = Draft(st.to_bytes({"mask": np.ones(2, bool)}))
        draft.data[1] = 255
        file.write_bytes(draft.file(with_digests=True))
    return Scenario(lambda: st.load(file, foreign=is_foreign), st.errors.FormatError, {"path": file})


@scenario
def numbers_of_64_bits(path):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        file = saved(path, [jnp.arange(2)])

    def after(_):
        assert st.load(file)[0].dtype == np.int64
        jax.config.update("jax_enable_x64", False)

    return refused(file, st.errors.StructureMismatchError, after)


@scenario
def a_mesh_of_more_devices(path):
    count = 10_000
    shown = jax.config.jax_num_cpu_devices
    config = types.SimpleNamespace(update=lambda name, value: getattr(jax.config, name) is shown)
    parts = _nodes.Parts({}, [], [], _nodes.Collisions())
    parts.table = list(range(count))  # of the ids
    provoke = lambda: _all_kinds_of_nodes.BUILDERS["mesh"](
        parts, ["mesh", [count], ["x"], list(range(count)), ["Auto"]]
    )
    # With a backend running it is too late to change it.
    return Scenario(provoke, st.errors.StructureMismatchError, {"jax": types.SimpleNamespace(config=config)})


@scenario
def a_sharding_that_does_not_fit(path):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    of_two_axes = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    path = saved(path)
    return Scenario(lambda: st.load(path, sharding=of_two_axes), st.errors.StructureMismatchError, {"path": path})


@scenario
def a_dtype_that_jax_has_not(path):
    entry = types.SimpleNamespace(kind="jax", dtype="longdouble", tensor="a", shape=(1,))
    place = lambda: _placing.placements_of([entry], lambda _: None)
    return Scenario(under(place, (_placing, "_is_dtype_of_jax", lambda name: False)), st.errors.FormatError)


def a_bar():
    with _byte_sources.progress_reporter(True, "saving"):
        pass


def manager_with_steps(path):
    """With the step 1 that something is wrong with, and the step 0."""
    manager = ocp.CheckpointManager(path)
    for step in (0, 1):
        st.orbax.save(manager, step, [jnp.ones(2)])
    manager.wait_until_finished()
    return manager


def saved_by_orbax_alone(path, args, template, **options):
    """A step that is restored by the manager with which we failed to restore it."""
    with ocp.CheckpointManager(path, **options) as manager:
        manager.save(1, args=args)
    names = {"manager": ocp.CheckpointManager(path, **options), "step": 1, "orbax": sys.modules["orbax"], **template}
    return Scenario(lambda: st.orbax.restore(names["manager"], 1), st.errors.FormatError, names)


PREFIXED = ocp.CheckpointManagerOptions(step_prefix="ck")
PREFIXED_WITH_ZEROS = ocp.CheckpointManagerOptions(step_prefix="ck", step_format_fixed_length=8)


def no_manager(path, manager, *, restores=False):
    with ocp.CheckpointManager(path / "steps") as another:
        st.orbax.save(another, 1, [7])
    provoke = lambda: st.orbax.restore(manager, 1) if restores else st.orbax.save(manager, 2, [7])
    names = {"orbax": sys.modules["orbax"], "folder": path / "steps"}

    def after(names):
        with names["manager"] as made:
            assert st.orbax.restore(made) == [7]

    return Scenario(provoke, TypeError, names, after)


def with_named_items(path, *items, **options):
    saves = {name: ocp.args.StandardSave({"a": jnp.ones(2)}) for name in items}
    template = {"a": jnp.zeros(2)}
    if len(items) > 1:
        saves["json"] = ocp.args.JsonSave({"b": 1})
    names = {"template": template, "templates": dict.fromkeys(items, template)}
    return saved_by_orbax_alone(path, ocp.args.Composite(**saves), names, **options)


@scenario
def a_step_that_is_missing(path):
    manager = manager_with_steps(path)
    return Scenario(lambda: st.orbax.restore(manager, 2), st.errors.MissingStepError, {"manager": manager})


@scenario
def an_item_by_the_name_of_ours(path):
    names = {"manager": ocp.CheckpointManager(path), "step": 1, "tree": [jnp.ones(1)]}
    names["items"] = {st_orbax._ARRAYS: ocp.args.JsonSave({})}
    return Scenario(lambda: st.orbax.save(names["manager"], 1, names["tree"], items=names["items"]), ValueError, names)


def restoring(path, category, *changes):
    manager = manager_with_steps(path)
    provoke = under(lambda: st.orbax.restore(manager, 1), *changes)
    return Scenario(provoke, category, {"manager": manager, "step": 1})


@scenario
def arrays_for_which_there_is_no_memory(path):
    def no_memory(*_):
        raise MemoryError

    change = (_orbax_forms, "np", types.SimpleNamespace(**{**vars(np), "empty": no_memory}))
    return restoring(path, st.errors.StructureMismatchError, change)


def orbax_says(path, text, category):
    manager = manager_with_steps(path)

    class Failing:
        directory = path
        all_steps = manager.all_steps

        def restore(self, step, args):
            if st_orbax._MANIFEST in args.keys():  # noqa: SIM118  a Composite is no mapping
                return manager.restore(step, args=args)
            raise ValueError(text)

    return Scenario(lambda: st.orbax.restore(Failing(), 1), category, {"manager": manager, "step": 1})


def made_by(category, provoke, *modules, **names):
    """A message that needs no folder, without some modules."""
    return lambda path: Scenario(without(provoke, *modules), category, names)


def metadata_that_are_no_dict():
    after = lambda names: st.to_bytes([1], metadata=names["metadata"])
    return Scenario(lambda: st.to_bytes([1], metadata=[("run", "first")]), TypeError, {}, after)


def with_renames(file, names):
    load(file, renames=names["renames"])


unknown = _dtypes._unknown_dtype_error


def of_another_equinox(change):
    """A file of a layer of Equinox's as another version would have written it."""
    draft = Draft(st.to_bytes(eqx.nn.Linear(2, 2, key=jax.random.key(0))))
    change(draft.manifest["types"][-1]["fields"], draft.manifest["nodes"][-1][2])
    data = draft.file(with_digests=True)

    def after(names):
        if "renames" in names:
            st.load(data, renames=names["renames"])

    return Scenario(lambda: st.load(data), st.errors.StructureMismatchError, {}, after)


def with_another_field(fields, values):
    fields.append("newer")
    values.append(False)


def without_a_field(fields, values):
    del fields[0], values[0]


scenarios(
    a_checkpoint_that_orbax_saved_alone=lambda path: saved_by_orbax_alone(
        path, ocp.args.StandardSave({"a": jnp.ones(2)}), {"template": {"a": jnp.zeros(2)}}
    ),
    a_checkpoint_of_json_that_orbax_saved_alone=lambda path: saved_by_orbax_alone(
        path, ocp.args.JsonSave({"a": 1}), {}
    ),
    a_checkpoint_with_a_prefix=lambda path: with_named_items(path, "state", options=PREFIXED),
    a_checkpoint_with_a_prefix_and_zeros=lambda path: with_named_items(path, "a", "b", options=PREFIXED_WITH_ZEROS),
    a_path_for_a_manager=lambda path: no_manager(path, str(path / "steps")),
    a_checkpointer_for_a_manager=lambda path: no_manager(path, ocp.StandardCheckpointer()),
    no_manager_to_restore_with=lambda path: no_manager(path, path / "steps", restores=True),
    a_checkpoint_with_a_named_item=lambda path: with_named_items(path, "state"),
    a_checkpoint_with_a_named_item_for_its_manager=lambda path: with_named_items(path, "state", item_names=("state",)),
    a_checkpoint_with_named_items=lambda path: with_named_items(path, "state", "for me", "class"),
    a_field_that_a_library_lacks=lambda: of_another_equinox(with_another_field),
    a_field_that_a_file_of_a_library_lacks=lambda: of_another_equinox(without_a_field),
    a_file_in_a_folder_that_takes_no_other=lambda path: a_folder_that_takes_no_file(path, is_there=True),
    a_new_file_in_a_folder_that_takes_none=lambda path: a_folder_that_takes_no_file(path, is_there=False),
    booleans_that_are_no_bits=lambda path: booleans_of_another_byte(path, is_foreign=False),
    foreign_booleans_that_are_no_bits=lambda path: booleans_of_another_byte(path, is_foreign=True),
    metadata_that_are_no_dict=lambda: metadata_that_are_no_dict(),
    progress_that_is_no_function=lambda path: refused(
        saved(path), TypeError, lambda names: st.load(names["path"], progress=names["progress"]), progress=1
    ),
    a_selection_that_is_none=lambda path: refused(
        saved(path), TypeError, lambda names: st.load(names["path"], select=names["select"]), select=["a"]
    ),
    a_file_that_is_mapped_by_load=lambda path: a_file_that_is_mapped(path, by_numpy=False),
    a_file_that_is_mapped_by_numpy=lambda path: a_file_that_is_mapped(path, by_numpy=True),
    a_version_that_is_none=made_by(
        st.SharedTreeError,
        lambda: st.to_bytes(dataclass_with([("weight", object)], __sharedtree_version__="new")(jnp.ones(1))),
    ),
    a_template_without_the_ties=lambda path: template_with_other_ties(path, tied=True),
    a_template_with_a_tie_too_many=lambda path: template_with_other_ties(path, tied=False),
    a_pipe_that_does_not_block=lambda: a_pipe_that_does_not_block(),
    a_file_that_does_not_block=lambda path: Scenario(
        lambda: _container._write_all(Blocking(), memoryview(b"a")), BlockingIOError, {"file": Pipe()}
    ),
    half_a_character=made_by(ValueError, lambda: st.to_bytes([1], metadata={"key": "\ud800"}), text="\ud800"),
    a_newer_format=made_by(
        st.errors.FormatError, lambda: _manifest.parse_manifest('{"format": 99, "library": "sharedtree 9"}')
    ),
    a_dtype_of_a_newer_version=made_by(st.errors.FormatError, raising(unknown, "float77", "float77")),
    a_dtype_of_a_newer_ml_dtypes=made_by(
        st.errors.FormatError, raising(unknown, "float4_e2m1fn", min(_dtypes._ML_NAMES))
    ),
    a_long_double_of_another_machine=made_by(
        st.errors.FormatError, raising(unknown, "longdouble[9]", "longdouble[9]"), array=np.ones(1)
    ),
    a_bar_without_tqdm=made_by(ImportError, a_bar, "tqdm", "tqdm.auto"),
    a_program_without_flatbuffers=made_by(ImportError, lambda: st.Exported.deserialize(b""), "flatbuffers"),
    without_orbax=made_by(ImportError, st_orbax._import_orbax, "orbax.checkpoint"),
    names_that_are_not_trusted=lambda path: untrusted(path, st.load, st.errors.UntrustedTypeError),
    an_audit_that_refuses=lambda path: untrusted(path, audited, Report),
    a_library_that_is_not_imported=lambda path: of_optax(path, st.load, st.errors.UntrustedTypeError),
    an_audit_of_a_library_that_is_not_imported=lambda path: of_optax(path, audited, Report),
    a_name_that_is_gone=lambda path: changed_since(path, lambda: delattr(sys.modules["fixes_own_models"], "Model")),
    a_field_that_is_gone=lambda path: changed_since(path, lambda: dataclass_with([("weight", object)]), with_renames),
    renames_that_are_no_dict=lambda path: wrong_renames(path, ["a"], TypeError),
    renames_of_nothing=lambda path: wrong_renames(path, {"no name": "b"}, ValueError),
    renames_to_no_name=lambda path: wrong_renames(path, {"a:B": 1}, TypeError),
    all_of_the_standard_library=lambda path: refused(
        saved(path), ValueError, lambda names: st.load(names["path"], trusted=names["trusted"]), trusted=["os"]
    ),
    a_file_of_another_program=lambda path: of_another_program(
        path, st.errors.FormatError, {"safetensors": safetensors}
    ),
    a_template_for_a_file_of_another_program=lambda path: of_another_program(
        path, ValueError, foreign=True, like={"a": 1}
    ),
    what_is_left_out_and_is_not_there=lambda path: leaving_out(path, "tx2"),
    what_is_left_out_and_is_no_attribute=lambda path: leaving_out(path, "no name"),
    a_part_that_is_not_there=lambda path: refused(saved(path), st.errors.StructureMismatchError, select=".b"),
    a_sharding_that_is_none=lambda path: refused(saved(path), TypeError, sharding="cpu"),
    a_source_that_is_none=lambda path: Scenario(lambda: st.load(io.StringIO()), TypeError, {"path": saved(path)}),
    a_damaged_file=lambda path: damaged(path, st.load),
    a_damaged_file_that_is_verified=lambda path: damaged(path, st.verify),
    a_manifest_beside_orbax_that_was_changed=lambda path: restoring(
        path, st.errors.CorruptFileError, (st_orbax, "_crc", lambda text: "00000000")
    ),
    arrays_of_another_checkpoint=lambda path: restoring(
        path, st.errors.FormatError, (_orbax_forms, "orbax_form", lambda entry: (np.dtype("int8"), (7,)))
    ),
    arrays_that_orbax_finds_damaged=lambda path: orbax_says(path, "DATA_LOSS", st.errors.CorruptFileError),
    arrays_that_orbax_cannot_read=lambda path: orbax_says(path, "no such array", st.errors.FormatError),
)
