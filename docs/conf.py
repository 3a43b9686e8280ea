"""Configuration of the documentation site; `scripts/docs` builds it. Nothing here reaches for a network."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "Feedloop"
author = "The Feedloop authors"
copyright = "The Feedloop authors, Apache-2.0"  # noqa: A001 - Sphinx reads this name
version = release = version_of("feedloop")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "feedloop_docs"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
master_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # it would make one dash of the two of an option
highlight_language = "text"

# Docstrings put names and expressions between single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Types in signatures that are other projects' (to link them would need their inventories, and so a network), names of
# type aliases, which Python documents nowhere, and types that only other types of Feedloop mention. Everything that is
# imported from Feedloop by name is documented, and so must be found.
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|jnp|numpy|np|optax|collections|pathlib|typing|os|ts|tensorstore|click)(\..*)?"),
    (r"py:.*", r"(Path|PathLike|Sequence|Mapping|Callable|Iterator|Protocol|Any|Self|NDArray|DTypeLike|Literal|Array)"),
    (r"py:.*", r"(str|int|float|bool|None|tuple|list|dict|object|bytes|type|BaseException|TracebackType)"),
    (
        r"py:.*",
        r"[\w.]*\b(Pixels|Labels|BatchFunction|EvaluationArrays|Params|BatchStats|Channels|Pair|Padding|Apply|\w+Name)",
    ),
    (r"py:.*", r"(ValueError|KeyboardInterrupt|RuntimeError|OSError|ArithmeticError|DataclassInstance)"),
]

html_theme = "furo"
html_title = f"Feedloop {version}"
html_static_path = ["_static"]
html_css_files = ["feedloop.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
