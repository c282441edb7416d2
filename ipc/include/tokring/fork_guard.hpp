// Handles die in a forked child: the mapping is not inherited (MADV_DONTFORK), so touching it would be a SIGSEGV.
#pragma once
#include <pthread.h>

#include "tokring/errors.hpp"

namespace tokring {

class ForkGuard {
 public:
  ForkGuard() : born_in_(current()) {}

  bool in_child() const { return born_in_ != current(); }

  // Throws HandleDead in a forked child.
  void check() const {
    if (in_child()) [[unlikely]] {
      throw HandleDead("this handle belongs to the parent process: a forked child must open its own channel");
    }
  }

 private:
  // Counts forks on the child's side. A plain integer: the child has one thread when the handler runs.
  static unsigned& current() {
    static unsigned generation = 0;
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++current(); });
    (void)registered;
    return generation;
  }

  unsigned born_in_;
};

}  // namespace tokring
