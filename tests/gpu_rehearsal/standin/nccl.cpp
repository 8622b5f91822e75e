// NCCL between processes of this machine, over a file that they all map. Sums are added up in the order of the ranks.
//
// NCCL's documentation, "NCCL API": a communicator is one rank a device; buffers are on the device of the communicator
// (here checked, where NCCL would fault); an aborted communicator ends what waits in it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "nccl_numbers.h"
#include "standin.h"

constexpr size_t SLOT = 4 << 20;  // bytes of a rank that all see at once
constexpr double MEET_MS = 60000;

struct Shared {
  std::atomic<int> attached, arrived, generation;
  char uuids[64][16];
};
// From one rank to another: empty, or a piece of what is sent.
struct Mailbox {
  std::atomic<size_t> bytes;
  char data[256 << 10];
};
struct ncclComm {
  Shared* shared;
  char* slots;
  Mailbox* mail;
  int size, rank, device;
  std::atomic<bool> aborted{false};
};

// All ranks, or false where the communicator was aborted meanwhile.
static bool meet(ncclComm* comm) {
  int generation = comm->shared->generation;
  if (++comm->shared->arrived == comm->size) {
    comm->shared->arrived = 0;
    comm->shared->generation++;
    return true;
  }
  while (comm->shared->generation == generation) {
    if (comm->aborted) return false;
    usleep(50);
  }
  return true;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int count = 0;
  const char* folder = getenv("TMPDIR");
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/nccl-%d-%d-%ld", folder ? folder : "/tmp", getpid(), count++, (long)time(nullptr));
  return ncclSuccess;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* found, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  log_line("COMMUNICATOR size=%d rank=%d device=%d", size, rank, current_device);
  open_context(current_device, "ncclCommInitRank");
  int file = open(id.internal, O_RDWR | O_CREAT, 0600);
  size_t bytes = sizeof(Shared) + SLOT * size + sizeof(Mailbox) * size * size;
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return ncclSystemError;
  char* slots = (char*)mapped + sizeof(Shared);
  auto* comm = new ncclComm{(Shared*)mapped, slots, (Mailbox*)(slots + SLOT * size), size, rank, current_device};
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, current_device);
  memcpy(comm->shared->uuids[rank], properties.uuid.bytes, 16);
  comm->shared->attached++;
  for (double began = now_ms(); comm->shared->attached < size; usleep(200))
    if (now_ms() - began > MEET_MS) return ncclRemoteError;
  if (rank == 0) unlink(id.internal);
  for (int one = 0; one < size; one++)
    for (int other = 0; other < one; other++)
      if (!memcmp(comm->shared->uuids[one], comm->shared->uuids[other], 16)) {
        log_line("VIOLATION NCCL: Duplicate GPU detected: rank %d and rank %d", other, one);
        return ncclInvalidUsage;
      }
  meet(comm);
  *found = comm;
  return ncclSuccess;
}
// Of a communicator that exists: each rank makes a new one of its colour, its number told by the first of them.
API ncclResult_t ncclCommSplit(ncclComm_t parent, int colour, int key, ncclComm_t* found, ncclConfig_t* config) {
  struct Entry {
    int colour, key;
    ncclUniqueId id;
  };
  auto* mine = (Entry*)(parent->slots + SLOT * parent->rank);
  mine->colour = colour, mine->key = key;
  ncclGetUniqueId(&mine->id);
  if (!meet(parent)) return ncclSystemError;
  int rank = 0, size = 0, first = -1;
  for (int other = 0; other < parent->size; other++) {
    auto* entry = (Entry*)(parent->slots + SLOT * other);
    if (entry->colour != colour) continue;
    if (first < 0) first = other;
    rank += entry->key < key || (entry->key == key && other < parent->rank);
    size++;
  }
  ncclUniqueId id = ((Entry*)(parent->slots + SLOT * first))->id;
  if (!meet(parent)) return ncclSystemError;
  *found = nullptr;
  return colour < 0 ? ncclSuccess : ncclCommInitRankConfig(found, size, id, rank, config);
}
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  log_line("ABORT rank=%d", comm->rank);
  comm->aborted = true;
  return ncclSuccess;
}
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;  // a dead peer is seen by NCCL's sockets at times, and at times by nobody
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
  *handle = (void*)1;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in's NCCL"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }

// What one rank sends to another, or gets from it.
struct Transfer {
  ncclComm* comm;
  cudaStream_t stream;
  char* buffer;
  size_t bytes;
  Mailbox* box;
  bool sends;
  size_t done = 0;

  bool move() {
    size_t waiting = box->bytes;
    if (done == bytes || (waiting > 0) == sends) return false;
    size_t count = sends ? std::min(bytes - done, sizeof box->data) : waiting;
    memcpy(sends ? box->data : buffer + done, sends ? buffer + done : box->data, count);
    done += count;
    box->bytes = sends ? count : 0;
    return true;
  }
};

// Between ncclGroupStart and ncclGroupEnd calls are collected, and posted together. Sends and receives then make progress
// together: two ranks that first send to each other do not wait for ever.
static thread_local int depth = 0;
static thread_local std::vector<std::function<ncclResult_t()>> grouped;
static thread_local std::vector<Transfer> transfers;

