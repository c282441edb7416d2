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
    STATS_PAGE_BYTES,
    AttachError,
    EngineChannel,
    Frame,
    FrontEndChannel,
    HandleDead,
    Heartbeat,
    PeerCorrupt,
    Request,
    RequestLimits,
    StepFrame,
    Watch,
    now_ns,
    request_frame_bytes,
    step_bytes,
    struct_dtype,
)
from tokring_ipc.control import Call, CallRefused, ControlCaller, PeerGone, receive_calls
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
from tokring_ipc.stats import (
    STAT_INDEX,
    STATS_TABLE,
    WORD_INDEX,
    Histogram,
    PageName,
    RingStats,
    StatsPage,
    StatsSums,
    list_pages,
    page_name,
    parse_page_name,
    read_rings,
    read_sums,
    server_prefix,
    sweep_stale,
)

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
    "STATS_PAGE_BYTES",
    "STATS_TABLE",
    "STAT_INDEX",
    "WORD_INDEX",
    "AttachError",
    "Call",
    "CallRefused",
    "CallStatus",
    "ControlCaller",
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
    "Heartbeat",
    "Histogram",
    "PageName",
    "PeerCorrupt",
    "PeerGone",
    "PeerState",
    "ProcessPhase",
    "RefuseCode",
    "Request",
    "RequestFlag",
    "RequestLimits",
    "RingStats",
    "Role",
    "SectionKind",
    "StatsPage",
    "StatsSums",
    "StepFrame",
    "StepPhase",
    "Watch",
    "decode_extensions",
    "encode_extensions",
    "list_pages",
    "now_ns",
    "page_name",
    "parse_page_name",
    "read_rings",
    "read_sums",
    "receive_calls",
    "req_ring_bytes",
    "request_frame_bytes",
    "server_prefix",
    "step_bytes",
    "struct_dtype",
    "sweep_stale",
]
