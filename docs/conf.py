"""Sphinx builds the site with this: ``tox -e docs``. It needs no network."""

from celery_singleton_lock import __version__

project = "celery_singleton_lock"
author = "the celery_singleton_lock authors"
copyright = author  # the name that Sphinx reads
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # links to headings as GitHub spells them

default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_custom_sections = [("Options", "params_style")]
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"celery_singleton_lock {release}"
html_theme_options = {
    "source_repository": "https://github.com/celery-singleton-lock/celery_singleton_lock/",
    "source_branch": "main",
    "source_directory": "docs/",
}
