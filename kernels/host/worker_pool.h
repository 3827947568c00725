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
// for one version of torch. The number of threads is torch's.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringcomm::host {

// The bytes per thread from which another thread pays while workers are awake. They stay awake for
// 10 us after a call, and two threads then share 50 us of work in 25.4 us (Zen 4, 2 cores).
constexpr uint64_t kBytesPerThread = 512 << 10;

// The bytes of a call from which it pays to wake workers. On a virtual machine of 2 cores (Zen 4)
// the caller needs 12 us to wake a worker that has slept for 0.5 ms, and 34 us after 5 ms; the
// worker begins after 34 and 84 us. Two threads are therefore ahead from 50 and 120 us of work on.
// In 120 us one thread takes the norm of 3 MiB, adds up 4 MiB, moves 5 MiB in an update, and moves
// 1 MiB in an all-reduce of two ranks.
constexpr uint64_t kBytesToWakeFor = 8 << 20;

// Ranks that have more threads than cores run collectives on their calling threads alone: their
// peers need the same cores for the same call. Two ranks of two threads on 2 cores took 1.4 to 2.4
// times as long for 4 MiB as with one thread each, and 1.0 to 1.2 times for 64 MiB (Zen 4).

// Test knobs, set before the first call.
inline uint64_t bytes_to_wake_for = kBytesToWakeFor;
inline bool crowds = false;  // true: workers take part although ranks have more threads than cores

// How many threads a rank's calls use: `most`, or torch's number if that is less.
class ThreadShare {
 public:
  // `is_exact`: `most` counts whatever torch's number is.
  ThreadShare(int most, bool is_exact);
  ~ThreadShare();
  ThreadShare(const ThreadShare&) = delete;
  ThreadShare& operator=(const ThreadShare&) = delete;

  // As of now, on the calling thread.
  int threads() const;

 private:
  int most_;
  bool is_exact_;
};

// The same of calls that have no communicator: the least of all exact shares that exist, or else of
// all shares, or else `most`.
int threads_without_communicator();
void limit_threads_without_communicator(int most);

// Where torch says how many threads its own operators use (at::get_num_threads); null: 1.
void ask_torch_for_threads(int (*threads)());

// The threads that a call of `bytes` uses, at most `threads`.
int threads_for(uint64_t bytes, int threads);

// Starts the workers that `threads` threads need beside a caller. Throws std::runtime_error, naming
// the limits that may be in the way, if the system starts no more of them.
void start_workers(int threads);

// One call's tasks.
struct Tasks {
  void (*run)(const void* of, int task);
  const void* of;
  int count;
  uint64_t bytes;   // that the loops of all tasks move, about
  bool is_crowded;  // ranks have more threads than cores
  // Called by the caller, some 100 times a second while it waits for workers; or null.
  void (*waiting)(const void* of);
};

// Returns once all tasks are done. They must not throw.
void run_tasks(const Tasks& tasks, int threads);

// task(i) for i < count, by up to `threads` threads.
template <class Task>
void run_tasks(int count, uint64_t bytes, int threads, const Task& task) {
  const auto run = [](const void* of, int i) { (*static_cast<const Task*>(of))(i); };
  run_tasks(Tasks{run, &task, count, bytes, false, nullptr}, threads);
}

// run(begin, end) for parts of [0, elems) whose borders are multiples of `align`; bytes are those
// that the whole moves.
template <class Run>
void run_in_parts(uint64_t elems, uint64_t align, uint64_t bytes, int threads, const Run& run) {
  const int used = threads_for(bytes, threads);
  if (used <= 1) return run(uint64_t(0), elems);
  // Several parts a thread, so that one which is held up holds up the others less.
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
