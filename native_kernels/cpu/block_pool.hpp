// KV blocks 0 … n - 1: in use, free, or free with content that can be found by its digest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokring::cpu {

using Digest = std::array<uint8_t, 32>;  // of a block's tokens and of all before them

enum class BlockEvent : uint8_t { kStored = 0, kRemoved = 1, kCleared = 2 };
constexpr std::size_t kEventBytes = 1 + sizeof(Digest);

// A free block without content is on a stack. A free block with cached content is in a list, oldest first: handed out
// last, and from the front. Everything costs O(1) a block. Not for several threads.
class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const { return num_free_; }
  std::vector<int32_t>& references() { return references_; }
  std::vector<uint8_t>& cached() { return cached_; }

  // Takes `count` blocks with one reference each; the caller knows that as many are free. Content is given up last.
  template <class Id>
  void allocate(int64_t count, Id* blocks) {
    for (int64_t i = 0; i < count; ++i) blocks[i] = take_one();
    num_free_ -= count;
  }
  // One reference more for a block in use, or for a free one with cached content.
  void share(int64_t block);
  // One reference less; the block must be in use.
  void release(int64_t block);

  // The block with this content, or -1.
  int64_t find(const Digest& digest) const;
  // Notes the content of a block in use, unless either is known already.
  void insert(const Digest& digest, int64_t block);
  // A block in use loses its content, if it has any.
  void forget(int64_t block);
  // All blocks lose their content.
  void forget_all();

  // From now on every change of the index is noted, for those outside who follow it.
  void log_events() { logs_events_ = true; }
  // What was noted since the last call, oldest first: kEventBytes each, a BlockEvent and a digest (zeros for kCleared).
  std::vector<uint8_t> take_events();

  // The free blocks: the stack, bottom first; those with content, oldest first. For tests.
  const std::vector<int32_t>& stack() const { return stack_; }
  std::vector<int32_t> queue() const;
  // Whether the index holds exactly the blocks marked as cached, each under its own digest. For tests.
  bool index_is_sound() const;

 private:
  struct Links {
    int32_t before, after;
  };

  int32_t take_one();
  void note(BlockEvent event, const Digest& digest);
  int32_t& chain_of(const Digest& digest);
  const int32_t& chain_of(const Digest& digest) const;
  void append(int32_t block);
  void unlink(int32_t block);

  std::vector<int32_t> references_;
  std::vector<uint8_t> cached_;
  std::vector<Digest> digest_of_;  // valid where cached_
  // The index: a chain of blocks for each of a power of two of hashes, through the blocks themselves. No allocation.
  // Digests are even already, but whoever writes prompts can choose some bits of them: not the chains, which a secret
  // picks.
  uint64_t secret_;
  std::vector<int32_t> chains_;  // first block, or -1
  std::vector<int32_t> next_;    // of a cached block
  std::vector<int32_t> stack_;
  std::vector<Links> links_;  // one more than blocks: the last one is both ends of the list
  int64_t num_free_;
  bool logs_events_ = false;
  std::vector<uint8_t> events_;
};

}  // namespace tokring::cpu
