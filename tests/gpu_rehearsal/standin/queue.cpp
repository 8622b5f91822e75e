// What a GPU would do meanwhile: the work of each stream in its order, streams side by side.
//
// Without STANDIN_LATE a launch runs its work before it returns; only what waits for other processes (NCCL, and graphs,
// which may hold it) runs in a thread beside. With it, nothing runs until somebody waits for it, and then only what is
// needed: whoever reads too early, or forgets that one stream has to wait for another, reads what was there before.
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "standin.h"

struct Work {
  uint64_t number;
  Body body;
  std::set<uint64_t> after;
  double born;
};
struct ById {
  bool operator()(const CUstream_st* a, const CUstream_st* b) const {
    return a->id != b->id ? a->id < b->id : a < b;
  }
};

static std::mutex& guard = *new std::mutex;
static std::condition_variable& changed = *new std::condition_variable;
static std::map<CUstream_st*, std::deque<Work>, ById>& queues = *new std::map<CUstream_st*, std::deque<Work>, ById>;
static std::map<uint64_t, CUstream_st*>& unfinished = *new std::map<uint64_t, CUstream_st*>;
static std::set<CUstream_st*>& busy = *new std::set<CUstream_st*>;
static std::deque<uint64_t>& beside = *new std::deque<uint64_t>;
static std::map<ncclComm_t, uint64_t>& latest = *new std::map<ncclComm_t, uint64_t>;  // work of each communicator
static uint64_t issued = 0;
using Lock = std::unique_lock<std::mutex>;

bool works_late() {
  static const char* order = getenv("STANDIN_LATE");
  return order && *order;
}
static bool newest_first() {
  static bool newest = works_late() && !strcmp(getenv("STANDIN_LATE"), "newest");
  return newest;
}

// Runs the first work of a stream; the caller has seen that it may. The lock is let go meanwhile.
static void run_head(CUstream_st* stream, Lock& lock) {
  Work work = queues[stream].front();
  busy.insert(stream);
  lock.unlock();
  work.body();
  lock.lock();
  queues[stream].pop_front();
  busy.erase(stream);
  unfinished.erase(work.number);
  changed.notify_all();
}

// The stream whose first work has to run for `number`'s sake.
static CUstream_st* needed_by(uint64_t number) {
  CUstream_st* stream = unfinished.at(number);
  for (bool found = true; found;) {
    found = false;
    for (uint64_t earlier : queues[stream].front().after) {
      auto entry = unfinished.find(earlier);
      if (entry == unfinished.end()) continue;
      stream = entry->second;
      found = true;
      break;
    }
  }
  return stream;
}

static void reach_locked(uint64_t number, Lock& lock) {
  while (unfinished.count(number)) {
    CUstream_st* stream = needed_by(number);
    if (busy.count(stream))
      changed.wait(lock);
    else
      run_head(stream, lock);
  }
}

void reach(uint64_t number) {
  Lock lock(guard);
  reach_locked(number, lock);
}

void reach_end(cudaStream_t stream) {
  Lock lock(guard);
  auto& queue = queues[stream];
  if (!queue.empty()) reach_locked(queue.back().number, lock);
}

// The last work of the stream that is to go first among those with any, which are at least `age` old; 0: none.
static uint64_t next_of_all(double age) {
  uint64_t found = 0;
  double now = now_ms();
  for (auto& [stream, queue] : queues) {
    if (queue.empty() || now - queue.front().born < age) continue;
    found = queue.front().number;
    if (!newest_first()) break;
  }
  return found;
}

void reach_end_of_all() {
  Lock lock(guard);
  while (uint64_t number = next_of_all(0)) reach_locked(number, lock);
}

bool is_done(uint64_t number) {
  Lock lock(guard);
  return !unfinished.count(number);
}

// The thread beside: what is `apart`, in its order; and what has become late.
static void run_beside() {
  for (;;) {
    Lock lock(guard);
    if (works_late()) {
      while (uint64_t number = next_of_all(LATE_MS)) reach_locked(number, lock);
      lock.unlock();
      usleep(10000);
      continue;
    }
    changed.wait(lock, [] { return !beside.empty(); });
    uint64_t number = beside.front();
    beside.pop_front();
    reach_locked(number, lock);
  }
}

uint64_t enqueue(cudaStream_t stream, const char*, Body body, std::set<uint64_t> after, ncclComm_t comm) {
  Lock lock(guard);
  bool apart = comm != nullptr;
  static bool started = false;
  if (!started && (apart || works_late())) {
    started = true;
    std::thread(run_beside).detach();
  }
  uint64_t number = ++issued;
  // NCCL runs the operations of a communicator in the order of the calls, on whatever streams: its launches wait for
  // each other on a stream of its own (`deviceStream` in its enqueue.cc), in a graph, too.
  if (comm) after.insert(std::exchange(latest[comm], number));
  unfinished[number] = stream;
  queues[stream].push_back({number, std::move(body), std::move(after), now_ms()});
  if (works_late()) return number;
  if (!apart) {
    // Behind a collective that waits for another process the host does not wait: a launch never does.
    for (const Work& earlier : queues[stream])
      for (uint64_t other : earlier.after) apart = apart || unfinished.count(other);
    apart = apart || queues[stream].size() > 1;
  }
  if (apart) {
    beside.push_back(number);
    changed.notify_all();
  } else {
    reach_locked(number, lock);
  }
  return number;
}
