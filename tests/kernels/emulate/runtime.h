// A GPU's threads on the host: the threads of a block as fibers (fast, one at a time) or as OS threads (QK_OS_THREADS:
// a race detector sees real races). Blocks run one after the other, last first, so that what one leaves in shared memory
// is garbage to the next.
#pragma once

#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "launch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

constexpr int kThreads = 256;
constexpr int kWave = 32;
constexpr size_t kStack = 128 << 10;

inline thread_local int current = 0;
inline int64_t block = 0;
inline uint32_t slots[kThreads];

#if defined(QK_OS_THREADS)

// A barrier of `size` threads that can be used again.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int turn = turn_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn != turn_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int size_, arrived_ = 0, turn_ = 0;
};

inline Meeting block_meeting(kThreads);
inline Meeting wave_meetings[kThreads / kWave] = {Meeting(kWave), Meeting(kWave), Meeting(kWave), Meeting(kWave),
                                                  Meeting(kWave), Meeting(kWave), Meeting(kWave), Meeting(kWave)};

inline void meet_block() { block_meeting.wait(); }
inline void meet_wave() { wave_meetings[current / kWave].wait(); }

inline void run_block(void (*kernel)(qk::WorkList), const qk::WorkList& list) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      current = i;
      kernel(list);
    });
  }
  for (auto& thread : threads) thread.join();
}

#else

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done = false;
  int waits = 0;  // meetings that it has come to
};

inline std::vector<Fiber> fibers(kThreads);
inline ucontext_t scheduler;
inline jmp_buf scheduler_jump;
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_size = 0;
inline void (*running)(qk::WorkList) = nullptr;
inline const qk::WorkList* argument = nullptr;

// Back to the scheduler, which lets every other thread come to the same point first.
inline void yield([[maybe_unused]] bool last = false) {
  Fiber& me = fibers[static_cast<size_t>(current)];
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_stack, scheduler_stack_size);
  swapcontext(&me.context, &scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  // A jump needs no system call, as swapcontext does for the signal mask.
  if (_setjmp(me.jump) == 0) _longjmp(scheduler_jump, 1);
#endif
}

// All threads of a block make the same sequence of meetings, so one round of the scheduler is one meeting.
inline void meet_block() { yield(); }
inline void meet_wave() { yield(); }

inline void body() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
  running(*argument);
  fibers[static_cast<size_t>(current)].done = true;
  yield(true);
}

// Let a fiber run to its next meeting. Out of line: a jump back may clobber the locals of the function that it returns to.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack.data(), fiber.stack.size());
#endif
#if defined(__SANITIZE_ADDRESS__)
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  if (_setjmp(scheduler_jump) == 0) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    swapcontext(&scheduler, &fiber.context);
  }
#endif
}

inline void run_block(void (*kernel)(qk::WorkList), const qk::WorkList& list) {
  running = kernel;
  argument = &list;
  for (int i = 0; i < kThreads; ++i) {
    Fiber& fiber = fibers[static_cast<size_t>(i)];
    fiber.done = fiber.started = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack.data(), fiber.stack.size());
#endif
    makecontext(&fiber.context, body, 0);
  }
  for (int left = kThreads; left > 0;) {
    for (int i = 0; i < kThreads; ++i) {
      Fiber& fiber = fibers[static_cast<size_t>(i)];
      if (fiber.done) continue;
      current = i;
      resume(fiber);
      if (fiber.done) --left;
    }
  }
}

#endif

}  // namespace emulation

namespace qk {

int thread_index() { return emulation::current; }
int64_t block_index() { return emulation::block; }
void barrier() { emulation::meet_block(); }

// The value of the thread at a place in the block, which is one of the same wave.
uint32_t value_of(uint32_t value, int place) {
  emulation::slots[emulation::current] = value;
  emulation::meet_wave();
  const uint32_t found = emulation::slots[place];
  emulation::meet_wave();
  return found;
}

uint32_t shuffle_xor(uint32_t value, int distance) { return value_of(value, emulation::current ^ distance); }

uint32_t shuffle(uint32_t value, int source) {
  return value_of(value, emulation::current / emulation::kWave * emulation::kWave + source);
}

const char* start(void (*kernel)(WorkList), int64_t tiles, int threads, const WorkList& list, int64_t) {
  if (threads != emulation::kThreads) return "the emulation runs blocks of 256 threads";
  for (int64_t tile = tiles; tile-- > 0;) {
    emulation::block = tile;
    emulation::run_block(kernel, list);
  }
  return nullptr;
}

}  // namespace qk
