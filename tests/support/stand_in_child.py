"""A child that fails on purpose, in place of front end and engine; and, run as a program, `tokring` with such children.

python -m tests.support.stand_in_child serve --port 0    # TOKRING_TEST_ENGINE=raise, refuse, exit, killed, hang, ignore
"""

import os
import select
import signal
import sys

from tokring.config import ConfigError
from tokring.launch import child_process
from tokring.launch.child import ChildSetup, SupervisorLink, run_child


def main(setup: ChildSetup, supervisor: SupervisorLink) -> int:
    behaviour = os.environ.get("TOKRING_TEST_ENGINE", "") if setup.role == "engine" else ""
    print(f"I am {setup.name}")
    supervisor.send("phase", phase="loading weights")
    match behaviour:
        case "raise":
            raise ArithmeticError("the sum does not add up")
        case "refuse":
            raise ConfigError("model.gguf: not a model")
        case "exit":
            print("my last words", file=sys.stderr)
            return 7
        case "killed":
            print("what I say every day", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            select.select([], [], [])
    supervisor.send("ready")
    while True:
        select.select([supervisor], [], [])
        message = supervisor.receive()
        if message and message["type"] == "shutdown" and behaviour != "ignore":
            return 0


if __name__ == "__main__":
    if "--config-fd" in sys.argv:
        run_child(main)
    else:
        from tokring.cli import main as tokring

        child_process.MODULE_OF_ROLE.update(
            frontend="tests.support.stand_in_child", engine="tests.support.stand_in_child"
        )
        sys.exit(tokring())
