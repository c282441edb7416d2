/* The channel between a front end and tokring's EngineCore, for front ends in C or any language that reads C headers.
 * docs/ipc-protocol.md is the specification. The structs are those of layout.hpp, held against it by
 * tests/ipc/test_c_header.py; below them stands one front end's side of a channel: connect, submit, poll, release,
 * sleep. One thread a channel. Linux, little-endian, 64-bit, C11 with _GNU_SOURCE; GCC or clang (their __atomic
 * builtins). */
#ifndef TOKRING_H
#define TOKRING_H

#include <stdint.h>

#define TOKRING_LAYOUT_VERSION 1u
#define TOKRING_LAYOUT_HASH 0x7ccce903a9478703ull
#define TOKRING_SEGMENT_MAGIC 0x31474e49524b4f54ull
#define TOKRING_CONTROL_MAGIC 0x434b4f54u
#define TOKRING_AWAKE (~0ull)
#define TOKRING_CONTROL_OFFSET 1024
#define TOKRING_HEADER_BYTES 4096
#define TOKRING_DATA_ALIGNMENT 65536

struct tokring_segment_header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t header_bytes;
  uint64_t layout_hash;
  uint64_t segment_bytes;
  uint64_t connection_generation;
  uint64_t req_offset;
  uint64_t req_bytes;
  uint64_t out_offset;
  uint64_t out_bytes;
  uint64_t cancel_offset;
  uint32_t num_stream_slots;
  uint32_t engine_index;
  uint32_t engine_pid;
  uint32_t frontend_pid;
  uint64_t engine_start_time;
  uint64_t frontend_start_time;
};

struct tokring_segment_control {
  _Alignas(128) uint64_t engine_state;
  _Alignas(128) uint64_t frontend_state;
  _Alignas(128) uint64_t cancel_count;
  _Alignas(128) uint64_t req_write_position;
  _Alignas(128) uint64_t req_read_position;
  _Alignas(128) uint64_t req_wake_at;
  _Alignas(128) uint64_t out_write_position;
  _Alignas(128) uint64_t out_read_position;
  _Alignas(128) uint64_t out_wake_at;
};

struct tokring_frame_header {
  uint32_t length;
  uint16_t type;
  uint16_t flags;
  uint64_t position;
  uint64_t publish_ns;
  uint32_t count;
  uint32_t crc32c;
};

struct tokring_request_record {
  uint32_t stream_slot;
  uint32_t slot_generation;
  uint32_t parent_slot;
  uint32_t choice_index;
  uint32_t num_ids;
  uint32_t num_prior_output;
  uint32_t extension_bytes;
  uint32_t flags;
  uint32_t max_tokens;
  uint32_t min_tokens;
  int32_t num_logprobs;
  int32_t num_prompt_logprobs;
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t priority;
  int64_t seed;
  uint64_t arrival_ns;
  uint64_t deadline_ns;
  uint32_t num_stop_ids;
  uint32_t eos_mask;
  int32_t stop_ids[8];
};

struct tokring_finish_record {
  uint32_t stream_slot;
  uint32_t slot_generation;
  uint16_t reason;
  uint16_t error_code;
  int32_t stop_id;
  uint32_t num_prompt_tokens;
  uint32_t num_cached_tokens;
  uint32_t num_output_tokens;
  uint32_t num_preemptions;
  uint64_t scheduled_ns;
  uint64_t first_token_ns;
  uint64_t end_ns;
  uint32_t num_draft_tokens;
  uint32_t num_accepted_tokens;
};

struct tokring_section_header {
  uint16_t kind;
  uint16_t width;
  uint32_t count;
  uint32_t bytes;
  uint32_t reserved;
};

struct tokring_extension_header {
  uint16_t kind;
  uint16_t reserved;
  uint32_t bytes;
};

struct tokring_ready_record {
  uint32_t max_model_len;
  uint32_t vocab_size;
  uint32_t block_size;
  uint32_t num_blocks;
  uint32_t max_num_seqs;
  uint32_t max_num_batched_tokens;
  uint32_t max_logprobs;
  uint32_t flags;
};

