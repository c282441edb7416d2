"""The one array type of this package's signatures."""

from typing import Any

# A numpy array or a DLPack exporter (torch CPU tensor); dtype and shape are checked natively, see each docstring.
Array = Any
