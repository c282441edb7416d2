"""Why a model can't be loaded."""


class ModelError(ValueError):
    """The checkpoint doesn't fit the code; one line with what was found, what was needed and what to do."""