struct tokring_prompt_logprobs_record {
  uint32_t stream_slot;
  uint32_t slot_generation;
  uint32_t start;
  uint32_t width;
};

struct tokring_control_header {
  uint32_t magic;
  uint16_t kind;
  uint16_t reserved;
  uint32_t layout_version;
  uint32_t pid;
  uint64_t layout_hash;
};

struct tokring_hello_message {
  uint64_t req_bytes;
  uint64_t out_bytes;
  uint64_t frontend_start_time;
  uint32_t num_stream_slots;
  uint32_t frontend_index;
};

struct tokring_segment_message {
  uint64_t segment_bytes;
  uint64_t connection_generation;
};

struct tokring_refuse_message {
  uint32_t code;
  uint32_t text_bytes;
};

struct tokring_call_message {
  uint64_t call_id;
  uint32_t method;
  uint32_t status;
  uint32_t payload_bytes;
  uint32_t reserved;
};

enum tokring_frame_type {
  TOKRING_FRAME_TYPE_STEP = 1,
  TOKRING_FRAME_TYPE_REQUEST = 2,
  TOKRING_FRAME_TYPE_READY = 3,
  TOKRING_FRAME_TYPE_PROMPT_LOGPROBS = 4,
};

enum tokring_frame_flag {
  TOKRING_FRAME_FLAG_MULTI_TOKEN = 1,
  TOKRING_FRAME_FLAG_HAS_SECTIONS = 2,
  TOKRING_FRAME_FLAG_MORE = 4,
  TOKRING_FRAME_FLAG_HAS_CRC = 8,
};

enum tokring_section_kind {
  TOKRING_SECTION_KIND_FINISH = 1,
  TOKRING_SECTION_KIND_LOGPROBS = 2,
};

enum tokring_finish_reason {
  TOKRING_FINISH_REASON_NONE = 0,
  TOKRING_FINISH_REASON_STOP = 1,
  TOKRING_FINISH_REASON_LENGTH = 2,
  TOKRING_FINISH_REASON_ABORT = 3,
  TOKRING_FINISH_REASON_ERROR = 4,
  TOKRING_FINISH_REASON_REPETITION = 5,
};

enum tokring_error_code {
  TOKRING_ERROR_CODE_NONE = 0,
  TOKRING_ERROR_CODE_INVALID_REQUEST = 1,
  TOKRING_ERROR_CODE_DEADLINE = 2,
  TOKRING_ERROR_CODE_GRAMMAR = 3,
  TOKRING_ERROR_CODE_NOT_FINITE = 4,
  TOKRING_ERROR_CODE_OUT_OF_MEMORY = 5,
  TOKRING_ERROR_CODE_INTERNAL = 6,
  TOKRING_ERROR_CODE_POISON = 7,
  TOKRING_ERROR_CODE_OVERLOADED = 8,
};

enum tokring_request_flag {
  TOKRING_REQUEST_FLAG_SEED_GIVEN = 1,
  TOKRING_REQUEST_FLAG_SKIP_PREFIX_CACHE = 2,
  TOKRING_REQUEST_FLAG_RESUMED = 4,
};

enum tokring_extension_kind {
  TOKRING_EXTENSION_KIND_STOP_IDS = 1,
  TOKRING_EXTENSION_KIND_LOGIT_BIAS = 2,
  TOKRING_EXTENSION_KIND_ALLOWED_IDS = 3,
  TOKRING_EXTENSION_KIND_BAD_WORDS = 4,
  TOKRING_EXTENSION_KIND_GRAMMAR_JSON_SCHEMA = 5,
  TOKRING_EXTENSION_KIND_GRAMMAR_JSON_OBJECT = 6,
  TOKRING_EXTENSION_KIND_GRAMMAR_REGEX = 7,
  TOKRING_EXTENSION_KIND_GRAMMAR_CHOICE = 8,
  TOKRING_EXTENSION_KIND_GRAMMAR_EBNF = 9,
  TOKRING_EXTENSION_KIND_CACHE_SALT = 10,
  TOKRING_EXTENSION_KIND_ADAPTER_ID = 11,
  TOKRING_EXTENSION_KIND_LOGPROB_IDS = 12,
  TOKRING_EXTENSION_KIND_GRAMMAR_STRUCTURAL_TAG = 13,
};

