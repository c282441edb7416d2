"""`tokring` whose mock engine stands for one on a GPU that can be lost; run as a program.

python -m tests.support.lost_gpu_engine serve --device auto …     # TOKRING_TEST_GPU=FILE

The file says what is wrong with the GPU: nothing (or there is no file), "lost", "full" or "nearly full".
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from tokring.engine import __main__ as engine_process
from tokring.engine import runners
from tokring.engine.cuda import device
from tokring.engine.cuda.device import DeviceFailure, NoCuda
from tokring.engine.kv_memory import KvMemoryError
from tokring.launch import child_process
from tokring.launch.child import run_child


def trouble() -> str:
    path = Path(os.environ["TOKRING_TEST_GPU"])
    return path.read_text() if path.exists() else ""


def find_cuda(*_: object) -> str:
    if trouble() == "lost":
        raise NoCuda("it has fallen off the bus")
    return "a stand-in for a GPU"


def load_runner(config, chosen, *arguments):  # type: ignore[no-untyped-def]
    if trouble() == "full":
        raise DeviceFailure("out of GPU memory while the weights were loaded")
    if trouble() == "nearly full":
        raise KvMemoryError("KV cache: one sequence needs more than there is")
    mock = replace(config, engine=replace(config.engine, engine="mock"))
    return runners.load_runner(mock, chosen, *arguments)


if __name__ == "__main__":
    if "--config-fd" in sys.argv:
        device.find_cuda = find_cuda  # type: ignore[assignment]
        engine_process.load_runner = load_runner
        run_child(engine_process.main, clean_errors=(KvMemoryError,))
    else:
        from tokring.cli import main as tokring

        child_process.MODULE_OF_ROLE.update(engine="tests.support.lost_gpu_engine")
        sys.exit(tokring())
