"""A file is shown and drawn as its model is, without the model's classes."""

import json
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.cli import _show_and_draw
from tests.processes import HANGS
from tests.serialise.strategies import trees

from .models import language_model
from .tables import table_of_file


def nnx_model():
    pytest.importorskip("flax", minversion="0.12.1")
    from .nnx_net import net

    return net()


def equinox_model():
    return language_model(5)


def dict_model():
    w = np.ones((2, 3), np.float16)
    layers = {f"layer_{i}": {"kernel": jnp.ones((2, 2))} for i in range(12)}
    keys = {"key": jax.random.key(0), "many": jax.random.split(jax.random.key(1), 3)}
    keys["abstract"] = jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype)
    return {"w": w, "a": [w, (jnp.ones(1), w)], **layers, **keys, "struct": jax.ShapeDtypeStruct((3,), "bfloat16")}


MODELS = [nnx_model, equinox_model, dict_model]


@pytest.mark.parametrize("make", MODELS)
def test_the_table_of_a_file_is_that_of_the_model(make):
    model = make()
    assert table_of_file(st.to_bytes(model)).text() == st.summary(model).text()


@given(trees())
def test_any_file_is_shown_and_drawn(tree):
    table = table_of_file(st.to_bytes(tree))
    assert str(table)
    assert table._repr_html_()


@pytest.mark.parametrize("make", MODELS)
def test_show_and_draw_print_what_the_functions_do(make, command, tmp_path, monkeypatch):
    pytest.importorskip("igraph")
    pytest.importorskip("drawsvg")
    model, path, picture = make(), tmp_path / "m.safetensors", tmp_path / "m.svg"
    st.save(path, model)
    for width in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        status, out, err = command("show", path)
        assert (status, err) == (0, "")
        assert out.partition("\n\n")[2] == f"{st.summary(model)}\n"
    status, out, err = command("draw", path, "-o", picture)
    assert (status, err) == (0, "")
    assert picture.read_text("utf-8") == st.draw(model).svg
    assert command("draw", path, "--depth", 1)[1] == st.draw(model, depth=1).svg
    status, _, err = command("draw", path, "-o", tmp_path / "m.png")
    assert (status, "is another format" in err) == (2, True)
    assert command("draw", tmp_path / "none")[0] == 2


@pytest.mark.slow
def test_draw_needs_no_class_of_the_file(tmp_path):
    pytest.importorskip("igraph")
    pytest.importorskip("drawsvg")
    st.save(tmp_path / "m.safetensors", language_model(3))
    code = """
import sys
from sharedtree.__main__ import main
assert main(["draw", "m.safetensors", "-o", "m.svg"]) == 0
assert main(["show", "m.safetensors"]) == 0
assert "tests" not in sys.modules
"""
    root = pathlib.Path(st.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(root)!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ">Block<" in (tmp_path / "m.svg").read_text()
    assert "#1" in done.stdout


def test_show_keeps_its_json_and_its_values(command, tmp_path):
    path = tmp_path / "m.safetensors"
    st.save(path, {"w": jnp.ones(2), "steps": 7})
    assert "['steps']" not in command("show", path)[1]
    assert "  ['steps']  7\n" in command("show", "--values", path)[1]
    assert len(json.loads(command("show", "--json", path)[1])["tree"]) == 3
    st.save(path, 3)
    assert "a value without arrays" in command("show", path)[1]


def test_draw_without_a_library_says_what_to_install(command, tmp_path, monkeypatch):
    st.save(tmp_path / "m.safetensors", [jnp.ones(2)])
    monkeypatch.setitem(sys.modules, "igraph", None)
    status, out, err = command("draw", tmp_path / "m.safetensors")
    assert (status, out) == (2, "")
    assert "pip install igraph drawsvg" in err


def test_draw_writes_no_svg_to_a_terminal(command, tmp_path, monkeypatch):
    pytest.importorskip("igraph")
    pytest.importorskip("drawsvg")
    st.save(tmp_path / "m.safetensors", [jnp.ones(2)])
    monkeypatch.setattr(_show_and_draw, "_is_terminal", lambda: True)
    status, out, err = command("draw", tmp_path / "m.safetensors")
    assert (status, out) == (2, "")
    assert f"sharedtree draw {tmp_path / 'm.safetensors'} -o m.svg" in err
    assert command("draw", tmp_path / "m.safetensors", "-o", "-")[1].startswith("<?xml")


@pytest.mark.slow
def test_a_terminal_that_has_no_sign_for_times(tmp_path):
    st.save(tmp_path / "m.safetensors", [jnp.ones(2) for _ in range(5)])
    code = f"from sharedtree.__main__ import main; main(['show', {str(tmp_path / 'm.safetensors')!r}])"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, timeout=HANGS, check=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(pathlib.Path(st.__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert b"[0..4] x5" in done.stdout


def test_a_file_with_more_paths_than_can_be_walked():
    values, lists = (jnp.ones(1),), [jnp.ones(1)]
    for _ in range(60):
        values, lists = (values, values), [lists, lists]
    table = table_of_file(st.to_bytes({"values": values, "lists": lists}))
    assert len(table.rows) < 300
    assert table.num_ties == 60
    assert "tuple again" in table.text()


def test_equinox_layers_are_named_without_being_imported():
    table = table_of_file(st.to_bytes(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))))
    assert [row.part.name for row in table.rows][:3] == ["MLP", "tuple", "Linear"]
