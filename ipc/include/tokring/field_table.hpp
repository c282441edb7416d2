// The compiled field table: one row per field of every shared struct, one per enumerator, and the layout hash over
// both. numpy dtypes, the golden offsets and the check of docs/ipc-protocol.md read it.
#pragma once
#include <array>
#include <string_view>
#include <type_traits>

#include "tokring/layout.hpp"

namespace tokring {

struct FieldRow {
  std::string_view structure;
  std::string_view name;
  char kind;       // numpy's kind: 'u', 'i' or 'f'
  uint32_t width;  // bytes of one element
  uint32_t offset;
  uint32_t count;  // elements
};

struct EnumRow {
  std::string_view enumeration;
  std::string_view name;
  uint32_t value;
};

struct StructRow {
  std::string_view name;
  uint32_t bytes;
};

template <class T>
constexpr char kind_of() {
  return std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
}

#define TOKRING_ROW(structure, type, name) \
  FieldRow{#structure, #name, kind_of<type>(), sizeof(type), offsetof(structure, name), 1},
#define TOKRING_ROW_SEGMENT_HEADER(type, name) TOKRING_ROW(SegmentHeader, type, name)
#define TOKRING_ROW_SEGMENT_CONTROL(type, name, writer) TOKRING_ROW(SegmentControl, type, name)
#define TOKRING_ROW_FRAME(type, name) TOKRING_ROW(FrameHeader, type, name)
#define TOKRING_ROW_REQUEST(type, name) TOKRING_ROW(RequestRecord, type, name)
#define TOKRING_ROW_FINISH(type, name) TOKRING_ROW(FinishRecord, type, name)
#define TOKRING_ROW_SECTION(type, name) TOKRING_ROW(SectionHeader, type, name)
#define TOKRING_ROW_EXTENSION(type, name) TOKRING_ROW(ExtensionHeader, type, name)
#define TOKRING_ROW_READY(type, name) TOKRING_ROW(ReadyRecord, type, name)
#define TOKRING_ROW_PROMPT(type, name) TOKRING_ROW(PromptLogprobsRecord, type, name)
#define TOKRING_ROW_CONTROL(type, name) TOKRING_ROW(ControlHeader, type, name)
#define TOKRING_ROW_HELLO(type, name) TOKRING_ROW(HelloMessage, type, name)
#define TOKRING_ROW_SEGMENT(type, name) TOKRING_ROW(SegmentMessage, type, name)
#define TOKRING_ROW_REFUSE(type, name) TOKRING_ROW(RefuseMessage, type, name)
#define TOKRING_ROW_CALL(type, name) TOKRING_ROW(CallMessage, type, name)

inline constexpr auto kFieldTable = std::to_array<FieldRow>({
    TOKRING_SEGMENT_HEADER_FIELDS(TOKRING_ROW_SEGMENT_HEADER)    //
    TOKRING_SEGMENT_CONTROL_FIELDS(TOKRING_ROW_SEGMENT_CONTROL)  //
    TOKRING_FRAME_HEADER_FIELDS(TOKRING_ROW_FRAME)               //
    TOKRING_REQUEST_FIELDS(TOKRING_ROW_REQUEST)                  //
    FieldRow{"RequestRecord", "stop_ids", 'i', 4, offsetof(RequestRecord, stop_ids), kNumInlineStopIds},
    TOKRING_FINISH_FIELDS(TOKRING_ROW_FINISH)            //
    TOKRING_SECTION_FIELDS(TOKRING_ROW_SECTION)          //
    TOKRING_EXTENSION_FIELDS(TOKRING_ROW_EXTENSION)      //
    TOKRING_READY_FIELDS(TOKRING_ROW_READY)              //
    TOKRING_PROMPT_LOGPROBS_FIELDS(TOKRING_ROW_PROMPT)   //
    TOKRING_CONTROL_HEADER_FIELDS(TOKRING_ROW_CONTROL)   //
    TOKRING_HELLO_FIELDS(TOKRING_ROW_HELLO)              //
    TOKRING_SEGMENT_MESSAGE_FIELDS(TOKRING_ROW_SEGMENT)  //
    TOKRING_REFUSE_FIELDS(TOKRING_ROW_REFUSE)            //
    TOKRING_CALL_FIELDS(TOKRING_ROW_CALL)                //
});

#define TOKRING_STRUCT(name) \
  StructRow { #name, sizeof(name) }
inline constexpr auto kStructTable = std::to_array<StructRow>({
    TOKRING_STRUCT(SegmentHeader),
    TOKRING_STRUCT(SegmentControl),
    TOKRING_STRUCT(FrameHeader),
    TOKRING_STRUCT(RequestRecord),
    TOKRING_STRUCT(FinishRecord),
    TOKRING_STRUCT(SectionHeader),
    TOKRING_STRUCT(ExtensionHeader),
    TOKRING_STRUCT(ReadyRecord),
    TOKRING_STRUCT(PromptLogprobsRecord),
    TOKRING_STRUCT(ControlHeader),
    TOKRING_STRUCT(HelloMessage),
    TOKRING_STRUCT(SegmentMessage),
    TOKRING_STRUCT(RefuseMessage),
    TOKRING_STRUCT(CallMessage),
});

#define TOKRING_ENUM_FRAME_TYPE(name, value) EnumRow{"FrameType", #name, value},
#define TOKRING_ENUM_FRAME_FLAG(name, value) EnumRow{"FrameFlag", #name, value},
#define TOKRING_ENUM_SECTION(name, value) EnumRow{"SectionKind", #name, value},
#define TOKRING_ENUM_FINISH(name, value) EnumRow{"FinishReason", #name, value},
#define TOKRING_ENUM_ERROR(name, value) EnumRow{"ErrorCode", #name, value},
#define TOKRING_ENUM_REQUEST(name, value) EnumRow{"RequestFlag", #name, value},
#define TOKRING_ENUM_EXTENSION(name, value) EnumRow{"ExtensionKind", #name, value},
#define TOKRING_ENUM_PEER(name, value) EnumRow{"PeerState", #name, value},
#define TOKRING_ENUM_CONTROL(name, value) EnumRow{"ControlKind", #name, value},
#define TOKRING_ENUM_REFUSE(name, value) EnumRow{"RefuseCode", #name, value},
#define TOKRING_ENUM_METHOD(name, value) EnumRow{"ControlMethod", #name, value},
#define TOKRING_ENUM_STATUS(name, value) EnumRow{"CallStatus", #name, value},

inline constexpr auto kEnumTable = std::to_array<EnumRow>({
    TOKRING_FRAME_TYPES(TOKRING_ENUM_FRAME_TYPE)     //
    TOKRING_FRAME_FLAGS(TOKRING_ENUM_FRAME_FLAG)     //
    TOKRING_SECTION_KINDS(TOKRING_ENUM_SECTION)      //
    TOKRING_FINISH_REASONS(TOKRING_ENUM_FINISH)      //
    TOKRING_ERROR_CODES(TOKRING_ENUM_ERROR)          //
    TOKRING_REQUEST_FLAGS(TOKRING_ENUM_REQUEST)      //
    TOKRING_EXTENSION_KINDS(TOKRING_ENUM_EXTENSION)  //
    TOKRING_PEER_STATES(TOKRING_ENUM_PEER)           //
    TOKRING_CONTROL_KINDS(TOKRING_ENUM_CONTROL)      //
    TOKRING_REFUSE_CODES(TOKRING_ENUM_REFUSE)        //
    TOKRING_CONTROL_METHODS(TOKRING_ENUM_METHOD)     //
    TOKRING_CALL_STATUSES(TOKRING_ENUM_STATUS)       //
});

// FNV-1a, 64 bit; of numbers as eight little-endian bytes.
class Fnv1a {
 public:
  constexpr Fnv1a& text(std::string_view value) {
    for (char c : value) byte(static_cast<uint8_t>(c));
    byte(0);
    return *this;
  }
  constexpr Fnv1a& number(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<uint8_t>(value >> shift));
    return *this;
  }
  constexpr uint64_t value() const { return hash_; }

 private:
  constexpr void byte(uint8_t value) { hash_ = (hash_ ^ value) * 0x100000001b3ULL; }
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

constexpr uint64_t layout_hash() {
  Fnv1a hash;
  for (const StructRow& row : kStructTable) hash.text(row.name).number(row.bytes);
  for (const FieldRow& row : kFieldTable) {
    hash.text(row.structure).text(row.name).number(static_cast<uint64_t>(row.kind)).number(row.width);
    hash.number(row.offset).number(row.count);
  }
  for (const EnumRow& row : kEnumTable) hash.text(row.enumeration).text(row.name).number(row.value);
  return hash.number(kFrameAlignment).number(kSegmentHeaderBytes).number(kSegmentControlOffset).value();
}

inline constexpr uint64_t kLayoutHash = layout_hash();

}  // namespace tokring