enum tokring_peer_state {
  TOKRING_PEER_STATE_ABSENT = 0,
  TOKRING_PEER_STATE_ATTACHED = 1,
  TOKRING_PEER_STATE_CLOSED = 2,
};

enum tokring_control_kind {
  TOKRING_CONTROL_KIND_HELLO = 1,
  TOKRING_CONTROL_KIND_SEGMENT = 2,
  TOKRING_CONTROL_KIND_REFUSE = 3,
  TOKRING_CONTROL_KIND_CALL = 4,
  TOKRING_CONTROL_KIND_RESULT = 5,
};

enum tokring_refuse_code {
  TOKRING_REFUSE_CODE_LAYOUT = 1,
  TOKRING_REFUSE_CODE_SIZE = 2,
  TOKRING_REFUSE_CODE_MEMORY = 3,
  TOKRING_REFUSE_CODE_PROTOCOL = 4,
};

enum tokring_control_method {
  TOKRING_CONTROL_METHOD_RESET_PREFIX_CACHE = 1,
  TOKRING_CONTROL_METHOD_PAUSE = 2,
  TOKRING_CONTROL_METHOD_RESUME = 3,
  TOKRING_CONTROL_METHOD_PROFILE = 4,
  TOKRING_CONTROL_METHOD_INSPECT = 5,
  TOKRING_CONTROL_METHOD_EXPLAIN = 6,
};

enum tokring_call_status {
  TOKRING_CALL_STATUS_OK = 0,
  TOKRING_CALL_STATUS_UNKNOWN_METHOD = 1,
  TOKRING_CALL_STATUS_BAD_ARGUMENT = 2,
  TOKRING_CALL_STATUS_FAILED = 3,
};

enum tokring_process_phase {
  TOKRING_PROCESS_PHASE_NONE = 0,
  TOKRING_PROCESS_PHASE_STARTING = 1,
  TOKRING_PROCESS_PHASE_LOADING = 2,
  TOKRING_PROCESS_PHASE_WARMING = 3,
  TOKRING_PROCESS_PHASE_READY = 4,
  TOKRING_PROCESS_PHASE_DRAINING = 5,
  TOKRING_PROCESS_PHASE_FAILED = 6,
  TOKRING_PROCESS_PHASE_STOPPED = 7,
};

enum tokring_step_phase {
  TOKRING_STEP_PHASE_RECEIVE = 0,
  TOKRING_STEP_PHASE_SCHEDULE = 1,
  TOKRING_STEP_PHASE_EXECUTE = 2,
  TOKRING_STEP_PHASE_SAMPLE = 3,
  TOKRING_STEP_PHASE_PUBLISH = 4,
};

enum tokring_role {
  TOKRING_ROLE_SUPERVISOR = 0,
  TOKRING_ROLE_FRONTEND = 1,
  TOKRING_ROLE_ENGINE = 2,
};

/* ---- one front end's side of a channel ---- */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

struct tokring_channel {
  int control, req_doorbell, out_doorbell; /* control ends (POLLIN and recv() == 0) when the engine dies or closes */
  struct tokring_segment_header header;    /* private copy */
  struct tokring_segment_control* words;
  uint32_t* cancel_table;
  uint8_t *req, *out; /* mapped twice, back to back */
  uint64_t req_position, out_position, out_written, cancel_count;
  const char* error; /* why the last call failed */
};

/* The columns of one STEP frame, valid until tokring_release(). Their contents are the engine's: bound what you index.
 */
struct tokring_step {
  uint32_t num_rows, num_finished;
  const uint32_t *stream_slot, *slot_generation;
  const int32_t* token_id;
  const struct tokring_finish_record* finish;
};

static inline int tokring_fail(struct tokring_channel* channel, const char* error) {
  channel->error = error;
  return -1;
}

