// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Device memory for what one launch leaves to the next: belongs to an execution space instance and a host
/// thread, grows only, is tied to a graph when captured, and is freed at Kokkos::finalize.

#ifndef KOKKOSSOFTMAX_SCRATCH_HPP
#define KOKKOSSOFTMAX_SCRATCH_HPP

#include <Kokkos_Core.hpp>

#include <cstdint>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace KokkosSoftmax::impl {

/// How an execution space captures launches into a graph. Specialised by backends that can.
template <class Exec>
struct Capture {
  static constexpr bool possible = false;
  /// Identifies the capture under way on the instance; 0: none.
  static std::uint64_t id(const Exec&) { return 0; }
  /// Keeps the memory alive as long as the graph that is being captured.
  static void keep_with_graph(const Exec&, std::shared_ptr<void>) {}
};

/// Memory that a graph let go of: a graph's destructor may call no function of the backend, so it is freed
/// later.
class RetiredMemory {
 public:
  static void add(std::shared_ptr<void> memory) {
    const std::lock_guard lock(mutex());
    list().push_back(std::move(memory));
  }
  static void free() {
    std::vector<std::shared_ptr<void>> freed;
    const std::lock_guard lock(mutex());
    freed.swap(list());
  }

 private:
  // Never destroyed: graphs may outlive the end of main.
  static std::mutex& mutex() {
    static auto* m = new std::mutex;
    return *m;
  }
  static std::vector<std::shared_ptr<void>>& list() {
    static auto* l = new std::vector<std::shared_ptr<void>>;
    return *l;
  }
};

/// The scratch of one kind of memory. What is in use at the same time on one instance differs in `Purpose`: a
/// head's logits stay where they are while the softmax of them takes scratch of its own. A Purpose that
/// declares starts_zeroed gets new memory all zero: its kernels count on what they left there themselves.
template <class MemorySpace, class Purpose = void>
class ScratchPool {
 public:
  /// At least `bytes` bytes for launches on `exec` from this host thread, in order. Once as much was asked
  /// for outside a capture, nothing is allocated. In a capture the memory goes to the graph for good.
  template <class Exec>
  static void* get(const Exec& exec, std::size_t bytes) {
    return instance().find(exec, bytes).memory;
  }

  struct Span {
    void* memory;
    std::size_t bytes;
  };
  /// The same, with the size of all that is there.
  template <class Exec>
  static Span get_span(const Exec& exec, std::size_t bytes) {
    return instance().find(exec, bytes);
  }

  /// Makes what get() needs, in a capture too.
  template <class Exec>
  static void reserve(const Exec& exec, std::size_t bytes) {
    instance().reserve_for(exec, bytes);
  }

 private:
  struct Buffer {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
  };

  struct Entry {
    Buffer eager;     ///< for launches outside of captures
    Buffer spare;     ///< for the next capture
    Buffer captured;  ///< the graph's, for further launches of the same capture
    std::uint64_t capture_id = 0;
  };

  /// 0 as owner: the host thread has ended, the next one that uses the instance takes the entry over.
  using Key = std::pair<std::uint32_t, std::uint64_t>;

  static ScratchPool& instance() {
    static auto* pool = new ScratchPool;
    return *pool;
  }

  static std::uint64_t this_thread() {
    struct Owner {
      std::uint64_t id;
      Owner() {
        static std::atomic<std::uint64_t> last{0};
        id = ++last;
      }
      ~Owner() { instance().disown(id); }
    };
    thread_local Owner owner;
    return owner.id;
  }

  void disown(std::uint64_t thread) {
    const std::lock_guard lock(mutex_);
    std::vector<Key> owned;
    for (const auto& [key, entry] : entries_) {
      if (key.second == thread) owned.push_back(key);
    }
    for (const Key& key : owned) {
      auto node = entries_.extract(key);
      node.key().second = 0;
      entries_.insert(std::move(node));
    }
  }

