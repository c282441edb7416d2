// The shared-memory layout of tokring: segment header, ring controls, frames and records. Defined here and nowhere
// else: structs, the field table behind the numpy dtypes, the layout hash and the tables of docs/ipc-protocol.md all
// come from the lists in this file. Little-endian, 64-bit, no pointers, no implicit padding.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tokring {

static_assert(sizeof(void*) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "tokring needs a 64-bit little-endian machine");

inline constexpr uint64_t kSegmentMagic = 0x31474e49524b4f54ULL;  // "TOKRING1" in memory order
inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr size_t kFalseSharingRange = 128;  // two lines: the adjacent-line prefetcher pairs them
inline constexpr size_t kFrameAlignment = 64;
inline constexpr size_t kDataAlignment = 65536;  // data areas are mapped twice; 64 KiB suits arm64's largest page
inline constexpr size_t kSegmentHeaderBytes = 4096;
inline constexpr size_t kSegmentControlOffset = 1024;
inline constexpr size_t kMinRingBytes = kDataAlignment;
inline constexpr uint32_t kMaxStreamSlots = 1U << 20;
inline constexpr uint32_t kMaxFrameFraction = 4;  // a frame takes at most a quarter of its ring
inline constexpr uint64_t kAwake = ~0ULL;         // `wake_at` of a reader that polls: no publish ever crosses it
inline constexpr size_t kNumInlineStopIds = 8;
inline constexpr uint32_t kMaxLogprobs = 20;
inline constexpr uint32_t kNoStreamSlot = 0xffffffffU;

// ---- segment header, written by the engine before the descriptor is passed; read once by the front end ----
#define TOKRING_SEGMENT_HEADER_FIELDS(X) \
  X(uint64_t, magic)                     \
  X(uint32_t, layout_version)            \
  X(uint32_t, header_bytes)              \
  X(uint64_t, layout_hash)               \
  X(uint64_t, segment_bytes)             \
  X(uint64_t, connection_generation)     \
  X(uint64_t, req_offset)                \
  X(uint64_t, req_bytes)                 \
  X(uint64_t, out_offset)                \
  X(uint64_t, out_bytes)                 \
  X(uint64_t, cancel_offset)             \
  X(uint32_t, num_stream_slots)          \
  X(uint32_t, engine_index)              \
  X(uint32_t, engine_pid)                \
  X(uint32_t, frontend_pid)              \
  X(uint64_t, engine_start_time)         \
  X(uint64_t, frontend_start_time)

// ---- words that change, at kSegmentControlOffset; each on its own 128 bytes and written by one side only ----
// X(type, name, writer). Positions are absolute and monotonic: index = position & (ring bytes - 1).
#define TOKRING_SEGMENT_CONTROL_FIELDS(X)   \
  X(uint64_t, engine_state, engine)         \
  X(uint64_t, frontend_state, frontend)     \
  X(uint64_t, cancel_count, frontend)       \
  X(uint64_t, req_write_position, frontend) \
  X(uint64_t, req_read_position, engine)    \
  X(uint64_t, req_wake_at, engine)          \
  X(uint64_t, out_write_position, engine)   \
  X(uint64_t, out_read_position, frontend)  \
  X(uint64_t, out_wake_at, frontend)

// ---- every frame begins with this; `position` is the frame's own absolute ring position (self-stamp) ----
#define TOKRING_FRAME_HEADER_FIELDS(X) \
  X(uint32_t, length)                  \
  X(uint16_t, type)                    \
  X(uint16_t, flags)                   \
  X(uint64_t, position)                \
  X(uint64_t, publish_ns)              \
  X(uint32_t, count)                   \
  X(uint32_t, crc32c)

// ---- REQ: one record, then `num_ids` i32 (prompt, then prior output), then `extension_bytes` of extensions ----
#define TOKRING_REQUEST_FIELDS(X) \
  X(uint32_t, stream_slot)        \
  X(uint32_t, slot_generation)    \
  X(uint32_t, parent_slot)        \
  X(uint32_t, choice_index)       \
  X(uint32_t, num_ids)            \
  X(uint32_t, num_prior_output)   \
  X(uint32_t, extension_bytes)    \
  X(uint32_t, flags)              \
  X(uint32_t, max_tokens)         \
  X(uint32_t, min_tokens)         \
  X(int32_t, num_logprobs)        \
  X(int32_t, num_prompt_logprobs) \
  X(float, temperature)           \
  X(float, top_p)                 \
  X(float, min_p)                 \
  X(int32_t, top_k)               \
  X(float, repetition_penalty)    \
  X(float, presence_penalty)      \
  X(float, frequency_penalty)     \
  X(int32_t, priority)            \
  X(int64_t, seed)                \
  X(uint64_t, arrival_ns)         \
  X(uint64_t, deadline_ns)        \
  X(uint32_t, num_stop_ids)       \
  X(uint32_t, eos_mask)

