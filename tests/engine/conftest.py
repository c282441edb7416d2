"""Makes the hypothesis profile `long` known before the command line asks for it."""

import tests.engine.machines  # noqa: F401
