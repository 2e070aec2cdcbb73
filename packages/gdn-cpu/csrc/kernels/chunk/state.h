// SPDX-License-Identifier: Apache-2.0
//
// The state of a head between chunks: its update, M = decay M + k^T (decayed u), and the way from and to memory, where
// it lies as [K, V] or [V, K], fp32 or rounded.
#pragma once

#include "rows.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Rows of the state as a right operand.
template <class Engine>
GDN_INLINE void pack_state_rows(typename Engine::Element* panel, std::int64_t width, std::int64_t row,
                                std::int64_t column, const Vec* x) {
  if constexpr (!kIsFloat<typename Engine::Element>) {
    Engine::store_rows(panel + column * Engine::kStep, width * Engine::kStep, row, x);
  }
}

// What an update needs: k_steps and u are operands of `steps` steps; `sums` is for products of blocks.
template <class Engine>
struct Update {
  std::int64_t keys;
  bool has_state;
  float decay;
  const typename Engine::Element* k_steps;
  const typename Engine::Element* u;
  std::int64_t steps;
  float* sums;
  const Blas* blas;
};

// Rows of one panel, from their products x.
template <class Engine, int kRows, int kVectors>
GDN_INLINE void update_rows(const Update<Engine>& update, HeadState<Engine> panel, HeadState<Engine> to,
                            std::int64_t row, Vec (&x)[kRows][kVectors]) {
  constexpr std::int64_t width = kVectors * kLanes;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vec rows[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const std::int64_t index = (row + r + i) * width + j * kLanes;
        const float* values = panel.values + index;
        rows[i] = update.has_state ? fma(set1(update.decay), load(values), x[r + i][j]) : x[r + i][j];
        store(to.values + index, rows[i]);
      }
      pack_state_rows<Engine>(to.packed, width, row + r, j * kLanes, rows);
    }
  }
}

// The whole panel by a library.
template <class Engine, int kVectors>
void update_panel_at_once(const Update<Engine>& update, HeadState<Engine> panel, HeadState<Engine> to) {
  constexpr std::int64_t width = kVectors * kLanes;
  if (update.has_state) {
    for (std::int64_t i = 0; i < update.keys * width; i += kLanes) {
      store(to.values + i, mul(set1(update.decay), load(panel.values + i)));
    }
  }
  Engine::multiply(*update.blas, Blas::kTransposed, update.k_steps, update.keys, Blas::kAsIs, update.u, width,
                   update.keys, width, update.steps, update.has_state, to.values, width);
  if constexpr (!kIsFloat<typename Engine::Element>) {
    for (std::int64_t i = 0; i < update.keys * width; i += kLanes) store(to.packed + i, load(to.values + i));
  }
}

// `to` may be `panel` itself.
template <class Engine, int kVectors>
void update_panel(const Update<Engine>& update, HeadState<Engine> panel, HeadState<Engine> to) {
  constexpr int kRows = kTileRows<kVectors>;
  constexpr std::int64_t width = kVectors * kLanes;
  if constexpr (Engine::kSums == Sums::kOfChunks) {
    update_panel_at_once<Engine, kVectors>(update, panel, to);
  } else if constexpr (Engine::kSums == Sums::kOfBlocks) {
    for (std::int64_t block = 0; block < update.keys; block += 2 * kRowBlock) {
      const auto* first = update.k_steps + block * kTokens;
      const typename Engine::Element* const left[] = {first, first + kRowBlock * kTokens};
      const SumBlock sums[] = {{update.sums, width}, {update.sums + kRowBlock * width, width}};
      Engine::template multiply_blocks<2>(left, kTokens, update.u, width * 2, update.steps, kVectors, sums);
      for (std::int64_t row = 0; row < 2 * kRowBlock; row += kRows) {
        Vec x[kRows][kVectors];
        load_sums(update.sums, row, x);
        update_rows(update, panel, to, block + row, x);
      }
    }
  } else {
    const Left<Engine> k{update.k_steps, Engine::kStep, update.keys * Engine::kStep};
    for (std::int64_t row = 0; row < update.keys; row += kRows) {
      Vec x[kRows][kVectors];
      clear(x);
      accumulate<Engine>(x, rows_from(k, row), Right<Engine>{update.u, width * Engine::kStep}, update.steps);
      update_rows(update, panel, to, row, x);
    }
  }
}

// Calls body with the first column of each panel, its vectors as a constant, and the offset of its rows.
template <class Body>
GDN_INLINE void for_each_panel(std::int64_t columns, Body body) {
  for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
    const std::int64_t vectors = min_of(kTileVectors, (columns - column + kLanes - 1) / kLanes);
    with_vectors(vectors, [&](auto n) { body(column, n); });
  }
}

template <class Engine>
HeadState<Engine> panel_of(const HeadState<Engine>& state, std::int64_t keys, std::int64_t column) {
  return {state.values + keys * column, state.packed + keys * column};
}