// ---- OUT: a finished request (also one that ends without a token: abort, error) ----
#define TOKRING_FINISH_FIELDS(X) \
  X(uint32_t, stream_slot)       \
  X(uint32_t, slot_generation)   \
  X(uint16_t, reason)            \
  X(uint16_t, error_code)        \
  X(int32_t, stop_id)            \
  X(uint32_t, num_prompt_tokens) \
  X(uint32_t, num_cached_tokens) \
  X(uint32_t, num_output_tokens) \
  X(uint32_t, num_preemptions)   \
  X(uint64_t, scheduled_ns)      \
  X(uint64_t, first_token_ns)    \
  X(uint64_t, end_ns)            \
  X(uint32_t, num_draft_tokens)  \
  X(uint32_t, num_accepted_tokens)

// ---- optional sections of a STEP frame; each 8-byte aligned, in ascending `kind`; `bytes` is the payload padded to 8
// ---- The list ends at a header of kind 0 or where no further header fits into the frame.
#define TOKRING_SECTION_FIELDS(X) \
  X(uint16_t, kind)               \
  X(uint16_t, width)              \
  X(uint32_t, count)              \
  X(uint32_t, bytes)              \
  X(uint32_t, reserved)

// ---- typed extensions of a request; `bytes` is the payload without this header, padded to 8 in the frame ----
#define TOKRING_EXTENSION_FIELDS(X) \
  X(uint16_t, kind)                 \
  X(uint16_t, reserved)             \
  X(uint32_t, bytes)

// ---- OUT: the engine's first frame on a channel ----
#define TOKRING_READY_FIELDS(X)       \
  X(uint32_t, max_model_len)          \
  X(uint32_t, vocab_size)             \
  X(uint32_t, block_size)             \
  X(uint32_t, num_blocks)             \
  X(uint32_t, max_num_seqs)           \
  X(uint32_t, max_num_batched_tokens) \
  X(uint32_t, max_logprobs)           \
  X(uint32_t, flags)

// ---- OUT: logprobs of prompt positions [start, start + count) of one request; then columns, see below ----
#define TOKRING_PROMPT_LOGPROBS_FIELDS(X) \
  X(uint32_t, stream_slot)                \
  X(uint32_t, slot_generation)            \
  X(uint32_t, start)                      \
  X(uint32_t, width)

// ---- control socket (SOCK_SEQPACKET): one message per packet, each begins with this. These five fields never move,
// whatever the layout version: two installations can always tell each other apart. ----
#define TOKRING_CONTROL_HEADER_FIELDS(X) \
  X(uint32_t, magic)                     \
  X(uint16_t, kind)                      \
  X(uint16_t, reserved)                  \
  X(uint32_t, layout_version)            \
  X(uint32_t, pid)                       \
  X(uint64_t, layout_hash)

// ---- HELLO, front end -> engine: what the segment must hold ----
#define TOKRING_HELLO_FIELDS(X)    \
  X(uint64_t, req_bytes)           \
  X(uint64_t, out_bytes)           \
  X(uint64_t, frontend_start_time) \
  X(uint32_t, num_stream_slots)    \
  X(uint32_t, frontend_index)

// ---- SEGMENT, engine -> front end, carries the memfd (SCM_RIGHTS) ----
#define TOKRING_SEGMENT_MESSAGE_FIELDS(X) \
  X(uint64_t, segment_bytes)              \
  X(uint64_t, connection_generation)

// ---- REFUSE, engine -> front end; then `text_bytes` of UTF-8 ----
#define TOKRING_REFUSE_FIELDS(X) \
  X(uint32_t, code)              \
  X(uint32_t, text_bytes)

// ---- CALL and RESULT, rare control calls after the handshake; then `payload_bytes` of JSON ----
#define TOKRING_CALL_FIELDS(X) \
  X(uint64_t, call_id)         \
  X(uint32_t, method)          \
  X(uint32_t, status)          \
  X(uint32_t, payload_bytes)   \
  X(uint32_t, reserved)

