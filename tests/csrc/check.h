// What the host tests share: checks that say what to repeat, a seeded generator, and the errors
// that one fp32 operation may make.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "rl_logp/arithmetic.h"

namespace host_test {

inline uint64_t seed = 1;  // or a test binary's argument
inline const char* running = "";

[[noreturn, gnu::format(printf, 4, 5)]] inline void fail(
    const char* file, int line, const char* condition, const char* format, ...) {
  std::printf("%s:%d: %s: expected %s; ", file, line, running, condition);
  std::va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("; seed %llu\n", static_cast<unsigned long long>(seed));
  std::exit(1);
}

// CHECK(condition, what was there, as for printf)
#define CHECK(condition, ...) \
  ((condition) ? (void)0 : host_test::fail(__FILE__, __LINE__, #condition, __VA_ARGS__))

struct Test {
  const char* name;
  void (*run)();
};

inline int run_all(int argc, char** argv, std::initializer_list<Test> tests) {
  if (argc > 1) seed = std::strtoull(argv[1], nullptr, 0);
  for (const Test& test : tests) {
    running = test.name;
    test.run();
  }
  std::printf("%zu tests passed\n", tests.size());
  return 0;
}

// splitmix64, written out: the standard's distributions differ from library to library.
class Random {
 public:
  uint64_t bits() {
    uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }
  uint64_t below(uint64_t limit) { return bits() % limit; }
  bool chance(double probability) { return uniform(0, 1) < probability; }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53;
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform(0x1p-60, 1)));
    return radius * std::cos(6.283185307179586 * uniform(0, 1));
  }
  // A random significand and an exponent in [low, high).
  float magnitude(int low, int high) {
    const float significand =
        rl_logp::bits_float(0x3f800000u | static_cast<uint32_t>(bits() >> 41));
    return std::ldexp(significand, low + static_cast<int>(below(high - low)));
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  uint64_t state_ = seed;
};

inline bool same_bits(float a, float b) { return rl_logp::float_bits(a) == rl_logp::float_bits(b); }

inline bool same_bits(double a, double b) {
  return rl_logp::double_bits(a) == rl_logp::double_bits(b);
}

// Half an ulp, at most, of a result of fp32, relative to it.
constexpr long double kRounding = 0x1p-24L;
// exp2_approx on the host: an ulp.
constexpr long double kExp2Error = 2 * kRounding;

}  // namespace host_test
