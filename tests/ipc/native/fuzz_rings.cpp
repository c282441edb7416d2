// Fuzzes both readers and both writers with forged control words and forged ring bytes: everything is read right or
// refused as PeerCorrupt. Each polled frame is parsed in a heap block of exactly its length, so that AddressSanitizer
// sees a read of one byte too many.
//
// With clang: -fsanitize=fuzzer,address,undefined. With g++: -DSTANDALONE gives a main() that mutates sound frames:
//   fuzz_rings RUNS SEED      prints how many rings were read and how many refused
//   fuzz_rings seeds FOLDER   writes sound inputs for the other build to start from
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "tokring/channel.hpp"

using namespace tokring;

namespace {

constexpr uint64_t kRingBytes = 4096;  // a frame is at most 1,024 bytes
constexpr uint32_t kSlots = 64;
constexpr size_t kMaxFrames = kRingBytes / kFrameAlignment;

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "fuzz_rings: %s\n", what);
  std::abort();
}

volatile uint64_t sink;
uint64_t num_read, num_refused;

void read_all(const std::byte* start, uint64_t bytes) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < bytes; ++i) sum += static_cast<uint64_t>(start[i]);
  sink = sum;
}

// Reads what a consumer reads: every column that the parsed frame announces.
void read_columns(const OutFrame& frame) {
  const std::byte* start = frame.address;
  const uint64_t rows = frame.header.count;
  if (frame.header.type == static_cast<uint16_t>(FrameType::STEP)) {
    read_all(start + frame.at.stream_slot, 4 * rows);
    read_all(start + frame.at.slot_generation, 4 * rows);
    if (has_flag(frame.header.flags, FrameFlag::MULTI_TOKEN)) read_all(start + frame.at.num_tokens, 4 * rows);
    read_all(start + frame.at.token_id, 4ULL * frame.num_token_ids);
    read_all(start + frame.at.finish, sizeof(FinishRecord) * frame.num_finished);
    for (uint32_t i = 0; i < frame.num_finished; ++i) {
      FinishRecord record;
      std::memcpy(&record, start + frame.at.finish + i * sizeof record, sizeof record);
      if (record.stream_slot >= kSlots || record.reason == 0) broken("a finish row was let through");
    }
  }
  if (frame.header.type == static_cast<uint16_t>(FrameType::READY)) {
    read_all(start + sizeof(FrameHeader), sizeof(ReadyRecord));
  }
  if (frame.logprobs.count > 0)
    read_all(start + frame.logprobs.at.rank, frame.logprobs.at.end - frame.logprobs.at.rank);
}

void read_request(const RequestFrame& request) {
  const RequestRecord& record = request.record;
  if (record.stream_slot >= kSlots || record.slot_generation == 0) broken("a request was let through");
  read_all(request.bytes.data() + request.ids, 4ULL * record.num_ids);
  for (uint64_t offset = 0; offset < record.extension_bytes;) {
    ExtensionHeader extension;
    std::memcpy(&extension, request.bytes.data() + request.extensions + offset, sizeof extension);
    read_all(request.bytes.data() + request.extensions + offset + sizeof extension, extension.bytes);
    offset += sizeof extension + round_up(extension.bytes, 8);
  }
}

// A ring in private memory; the mirror is a second copy, as the second mapping would show it.
struct ForgedRing {
  uint64_t write_position = 0, read_position = 0, wake_at = kAwake;
  std::unique_ptr<std::byte[]> data = std::make_unique<std::byte[]>(2 * kRingBytes);
  RingMemory memory() { return {&write_position, &read_position, &wake_at, data.get(), kRingBytes}; }
  void fill(const uint8_t* bytes, size_t size) {
    size = std::min<size_t>(size, kRingBytes);
    if (size > 0) std::memcpy(data.get(), bytes, size);
    std::memcpy(data.get() + kRingBytes, data.get(), kRingBytes);
  }
};

// In a block of exactly the frame's length.
RingFrame in_own_block(const RingFrame& frame, std::unique_ptr<std::byte[]>& block) {
  block.reset(new std::byte[frame.header.length]);
  std::memcpy(block.get(), frame.address, frame.header.length);
  return {block.get(), frame.header};
}