inline constexpr uint32_t kControlMagic = 0x434b4f54;       // "TOKC"
inline constexpr size_t kMaxControlMessageBytes = 1 << 16;  // fits the default socket buffer

#define TOKRING_DECLARE(type, name) type name;
#define TOKRING_DECLARE_ALONE(type, name, writer) alignas(kFalseSharingRange) type name;
struct SegmentHeader {
  TOKRING_SEGMENT_HEADER_FIELDS(TOKRING_DECLARE)
};
struct FrameHeader {
  TOKRING_FRAME_HEADER_FIELDS(TOKRING_DECLARE)
};
struct RequestRecord {
  TOKRING_REQUEST_FIELDS(TOKRING_DECLARE) int32_t stop_ids[kNumInlineStopIds];
};
struct FinishRecord {
  TOKRING_FINISH_FIELDS(TOKRING_DECLARE)
};
struct SectionHeader {
  TOKRING_SECTION_FIELDS(TOKRING_DECLARE)
};
struct ExtensionHeader {
  TOKRING_EXTENSION_FIELDS(TOKRING_DECLARE)
};
struct ReadyRecord {
  TOKRING_READY_FIELDS(TOKRING_DECLARE)
};
struct PromptLogprobsRecord {
  TOKRING_PROMPT_LOGPROBS_FIELDS(TOKRING_DECLARE)
};
struct SegmentControl {
  TOKRING_SEGMENT_CONTROL_FIELDS(TOKRING_DECLARE_ALONE)
};
struct ControlHeader {
  TOKRING_CONTROL_HEADER_FIELDS(TOKRING_DECLARE)
};
struct HelloMessage {
  TOKRING_HELLO_FIELDS(TOKRING_DECLARE)
};
struct SegmentMessage {
  TOKRING_SEGMENT_MESSAGE_FIELDS(TOKRING_DECLARE)
};
struct RefuseMessage {
  TOKRING_REFUSE_FIELDS(TOKRING_DECLARE)
};
struct CallMessage {
  TOKRING_CALL_FIELDS(TOKRING_DECLARE)
};
#undef TOKRING_DECLARE
#undef TOKRING_DECLARE_ALONE

static_assert(sizeof(SegmentHeader) <= kSegmentControlOffset);
static_assert(kSegmentControlOffset + sizeof(SegmentControl) <= kSegmentHeaderBytes);
static_assert(sizeof(ControlHeader) == 24 && sizeof(HelloMessage) == 32 && sizeof(CallMessage) == 24);
static_assert(sizeof(FrameHeader) == 32 && sizeof(RequestRecord) == 144 && sizeof(FinishRecord) == 64);
static_assert(sizeof(SectionHeader) == 16 && sizeof(ExtensionHeader) == 8 && sizeof(ReadyRecord) == 32);

// A step's columns, straight after the header, each 4-byte elements, no gaps:
//   stream_slot u32[count] | slot_generation u32[count] | token_id i32[count]          (flag kMultiToken unset)
//   stream_slot u32[count] | slot_generation u32[count] | num_tokens u32[count] | token_id i32[sum(num_tokens)]
// then, 8-byte aligned, the sections announced by kHasSections:
//   kFinishSection:   FinishRecord[count]
//   kLogprobsSection: token_index u32[count] | rank i32[count] | logprob f32[count] |
//                     top_id i32[count * width] | top_logprob f32[count * width]
//     token_index points into the token_id column; rank is 1-based; rows with fewer than `width` entries carry -1 ids.
// A PROMPT_LOGPROBS frame: PromptLogprobsRecord, then the same columns without token_index (count positions).
// clang-format off
#define TOKRING_FRAME_TYPES(X) X(STEP, 1) X(REQUEST, 2) X(READY, 3) X(PROMPT_LOGPROBS, 4)
#define TOKRING_FRAME_FLAGS(X) X(MULTI_TOKEN, 1) X(HAS_SECTIONS, 2) X(MORE, 4) X(HAS_CRC, 8)
#define TOKRING_SECTION_KINDS(X) X(FINISH, 1) X(LOGPROBS, 2)
#define TOKRING_FINISH_REASONS(X) X(NONE, 0) X(STOP, 1) X(LENGTH, 2) X(ABORT, 3) X(ERROR, 4) X(REPETITION, 5)
#define TOKRING_ERROR_CODES(X)                                                                                   \
  X(NONE, 0) X(INVALID_REQUEST, 1) X(DEADLINE, 2) X(GRAMMAR, 3) X(NOT_FINITE, 4) X(OUT_OF_MEMORY, 5) X(INTERNAL, 6) \
  X(POISON, 7) X(OVERLOADED, 8)
