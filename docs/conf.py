"""Settings for Sphinx. Build with `sphinx-build -n -W docs docs/_build`, which executes the notebooks.

Two things are done to the pages here. A name of the library in backticks, such as `st.jit`, becomes a link to its
entry in the reference. And below each entry stand the guides that use the name. A name that has no entry, and an entry
that no guide uses, is a warning, which `-W` makes an error.
"""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

import sharedtree

project = "sharedtree"
copyright = "The sharedtree authors"  # noqa: A001
version = release = sharedtree.__version__
repository = "`github.com/OWNER/sharedtree`"  # the only place that names the address: replace it once there is one

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"sharedtree {version}"
html_static_path = ["static"]
html_css_files = ["guides.css"]
pygments_dark_style = "one-dark"  # furo's own choice underlines every class and every imported module

default_role = "literal"  # docstrings are written for readers of code, with single backticks
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = {"repository": repository}

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_typehints = "none"  # docstrings say it in words, and most types belong to libraries that would not be found
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # as `autodoc_typehints`
napoleon_custom_sections = [("The function it returns raises", "Raises"), ("and warns with", "Warns")]

_SUFFIXED = re.compile(r"(`[^`\n]+`)(?=\w)")
_USED = re.compile(r"(?<![\w./-])(?:st|sharedtree)\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")

# Modules that have no entry, and words of the file format that look like names.
_NO_ENTRIES = {"tree", "show", "orbax", "compat", "serialise", "errors", "linen", "transforms"}
_WORDS_OF_FILES = {"header", "digests", "manifest", "crc32"}
_GUIDES_AT_MOST = 4

_log = logging.getLogger(__name__)


def _part_suffixes(app, what, name, obj, options, lines):
    """Docstrings say "two `Dag`s"; reStructuredText wants the markup parted from the letter."""
    del app, what, name, obj, options
    lines[:] = [_SUFFIXED.sub(r"\1\\ ", line) for line in lines]


def _note_names(app, docname, content):
    """Which names of the library each page uses, in its text or in its code."""
    if not hasattr(app.env, "names_used"):
        app.env.names_used = {}
    app.env.names_used[docname] = set(_USED.findall(content[0]))


def _link_names(app, doctree, docname):
    """Makes links of the names in backticks, and says below each entry where its name is used."""
    entries = app.env.domains["py"].objects
    for literal in list(doctree.findall(nodes.literal)):
        match = _USED.search(literal.astext())
        if not match or isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        name = match[1]
        entry = entries.get(f"sharedtree.{name}")
        if entry is None:
            if name.partition(".")[0] not in _NO_ENTRIES | _WORDS_OF_FILES:
                _log.warning("`st.%s` has no entry in the reference", name, location=literal)
            continue
        if entry.docname == docname:
            link = nodes.reference("", "", refid=entry.node_id, internal=True)
        else:
            to = app.builder.get_relative_uri(docname, entry.docname)
            link = nodes.reference("", "", refuri=f"{to}#{entry.node_id}", internal=True)
        literal.replace_self(link)
        link += literal
    if docname.startswith("reference/"):
        for described in doctree.findall(addnodes.desc):
            _name_guides(app, described, docname)


def _name_guides(app, described, docname):
    (name,) = described[0].get("ids", [])[:1] or [""]
    name = name.removeprefix("sharedtree.")
    if described["objtype"] in ("method", "attribute", "property"):
        return
    guides = [guide for guide in _in_order(app.env) if _uses(app.env.names_used.get(guide, ()), name)]
    if not guides:
        _log.warning("no guide uses `sharedtree.%s`", name, location=described)
        return
    line = nodes.paragraph(classes=["guides"])
    line += nodes.Text("Guides: ")
    for i, guide in enumerate(guides[:_GUIDES_AT_MOST]):
        line += nodes.Text(", " if i else "")
        title = app.env.titles[guide].astext()
        line += nodes.reference("", title, refuri=app.builder.get_relative_uri(docname, guide), internal=True)
    described[1] += line


def _uses(used, name):
    return name in used or any(each.startswith(f"{name}.") for each in used)


def _in_order(env):
    """The guides as they stand in the sidebar."""
    found = []
    for page in ["index", *env.toctree_includes.get("index", [])]:
        found += [page, *env.toctree_includes.get(page, [])]
    return [page for page in dict.fromkeys(found) if not page.startswith(("reference/", "index"))]


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _part_suffixes)
    app.connect("source-read", _note_names)
    app.connect("doctree-resolved", _link_names)
