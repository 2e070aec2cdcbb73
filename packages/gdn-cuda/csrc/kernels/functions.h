// SPDX-License-Identifier: Apache-2.0
//
// Functions of one fp32 value, from products and quotients that IEEE defines: a GPU, and the emulator, give the same
// bits.
#pragma once

#include <device.h>

namespace gdn::cuda {

using namespace gdn::device;  // NOLINT: the names of device.h are the language of these files

// e^x to about one unit in the last place. x = n ln 2 + r; e^r by its Taylor series, |r| <= ln 2 / 2.
GDN_DEVICE float exponential(float x) {
  if (x != x) return x;
  if (x > 88.72284f) return from_bits(0x7f800000u);
  if (x < -103.98f) return 0.0f;
  const float shifter = 12582912.0f;  // adding it rounds to an integer
  const float n = (x * 1.44269504f + shifter) - shifter;
  float r = multiply_add(n, -0.693145752f, x);
  r = multiply_add(n, -1.42860677e-6f, r);
  float sum = 1.98412698e-4f;
  sum = multiply_add(sum, r, 1.38888889e-3f);
  sum = multiply_add(sum, r, 8.33333333e-3f);
  sum = multiply_add(sum, r, 4.16666667e-2f);
  sum = multiply_add(sum, r, 1.66666667e-1f);
  sum = multiply_add(sum, r, 0.5f);
  sum = multiply_add(sum, r, 1.0f);
  sum = multiply_add(sum, r, 1.0f);
  // In two steps, since 2^n may lie outside of the range where the result does not.
  const int exponent = static_cast<int>(n), half = exponent >> 1;
  return sum * from_bits(static_cast<unsigned>(half + 127) << 23) *
         from_bits(static_cast<unsigned>(exponent - half + 127) << 23);
}

// log(1 + y) for y in [0, 1]: twice the series of atanh(y / (2 + y)).
GDN_DEVICE float log_one_plus(float y) {
  const float s = y / (2.0f + y);
  const float z = s * s;
  float sum = 6.66666667e-2f;
  sum = multiply_add(sum, z, 7.69230769e-2f);
  sum = multiply_add(sum, z, 9.09090909e-2f);
  sum = multiply_add(sum, z, 1.11111111e-1f);
  sum = multiply_add(sum, z, 1.42857143e-1f);
  sum = multiply_add(sum, z, 0.2f);
  sum = multiply_add(sum, z, 3.33333333e-1f);
  const float twice = s + s;
  return multiply_add(twice * z, sum, twice);
}

GDN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// g = -exp(A_log) softplus(x), with softplus(x) = log(1 + e^(beta x)) / beta, or x beyond the threshold.
GDN_DEVICE float log_decay(float A_log, float x, float beta, float threshold) {
  const float scaled = beta * x;
  if (scaled > threshold) return -(exponential(A_log) * x);
  const float softplus =
      (scaled > 0.0f ? scaled + log_one_plus(exponential(-scaled)) : log_one_plus(exponential(scaled))) / beta;
  // Where softplus is 0, so is g, however large A_log: infinity times 0 must not come up.
  if (softplus == 0.0f) return -0.0f;
  // exp(A_log) may leave the range of fp32 where the product with so small a softplus, e^scaled, does not.
  if (scaled < -15.0f && A_log > 60.0f) return -(exponential(A_log + scaled) / beta);
  return -(exponential(A_log) * softplus);
}

}  // namespace gdn::cuda