// parent_slot names the stream slot of choice 0 when n > 1 (kNoStreamSlot otherwise): prompt blocks are shared.
// GREEDY is not a flag: temperature == 0 means greedy. eos_mask: bit i set = inline stop id i is an end-of-text id.
#define TOKRING_REQUEST_FLAGS(X) X(SEED_GIVEN, 1) X(SKIP_PREFIX_CACHE, 2) X(RESUMED, 4)
#define TOKRING_EXTENSION_KINDS(X)                                                                     \
  X(STOP_IDS, 1) X(LOGIT_BIAS, 2) X(ALLOWED_IDS, 3) X(BAD_WORDS, 4) X(GRAMMAR_JSON_SCHEMA, 5)             \
  X(GRAMMAR_JSON_OBJECT, 6) X(GRAMMAR_REGEX, 7) X(GRAMMAR_CHOICE, 8) X(GRAMMAR_EBNF, 9) X(CACHE_SALT, 10) \
  X(ADAPTER_ID, 11) X(LOGPROB_IDS, 12) X(GRAMMAR_STRUCTURAL_TAG, 13)
// STOP_IDS, ALLOWED_IDS, LOGPROB_IDS: i32[]. LOGIT_BIAS: i32 ids[n], f32 bias[n]. BAD_WORDS: u32 n, u32 length[n],
// i32 ids[sum]. GRAMMAR_*: UTF-8 text (CHOICE: a JSON list of strings). CACHE_SALT: bytes. ADAPTER_ID: u32.

// State of one side of a channel: zero until it has attached, closed for good afterwards.
#define TOKRING_PEER_STATES(X) X(ABSENT, 0) X(ATTACHED, 1) X(CLOSED, 2)
#define TOKRING_CONTROL_KINDS(X) X(HELLO, 1) X(SEGMENT, 2) X(REFUSE, 3) X(CALL, 4) X(RESULT, 5)
#define TOKRING_REFUSE_CODES(X) X(LAYOUT, 1) X(SIZE, 2) X(MEMORY, 3) X(PROTOCOL, 4)
#define TOKRING_CONTROL_METHODS(X) X(RESET_PREFIX_CACHE, 1) X(PAUSE, 2) X(RESUME, 3) X(PROFILE, 4) X(INSPECT, 5) X(EXPLAIN, 6)
#define TOKRING_CALL_STATUSES(X) X(OK, 0) X(UNKNOWN_METHOD, 1) X(BAD_ARGUMENT, 2) X(FAILED, 3)
// clang-format on

#define TOKRING_ENUMERATOR(name, value) name = value,
enum class FrameType : uint16_t { TOKRING_FRAME_TYPES(TOKRING_ENUMERATOR) };
enum class FrameFlag : uint16_t { TOKRING_FRAME_FLAGS(TOKRING_ENUMERATOR) };
enum class SectionKind : uint16_t { TOKRING_SECTION_KINDS(TOKRING_ENUMERATOR) };
enum class FinishReason : uint16_t { TOKRING_FINISH_REASONS(TOKRING_ENUMERATOR) };
enum class ErrorCode : uint16_t { TOKRING_ERROR_CODES(TOKRING_ENUMERATOR) };
enum class RequestFlag : uint32_t { TOKRING_REQUEST_FLAGS(TOKRING_ENUMERATOR) };
enum class ExtensionKind : uint16_t { TOKRING_EXTENSION_KINDS(TOKRING_ENUMERATOR) };
enum class PeerState : uint64_t { TOKRING_PEER_STATES(TOKRING_ENUMERATOR) };
enum class ControlKind : uint16_t { TOKRING_CONTROL_KINDS(TOKRING_ENUMERATOR) };
enum class RefuseCode : uint32_t { TOKRING_REFUSE_CODES(TOKRING_ENUMERATOR) };
enum class ControlMethod : uint32_t { TOKRING_CONTROL_METHODS(TOKRING_ENUMERATOR) };
enum class CallStatus : uint32_t { TOKRING_CALL_STATUSES(TOKRING_ENUMERATOR) };
#undef TOKRING_ENUMERATOR

}  // namespace tokring
