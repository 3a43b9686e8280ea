"""Configuration of the documentation site; `scripts/docs` builds it. Needs no network."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "Loopfeed"
author = "The Loopfeed authors"
copyright = "The Loopfeed authors, Apache-2.0"  # noqa: A001 - Sphinx reads this name
version = release = version_of("loopfeed")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "loopfeed_docs"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
master_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "text"

# Docstrings put names and expressions between single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Types of other projects, whose inventories would have to be fetched, and type aliases of Loopfeed, which are not
# documented separately. Every other name in a signature or docstring must be on a page.
_ALIASES = (
    "Apply|BatchFunction|BatchStats|Channels|EvaluationArrays|Format|Images|Indices|Labels|LaunchState|Logits|Loss|"
    "UserAugmentation|UserOptimizer|Padding|Pair|Params|PerExample|Phase|Pixels|RecordFunction|Schedule"
)
nitpick_ignore_regex = [
    ("py:class", r"(collections\.abc|jax|jaxtyping|numpy|os|pathlib|pd|tensorstore|PIL)\..*"),
    ("py:class", r"'.*"),  # the shape of an array: Float[Array, 'B K']
    ("py:class", rf"loopfeed\.[\w.]+\.({_ALIASES})"),
    # Of public classes and functions, but not public.
    (
        "py:class",
        r"RecordedRun|loopfeed\.(engine\.parts\.PartArguments|engine\.evaluation\.programs\.PredictorArguments|"
        r"engine\.charts\.charts\.Chart|preprocess\.shards\.targets\.Targets)",
    ),
]

html_theme = "furo"
html_title = f"Loopfeed {version}"
html_static_path = ["_static"]
html_css_files = ["loopfeed.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
