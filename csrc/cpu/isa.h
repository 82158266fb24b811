// One function body compiled for several instruction sets, chosen at run time.
//
// -march=native would make a wheel for one machine only; target_clones needs ifunc and does not
// support templates. The body must be always inlined (HVD_BODY).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
// Exactly the features that isa_level checks, since a hypervisor may mask single ones.
#define HVD_V4_FEATURES "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi2"
#if defined(__clang__)
#define HVD_V4 __attribute__((target(HVD_V4_FEATURES)))
#else
#define HVD_V4 __attribute__((target(HVD_V4_FEATURES ",prefer-vector-width=512")))
#endif
#define HVD_V3 __attribute__((target("avx2,fma,bmi2")))
#endif

namespace hvd_compress {

// Body has a static HVD_BODY function run(args...).
template <typename Body>
struct Isa {
  template <typename... A>
  static auto plain(A... args) {
    return Body::run(args...);
  }
#ifdef HVD_V4
  template <typename... A>
  HVD_V3 static auto v3(A... args) {
    return Body::run(args...);
  }
  template <typename... A>
  HVD_V4 static auto v4(A... args) {
    return Body::run(args...);
  }
#endif
};

// The highest level that torch's environment variable allows: "default", "avx2" or any other.
inline int isa_allowed() {
  const char* name = std::getenv("ATEN_CPU_CAPABILITY");
  if (!name) return 4;
  return !std::strcmp(name, "default") ? 0 : !std::strcmp(name, "avx2") ? 3 : 4;
}

// The level of this processor: 4 (AVX-512), 3 (AVX2) or 0.
inline int isa_level() {
#ifdef HVD_V4
  static const int level = [] {
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi2");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
    return std::min(v4 ? 4 : v3 ? 3 : 0, isa_allowed());
  }();
  return level;
#else
  return 0;
#endif
}

template <typename Body, typename... A>
auto run_best(A... args) {
#ifdef HVD_V4
  if (isa_level() == 4) return Isa<Body>::v4(args...);
  if (isa_level() == 3) return Isa<Body>::v3(args...);
#endif
  return Isa<Body>::plain(args...);
}

}  // namespace hvd_compress
