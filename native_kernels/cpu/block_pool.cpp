#include "block_pool.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <random>
#include <utility>

namespace tokring::cpu {

BlockPool::BlockPool(int64_t num_blocks)
    : references_(static_cast<std::size_t>(num_blocks)),
      cached_(static_cast<std::size_t>(num_blocks)),
      digest_of_(static_cast<std::size_t>(num_blocks)),
      secret_(std::random_device()() | uint64_t{std::random_device()()} << 32),
      chains_(std::bit_ceil(static_cast<std::size_t>(num_blocks) + 1), -1),
      next_(static_cast<std::size_t>(num_blocks)),
      links_(static_cast<std::size_t>(num_blocks) + 1),
      num_free_(num_blocks) {
  stack_.reserve(static_cast<std::size_t>(num_blocks));
  for (int64_t block = num_blocks; block-- > 0;) stack_.push_back(static_cast<int32_t>(block));
  const auto ends = static_cast<int32_t>(num_blocks);
  links_.back() = {ends, ends};
}

int32_t BlockPool::take_one() {
  int32_t block;
  if (!stack_.empty()) {
    block = stack_.back();
    stack_.pop_back();
  } else {
    block = links_.back().after;
    unlink(block);
    forget(block);
  }
  references_[block] = 1;
  return block;
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

int64_t BlockPool::find(const Digest& digest) const {
  int32_t block = chain_of(digest);
  while (block >= 0 && digest_of_[block] != digest) block = next_[block];
  return block;
}

void BlockPool::insert(const Digest& digest, int64_t block) {
  if (cached_[block] != 0 || find(digest) >= 0) return;
  digest_of_[block] = digest;
  next_[block] = std::exchange(chain_of(digest), static_cast<int32_t>(block));
  cached_[block] = 1;
  note(BlockEvent::kStored, digest);
}

void BlockPool::forget(int64_t block) {
  if (cached_[block] == 0) return;
  int32_t* link = &chain_of(digest_of_[block]);
  while (*link != block) link = &next_[*link];
  *link = next_[block];
  cached_[block] = 0;
  note(BlockEvent::kRemoved, digest_of_[block]);
}

void BlockPool::forget_all() {
  for (int32_t block : queue()) {
    unlink(block);
    stack_.push_back(block);
  }
  std::fill(chains_.begin(), chains_.end(), -1);
  cached_.assign(cached_.size(), 0);
  note(BlockEvent::kCleared, Digest{});
}

void BlockPool::note(BlockEvent event, const Digest& digest) {
  if (!logs_events_) return;
  events_.push_back(static_cast<uint8_t>(event));
  events_.insert(events_.end(), digest.begin(), digest.end());
}

std::vector<uint8_t> BlockPool::take_events() { return std::exchange(events_, {}); }

bool BlockPool::index_is_sound() const {
  std::size_t num_cached = 0;
  for (std::size_t block = 0; block < cached_.size(); ++block) {
    if (cached_[block] == 0) continue;
    ++num_cached;
    if (find(digest_of_[block]) != static_cast<int64_t>(block)) return false;
  }
  std::size_t num_chained = 0;
  for (int32_t block : chains_) {
    for (; block >= 0; block = next_[block]) ++num_chained;
  }
  return num_cached == num_chained;
}

const int32_t& BlockPool::chain_of(const Digest& digest) const {
  uint64_t word;
  std::memcpy(&word, digest.data(), sizeof word);
  word = (word ^ secret_) * 0x9E3779B97F4A7C15;
  return chains_[(word ^ word >> 32) & (chains_.size() - 1)];
}

int32_t& BlockPool::chain_of(const Digest& digest) {
  return const_cast<int32_t&>(std::as_const(*this).chain_of(digest));
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