/* One packet with up to two descriptors; returns its bytes or -1. */
static inline long tokring_receive(int control, void* packet, size_t bytes, int* fds, int num_fds) {
  struct iovec part = {packet, bytes};
  union {
    struct cmsghdr align;
    char room[CMSG_SPACE(2 * sizeof(int))];
  } ancillary;
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
  long got = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
  struct cmsghdr* item = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (item == NULL) return got;
  if (item->cmsg_type != SCM_RIGHTS || item->cmsg_len != CMSG_LEN(sizeof(int) * (size_t)num_fds)) return -1;
  memcpy(fds, CMSG_DATA(item), sizeof(int) * (size_t)num_fds);
  return got;
}

static inline int tokring_map(struct tokring_channel* channel, int fd) {
  const struct tokring_segment_header* header = &channel->header;
  size_t head = header->req_offset, req = header->req_bytes, out = header->out_bytes;
  int flags = MAP_SHARED | MAP_FIXED, access = PROT_READ | PROT_WRITE;
  uint8_t* base = (uint8_t*)mmap(NULL, head + 2 * (req + out), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return -1;
  channel->words = (struct tokring_segment_control*)(void*)(base + TOKRING_CONTROL_OFFSET);
  channel->cancel_table = (uint32_t*)(void*)(base + header->cancel_offset);
  channel->req = base + head;
  channel->out = base + head + 2 * req;
  if (mmap(base, head, access, flags, fd, 0) == MAP_FAILED ||
      mmap(channel->req, req, access, flags, fd, (off_t)header->req_offset) == MAP_FAILED ||
      mmap(channel->req + req, req, access, flags, fd, (off_t)header->req_offset) == MAP_FAILED ||
      mmap(channel->out, out, access, flags, fd, (off_t)header->out_offset) == MAP_FAILED ||
      mmap(channel->out + out, out, access, flags, fd, (off_t)header->out_offset) == MAP_FAILED) {
    return -1;
  }
  return madvise(base, head + 2 * (req + out), MADV_DONTFORK);
}

/* Sizes are powers of two of at least 65536. 0, or -1 with channel->error set. SIGPIPE is ignored from here on. */
static inline int tokring_connect(struct tokring_channel* channel, const char* path, uint64_t req_bytes,
                                  uint64_t out_bytes, uint32_t num_stream_slots) {
  struct {
    struct tokring_control_header header;
    union {
      struct tokring_hello_message hello;
      struct tokring_segment_message segment;
      char refusal[1024];
    } body;
  } packet;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const size_t head = sizeof packet.header;
  int doorbells[2] = {-1, -1}, fd = -1;
  struct stat status;
  memset(channel, 0, sizeof *channel);
  signal(SIGPIPE, SIG_IGN); /* a doorbell may belong to an engine that has died */
  if (strlen(path) >= sizeof address.sun_path) return tokring_fail(channel, "the socket's path is too long");
  strcpy(address.sun_path, path);
  channel->control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (channel->control < 0 || connect(channel->control, (struct sockaddr*)&address, sizeof address) != 0)
    return tokring_fail(channel, strerror(errno));
  if (tokring_receive(channel->control, &packet, sizeof packet, doorbells, 2) != (long)head || doorbells[1] < 0 ||
      packet.header.magic != TOKRING_CONTROL_MAGIC || packet.header.kind != TOKRING_CONTROL_KIND_HELLO)
    return tokring_fail(channel, "the engine did not send its doorbells: another user, or too many front ends?");
  channel->req_doorbell = doorbells[0];
  channel->out_doorbell = doorbells[1];
  if (packet.header.layout_version != TOKRING_LAYOUT_VERSION || packet.header.layout_hash != TOKRING_LAYOUT_HASH)
    return tokring_fail(channel, "the engine has another layout: compile against the tokring.h of its installation");
  memset(&packet.body.hello, 0, sizeof packet.body.hello);
  packet.header.pid = (uint32_t)getpid();
  packet.body.hello.req_bytes = req_bytes;
  packet.body.hello.out_bytes = out_bytes;
  packet.body.hello.num_stream_slots = num_stream_slots;
  if (send(channel->control, &packet, head + sizeof packet.body.hello, MSG_NOSIGNAL) < 0)
    return tokring_fail(channel, strerror(errno));
  if (tokring_receive(channel->control, &packet, sizeof packet, &fd, 1) != (long)(head + sizeof packet.body.segment) ||
      fd < 0 || packet.header.kind != TOKRING_CONTROL_KIND_SEGMENT)
    return tokring_fail(channel, "the engine refused the channel: its log says why");
  if ((fcntl(fd, F_GET_SEALS) & seals) != seals || fstat(fd, &status) != 0 ||
      (uint64_t)status.st_size != packet.body.segment.segment_bytes ||
      pread(fd, &channel->header, sizeof channel->header, 0) != (long)sizeof channel->header)
    return tokring_fail(channel, "the segment is not a sealed memfd of the announced size");
  const struct tokring_segment_header* header = &channel->header;
  if (header->magic != TOKRING_SEGMENT_MAGIC || header->layout_hash != TOKRING_LAYOUT_HASH ||
      header->req_bytes != req_bytes || header->out_bytes != out_bytes ||
      header->num_stream_slots != num_stream_slots || header->cancel_offset != TOKRING_HEADER_BYTES ||
      header->out_offset != header->req_offset + req_bytes || header->out_offset + out_bytes != header->segment_bytes ||
      header->segment_bytes != packet.body.segment.segment_bytes)
    return tokring_fail(channel, "the segment's header is not what was asked for");
  if (tokring_map(channel, fd) != 0) return tokring_fail(channel, strerror(errno));
  close(fd);
  __atomic_store_n(&channel->words->frontend_state, TOKRING_PEER_STATE_ATTACHED, __ATOMIC_RELEASE);
  return (int)write(channel->req_doorbell, "\1", 1) < 0 ? tokring_fail(channel, "the engine is gone") : 0;
}

/* 1: submitted. 0: the ring is full, try again later. -1: the engine forged a word (error set) or it never fits. */
static inline int tokring_submit(struct tokring_channel* channel, struct tokring_request_record record,
                                 const int32_t* ids, uint32_t num_ids, uint64_t now_ns) {
  const uint64_t ring = channel->header.req_bytes;
  struct tokring_frame_header header = {0};
  uint64_t length = (sizeof header + sizeof record + 4ull * num_ids + 63) / 64 * 64;
  /* SYNC POINT: bytes are free again */
  uint64_t read = __atomic_load_n(&channel->words->req_read_position, __ATOMIC_ACQUIRE);
  if (read > channel->req_position || channel->req_position - read > ring)
    return tokring_fail(channel, "the engine's read position is impossible");
  if (length > ring / 4) return tokring_fail(channel, "the request is larger than a quarter of the ring");
  if (channel->req_position - read + length > ring) return 0;
  uint8_t* frame = channel->req + (channel->req_position & (ring - 1));
  record.num_ids = num_ids;
  header.length = (uint32_t)length;
  header.type = TOKRING_FRAME_TYPE_REQUEST;
  header.position = channel->req_position;
  header.publish_ns = now_ns;
  header.count = 1;
  memcpy(frame, &header, sizeof header);
  memcpy(frame + sizeof header, &record, sizeof record);
  memcpy(frame + sizeof header + sizeof record, ids, 4ull * num_ids);
  channel->req_position += length;
  /* SYNC POINT: frame is visible */
  uint64_t old = __atomic_exchange_n(&channel->words->req_write_position, channel->req_position, __ATOMIC_SEQ_CST);
  uint64_t wake_at = __atomic_load_n(&channel->words->req_wake_at, __ATOMIC_SEQ_CST);
  if (old <= wake_at && wake_at < channel->req_position && write(channel->req_doorbell, "\1", 1) < 0) {
    /* full: it has rung; broken: the control socket tells */
  }
  return 1;
}

static inline void tokring_cancel(struct tokring_channel* channel, uint32_t stream_slot, uint32_t slot_generation) {
  __atomic_store_n(&channel->cancel_table[stream_slot], slot_generation, __ATOMIC_RELEASE);
  __atomic_exchange_n(&channel->words->cancel_count, ++channel->cancel_count, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&channel->words->req_wake_at, __ATOMIC_SEQ_CST) != TOKRING_AWAKE &&
      write(channel->req_doorbell, "\1", 1) < 0) {
    /* as above */
  }
}

