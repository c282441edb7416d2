"""`python -m tokring.server --config-fd N`: one front-end process, started by the supervisor."""

import os

# Before tokenizers is imported: its thread pool would compete with the engine for cores.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import uvloop  # noqa: E402

from tokring.checkpoint import CheckpointError  # noqa: E402
from tokring.launch.child import ChildSetup, SupervisorLink, run_child  # noqa: E402
from tokring.recording.file_format import RecordingError  # noqa: E402
from tokring.server.chat_template import ChatTemplateError  # noqa: E402
from tokring.server.serving import serve  # noqa: E402


def main(setup: ChildSetup, supervisor: SupervisorLink) -> int:
    return uvloop.run(serve(setup, supervisor))


if __name__ == "__main__":
    run_child(main, clean_errors=(CheckpointError, ChatTemplateError, RecordingError))
