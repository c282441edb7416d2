"""Lock-free shared-memory rings between HTTP front ends and an EngineCore.

FrontEndChannel and EngineChannel are the two ends of one connection; StatsPage holds what a process counts; the dtypes
and enumerations come from the compiled field table of ipc/include/tokring/layout.hpp. docs/ipc-protocol.md is the
specification.
"""

from tokring_ipc._core import (
    LAYOUT_HASH,
    LAYOUT_VERSION,
    MAX_LOGPROBS,
    MAX_STREAM_SLOTS,
    NO_STREAM_SLOT,
    NUM_INLINE_STOP_IDS,
    AttachError,
    EngineChannel,
    Frame,
    FrontEndChannel,
    HandleDead,
    PeerCorrupt,
    Request,
    StepFrame,
    now_ns,
    request_frame_bytes,
    step_bytes,
    struct_dtype,
)
from tokring_ipc.enums import (
    CallStatus,
    ControlKind,
    ControlMethod,
    ErrorCode,
    ExtensionKind,
    FinishReason,
    FrameFlag,
    FrameType,
    PeerState,
    ProcessPhase,
    RefuseCode,
    RequestFlag,
    Role,
    SectionKind,
    StepPhase,
)
from tokring_ipc.extensions import decode_extensions, encode_extensions

REQUEST_DTYPE = struct_dtype("RequestRecord")
FINISH_DTYPE = struct_dtype("FinishRecord")
READY_DTYPE = struct_dtype("ReadyRecord")
FRAME_HEADER_DTYPE = struct_dtype("FrameHeader")
SECTION_DTYPE = struct_dtype("SectionHeader")
PROMPT_LOGPROBS_DTYPE = struct_dtype("PromptLogprobsRecord")


def req_ring_bytes(max_ids: int, max_extension_bytes: int = 65536) -> int:
    """Bytes of a request ring in which a request of that size takes at most a quarter; at least 1 MiB."""
    return max(1 << 20, 4 * request_frame_bytes(max_ids, max_extension_bytes))


__all__ = [
    "FINISH_DTYPE",
    "FRAME_HEADER_DTYPE",
    "LAYOUT_HASH",
    "LAYOUT_VERSION",
    "MAX_LOGPROBS",
    "MAX_STREAM_SLOTS",
    "NO_STREAM_SLOT",
    "NUM_INLINE_STOP_IDS",
    "PROMPT_LOGPROBS_DTYPE",
    "READY_DTYPE",
    "REQUEST_DTYPE",
    "SECTION_DTYPE",
    "AttachError",
    "CallStatus",
    "ControlKind",
    "ControlMethod",
    "EngineChannel",
    "ErrorCode",
    "ExtensionKind",
    "FinishReason",
    "Frame",
    "FrameFlag",
    "FrameType",
    "FrontEndChannel",
    "HandleDead",
    "PeerCorrupt",
    "PeerState",
    "ProcessPhase",
    "RefuseCode",
    "Request",
    "RequestFlag",
    "Role",
    "SectionKind",
    "StepFrame",
    "StepPhase",
    "decode_extensions",
    "encode_extensions",
    "now_ns",
    "req_ring_bytes",
    "request_frame_bytes",
    "step_bytes",
]