/* The next frame's header, checked and copied to `header`; its bytes begin at the returned address. NULL: none, or, if
 * channel->error is set, the engine wrote nonsense: close the channel. */
static inline const uint8_t* tokring_poll(struct tokring_channel* channel, struct tokring_frame_header* header) {
  const uint64_t ring = channel->header.out_bytes;
  channel->error = NULL;
  __atomic_store_n(&channel->words->out_wake_at, TOKRING_AWAKE, __ATOMIC_RELAXED);
  if (channel->out_position == channel->out_written) {
    /* SYNC POINT: frame is visible */
    uint64_t written = __atomic_load_n(&channel->words->out_write_position, __ATOMIC_SEQ_CST);
    if (written < channel->out_position || written - channel->out_position > ring || written % 64 != 0)
      return channel->error = "the engine's write position is impossible", (const uint8_t*)NULL;
    channel->out_written = written;
    if (written == channel->out_position) return NULL;
  }
  const uint8_t* frame = channel->out + (channel->out_position & (ring - 1));
  memcpy(header, frame, sizeof *header);
  if (header->position != channel->out_position || header->length < 64 || header->length % 64 != 0 ||
      header->length > channel->out_written - channel->out_position || header->length > ring / 4)
    return channel->error = "a frame is torn or forged", (const uint8_t*)NULL;
  channel->out_position += header->length;
  return frame;
}