void read_ring(ForgedRing& ring, bool out) {
  RingReader<> reader(ring.memory());
  RingFrame frame;
  std::unique_ptr<std::byte[]> block;
  try {
    for (size_t frames = 0; reader.poll(frame); ++frames) {
      if (frames >= kMaxFrames) broken("more frames than the ring holds");
      RingFrame own = in_own_block(frame, block);
      if (out) {
        read_columns(parse_out_frame(own, kSlots));
      } else {
        read_request(copy_request_frame(own, kSlots));
      }
    }
    reader.release();
    reader.arm();
    ++num_read;
  } catch (const PeerCorrupt&) {
    ++num_refused;
  }
}

// A writer whose reader forges its words between any two operations.
void write_ring(ForgedRing& ring, const uint64_t* words, size_t num_words) {
  RingWriter<> writer(ring.memory());
  ring.write_position = ring.read_position = 0;
  for (size_t i = 0; i < num_words; ++i) {
    ring.read_position = words[i];
    ring.wake_at = words[num_words - 1 - i];
    uint64_t length = (1 + words[i] % 4) * kFrameAlignment;
    std::byte* frame = writer.claim(length);
    if (frame != nullptr) {
      if (frame < ring.data.get() || frame + length > ring.data.get() + 2 * kRingBytes) broken("claimed outside");
      std::memset(frame, 1, length);
      FrameHeader header{};
      header.length = static_cast<uint32_t>(length);
      writer.commit(header, 0, false);
    }
    writer.publish();
    if (writer.free_bytes() > kRingBytes) broken("more space than the ring has");
    writer.reader_sleeps();
  }
}

struct Input {
  uint64_t words[6];  // write_position of REQ and OUT, then what the writers' peer forges
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input{};
  std::memcpy(&input, data, std::min(size, sizeof input));
  const size_t used = std::min(size, sizeof input);
  for (bool out : {false, true}) {
    ForgedRing ring;
    // Most inputs shall get past the positions: the plain ones name what is there.
    uint64_t forged = input.words[out];
    ring.write_position = forged % 4 != 0 ? round_up(std::min<uint64_t>(size - used, kRingBytes), 64) : forged;
    ring.fill(data + used, size - used);
    read_ring(ring, out);
    write_ring(ring, input.words, std::size(input.words));
  }
  return 0;
}

#ifdef STANDALONE
namespace {

using Random = std::mt19937_64;

// Frames as the real writers make them, to be mutated: ring bytes from position 0 on.
class SoundFrames {
 public:
  explicit SoundFrames(Random& random) : random_(random) {}

