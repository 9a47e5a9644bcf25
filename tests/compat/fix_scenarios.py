"""One scenario for each message about treex and treeo that offers code, where the two are installed."""

import importlib
import importlib.util

import pytest

import sharedtree as st
from sharedtree.compat import _import_hook, _linen, _names_jax_dropped
from tests.fixes import Scenario, scenario

IS_INSTALLED = importlib.util.find_spec("treex") is not None

if IS_INSTALLED:
    from flax import linen

    from sharedtree.compat import treeo, treex as tx

    @scenario
    def something_is_not_installed(path):
        return Scenario(
            lambda: _import_hook._version_of("nothing-of-this-name", "It is absent."), st.errors.CompatibilityError
        )

    @scenario
    def a_name_that_nothing_can_stand_in_for(path):
        row = _names_jax_dropped.DroppedName("jax", "old", "JAX 0.1", "jax.gone")
        return Scenario(lambda: _names_jax_dropped.find_stand_in(row), st.errors.CompatibilityError)

    @scenario
    def no_linen_module(path):
        return Scenario(lambda: _linen.frozen_twin(None), TypeError, {"tx": tx, "flax": type("", (), {"linen": linen})})

    @scenario
    def classes_of_another_treeo(path):
        class Other:
            pass

        class Mine(Other):
            pass

        def provoke():
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(_import_hook.sys.modules, "treeo.tree", type("", (), {"Tree": Other}))
                _import_hook._modules_of_earlier_import()

        def after(names):
            assert names["treeo"] is treeo

        return Scenario(provoke, st.errors.CompatibilityError, {"mine": Mine}, after)

    @scenario
    def a_submodule_by_another_name(path):
        def provoke():
            importlib.import_module("sharedtree.compat.treex.types")

        return Scenario(provoke, st.errors.CompatibilityError)
