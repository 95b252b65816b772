"""The site of the pages, which `make docs` builds."""