// A head's state in memory, from the task's first column on.
template <class T>
struct StoredState {
  T* data;
  std::int64_t key_stride, column_stride;
};

template <class T>
GDN_INLINE StoredState<T> stored_state(const RecurrenceParams& p, T* head, std::int64_t v_begin) {
  if (p.state_v_first) return {head + v_begin * p.key_dim, 1, p.key_dim};
  return {head + v_begin, p.value_dim, 1};
}

// What of a block lies in the state: `keys` and `columns` from `data` on. What does not is zero, or not stored.
template <class T>
struct StateBlock {
  StoredState<T> state;
  T* data;
  std::int64_t keys, columns;
};

template <class T>
GDN_INLINE StateBlock<T> block_at(const RecurrenceParams& p, StoredState<T> state, std::int64_t key,
                                  std::int64_t column, std::int64_t columns) {
  return {state, state.data + key * state.key_stride + column * state.column_stride, p.key_dim - key, columns - column};
}

template <class T>
GDN_INLINE Vec load_line(const T* line, std::int64_t number, std::int64_t lines, std::int64_t length) {
  return number < lines && length > 0 ? load_up_to(line, length) : zero();
}

// Blocks of [K, V] are a few rows, read in order; those of [V, K] are squares, which are transposed.
struct KeyRows {
  static constexpr int kKeys = 4;

  template <class T>
  GDN_INLINE void load(const StateBlock<const T>& block, Vec* x) {
    for (std::int64_t i = 0; i < kKeys; ++i) {
      x[i] = load_line(block.data + i * block.state.key_stride, i, block.keys, block.columns);
    }
  }
  template <class T>
  GDN_INLINE void store(const StateBlock<T>& block, Vec* x) {
    for (std::int64_t i = 0; i < min_of(kKeys, block.keys); ++i) {
      store_up_to(block.data + i * block.state.key_stride, x[i], block.columns);
    }
  }
};

struct ColumnRows {
  static constexpr int kKeys = static_cast<int>(kLanes);

  template <class T>
  GDN_INLINE void load(const StateBlock<const T>& block, Vec* x) {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      x[i] = load_line(block.data + i * block.state.column_stride, i, block.columns, block.keys);
    }
    transpose(x);
  }
  template <class T>
  GDN_INLINE void store(const StateBlock<T>& block, Vec* x) {
    transpose(x);
    for (std::int64_t i = 0; i < min_of(kLanes, block.columns); ++i) {
      store_up_to(block.data + i * block.state.column_stride, x[i], block.keys);
    }
  }
};

template <class Body>
GDN_INLINE void with_layout(const RecurrenceParams& p, Body body) {
  if (p.state_v_first) {
    body(ColumnRows{});
  } else {
    body(KeyRows{});
  }
}

template <class Engine, class T>
void load_state(const RecurrenceParams& p, StoredState<const T> from, std::int64_t columns, HeadState<Engine> state) {
  const std::int64_t keys = padded_keys<Engine>(p.key_dim);
  with_layout(p, [&](auto layout) {
    using Layout = decltype(layout);
    constexpr int kKeys = Layout::kKeys;
    for (std::int64_t key = 0; key < keys; key += kKeys) {
      if (!p.state_v_first)
        ask_page_ahead(from.data + key * p.value_dim, kKeys * p.value_dim * static_cast<std::int64_t>(sizeof(T)));
      for_each_panel(columns, [&](std::int64_t first, auto n) {
        constexpr std::int64_t width = decltype(n)::value * kLanes;
        const HeadState<Engine> panel = panel_of(state, keys, first);
        for (std::int64_t c = 0; c < width; c += kLanes) {
          Vec x[kKeys];
          Layout::load(block_at(p, from, key, first + c, columns), x);
          for (std::int64_t i = 0; i < kKeys; i += 4) {
            for (std::int64_t r = i; r < i + 4; ++r) store(panel.values + (key + r) * width + c, x[r]);
            pack_state_rows<Engine>(panel.packed, width, key + i, c, x + i);
          }
        }
      });
    }
  });
}

template <class Engine, class T>
void store_state(const RecurrenceParams& p, HeadState<Engine> state, StoredState<T> to, std::int64_t columns) {
  const std::int64_t keys = padded_keys<Engine>(p.key_dim);
  with_layout(p, [&](auto layout) {
    using Layout = decltype(layout);
    constexpr int kKeys = Layout::kKeys;
    for (std::int64_t key = 0; key < p.key_dim; key += kKeys) {
      for_each_panel(columns, [&](std::int64_t first, auto n) {
        constexpr std::int64_t width = decltype(n)::value * kLanes;
        const HeadState<Engine> panel = panel_of(state, keys, first);
        for (std::int64_t c = 0; c < width; c += kLanes) {
          Vec x[kKeys];
          for (std::int64_t i = 0; i < kKeys; ++i) x[i] = load(panel.values + (key + i) * width + c);
          Layout::store(block_at(p, to, key, first + c, columns), x);
        }
      });
    }
  });
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
