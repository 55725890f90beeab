#include "common/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace kdtree {
namespace {

// Rounding mode and flush-to-zero as the C++ standard library starts a thread, for as long as it
// lives: results may not depend on what the caller, or whoever made the worker threads, set for
// itself.
class DefaultFloatMode {
 public:
#if defined(__SSE2__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Waking a thread takes 5 to 50 µs, so that a smaller share of a job is sooner done by the caller.
constexpr int64_t kMinShareNs = 30000;

struct Job {
  int64_t num_items = 0;
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<int64_t> next{0};

  void work() {
    DefaultFloatMode float_mode;
    for (int64_t item = next++; item < num_items; item = next++) body(context, item);
  }
};

// Waits for jobs on its own threads. Never destroyed: its threads may outlive static destructors.
class Pool {
 public:
  // Some items of the job on up to `num_workers` threads of the pool, the rest on the caller.
  void run(Job& job, int num_workers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_threads(num_workers);
      job_ = &job;
      seats_ = std::min(num_workers, num_threads_);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    seats_ = 0;
    idle_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  void start_threads(int num_workers) {
    for (; num_threads_ < num_workers; ++num_threads_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: those there are do the work
      }
    }
  }

  void serve();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  Job* job_ = nullptr;
  int num_threads_ = 0;
  int seats_ = 0;   // threads that may still join the job
  int active_ = 0;  // threads at work on it
};

// Processors of the process when the library was loaded. An engine may pin the calling thread to
// one of them later; the pool's threads must not inherit that.
cpu_set_t initial_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_SET(0, &set);
  return set;
}

const cpu_set_t kProcessors = initial_processors();
std::atomic<int> thread_limit{0};
std::atomic<Pool*> pool{nullptr};
std::mutex pool_in_use;

void Pool::serve() {
  pthread_setaffinity_np(pthread_self(), sizeof kProcessors, &kProcessors);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return seats_ > 0; });
    --seats_;
    ++active_;
    Job* const job = job_;
    lock.unlock();
    job->work();
    lock.lock();
    if (--active_ == 0) idle_.notify_one();
  }
}

// The threads of a pool do not survive a fork: the child starts with a new one.
void forget_pool_in_child() {
  pool = nullptr;
  new (&pool_in_use) std::mutex;
}

const int kForkHandler = pthread_atfork(nullptr, nullptr, forget_pool_in_child);

}  // namespace

int num_threads() {
  const int limit = thread_limit;
  return limit > 0 ? limit : std::max(1, CPU_COUNT(&kProcessors));
}

void set_num_threads(int num_threads) {
  thread_limit = num_threads;
}

void detail::parallel_for(int64_t num_items, int64_t item_ns, void (*body)(void*, int64_t),
                          void* context) {
  Job job;
  job.num_items = num_items;
  job.body = body;
  job.context = context;
  const int64_t shares = std::min(num_items, num_items * item_ns / kMinShareNs);
  const int num_workers = static_cast<int>(std::min<int64_t>(num_threads(), shares)) - 1;
  std::unique_lock<std::mutex> lock(pool_in_use, std::defer_lock);
  if (num_workers <= 0 || !lock.try_lock()) {
    job.work();
    return;
  }
  if (pool == nullptr) pool = new Pool;
  pool.load()->run(job, num_workers);
}

}  // namespace kdtree
