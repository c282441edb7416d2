"""The enumerations of the shared layout, built from the compiled table (their types: enums.pyi)."""

from enum import IntEnum, IntFlag

from tokring_ipc import _core

_TABLE = _core.enum_table()

FrameType = IntEnum("FrameType", _TABLE["FrameType"], module=__name__)
FrameFlag = IntFlag("FrameFlag", _TABLE["FrameFlag"], module=__name__)
SectionKind = IntEnum("SectionKind", _TABLE["SectionKind"], module=__name__)
FinishReason = IntEnum("FinishReason", _TABLE["FinishReason"], module=__name__)
ErrorCode = IntEnum("ErrorCode", _TABLE["ErrorCode"], module=__name__)
RequestFlag = IntFlag("RequestFlag", _TABLE["RequestFlag"], module=__name__)
ExtensionKind = IntEnum("ExtensionKind", _TABLE["ExtensionKind"], module=__name__)
PeerState = IntEnum("PeerState", _TABLE["PeerState"], module=__name__)
ControlKind = IntEnum("ControlKind", _TABLE["ControlKind"], module=__name__)
RefuseCode = IntEnum("RefuseCode", _TABLE["RefuseCode"], module=__name__)
ControlMethod = IntEnum("ControlMethod", _TABLE["ControlMethod"], module=__name__)
CallStatus = IntEnum("CallStatus", _TABLE["CallStatus"], module=__name__)
ProcessPhase = IntEnum("ProcessPhase", _TABLE["ProcessPhase"], module=__name__)
StepPhase = IntEnum("StepPhase", _TABLE["StepPhase"], module=__name__)
Role = IntEnum("Role", _TABLE["Role"], module=__name__)
