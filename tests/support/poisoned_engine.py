"""`tokring` whose mock engine aborts, or hangs, when it computes a certain token; run as a program.

python -m tests.support.poisoned_engine serve --engine mock …     # TOKRING_TEST_POISON=hang
"""

import os
import sys
import threading

import numpy as np
from numpy.typing import NDArray

from tokring.engine import __main__ as engine_process
from tokring.engine.mock_runner import MockRunner
from tokring.engine.step_batch import StepBatch
from tokring.launch import child_process
from tokring.launch.child import run_child

POISON_ID = 399
_execute = MockRunner.execute


def execute(self: MockRunner, batch: StepBatch) -> NDArray[np.float32]:
    """Dies of the token as of a fault in a kernel."""
    if (batch.token_ids[: batch.num_tokens] == POISON_ID).any() and 0 in batch.positions[batch.token_ids == POISON_ID]:
        if os.environ.get("TOKRING_TEST_POISON") == "hang":
            threading.Event().wait()
        os.abort()
    return _execute(self, batch)


if __name__ == "__main__":
    if "--config-fd" in sys.argv:
        MockRunner.execute = execute  # type: ignore[method-assign]
        run_child(engine_process.main)
    else:
        from tokring.cli import main as tokring

        child_process.MODULE_OF_ROLE.update(engine="tests.support.poisoned_engine")
        sys.exit(tokring())