static ncclResult_t start_transfers() {
  if (transfers.empty()) return ncclSuccess;
  auto all = std::make_shared<std::vector<Transfer>>(std::move(transfers));
  transfers.clear();
  Body body = [all] {
    for (bool left = true; left && !all->front().comm->aborted;) {
      left = false;
      bool moved = false;
      for (Transfer& one : *all) {
        moved = one.move() || moved;
        left = left || one.done < one.bytes;
      }
      if (!moved) usleep(50);
    }
  };
  return submit(all->front().stream, "send and receive", body, all->front().comm) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

API ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (--depth) return ncclSuccess;
  auto calls = std::move(grouped);
  grouped.clear();
  for (auto& call : calls)
    if (ncclResult_t error = call()) return error;
  return start_transfers();
}

static ncclResult_t transfer(Transfer one, const char* name) {
  Block block = block_of(one.buffer);
  if (block.kind != Kind::device) {
    log_line("VIOLATION %s of host memory", name);
    return ncclInvalidArgument;
  }
  if (block.device != one.comm->device) log_line("VIOLATION %s of a buffer of another device", name);
  transfers.push_back(one);
  return depth ? ncclSuccess : start_transfers();
}
API ncclResult_t ncclSend(
    const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  Mailbox* box = comm->mail + comm->rank * comm->size + peer;
  return transfer({comm, stream, (char*)from, count * width_of(type), box, true}, "send");
}
API ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  Mailbox* box = comm->mail + peer * comm->size + comm->rank;
  return transfer({comm, stream, (char*)to, count * width_of(type), box, false}, "receive");
}

static ncclResult_t post(
    ncclComm* comm, cudaStream_t stream, const char* name, std::vector<const void*> buffers, Body body) {
  auto call = [=]() -> ncclResult_t {
    for (const void* buffer : buffers) {
      Block block = block_of(buffer);
      if (block.kind != Kind::device) {
        log_line("VIOLATION %s of host memory", name);
        return ncclInvalidArgument;
      }
      if (block.device != comm->device) log_line("VIOLATION %s of a buffer of another device", name);
    }
    if (stream_of(stream)->device != comm->device) log_line("VIOLATION %s on a stream of another device", name);
    return submit(stream, name, body, comm) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  };
  if (!depth) return call();
  grouped.push_back(call);
  return ncclSuccess;
}

// All ranks show `bytes` of theirs, a slot at a time; `use(at, count)` sees every rank's slot.
static void exchange(ncclComm* comm, const char* mine, size_t bytes, const std::function<void(size_t, size_t)>& use) {
  for (size_t at = 0; at < bytes; at += SLOT) {
    size_t count = std::min(SLOT, bytes - at);
    memcpy(comm->slots + SLOT * comm->rank, mine + at, count);
    if (!meet(comm)) return;
    use(at, count);
    if (!meet(comm)) return;
  }
}

// The reduced slot, added up in the order of the ranks.
static std::vector<char> reduced(ncclComm* comm, size_t bytes, ncclDataType_t type, int op) {
  std::vector<char> sum(comm->slots, comm->slots + bytes);
  size_t count = bytes / width_of(type);
  for (int rank = 1; rank < comm->size; rank++)
    combine(sum.data(), comm->slots + SLOT * rank, count, type, op == ncclAvg ? (int)ncclSum : op);
  if (op == ncclAvg) scale(sum.data(), count, type, 1.0 / comm->size);
  return sum;
}

API ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return post(comm, stream, "all-reduce", {from, to}, [=] {
    exchange(comm, (const char*)from, count * width_of(type), [&](size_t at, size_t bytes) {
      memcpy((char*)to + at, reduced(comm, bytes, type, op).data(), bytes);
    });
  });
}

API ncclResult_t ncclReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return post(comm, stream, "reduce", {from}, [=] {
    exchange(comm, (const char*)from, count * width_of(type), [&](size_t at, size_t bytes) {
      if (comm->rank == root) memcpy((char*)to + at, reduced(comm, bytes, type, op).data(), bytes);
    });
  });
}

API ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return post(comm, stream, "broadcast", {to}, [=] {
    const char* mine = (const char*)(comm->rank == root ? from : to);
    exchange(comm, mine, count * width_of(type), [&](size_t at, size_t bytes) {
      memcpy((char*)to + at, comm->slots + SLOT * root, bytes);
    });
  });
}
API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclAllGather(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return post(comm, stream, "all-gather", {from, to}, [=] {
    size_t part = count * width_of(type);
    std::vector<char> own((const char*)from, (const char*)from + part);  // `to` may hold `from`
    exchange(comm, own.data(), part, [&](size_t at, size_t bytes) {
      for (int rank = 0; rank < comm->size; rank++) memcpy((char*)to + rank * part + at, comm->slots + SLOT * rank, bytes);
    });
  });
}

API ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return post(comm, stream, "reduce-scatter", {from, to}, [=] {
    size_t part = count * width_of(type);
    for (int owner = 0; owner < comm->size; owner++)
      exchange(comm, (const char*)from + owner * part, part, [&](size_t at, size_t bytes) {
        if (owner == comm->rank) memcpy((char*)to + at, reduced(comm, bytes, type, op).data(), bytes);
      });
  });
}
