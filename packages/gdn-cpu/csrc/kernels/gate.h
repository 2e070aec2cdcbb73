// SPDX-License-Identifier: Apache-2.0
//
// The gates of one lane each: g = -exp(A_log) softplus(a + dt_bias). A lane's value depends on that lane's operands
// only, so the gating kernel and the recurrence, which calls this for one head and several tokens, agree bit for bit.
#pragma once

#include "vector_math.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct SoftplusParams {
  float beta;
  float threshold;
};

// Below this, softplus(x) is exp(x) (1 - exp(x) / 2) in double precision, and rounding x to fp32 would cost more than
// the tolerance of g.
constexpr float kExponentialTail = -15.0f;
// Beyond this, exp(A_log) may leave the range of fp32.
constexpr float kLargeALog = 80.0f;

// Double precision for the few values that leave the range of fp32 on the way; Taylor series, error below 1e-15.
static double exp_double(double x) {
  if (x > 709.0) return __builtin_inf();
  if (x < -708.0) return 0.0;
  if (x != x) return x;
  const double shifter = 0x1.8p52;  // adding it rounds to an integer
  const double n = (x * 0x1.71547652b82fep+0 + shifter) - shifter;
  const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
  double sum = 1.0;
  for (int i = 13; i >= 1; --i) sum = 1.0 + sum * r / static_cast<double>(i);
  const std::uint64_t bits = static_cast<std::uint64_t>(static_cast<std::int64_t>(n) + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// softplus(a + dt_bias) may be as small as the A_log is large: multiply in double precision.
static float log_decay_edge(float a, float A_log, float dt_bias, float softplus_value, SoftplusParams softplus) {
  const double x = static_cast<double>(softplus.beta) * (static_cast<double>(a) + static_cast<double>(dt_bias));
  if (!(x < static_cast<double>(kExponentialTail))) {
    return static_cast<float>(-exp_double(static_cast<double>(A_log)) * static_cast<double>(softplus_value));
  }
  const double beta = static_cast<double>(softplus.beta);
  // Where softplus is 0 in fp32 (half the smallest subnormal or less), so is g, whatever A_log.
  const double e = exp_double(x);
  if (e / beta <= 0x1p-150) return -0.0f;
  return static_cast<float>(-exp_double(static_cast<double>(A_log) + x) * (1.0 - 0.5 * e) / beta);
}

static Vec log_decay_edges(unsigned edge_lanes, Vec g, Vec a, Vec A_log, Vec dt_bias, Vec softplus_value,
                           SoftplusParams softplus) {
  float g_lane[kLanes], a_lane[kLanes], A_log_lane[kLanes], dt_bias_lane[kLanes], softplus_lane[kLanes];
  store(g_lane, g);
  store(a_lane, a);
  store(A_log_lane, A_log);
  store(dt_bias_lane, dt_bias);
  store(softplus_lane, softplus_value);
  for (std::int64_t i = 0; i < kLanes; ++i) {
    if ((edge_lanes >> i) & 1u) {
      g_lane[i] = log_decay_edge(a_lane[i], A_log_lane[i], dt_bias_lane[i], softplus_lane[i], softplus);
    }
  }
  return load(g_lane);
}

// exp_A_log is exp(A_log), which a caller with many rows computes once.
GDN_INLINE Vec log_decay(Vec a, Vec A_log, Vec exp_A_log, Vec dt_bias, SoftplusParams params) {
  const Vec beta = set1(params.beta);
  const Vec x = add(a, dt_bias);
  const Vec scaled = mul(x, beta);
  const Mask is_linear = less(set1(params.threshold), scaled);
  const Vec softplus_value = select(is_linear, x, div(softplus(scaled), beta));
  const Vec g = neg(mul(exp_A_log, softplus_value));
  const Mask edge = either(less(scaled, set1(kExponentialTail)), less(set1(kLargeALog), abs(A_log)));
  const unsigned edge_lanes = lane_bits(edge);
  if (__builtin_expect(edge_lanes != 0, 0)) {
    return log_decay_edges(edge_lanes, g, a, A_log, dt_bias, softplus_value, params);
  }
  return g;
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
