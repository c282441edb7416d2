// KV blocks 0 … n - 1 with reference counts: in use, free, or free with cached content.
#pragma once

#include <cstdint>
#include <vector>

namespace tokring::cpu {

// A free block without content is on a stack. A free block with cached content is in a list, oldest first: handed out
// last, and from the front. Everything costs O(1) a block. Not for several threads.
class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const { return num_free_; }
  std::vector<int32_t>& references() { return references_; }
  std::vector<uint8_t>& cached() { return cached_; }

  // Takes `count` blocks with one reference each; the caller knows that as many are free. Returns how many of them had
  // cached content: the last ones.
  int64_t allocate(int64_t count, int64_t* blocks);
  // One reference more for a block in use, or for a free one with cached content.
  void share(int64_t block);
  // One reference less; the block must be in use.
  void release(int64_t block);
  // Free blocks lose their content; blocks in use will, once released, join the stack.
  void forget_cached();

  // The free blocks: the stack, bottom first; those with content, oldest first. For tests.
  const std::vector<int32_t>& stack() const { return stack_; }
  std::vector<int32_t> queue() const;

 private:
  struct Links {
    int32_t before, after;
  };

  void append(int32_t block);
  void unlink(int32_t block);

  std::vector<int32_t> references_;
  std::vector<uint8_t> cached_;
  std::vector<int32_t> stack_;
  std::vector<Links> links_;  // one more than blocks: the last one is both ends of the list
  int64_t num_free_;
};

}  // namespace tokring::cpu
