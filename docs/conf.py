"""Sphinx configuration: MyST pages, Furo theme, API and format tables generated from the packages themselves."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))

project = "quant-spec"
author = "quant-spec contributors"
project_copyright = "2026, quant-spec contributors"
release = version = installed_version("quant-spec")

extensions = [
    "activation_tables",
    "cli_help",
    "format_tables",
    "import_picture",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "tutorial/demo/*.txt"]

html_theme = "furo"
html_title = "quant-spec"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

# Docstrings write code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False
