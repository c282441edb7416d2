// The exceptions of the native layer. Full, empty and stale are results and never thrown.
#pragma once
#include <stdexcept>
#include <string>

namespace tokring {

// The peer wrote what the protocol forbids: this channel must be closed, nothing else is harmed.
struct PeerCorrupt : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The handshake failed: other layout, other sizes, refused, timed out, or the peer is gone.
struct AttachError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The handle was used after close(), or in a forked child, or a frame after release().
struct HandleDead : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tokring
