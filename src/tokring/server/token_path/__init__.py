"""From token ids to bytes on client sockets: interface.py is the contract, open_token_path() picks who keeps it."""

from tokring.server.token_path._native import NativeTokenPath, json_shape
from tokring.server.token_path.interface import (
    Event,
    EventKind,
    Field,
    Finish,
    FrameError,
    Histogram,
    LogprobStyle,
    Piece,
    Result,
    Template,
    TokenPath,
)
from tokring.server.token_path.reference import ReferenceTokenPath
from tokring.server.token_path.token_table import TokenTable

__all__ = [
    "Event",
    "EventKind",
    "Field",
    "Finish",
    "FrameError",
    "Histogram",
    "LogprobStyle",
    "NativeTokenPath",
    "Piece",
    "ReferenceTokenPath",
    "Result",
    "Template",
    "TokenPath",
    "TokenTable",
    "json_shape",
    "open_token_path",
]


def open_token_path(
    table: TokenTable,
    num_stream_slots: int,
    *,
    max_backlog_bytes: int = 1 << 20,
    max_backlog_age_s: float = 60.0,
    inter_token: Histogram | None = None,
    first_token: Histogram | None = None,
) -> TokenPath:
    """The native path; the Python one for tables of family "stream", whose decoder is not a table."""
    implementation: type[TokenPath] = ReferenceTokenPath if table.family == "stream" else NativeTokenPath
    return implementation(
        table,
        num_stream_slots,
        max_backlog_bytes=max_backlog_bytes,
        max_backlog_age_s=max_backlog_age_s,
        inter_token=inter_token,
        first_token=first_token,
    )
