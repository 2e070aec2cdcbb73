// SPDX-License-Identifier: Apache-2.0
//
// Products of tiles by the emulator's arithmetic and by the CPU's own, for test_amx_emulator.py on a CPU with AMX.
// Prints how many values were compared, how many differ, and how many are NaN on both sides with other bits.
#include "amx_emulator.c"
// After it, which says which parts of the C library it needs.
#include <immintrin.h>

static uint32_t next_random(void) {
  static uint32_t state = 12345;
  state ^= state << 13;
  state ^= state >> 17;
  return state ^= state << 5;
}

// A sign and a mantissa at random, with exponents around 1, of any pattern, of 0 or 1, of 2^-30 to 2^29, of all finite.
static uint16_t random_bf16(int kind) {
  const uint32_t r = next_random(), sign_and_mantissa = r & 0x807f, other = r >> 20;
  switch (kind) {
    case 0:
      return (uint16_t)((r & 0x80ff) | 0x3f00);
    case 1:
      return (uint16_t)r;
    case 2:
      return (uint16_t)(sign_and_mantissa | (other % 4 ? 0x3f80 : 0));
    case 3:
      return (uint16_t)(sign_and_mantissa | (97 + other % 60) << 7);
    default:
      return (uint16_t)(sign_and_mantissa | other % 255 << 7);
  }
}

static void fill(union tile* tile, int rows, int dwords, int kind) {
  memset(tile, 0, sizeof *tile);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < dwords; ++j) {
      tile->dwords[i][j] = (uint32_t)random_bf16(kind) << 16 | random_bf16(kind);
    }
  }
}

__attribute__((target("amx-tile,amx-bf16"))) static void multiply_natively(union tile* c, const union tile* a,
                                                                           const union tile* b,
                                                                           const struct configuration* shapes) {
  _tile_loadconfig(shapes);
  _tile_loadd(0, c, kRowBytes);
  _tile_loadd(1, a, kRowBytes);
  _tile_loadd(2, b, kRowBytes);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, kRowBytes);
  _tile_release();
}

static void multiply_emulated(union tile* c, const union tile* a, const union tile* b, int rows, int pairs) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);  // as the emulator does: denormals are zeros on the way in and out
  multiply_bf16(c, a, b, rows, pairs);
  _mm_setcsr(before);
}

static bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

int main(void) {
  enum { kRequestPermission = 0x1023, kTileData = 18, kProducts = 50000 };
  if (system_call(SYS_arch_prctl, kRequestPermission, kTileData, 0, 0, 0, 0) != 0) return 77;
  long compared = 0, different = 0, other_nans = 0;
  for (int i = 0; i < kProducts; ++i) {
    const int kind = i % 5, rows = 1 + next_random() % kRows, columns = 1 + next_random() % kColumns;
    const int pairs = 1 + next_random() % kRows;
    struct configuration shapes = {.palette = 1};
    shapes.rows[0] = shapes.rows[1] = (uint8_t)rows;
    shapes.row_bytes[0] = shapes.row_bytes[2] = (uint16_t)(4 * columns);
    shapes.row_bytes[1] = (uint16_t)(4 * pairs);
    shapes.rows[2] = (uint8_t)pairs;
    union tile a, b, emulated;
    fill(&a, rows, pairs, kind);
    fill(&b, pairs, columns, kind);
    fill(&emulated, rows, columns, kind);
    union tile native_result = emulated;
    multiply_natively(&native_result, &a, &b, &shapes);
    multiply_emulated(&emulated, &a, &b, rows, pairs);
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        const uint32_t one = native_result.dwords[m][n], other = emulated.dwords[m][n];
        ++compared;
        if (one != other) is_nan(one) && is_nan(other) ? ++other_nans : ++different;
      }
    }
  }
  printf("%ld %ld %ld\n", compared, different, other_nans);
  return 0;
}
