import numpyro_sls

project = "numpyro_sls"
author = "The numpyro_sls developers"
release = numpyro_sls.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
autodoc_typehints = "none"
html_theme = "alabaster"
