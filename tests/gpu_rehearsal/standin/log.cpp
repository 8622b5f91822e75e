// The log that tests read: one line an event, `THREAD WHAT key=value …`.
#include <time.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "standin.h"

std::recursive_mutex& state = *new std::recursive_mutex;  // never destroyed: torch's threads outlive main

static FILE* log_file() {
  static FILE* file = [] {
    const char* path = getenv("STANDIN_LOG");
    return path && *path ? fopen(path, "a") : nullptr;
  }();
  return file;
}

int thread_number() {
  static std::atomic<int> threads{0};
  static thread_local int number = threads++;
  return number;
}

void log_line(const char* format, ...) {
  FILE* file = log_file();
  if (!file) return;
  Locked lock(state);
  va_list arguments;
  va_start(arguments, format);
  fprintf(file, "%d ", thread_number());
  vfprintf(file, format, arguments);
  fputc('\n', file);
  fflush(file);  // a process that is killed leaves what it had done
  va_end(arguments);
}

long number_from(const char* variable, long otherwise) {
  const char* text = getenv(variable);
  return text && *text ? atol(text) : otherwise;
}

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
