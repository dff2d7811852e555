"""The documentation site, and `docs.generate`, which writes its tables from the code."""
