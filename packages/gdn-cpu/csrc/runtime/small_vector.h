// SPDX-License-Identifier: Apache-2.0
//
// A vector that keeps up to 64 values in place: the batch of most decode steps, without an allocation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace gdn::cpu {

template <typename Value>
class SmallVector {
 public:
  SmallVector() {}  // NOLINT: `= default` would be deleted for a Value that initialises itself
  SmallVector(std::size_t size, Value value) {
    reserve(size);
    size_ = size;
    std::fill(begin(), end(), value);
  }
  SmallVector(const SmallVector& other) { *this = other; }
  SmallVector& operator=(const SmallVector& other) {
    if (this == &other) return *this;
    size_ = 0;
    reserve(other.size_);
    size_ = other.size_;
    std::copy(other.begin(), other.end(), begin());
    return *this;
  }

  void push_back(Value value) {
    if (size_ == capacity_) reserve(capacity_ * 2);
    data()[size_++] = value;
  }

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] Value* data() { return heap_ ? heap_.get() : inline_; }
  [[nodiscard]] const Value* data() const { return heap_ ? heap_.get() : inline_; }
  [[nodiscard]] Value* begin() { return data(); }
  [[nodiscard]] Value* end() { return data() + size_; }
  [[nodiscard]] const Value* begin() const { return data(); }
  [[nodiscard]] const Value* end() const { return data() + size_; }
  [[nodiscard]] Value& operator[](std::size_t i) { return data()[i]; }
  [[nodiscard]] Value operator[](std::size_t i) const { return data()[i]; }
  [[nodiscard]] Value front() const { return data()[0]; }
  [[nodiscard]] Value back() const { return data()[size_ - 1]; }

 private:
  static constexpr std::size_t kInline = 64;

  void reserve(std::size_t capacity) {
    if (capacity <= capacity_) return;
    std::unique_ptr<Value[]> grown(new Value[capacity]);
    std::copy(begin(), end(), grown.get());
    heap_ = std::move(grown);
    capacity_ = capacity;
  }

  std::size_t size_ = 0;
  std::size_t capacity_ = kInline;
  std::unique_ptr<Value[]> heap_;
  // Left as it is until a value is stored: most calls have few, and writing to all would fetch as many lines.
  static_assert(std::is_trivially_copyable_v<Value>);
  union {
    Value inline_[kInline];
  };
};

using Indices = SmallVector<std::int64_t>;

}  // namespace gdn::cpu