  std::vector<uint8_t> make(bool requests) {
    RingWriter<> writer(ring_.memory());
    for (uint64_t frames = 1 + random_() % 3; frames > 0; --frames) {
      const bool crc = random_() % 8 == 0;
      if (requests) {
        add_request(writer, crc);
      } else if (random_() % 4 != 0) {
        add_step(writer, crc);
      } else {
        add_prompt_logprobs(writer, crc);
      }
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(ring_.data.get());
    return {bytes, bytes + writer.position()};
  }

 private:
  void add_step(RingWriter<>& writer, bool crc) {
    StepShape shape;
    shape.num_rows = random_() % 8;
    shape.multi_token = random_() % 2 == 0;
    shape.num_token_ids = shape.multi_token ? 2 * shape.num_rows : shape.num_rows;
    shape.num_finished = random_() % 3;
    shape.num_logprob_rows = std::min<uint64_t>(random_() % 4, shape.num_token_ids);
    shape.logprobs_width = random_() % 6;
    const StepOffsets at = step_offsets(shape);
    std::byte* frame = writer.claim(at.length);
    if (frame == nullptr || at.length > max_frame_bytes(kRingBytes)) return;
    std::memset(frame, 0, at.length);
    for (uint64_t row = 0; shape.multi_token && row < shape.num_rows; ++row)
      frame[at.num_tokens + 4 * row] = std::byte{2};
    for (uint64_t i = 0; i < shape.num_finished; ++i) {
      FinishRecord finish{};
      finish.reason = static_cast<uint16_t>(1 + random_() % 5);
      std::memcpy(frame + at.finish + i * sizeof finish, &finish, sizeof finish);
    }
    write_step_sections(frame, shape, at);
    writer.commit(step_header(shape, at), 1, crc);
  }

  void add_prompt_logprobs(RingWriter<>& writer, bool crc) {
    PromptLogprobsRecord record{1, 1, 0, static_cast<uint32_t>(random_() % 4)};
    const uint64_t rows = random_() % 8;
    const LogprobOffsets at = logprob_offsets(sizeof(FrameHeader) + sizeof record, rows, record.width, false);
    FrameHeader header{};
    header.length = static_cast<uint32_t>(round_up(at.end, kFrameAlignment));
    header.type = static_cast<uint16_t>(FrameType::PROMPT_LOGPROBS);
    header.count = static_cast<uint32_t>(rows);
    std::byte* frame = writer.claim(header.length);
    if (frame == nullptr) return;
    std::memcpy(frame + sizeof header, &record, sizeof record);
    writer.commit(header, 1, crc);
  }

  void add_request(RingWriter<>& writer, bool crc) {
    RequestRecord record{};
    record.slot_generation = 1;
    record.num_ids = static_cast<uint32_t>(random_() % 32);
    record.extension_bytes = random_() % 2 == 0 ? 24 : 0;
    FrameHeader header{};
    header.length = static_cast<uint32_t>(request_frame_bytes(record.num_ids, record.extension_bytes));
    header.type = static_cast<uint16_t>(FrameType::REQUEST);
    header.count = 1;
    std::byte* frame = writer.claim(header.length);
    if (frame == nullptr) return;
    std::memset(frame, 0, header.length);
    std::memcpy(frame + sizeof header, &record, sizeof record);
    const ExtensionHeader extension{static_cast<uint16_t>(ExtensionKind::CACHE_SALT), 0, 9};
    const uint64_t at = round_up(sizeof header + sizeof record + 4ULL * record.num_ids, 8);
    if (record.extension_bytes > 0) std::memcpy(frame + at, &extension, sizeof extension);
    writer.commit(header, 1, crc);
  }

  Random& random_;
  ForgedRing ring_;
};

std::vector<uint8_t> sound_input(Random& random, bool requests) {
  Input words{};
  for (uint64_t& word : words.words) word = 1;
  std::vector<uint8_t> input(sizeof words);
  std::memcpy(input.data(), &words, sizeof words);
  std::vector<uint8_t> frames = SoundFrames(random).make(requests);
  input.insert(input.end(), frames.begin(), frames.end());
  return input;
}

// Values that break parsers more often than random ones.
void mutate(std::vector<uint8_t>& input, Random& random) {
  for (uint64_t changes = random() % 5; changes > 0; --changes) {
    // Half of them where headers and counts stand: the first lines of the ring.
    const size_t span = random() % 2 == 0 ? input.size() : std::min<size_t>(input.size(), sizeof(Input) + 192);
    const size_t at = random() % span;
    constexpr uint64_t kEdges[] = {0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fffffff, 0xffffffff, ~0ULL, ~63ULL};
    const uint64_t value = random() % 2 == 0 ? random() : kEdges[random() % std::size(kEdges)];
    const size_t width = std::min<size_t>(1ULL << random() % 4, input.size() - at);
    std::memcpy(input.data() + at, &value, width);
  }
}

int write_seeds(const std::string& folder) {
  Random random(1);
  for (int i = 0; i < 64; ++i) {
    std::vector<uint8_t> input = sound_input(random, i % 2 == 0);
    FILE* file = std::fopen((folder + "/seed" + std::to_string(i)).c_str(), "wb");
    if (file == nullptr || std::fwrite(input.data(), 1, input.size(), file) != input.size()) return 1;
    std::fclose(file);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  if (std::string_view(arguments[1]) == "seeds") return write_seeds(arguments[2]);
  Random random(std::strtoull(arguments[2], nullptr, 10));
  for (uint64_t run = std::strtoull(arguments[1], nullptr, 10); run > 0; --run) {
    std::vector<uint8_t> input = sound_input(random, run % 2 == 0);
    mutate(input, random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("read %llu rings, refused %llu\n", static_cast<unsigned long long>(num_read),
              static_cast<unsigned long long>(num_refused));
}
#endif
