// NCCL's types and operators, on the host. Half precision is computed in float32 and rounded to the nearest, ties to even.
#pragma once

#include <nccl.h>

#include <cmath>
#include <cstdint>
#include <cstring>

inline int width_of(ncclDataType_t type) {
  static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

struct Half {
  _Float16 value;
  operator float() const { return value; }
  Half(float number) : value((_Float16)number) {}
};
struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
  }
  BFloat16(float number) {
    uint32_t wide;
    memcpy(&wide, &number, 4);
    bits = number != number ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};

// Calls `use` with a pointer of the type's own kind, the value of which does not matter.
template <class Use>
void with_type(ncclDataType_t type, Use use) {
  switch (type) {
    case ncclInt8: return use((int8_t*)nullptr);
    case ncclUint8: return use((uint8_t*)nullptr);
    case ncclInt32: return use((int32_t*)nullptr);
    case ncclUint32: return use((uint32_t*)nullptr);
    case ncclInt64: return use((int64_t*)nullptr);
    case ncclUint64: return use((uint64_t*)nullptr);
    case ncclFloat16: return use((Half*)nullptr);
    case ncclFloat32: return use((float*)nullptr);
    case ncclFloat64: return use((double*)nullptr);
    case ncclBfloat16: return use((BFloat16*)nullptr);
    default: return;
  }
}

template <class Number>
Number combined(Number a, Number b, int op) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return a != a ? a : b != b ? b : a > b ? a : b;
    case ncclMin: return a != a ? a : b != b ? b : a < b ? a : b;
    default: return a + b;
  }
}

inline void combine(char* into, const char* other, size_t count, ncclDataType_t type, int op) {
  with_type(type, [=](auto* kind) {
    auto* a = (decltype(kind))into;
    auto* b = (decltype(kind))other;
    for (size_t i = 0; i < count; i++) a[i] = combined(a[i], b[i], op);
  });
}

inline void scale(char* numbers, size_t count, ncclDataType_t type, double factor) {
  with_type(type, [=](auto* kind) {
    auto* all = (decltype(kind))numbers;
    for (size_t i = 0; i < count; i++) all[i] = all[i] * factor;
  });
}
