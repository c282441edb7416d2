#include "block_pool.hpp"

#include <cstddef>

namespace tokring::cpu {

BlockPool::BlockPool(int64_t num_blocks)
    : references_(static_cast<std::size_t>(num_blocks)),
      cached_(static_cast<std::size_t>(num_blocks)),
      links_(static_cast<std::size_t>(num_blocks) + 1),
      num_free_(num_blocks) {
  stack_.reserve(static_cast<std::size_t>(num_blocks));
  for (int64_t block = num_blocks; block-- > 0;) stack_.push_back(static_cast<int32_t>(block));
  const auto ends = static_cast<int32_t>(num_blocks);
  links_.back() = {ends, ends};
}

int64_t BlockPool::allocate(int64_t count, int64_t* blocks) {
  int64_t num_evicted = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t block;
    if (!stack_.empty()) {
      block = stack_.back();
      stack_.pop_back();
    } else {
      block = links_.back().after;
      unlink(block);
      cached_[block] = 0;
      ++num_evicted;
    }
    references_[block] = 1;
    blocks[i] = block;
  }
  num_free_ -= count;
  return num_evicted;
}

void BlockPool::share(int64_t block) {
  if (references_[block]++ == 0) {
    unlink(static_cast<int32_t>(block));
    --num_free_;
  }
}

void BlockPool::release(int64_t block) {
  if (--references_[block] > 0) return;
  ++num_free_;
  if (cached_[block] != 0) {
    append(static_cast<int32_t>(block));
  } else {
    stack_.push_back(static_cast<int32_t>(block));
  }
}

void BlockPool::forget_cached() {
  for (int32_t block : queue()) {
    unlink(block);
    stack_.push_back(block);
  }
  cached_.assign(cached_.size(), 0);
}

std::vector<int32_t> BlockPool::queue() const {
  const auto ends = static_cast<int32_t>(num_blocks());
  std::vector<int32_t> blocks;
  for (int32_t block = links_.back().after; block != ends; block = links_[block].after) blocks.push_back(block);
  return blocks;
}

void BlockPool::append(int32_t block) {
  Links& ends = links_.back();
  links_[block] = {ends.before, static_cast<int32_t>(links_.size() - 1)};
  links_[ends.before].after = block;
  ends.before = block;
}

void BlockPool::unlink(int32_t block) {
  links_[links_[block].before].after = links_[block].after;
  links_[links_[block].after].before = links_[block].before;
}

}  // namespace tokring::cpu
