"""The page of transforms says what each does, found by running it."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import pytest

import sharedtree as st
from sharedtree.transforms import _crossing, _function
from sharedtree.transforms._applying import title_of
from tests import transform_table


@pytest.mark.slow
def test_the_page_says_what_the_transforms_do():
    """In a process with eight devices."""
    root = transform_table.PAGE.parents[1]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    # Other tests register transforms of their own.
    code = "from tests import transform_table as t; assert t.SCENARIOS.keys() == t._adapters.keys(); print(t.table())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    written = transform_table.PAGE.read_text(encoding="utf-8")
    assert written == transform_table.page_with(run.stdout.strip() + "\n"), "python -m tests.transform_table"


def test_each_is_tested_where_the_table_says():
    folder = transform_table.PAGE.parents[1] / "tests"
    for transform, scenario in transform_table.SCENARIOS.items():
        text = (folder / f"{scenario.tested}.py").read_text(encoding="utf-8")
        names = {transform.__name__, transform_table.name_of(transform).rpartition(".")[2]}
        assert any(name in text for name in names), (names, scenario.tested)


ALIKE = [each for each, scenario in transform_table.SCENARIOS.items() if scenario.conflict is None]


@pytest.mark.parametrize(
    "transform", [*(each for each in ALIKE if each is not eqx.filter_shard), jax.vmap, jax.lax.scan], ids=title_of
)
def test_where_all_are_treated_alike_no_treatment_is_declared(transform, monkeypatch):
    """The last two show that it would be seen."""
    declared = []

    def treated(call, static, treatments, *others):
        declared.extend(treatments)
        return call

    for module in (_crossing, _function):
        monkeypatch.setattr(module, "treated", treated)
    net = transform_table.tied()
    transform_table.SCENARIOS[transform].call(st.preserve_identities(transform), lambda *nets: nets[0], net, net)
    assert bool(declared) is (transform not in ALIKE)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.vjp, jax.lax.scan, jax.lax.cond])
def test_vanilla_transforms_do_none_of_it(transform):
    """The scenarios can fail."""

    def vanilla(transform, **_):
        return transform

    inside, outside, aliases, treatments, in_place = transform_table.row(transform, vanilla)
    assert (inside, outside, aliases, in_place) == ("no",) * 4
    assert treatments in ("no", "all alike")


def test_what_is_said_of_answers():
    assert [transform_table.said(answers) for answers in ([], [True], [True, False])] == ["-", "yes", "no"]


def test_nothing_is_silently_not_written_back():
    rows = [
        line.split(" | ") for line in transform_table.PAGE.read_text(encoding="utf-8").splitlines() if " | " in line
    ]
    silent = {row[0].strip("| `") for row in rows if row[5] == "no"}
    assert silent == {"jax.eval_shape", "equinox.filter_eval_shape", "jax.make_jaxpr", "equinox.filter_make_jaxpr"}
    assert all(row[i] != "no" for row in rows for i in (1, 2, 3, 4, 6))
