// C++'s operators: every kind of new and delete, the new-handler, containers, exceptions, threads, and
// what a static initializer allocates.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

static std::string before_main(1000, 'x');
static std::map<std::string, std::vector<int>> table{{"a", {1, 2, 3}}, {"b", std::vector<int>(1000, 7)}};

struct alignas(256) Wide {
  unsigned char bytes[512];
};

static int handled;
static std::size_t volatile too_much = SIZE_MAX / 2;

static void on_no_memory() {
  if (++handled == 3) std::set_new_handler(nullptr);
}

int main() {
  CHECK(before_main.size() == 1000 && table["b"].size() == 1000);

  for (std::size_t size : {0ul, 1ul, 24ul, 4096ul, 1000000ul, 40000000ul}) {
    void* p = ::operator new(size);
    CHECK(p != nullptr && reinterpret_cast<std::uintptr_t>(p) % 16 == 0);
    ::operator delete(p);
    p = ::operator new(size);
    ::operator delete(p, size);
    p = ::operator new[](size);
    ::operator delete[](p);
    p = ::operator new[](size, std::nothrow);
    CHECK(p != nullptr);
    ::operator delete[](p, std::nothrow);
    for (std::size_t alignment = 16; alignment <= 1 << 21; alignment *= 4) {
      p = ::operator new(size, std::align_val_t(alignment));
      CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
      ::operator delete(p, std::align_val_t(alignment));
      p = ::operator new[](size, std::align_val_t(alignment), std::nothrow);
      CHECK(p != nullptr && reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
      ::operator delete[](p, size, std::align_val_t(alignment));
    }
  }

  auto wide = std::make_unique<Wide[]>(10);
  CHECK(reinterpret_cast<std::uintptr_t>(wide.get()) % 256 == 0);

  CHECK(::operator new(too_much, std::nothrow) == nullptr);
  std::set_new_handler(on_no_memory);
  bool thrown = false;
  try {
    void* volatile p = ::operator new(too_much);
    (void)p;
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown && handled == 3);

  std::vector<std::thread> threads;
  std::atomic<long> sum{0};
  for (int t = 0; t < 4; t++)
    threads.emplace_back([t, &sum] {
      std::map<int, std::string> words;
      for (int i = 0; i < 20000; i++) words[(i * 7919 + t) % 5000] += std::to_string(i);
      for (auto& [key, word] : words) sum += static_cast<long>(word.size()) + key;
      try {
        throw std::string(100, 'e');
      } catch (const std::string& e) {
        sum += static_cast<long>(e.size());
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(sum > 0);

  std::vector<int> grown;
  for (int i = 0; i < 20000000; i++) grown.push_back(i);
  for (int i = 0; i < 20000000; i += 997) CHECK(grown[static_cast<std::size_t>(i)] == i);
  std::puts("ok");
}