/* 0, or -1 for a frame that is no STEP, carries several tokens a row, or does not hold what it announces. */
static inline int tokring_read_step(const uint8_t* frame, const struct tokring_frame_header* header,
                                    struct tokring_step* step) {
  struct tokring_section_header section;
  uint64_t end = sizeof *header + 12ull * header->count;
  memset(step, 0, sizeof *step);
  if (header->type != TOKRING_FRAME_TYPE_STEP || header->flags & TOKRING_FRAME_FLAG_MULTI_TOKEN || end > header->length)
    return -1;
  step->num_rows = header->count;
  step->stream_slot = (const uint32_t*)(const void*)(frame + sizeof *header);
  step->slot_generation = step->stream_slot + header->count;
  step->token_id = (const int32_t*)(const void*)(step->slot_generation + header->count);
  end = (end + 7) / 8 * 8;
  if (!(header->flags & TOKRING_FRAME_FLAG_HAS_SECTIONS) || end + sizeof section > header->length) return 0;
  memcpy(&section, frame + end, sizeof section);
  if (section.kind != TOKRING_SECTION_KIND_FINISH) return 0;
  end += sizeof section;
  if (section.count * (uint64_t)sizeof *step->finish > header->length - end) return -1;
  step->num_finished = section.count;
  step->finish = (const struct tokring_finish_record*)(const void*)(frame + end);
  return 0;
}

/* Everything polled so far may be overwritten. */
static inline void tokring_release(struct tokring_channel* channel) {
  /* SYNC POINT: bytes are free again */
  __atomic_store_n(&channel->words->out_read_position, channel->out_position, __ATOMIC_RELEASE);
}

/* Sleeps until there may be something to poll, at most `timeout_ms`. 0, or -1 if the engine is gone. */
static inline int tokring_sleep(struct tokring_channel* channel, int timeout_ms) {
  struct pollfd entries[2] = {{channel->out_doorbell, POLLIN, 0}, {channel->control, POLLIN, 0}};
  char bytes[512];
  /* SYNC POINT: reader is asleep */
  __atomic_exchange_n(&channel->words->out_wake_at, channel->out_position, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&channel->words->out_write_position, __ATOMIC_SEQ_CST) != channel->out_position) return 0;
  if (poll(entries, 2, timeout_ms) < 0 && errno != EINTR) return tokring_fail(channel, strerror(errno));
  if (entries[1].revents) return tokring_fail(channel, "the engine closed the channel");
  while (entries[0].revents && read(channel->out_doorbell, bytes, sizeof bytes) == (long)sizeof bytes) {
  }
  return 0;
}

#endif
