// SPDX-License-Identifier: Apache-2.0
//
// exp, softplus, sigmoid and silu on Vec, each within 2 ulp, each lane by itself. The coefficients are minimax fits
// whose own error is below 5e-9.
#pragma once

#include "simd/simd.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. Subnormal results are right, beyond the range it is 0 or infinity.
GDN_INLINE Vec exp(Vec x) {
  // Just past the thresholds of 0 and infinity. The order of the operands lets NaN through.
  x = max(set1(-104.0f), min(set1(89.0f), x));
  const Vec n = round(mul(x, set1(0x1.715476p+0f)));
  // ln(2) in two parts; n times the first is exact, so the levels without FMA lose nothing.
  Vec r = fma(n, set1(-0x1.62e4p-1f), x);
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);
  Vec p = set1(0.00138146920753f);
  p = fma(p, r, set1(0.00836877336647f));
  p = fma(p, r, set1(0.0416683894617f));
  p = fma(p, r, set1(0.166665201838f));
  p = fma(p, r, set1(0.499999934368f));
  const Vec tail = fma(mul(r, r), p, r);
  return scale_by_power_of_two(add(tail, set1(1.0f)), n);
}

// log(1 + y) for 0 <= y <= 1: with s = y / (2 + y), log(1 + y) = 2 atanh(s) = y - s (y - s^2 P(s^2)).
GDN_INLINE Vec log1p_unit(Vec y) {
  const Vec s = div(y, add(y, set1(2.0f)));
  const Vec z = mul(s, s);
  Vec p = set1(0.280244757073f);
  p = fma(p, z, set1(0.279991369318f));
  p = fma(p, z, set1(0.400216993868f));
  p = fma(p, z, set1(0.666664131246f));
  return fma(neg(s), fma(neg(z), p, y), y);
}

// log(1 + exp(x)), from exp(-|x|) so that nothing overflows.
GDN_INLINE Vec softplus(Vec x) { return add(max(zero(), x), log1p_unit(exp(neg(abs(x))))); }

// 1 / (1 + exp(-x)), from exp(-|x|) so that the small values keep their precision.
GDN_INLINE Vec sigmoid(Vec x) {
  const Vec e = exp(neg(abs(x)));
  return div(select(less(x, zero()), e, set1(1.0f)), add(e, set1(1.0f)));
}

GDN_INLINE Vec silu(Vec x) { return mul(x, sigmoid(x)); }

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
