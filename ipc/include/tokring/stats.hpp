// The stats page: what every process counts, in one list. One table for all roles (a word a role does not use stays 0),
// so that a sum over pages needs no case distinction. Every word is a u64 with one writer; a histogram is its sum and
// its buckets, its count is the sum of the buckets. Bucket bounds: contracts/METRICS.md; the last bucket is +Inf.
#pragma once
#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "tokring/field_table.hpp"

namespace tokring {

inline constexpr uint64_t kStatsMagic = 0x5354415453524b54ULL;  // "TKRSTATS" in memory order
inline constexpr uint32_t kStatsVersion = 1;
inline constexpr size_t kMaxPeers = 72;       // channels of one process: twice 32 front ends, 8 foreign ones
inline constexpr size_t kMaxHandlers = 32;    // routes with their own http_* series
inline constexpr size_t kMaxHttpMethods = 4;  // GET, POST, DELETE, other
inline constexpr size_t kMaxDraftTokens = 16;

// clang-format off
// X(name): only ever grow.
#define TOKRING_STATS_COUNTERS(X)                                                                                    \
  X(heartbeat_ticks)                                                                                                 \
  /* engine */                                                                                                       \
  X(steps) X(step_receive_ns) X(step_schedule_ns) X(step_execute_ns) X(step_sample_ns) X(step_publish_ns)            \
  X(prefix_cache_queries) X(prefix_cache_hits) X(num_preemptions) X(num_requests_intake) X(num_requests_refused)     \
  X(surplus_tokens) X(spec_decode_num_drafts) X(spec_decode_num_draft_tokens) X(spec_decode_num_accepted_tokens)     \
  X(out_stalls) X(requests_aborted_by_stall)                                                                         \
  /* front end */                                                                                                    \
  X(prompt_tokens) X(prompt_tokens_cached) X(generation_tokens)                                                      \
  X(request_success_stop) X(request_success_length) X(request_success_abort) X(request_success_error)                \
  X(request_success_repetition) X(requests_resumed)                                                                  \
  X(rejected_loading) X(rejected_overloaded) X(rejected_ring_full) X(rejected_engine_down) X(rejected_draining)      \
  X(rejected_paused) X(rejected_too_large) X(rejected_invalid) X(slow_client_aborts) X(disconnect_aborts)            \
  X(bytes_sent) X(sends) X(sends_blocked)                                                                            \
  /* supervisor */                                                                                                   \
  X(engine_restarts) X(frontend_restarts) X(hung_processes) X(reloads) X(reloads_failed) X(log_lines_dropped)

// X(name): the value now.
#define TOKRING_STATS_GAUGES(X)                                                                                      \
  X(heartbeat_ns) X(process_start_ns) X(phase) X(load_done_bytes) X(load_total_bytes)                                \
  /* engine; step_started_ns of a front end: when its event loop last came round */                                  \
  X(step_started_ns) X(num_requests_running) X(num_requests_waiting) X(num_requests_waiting_capacity)                \
  X(num_requests_waiting_deferred) X(kv_blocks_used) X(kv_blocks_total) X(block_size) X(max_model_len)               \
  X(max_num_seqs) X(max_num_batched_tokens) X(vocab_size) X(kv_cache_bytes) X(cache_dtype_bytes)                     \
  X(enable_prefix_caching) X(paused)                                                                                 \
  /* front end */                                                                                                    \
  X(open_streams) X(open_connections) X(queued_requests) X(event_loop_lag_ns) X(max_queued)        \
  X(stalled_connections)

// X(name, size): counters by a small index.
#define TOKRING_STATS_ARRAYS(X)                                                         \
  X(http_requests, kMaxHandlers * kMaxHttpMethods * 5) /* (handler, method, 2xx..5xx) */ \
  X(spec_decode_num_accepted_tokens_per_pos, kMaxDraftTokens)
// clang-format on

#define TOKRING_BOUNDS_B125 \
  1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000, 2000000
#define TOKRING_BOUNDS_LAT 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
#define TOKRING_BOUNDS_TOK 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
#define TOKRING_BOUNDS_TTFT \
  0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
#define TOKRING_BOUNDS_HTTP 0.1, 0.5, 1
#define TOKRING_BOUNDS_HIGHR \
  0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60
#define TOKRING_BOUNDS_ITERATION 1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384
#define TOKRING_BOUNDS_PHASE                                                                                       \
  0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, \
      2.5, 5, 10
#define TOKRING_BOUNDS_HOP                                                                                          \
  0.000001, 0.000002, 0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, \
      0.05, 0.1, 0.2, 0.5, 1
#define TOKRING_BOUNDS_PARAMS_N 1, 2, 5, 10, 20

// X(name, scale, instances, bounds...): values are in seconds (scale 1e9: the sum is kept in ns) or counts (scale 1).
#define TOKRING_STATS_HISTOGRAMS(X)                                                         \
  X(iteration_tokens, 1, 1, TOKRING_BOUNDS_ITERATION)                                       \
  X(engine_step_seconds, 1e9, 5, TOKRING_BOUNDS_PHASE) /* by StepPhase */                   \
  X(time_to_first_token_seconds, 1e9, 1, TOKRING_BOUNDS_TTFT)                               \
  X(inter_token_latency_seconds, 1e9, 1, TOKRING_BOUNDS_TOK)                                \
  X(request_time_per_output_token_seconds, 1e9, 1, TOKRING_BOUNDS_TOK)                      \
  X(e2e_request_latency_seconds, 1e9, 1, TOKRING_BOUNDS_LAT)                                \
  X(request_queue_time_seconds, 1e9, 1, TOKRING_BOUNDS_LAT)                                 \
  X(request_prefill_time_seconds, 1e9, 1, TOKRING_BOUNDS_LAT)                               \
  X(request_decode_time_seconds, 1e9, 1, TOKRING_BOUNDS_LAT)                                \
  X(request_inference_time_seconds, 1e9, 1, TOKRING_BOUNDS_LAT)                             \
  X(request_prompt_tokens, 1, 1, TOKRING_BOUNDS_B125)                                       \
  X(request_generation_tokens, 1, 1, TOKRING_BOUNDS_B125)                                   \
  X(request_max_num_generation_tokens, 1, 1, TOKRING_BOUNDS_B125)                           \
  X(request_params_max_tokens, 1, 1, TOKRING_BOUNDS_B125)                                   \
  X(request_prefill_kv_computed_tokens, 1, 1, TOKRING_BOUNDS_B125)                          \
  X(request_params_n, 1, 1, TOKRING_BOUNDS_PARAMS_N)                                        \
  X(http_request_duration_seconds, 1e9, kMaxHandlers* kMaxHttpMethods, TOKRING_BOUNDS_HTTP) \
  X(http_request_duration_highr_seconds, 1e9, 1, TOKRING_BOUNDS_HIGHR)                      \
  X(event_loop_lag_seconds, 1e9, 1, TOKRING_BOUNDS_PHASE)

// One block per channel, indexed by the peer's index. `sent_*`: the ring this process writes, `received_*`: reads.
// sent_position - the peer's received_position of the same connection = bytes used now.
// clang-format off
#define TOKRING_CHANNEL_STATS(X)                                                                                     \
  X(connection_generation) X(sent_capacity) X(sent_position) X(sent_frames) X(sent_records) X(sent_full)             \
  X(doorbells_sent) X(doorbells_suppressed) X(received_capacity) X(received_position) X(received_frames)             \
  X(received_records) X(cancels_sent) X(sleeps)

#define TOKRING_PROCESS_PHASES(X) \
  X(NONE, 0) X(STARTING, 1) X(LOADING, 2) X(WARMING, 3) X(READY, 4) X(DRAINING, 5) X(FAILED, 6) X(STOPPED, 7)
#define TOKRING_STEP_PHASES(X) X(RECEIVE, 0) X(SCHEDULE, 1) X(EXECUTE, 2) X(SAMPLE, 3) X(PUBLISH, 4)
#define TOKRING_ROLES(X) X(SUPERVISOR, 0) X(FRONTEND, 1) X(ENGINE, 2)
// clang-format on

#define TOKRING_ENUM_PHASE(name, value) EnumRow{"ProcessPhase", #name, value},
#define TOKRING_ENUM_STEP(name, value) EnumRow{"StepPhase", #name, value},
#define TOKRING_ENUM_ROLE(name, value) EnumRow{"Role", #name, value},
inline constexpr auto kStatsEnumTable = std::to_array<EnumRow>({TOKRING_PROCESS_PHASES(TOKRING_ENUM_PHASE)  //
                                                                TOKRING_STEP_PHASES(TOKRING_ENUM_STEP)      //
                                                                TOKRING_ROLES(TOKRING_ENUM_ROLE)});

struct StatRow {
  std::string_view name;
  char kind;  // 'c' counter, 'g' gauge, 'h' histogram
  uint32_t first_word;
  uint32_t instances;
  uint32_t words;  // of one instance; a histogram's: sum, buckets
  double scale;
  const double* bounds;
  uint32_t num_bounds;
};

#define TOKRING_BOUNDS_ARRAY(name, scale, instances, ...) inline constexpr double kBounds_##name[] = {__VA_ARGS__};
TOKRING_STATS_HISTOGRAMS(TOKRING_BOUNDS_ARRAY)
inline constexpr double kBounds_hop_seconds[] = {TOKRING_BOUNDS_HOP};
#undef TOKRING_BOUNDS_ARRAY

enum class StatIndex : uint32_t {
#define TOKRING_INDEX_SCALAR(name) name,
#define TOKRING_INDEX_ARRAY(name, size) name,
#define TOKRING_INDEX_HISTOGRAM(name, ...) name,
  TOKRING_STATS_COUNTERS(TOKRING_INDEX_SCALAR) TOKRING_STATS_GAUGES(TOKRING_INDEX_SCALAR)
      TOKRING_STATS_ARRAYS(TOKRING_INDEX_ARRAY) TOKRING_STATS_HISTOGRAMS(TOKRING_INDEX_HISTOGRAM) kCount
#undef TOKRING_INDEX_SCALAR
#undef TOKRING_INDEX_ARRAY
#undef TOKRING_INDEX_HISTOGRAM
};
inline constexpr size_t kNumStats = static_cast<size_t>(StatIndex::kCount);

constexpr std::array<StatRow, kNumStats> stats_table() {
  std::array<StatRow, kNumStats> rows{{
#define TOKRING_ROW_COUNTER(name) {#name, 'c', 0, 1, 1, 1, nullptr, 0},
#define TOKRING_ROW_GAUGE(name) {#name, 'g', 0, 1, 1, 1, nullptr, 0},
#define TOKRING_ROW_ARRAY(name, size) {#name, 'c', 0, size, 1, 1, nullptr, 0},
#define TOKRING_ROW_HISTOGRAM(name, scale, instances, ...) \
  {#name, 'h', 0, instances, std::size(kBounds_##name) + 2, scale, kBounds_##name, std::size(kBounds_##name)},
      TOKRING_STATS_COUNTERS(TOKRING_ROW_COUNTER) TOKRING_STATS_GAUGES(TOKRING_ROW_GAUGE)
          TOKRING_STATS_ARRAYS(TOKRING_ROW_ARRAY) TOKRING_STATS_HISTOGRAMS(TOKRING_ROW_HISTOGRAM)
#undef TOKRING_ROW_COUNTER
#undef TOKRING_ROW_GAUGE
#undef TOKRING_ROW_ARRAY
#undef TOKRING_ROW_HISTOGRAM
  }};
  uint32_t next = 0;
  for (StatRow& row : rows) {
    row.first_word = next;
    next += row.instances * row.words;
  }
  return rows;
}
inline constexpr auto kStatsTable = stats_table();
inline constexpr uint32_t kNumTableWords =
    kStatsTable.back().first_word + kStatsTable.back().instances * kStatsTable.back().words;

constexpr uint32_t stat_word(StatIndex index) { return kStatsTable[static_cast<size_t>(index)].first_word; }

// ---- channel blocks, behind the table ----
enum ChannelWord : uint32_t {
#define TOKRING_CHANNEL_WORD(name) kWord_##name,
  TOKRING_CHANNEL_STATS(TOKRING_CHANNEL_WORD) kWord_hop_sum,
#undef TOKRING_CHANNEL_WORD
};
inline constexpr std::string_view kChannelNames[] = {
#define TOKRING_CHANNEL_NAME(name) #name,
    TOKRING_CHANNEL_STATS(TOKRING_CHANNEL_NAME)
#undef TOKRING_CHANNEL_NAME
};
inline constexpr uint32_t kHopBuckets = std::size(kBounds_hop_seconds) + 1;
inline constexpr uint32_t kChannelWords = (kWord_hop_sum + 1 + kHopBuckets + 15) / 16 * 16;

constexpr uint32_t channel_word(uint32_t peer) { return kNumTableWords + peer * kChannelWords; }
inline constexpr uint32_t kNumStatsWords = kNumTableWords + kMaxPeers * kChannelWords;

// Bucket of a value: the first whose bound is >= value; the last one is +Inf.
constexpr uint32_t bucket_of(const double* bounds, uint32_t num_bounds, double value) {
  return static_cast<uint32_t>(std::lower_bound(bounds, bounds + num_bounds, value) - bounds);
}

constexpr uint64_t stats_hash() {
  Fnv1a hash;
  for (const StatRow& row : kStatsTable) {
    hash.text(row.name)
        .number(static_cast<uint64_t>(row.kind))
        .number(row.first_word)
        .number(row.instances)
        .number(row.words);
    for (uint32_t i = 0; i < row.num_bounds; ++i) hash.number(static_cast<uint64_t>(row.bounds[i] * 1e6));
  }
  for (std::string_view name : kChannelNames) hash.text(name);
  return hash.number(kChannelWords).number(kMaxPeers).value();
}
inline constexpr uint64_t kStatsHash = stats_hash();

// ---- the page's own header; the words follow at kStatsHeaderBytes ----
#define TOKRING_STATS_HEADER_FIELDS(X) \
  X(uint64_t, magic)                   \
  X(uint32_t, stats_version)           \
  X(uint32_t, role)                    \
  X(uint64_t, stats_hash)              \
  X(uint64_t, page_bytes)              \
  X(uint32_t, index)                   \
  X(uint32_t, pid)                     \
  X(uint64_t, process_start_time)
struct StatsHeader {
#define TOKRING_DECLARE(type, name) type name;
  TOKRING_STATS_HEADER_FIELDS(TOKRING_DECLARE)
#undef TOKRING_DECLARE
};
inline constexpr size_t kStatsHeaderBytes = 128;
inline constexpr size_t kStatsPageBytes = (kStatsHeaderBytes + 8ULL * kNumStatsWords + 4095) / 4096 * 4096;
static_assert(sizeof(StatsHeader) == 48 && sizeof(StatsHeader) <= kStatsHeaderBytes);

}  // namespace tokring
