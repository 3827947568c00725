// SPDX-License-Identifier: Apache-2.0

// The threads of a rank: their number, and the pool of workers that runs the tasks of a call.
//
// NOTE [Threads of a rank]
//
// A large call is cut into tasks. The borders depend on the call alone and not on the number of
// threads, so neither do the bits of the result. The calling thread and the workers of the process
// take the tasks in ascending order. The caller takes part, so a call also ends when no worker
// comes because other programs keep the cores busy.
//
// The tasks of a collective are its channels, and a channel waits for the same channel of the
// peers. Ranks with different numbers of threads cannot wait for each other in a circle, because
// tasks are taken in ascending order. Proof: take the lowest channel that is not finished on all
// ranks. The threads that could run it are busy with lower channels at most, and those are
// finished.
//
// The pool is not torch's. A thread of torch's pool (GNU OpenMP) polls for some milliseconds after
// each parallel region, and at its barriers, on cores that other ranks may need (see NOTE [Busy
// cores]). A fork leaves that pool unusable in the child, and this module would have to be built
// for one version of torch. Only the number of threads is torch's.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringcomm::host {

// The bytes per thread from which another thread is worth its cost while workers are awake. They
// stay awake for 10 us after a call; two threads then do 50 us of work in 25.4 us (Zen 4, 2 cores).
constexpr uint64_t kBytesPerThread = 512 << 10;

// The bytes of a call from which it is worth waking workers. On a virtual machine of 2 cores (Zen
// 4) the caller needs 12 us to wake a worker that has slept for 0.5 ms, and 34 us after 5 ms; the
// worker begins after 34 us or 84 us. So two threads are faster than one if the work takes more
// than 50 us or 120 us. In 120 us one thread takes the norm of 3 MiB, adds up 4 MiB, moves 5 MiB in
// an update, or moves 1 MiB in an all-reduce of two ranks.
constexpr uint64_t kBytesToWakeFor = 8 << 20;

// Ranks that have more threads than cores run collectives on their calling threads alone: their
// peers need the same cores for the same call. Two ranks of two threads on 2 cores took 1.4 to 2.4
// times as long for 4 MiB as with one thread each, and 1.0 to 1.2 times for 64 MiB (Zen 4).

// Test knobs, set before the first call.
inline uint64_t bytes_to_wake_for = kBytesToWakeFor;
inline bool crowds = false;  // true: workers take part although ranks have more threads than cores

// The number of threads that a rank's calls use: `most`, or torch's number if that is less.
class ThreadShare {
 public:
  // `is_exact`: `most` applies whatever torch's number is.
  ThreadShare(int most, bool is_exact);
  ~ThreadShare();
  ThreadShare(const ThreadShare&) = delete;
  ThreadShare& operator=(const ThreadShare&) = delete;

  // Returns the number of threads for a call that the calling thread makes now.
  int threads() const;

 private:
  int most_;
  bool is_exact_;
};

// Returns the number of threads for calls without a communicator: the minimum of all existing exact
// shares; without any, the minimum of all shares; without any, `most`.
int threads_without_communicator();
void limit_threads_without_communicator(int most);

// torch's function for the threads of its operators (at::get_num_threads); null: 1 thread.
void ask_torch_for_threads(int (*threads)());

// Returns the number of threads of a call that moves `bytes`: at most `threads`.
int threads_for(uint64_t bytes, int threads);

// Starts the workers that a call of `threads` threads needs besides its caller. Throws
// std::runtime_error, naming the limits that may be the cause, if the system refuses a thread.
void start_workers(int threads);

// One call's tasks.
struct Tasks {
  void (*run)(const void* of, int task);
  const void* of;
  int count;
  uint64_t bytes;   // approximate bytes that the loops of all tasks move
  bool is_crowded;  // the ranks have more threads than cores
  // Called by the caller about 100 times a second while it waits for workers; or null.
  void (*waiting)(const void* of);
};

// Runs all tasks and returns once they are done. Tasks must not throw.
void run_tasks(const Tasks& tasks, int threads);

// Runs task(i) for i < count, by up to `threads` threads.
template <class Task>
void run_tasks(int count, uint64_t bytes, int threads, const Task& task) {
  const auto run = [](const void* of, int i) { (*static_cast<const Task*>(of))(i); };
  run_tasks(Tasks{run, &task, count, bytes, false, nullptr}, threads);
}

// Calls run(begin, end) for parts of [0, elems) whose borders are multiples of `align`. bytes: the
// bytes that all parts move together.
template <class Run>
void run_in_parts(uint64_t elems, uint64_t align, uint64_t bytes, int threads, const Run& run) {
  const int used = threads_for(bytes, threads);
  if (used <= 1) return run(uint64_t(0), elems);
  // Several parts per thread, so that a delayed thread delays the others less.
  constexpr uint64_t kPartsPerThread = 4;
  const uint64_t units = (elems + align - 1) / align;
  uint64_t parts = bytes / kBytesPerThread * kPartsPerThread;
  const uint64_t most = uint64_t(used) * kPartsPerThread;
  parts = parts < most ? parts : most;
  parts = parts < units ? parts : units;
  run_tasks(int(parts), bytes, used, [&](int i) {
    const uint64_t begin = units * uint64_t(i) / parts * align,
                   end = units * (uint64_t(i) + 1) / parts * align;
    run(begin, end < elems ? end : elems);
  });
}

}  // namespace ringcomm::host
