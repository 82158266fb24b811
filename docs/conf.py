"""The documentation site: `bash scripts/docs.sh` builds it, without a network, into build/docs."""

from importlib.util import find_spec

from hvd_compress import __version__

project = "hvd_compress"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"hvd_compress {version}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 4
# Raw results are files that pages link, and no pages of the navigation.
suppress_warnings = ["toc.not_included"]
# Equations are no code.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
# Optional: the callbacks for them are documented without them, too.
autodoc_mock_imports = [name for name in ("accelerate", "lightning", "transformers") if find_spec(name) is None]
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = True

# A reference to one of our own names that does not exist is an error; other projects' names are not looked up.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!hvd_compress).*")]


def colour_examples(app, what, name, obj, options, lines):
    """Makes the examples in docstrings Python; other literal blocks are equations."""
    lines[:] = ["Example:\n\n.. code-block:: python" if line == "Example::" else line for line in lines]
    lines[:] = [part for line in lines for part in line.split("\n")]


def setup(app):
    app.connect("autodoc-process-docstring", colour_examples)
