"""How the documentation is built: Markdown through MyST, reference from the docstrings. Warnings are errors."""

from meshwright import __version__

project = "meshwright"
author = "The meshwright authors"
copyright = "2026, The meshwright authors"  # noqa: A001 - Sphinx's name
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"meshwright {__version__}"
html_extra_path = ["schema"]
myst_heading_anchors = 3
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "exclude-members": "reference"}
