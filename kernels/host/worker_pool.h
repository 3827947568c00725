// The threads of a rank: how many work on a call, and who runs its tasks.
//
// NOTE [Threads of a rank]
//
// A call that is large enough is cut into tasks, whose borders depend on the call alone, never on
// the number of threads; so neither do its bits. The calling thread and the workers of the process
// take the tasks in ascending order, one after the other. The caller takes part, so a call ends
// also where no worker comes, because others keep the cores busy.
//
// The tasks of a collective are its channels, and a channel waits for the same channel of its
// peers. Ascending order is why ranks with different numbers of threads cannot wait for each other
// in a circle. Of the channels that are not finished on all ranks take the lowest: the threads that
// could run it are busy with lower channels at most, and these are finished.
//
// The pool is ours and not torch's. A thread of torch's pool (GNU OpenMP) polls for some
// milliseconds after each parallel region, and at its barriers, on cores that other ranks may want;
// it cannot be told NOTE [Busy cores], a fork leaves it unusable in the child, and this module
// would have to be built for one torch. The number of threads is torch's all the same.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringcomm::host {

// Tasks are worth another thread from so many bytes per thread on while workers are awake, which
// they are for 10 us after each call: two threads then share 50 us of work in 25.4.
constexpr uint64_t kBytesPerThread = 512 << 10;

// And so many in all are worth waking workers. On a virtual machine of 2 cores (Zen 4) the caller
// needs 12 us to wake a worker that has slept for 0.5 ms, and 34 us after 5 ms; the worker begins
// after 34 and 84 us. So two threads are ahead from some 50 and 120 us of work on. One thread takes
// the norm of 3 MiB in 120 us, adds up 4 MiB, moves 5 MiB in an update, and 1 MiB in an all-reduce
// of two ranks.
constexpr uint64_t kBytesToWakeFor = 8 << 20;

// Ranks that together have more threads than cores work alone on collectives: their peers work on
// the same call on the same cores. With 2 ranks of 2 threads on 2 cores 4 MiB took 1.4 to 2.4 times
// as long as with one thread each, and 64 MiB 1.0 to 1.2 times (Zen 4).

// Test knobs, set before the first call.
inline uint64_t bytes_to_wake_for = kBytesToWakeFor;
inline bool crowds = false;  // workers take part all the same

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
void limit_threads_without_communicator(int most, bool is_exact);

// Where torch says how many threads its own operators use (at::get_num_threads); null: 1.
void ask_torch_for_threads(int (*threads)());

// Threads for so many bytes, of those that there are.
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
