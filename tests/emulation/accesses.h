// What -fsanitize=thread calls at every access: calls emulation::record(address, size, write,
// code), which has to be declared before. Included by races.cpp and scripts/lab/sectors.cpp.
#define HVD_ACCESS(name, size, write)                                     \
  void __tsan_##name(void* address) {                                     \
    emulation::record(address, size, write, __builtin_return_address(0)); \
  }
#define HVD_ACCESSES(bytes)                       \
  HVD_ACCESS(read##bytes, bytes, false)           \
  HVD_ACCESS(write##bytes, bytes, true)           \
  HVD_ACCESS(unaligned_read##bytes, bytes, false) \
  HVD_ACCESS(unaligned_write##bytes, bytes, true)
// Atomic operations in torch's host code; atomicOr announces its own.
#define HVD_ATOMIC(bits, type)                                               \
  type __tsan_atomic##bits##_load(const volatile type* at, int) {            \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                            \
  }                                                                          \
  void __tsan_atomic##bits##_store(volatile type* at, type value, int) {     \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                           \
  }                                                                          \
  type __tsan_atomic##bits##_fetch_add(volatile type* at, type value, int) { \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                  \
  }                                                                          \
  type __tsan_atomic##bits##_fetch_sub(volatile type* at, type value, int) { \
    return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);                  \
  }                                                                          \
  type __tsan_atomic##bits##_fetch_or(volatile type* at, type value, int) {  \
    return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST);                   \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_read_range(void* address, size_t size) {
  emulation::record(address, size, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t size) {
  emulation::record(address, size, true, __builtin_return_address(0));
}
HVD_ACCESS(read1, 1, false)
HVD_ACCESS(write1, 1, true)
HVD_ACCESSES(2)
HVD_ACCESSES(4)
HVD_ACCESSES(8)
HVD_ACCESSES(16)
HVD_ATOMIC(8, unsigned char)
HVD_ATOMIC(32, unsigned)
HVD_ATOMIC(64, unsigned long)
}
