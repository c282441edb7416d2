// SHA-256 (FIPS 180-4): what prefix cache blocks are found by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block_pool.hpp"

namespace tokring::cpu {

// Digest i of `digests` = SHA-256 of what is before it (first `previous`) and the i-th `width` bytes of `data`, which
// must be a multiple of 4 bytes. `use_instructions`: the processor's, where it has them.
void sha256_chain(const Digest& previous, const uint8_t* data, int64_t num_blocks, int64_t width, Digest* digests,
                  bool use_instructions);

}  // namespace tokring::cpu
