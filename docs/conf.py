"""Settings for Sphinx. Build with `sphinx-build -n -W docs docs/_build`."""

import re

import sharedtree

project = "sharedtree"
copyright = "The sharedtree authors"  # noqa: A001
version = release = sharedtree.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"sharedtree {version}"

default_role = "literal"  # docstrings are written for readers of code, with single backticks
myst_heading_anchors = 3

autodoc_typehints = "none"  # docstrings say it in words, and most types belong to libraries that would not be found
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # as `autodoc_typehints`
napoleon_custom_sections = [("The function it returns raises", "Raises"), ("and warns with", "Warns")]

_SUFFIXED = re.compile(r"(`[^`\n]+`)(?=\w)")


def _part_suffixes(app, what, name, obj, options, lines):
    """Docstrings say "two `Dag`s"; reStructuredText wants the markup parted from the letter."""
    del app, what, name, obj, options
    lines[:] = [_SUFFIXED.sub(r"\1\\ ", line) for line in lines]


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _part_suffixes)