  Entry& entry(std::uint32_t device, std::uint64_t thread) {
    const auto own = entries_.find({device, thread});
    if (own != entries_.end()) return own->second;
    auto ownerless =
        entries_.extract(entries_.find({device, 0}) == entries_.end() ? Key{device, thread} : Key{device, 0});
    if (!ownerless) return entries_[{device, thread}];
    ownerless.key().second = thread;
    return entries_.insert(std::move(ownerless)).position->second;
  }

  template <class Exec>
  Span find(const Exec& exec, std::size_t bytes) {
    const std::uint64_t thread = this_thread();
    const std::uint64_t capture = Capture<Exec>::id(exec);
    const std::lock_guard lock(mutex_);
    Entry& mine = entry(Kokkos::Tools::Experimental::device_id(exec), thread);
    if (capture == 0) {
      if (mine.eager.bytes < bytes) grow(exec, mine, bytes);
      return {mine.eager.memory.get(), mine.eager.bytes};
    }
    if (mine.capture_id == capture && mine.captured.bytes >= bytes)
      return {mine.captured.memory.get(), mine.captured.bytes};
    Buffer& source = mine.spare.bytes >= bytes ? mine.spare : mine.eager;
    if (source.bytes < bytes) {
      throw std::runtime_error("KokkosSoftmax: a call in a graph capture needs " + std::to_string(bytes) +
                               " bytes of scratch that the execution space instance does not have; call "
                               "KokkosSoftmax::reserve with these "
                               "operands before the capture");
    }
    mine.captured = std::exchange(source, Buffer{});
    mine.capture_id = capture;
    Capture<Exec>::keep_with_graph(exec, mine.captured.memory);
    void* memory = mine.captured.memory.get();
    // The graph alone owns it from here on; the address is remembered for the rest of this capture.
    mine.captured.memory = std::shared_ptr<void>(memory, [](void*) {});
    return {memory, mine.captured.bytes};
  }

  template <class Exec>
  void reserve_for(const Exec& exec, std::size_t bytes) {
    if (Capture<Exec>::id(exec) != 0) return;
    const std::uint64_t thread = this_thread();
    RetiredMemory::free();
    const std::lock_guard lock(mutex_);
    Entry& mine = entry(Kokkos::Tools::Experimental::device_id(exec), thread);
    if (mine.eager.bytes < bytes || (Capture<Exec>::possible && mine.spare.bytes < bytes))
      grow(exec, mine, bytes);
  }

  template <class Exec>
  void grow(const Exec& exec, Entry& mine, std::size_t bytes) {
    if (!hooked_) Kokkos::push_finalize_hook([] { instance().clear(); });
    hooked_ = true;
    // What is replaced may still be read by launches under way.
    if (mine.eager.bytes) exec.fence("KokkosSoftmax::scratch: fence before it grows");
    if (mine.eager.bytes < bytes) mine.eager = allocate(exec, bytes);
    if (Capture<Exec>::possible && mine.spare.bytes < bytes) mine.spare = allocate(exec, bytes);
  }

  template <class Exec>
  static Buffer allocate(const Exec& exec, std::size_t bytes) {
    void* memory = Kokkos::kokkos_malloc<MemorySpace>("KokkosSoftmax::scratch", bytes);
    if constexpr (requires { Purpose::starts_zeroed; }) {
      using Bytes = Kokkos::View<unsigned char*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
      Kokkos::deep_copy(exec, Bytes(static_cast<unsigned char*>(memory), bytes), 0);
      exec.fence("KokkosSoftmax::scratch: fence after it was cleared");
    }
    return {std::shared_ptr<void>(memory,
                                  [](void* p) {
                                    if (Kokkos::is_initialized()) Kokkos::kokkos_free<MemorySpace>(p);
                                  }),
            bytes};
  }

  void clear() {
    RetiredMemory::free();
    const std::lock_guard lock(mutex_);
    entries_.clear();
    hooked_ = false;
  }

  std::mutex mutex_;
  std::map<Key, Entry> entries_;
  bool hooked_ = false;
};

}  // namespace KokkosSoftmax::impl

#endif
