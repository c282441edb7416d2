// Choosing tokens from logits, and what is done to logits before. One row at a time: rows never influence each other.
#pragma once

#include <cstdint>

namespace tokring::cpu {

struct SamplingRow {
  float temperature;  // below 1e-5: greedy
  int32_t top_k;      // <= 0: off
  float top_p;        // >= 1: off
  float min_p;        // <= 0: off
  uint64_t seed;
  uint32_t choice;
  uint64_t position;
  uint32_t draw;
};

// The sampled token id, or -1 if the row holds NaN or +inf, or nothing but -inf.
int32_t sample_row(const float* logits, int64_t vocab_size, const SamplingRow& row);

struct Penalties {
  float repetition;  // 1 = none
  float presence;    // 0 = none
  float frequency;   // 0 = none
};

// ids[0, num_prompt) are the prompt, ids[num_prompt, num_ids) the output so far; ids outside the vocabulary are
// ignored.
void penalize_row(float* logits, int64_t vocab_size, const int32_t* ids, int64_t num_prompt, int64_t num_ids,
                  const Penalties& penalties);

// logits := -inf where the mask's bit (bit i % 32 of word i / 32) is 0
void mask_row(float* logits, int64_t vocab_size, const uint32_t* mask);

// Log-softmax of one row: of `chosen`, its rank (1 = likeliest; ties by id), and of the `k` likeliest in order.
void logprobs_row(const float* logits, int64_t vocab_size, int32_t chosen, int64_t k, float* chosen_logprob,
                  int32_t* rank, int32_t* top_ids, float* top_logprobs);

}  // namespace tokring::cpu
