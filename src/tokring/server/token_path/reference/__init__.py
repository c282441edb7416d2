"""The token path in plain Python: the reference in tests, and the path of tokenizers that are not a table."""

from tokring.server.token_path.reference.path import ReferenceTokenPath

__all__ = ["ReferenceTokenPath"]
