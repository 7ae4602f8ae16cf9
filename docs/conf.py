"""How Sphinx builds the site from these pages: `make docs`."""

import sys
from pathlib import Path

from flwr_privacy import __version__

sys.path.insert(0, str(Path(__file__).parent))  # sphinx_api

project = "flwr-privacy"
version = release = __version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_api"]
exclude_patterns = ["**/.ipynb_checkpoints"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings have them, with shapes and units
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Guarantee"]
default_role = "py:obj"
maximum_signature_line_length = 70
toc_object_entries = False  # hundreds of entries

nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "notebooks")
nb_execution_in_temp = True
nb_merge_streams = True

html_theme = "furo"
html_title = "flwr-privacy"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
