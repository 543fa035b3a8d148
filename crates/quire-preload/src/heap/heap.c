/* The heap's C side: mimalloc, compiled here in one piece with three changes.
 *
 * 1. Its memory comes from the arena, through the calls that the Rust side hands over at start
 *    (`struct heap_calls`): no symbol is looked up, so no program can come between.
 * 2. Every entry point goes through the gate (gate.rs), so that a fork never copies a heap in the
 *    middle of a change: the child would have the change, but not the thread that completes it.
 * 3. Its constructor and destructor are gone: start.rs starts it, and nothing is worth doing at exit.
 *
 * The thread-locals live here because stable Rust has no initial-exec thread-locals.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <linux/prctl.h>

/* What the Rust side does. The memory calls return an errno, 0 for success. */
struct heap_calls {
  int (*map)(size_t len, int prot, void** out);
  int (*unmap)(void* addr, size_t len);
  int (*protect)(void* addr, size_t len, int prot);
  int (*advise)(void* addr, size_t len, int advice);
  /* Gives the calling thread a gate slot. */
  _Atomic(uint32_t)* (*gate_register)(void);
  /* The thread ends: its slot may go to another. */
  void (*gate_release)(_Atomic(uint32_t)* slot);
  /* The gate is closed: leaves `slot`, waits until it opens, enters again. */
  void (*gate_wait)(_Atomic(uint32_t)* slot);
};

/* 1 while the gate is closed; a futex of the Rust side's. */
_Atomic(uint32_t) quire_heap_gate_closed;

static struct heap_calls calls;

static int result(int err) {
  if (err == 0) return 0;
  errno = err;
  return -1;
}

static void* arena_mmap(void* hint, size_t len, int prot, int flags, int fd, off_t offset) {
  (void)hint; (void)flags; (void)fd; (void)offset;
  void* p = MAP_FAILED;
  return (result(calls.map(len, prot, &p)) == 0 ? p : MAP_FAILED);
}
static int arena_munmap(void* addr, size_t len) { return result(calls.unmap(addr, len)); }
static int arena_mprotect(void* addr, size_t len, int prot) { return result(calls.protect(addr, len, prot)); }
static int arena_madvise(void* addr, size_t len, int advice) { return result(calls.advise(addr, len, advice)); }

static void (*thread_done)(void*);
static void thread_done_gated(void* value);

/* mimalloc's one key: its destructor gives a thread's pages back. */
static int key_create(pthread_key_t* key, void (*destructor)(void*)) {
  thread_done = destructor;
  return pthread_key_create(key, &thread_done_gated);
}

#define mmap arena_mmap
#define munmap arena_munmap
#define mprotect arena_mprotect
#define madvise arena_madvise
#define pthread_key_create key_create
/* A name on a mapping keeps the kernel from merging it with its neighbours, and UFFDIO_MOVE wants
 * both ends of a batch in one mapping. */
#undef PR_SET_VMA
/* Huge pages are the reclaim's business; the switch by prctl would even outlive an exec. */
#undef PR_GET_THP_DISABLE
#define MI_NO_THP 1
/* Hints between 2 and 30 TiB: the arena chooses its addresses itself. */
#define MI_NO_ALIGNED_HINT 1
#define MI_PRIM_HAS_PROCESS_ATTACH 1
/* A program that ends need not tidy up; with pages in swap it would read them back for nothing. */
#define MI_SKIP_COLLECT_ON_EXIT 1

#include "static.c"

#undef mmap
#undef munmap
#undef mprotect
#undef madvise
#undef pthread_key_create

/* ---- The gate ----
 * A thread's slot is 1 while the thread is inside the heap. The store and the load of `gate_closed`
 * need no barrier between them: the thread that closes the gate makes every thread execute one
 * (membarrier), so that either the thread sees the gate closed or the closer sees its slot. */

static __thread _Atomic(uint32_t)* gate_slot;

static __attribute__((noinline, cold)) _Atomic(uint32_t)* gate_first(void) {
  const int saved = errno;
  gate_slot = calls.gate_register();
  errno = saved;
  return gate_slot;
}

/* A stay inside the heap. */
struct stay {
  _Atomic(uint32_t)* slot;
  /* Whether the thread was inside already: the heap's own calls of libc may allocate. */
  uint32_t was_inside;
};

static inline struct stay gate_enter(void) {
  _Atomic(uint32_t)* slot = gate_slot;
  if (__builtin_expect(slot == NULL, 0)) slot = gate_first();
  const uint32_t was_inside = atomic_load_explicit(slot, memory_order_relaxed);
  atomic_store_explicit(slot, 1, memory_order_relaxed);
  atomic_signal_fence(memory_order_seq_cst);
  if (__builtin_expect(atomic_load_explicit(&quire_heap_gate_closed, memory_order_acquire) != 0, 0)) {
    if (!was_inside) calls.gate_wait(slot);
  }
  return (struct stay){slot, was_inside};
}

/* Release: a thread that finds the slot 0 and forks sees all that this thread did to the heap. */
static inline void gate_leave(struct stay stay) {
  atomic_store_explicit(stay.slot, stay.was_inside, memory_order_release);
}

static void thread_done_gated(void* value) {
  const struct stay stay = gate_enter();
  thread_done(value);
  gate_leave(stay);
  /* A destructor that runs after this one may allocate again: it then gets a new slot, and
   * mimalloc sets its key again, which brings us back here. */
  _Atomic(uint32_t)* slot = gate_slot;
  gate_slot = NULL;
  calls.gate_release(slot);
}

/* ---- What the Rust side calls ---- */

#define GATED(type, expression)           \
  const struct stay stay = gate_enter();  \
  type r = (expression);                  \
  gate_leave(stay);                       \
  return r

void* quire_heap_malloc(size_t size) { GATED(void*, mi_malloc(size)); }
void* quire_heap_calloc(size_t count, size_t size) { GATED(void*, mi_calloc(count, size)); }
void* quire_heap_realloc(void* p, size_t size) { GATED(void*, mi_realloc(p, size)); }
void* quire_heap_memalign(size_t size, size_t alignment) { GATED(void*, mi_malloc_aligned(size, alignment)); }
size_t quire_heap_usable_size(void* p) { GATED(size_t, mi_usable_size(p)); }
void quire_heap_collect(void) {
  const struct stay stay = gate_enter();
  mi_collect(true);
  gate_leave(stay);
}
void quire_heap_free(void* p) {
  const struct stay stay = gate_enter();
  mi_free(p);
  gate_leave(stay);
}

/* For changes that the Rust side makes itself. */
struct stay quire_heap_gate_enter(void) { return gate_enter(); }
void quire_heap_gate_leave(struct stay stay) { gate_leave(stay); }

/* The thread that forks gets a slot even if it never allocated: it may allocate while the gate is
 * closed. */
_Atomic(uint32_t)* quire_heap_gate_slot(void) {
  return (gate_slot != NULL ? gate_slot : gate_first());
}

/* Called once, by the thread that starts the process, before any other entry point. */
void quire_heap_start(const struct heap_calls* given) {
  calls = *given;

  /* Options set here are not read from the environment any more. */
  /* Memory of the arena is backed at its first touch: "uncommitted" would only cost an mprotect,
   * and a mapping of its own, for every piece. */
  mi_option_set(mi_option_arena_eager_commit, 1);
  /* What is taken from the arena at a time: address space, no memory. mimalloc's 1 GiB would only
   * make the counted address space of small programs look large. */
  mi_option_set(mi_option_arena_reserve, 256 * 1024 /* KiB */);
  /* No memory of hugetlbfs: it can be neither moved nor compressed. */
  mi_option_set(mi_option_allow_large_os_pages, 0);
  mi_option_set(mi_option_reserve_huge_os_pages, 0);
  mi_option_set(mi_option_reserve_os_memory, 0);
  /* 1, the default, and no more than that: with MI_NO_THP above nothing is advised. */
  mi_option_set(mi_option_allow_thp, 1);
  /* Purged memory goes back by MADV_DONTNEED, at once. By MADV_FREE it would stay charged until
   * reclaim finds it, and its reuse costs a fault all the same: the one that tells us of the write. */
  mi_option_set(mi_option_purge_decommits, 1);
  /* A freed page is reused soon or not at all. In between dead data takes room in the budget and
   * may even be compressed; but a page given back costs a fault when it is reused, and a fault is
   * dearer here than in the kernel. A fifth of mimalloc's second. */
  mi_option_set(mi_option_purge_delay, 200 /* ms */);
  /* One node: nothing here knows of more, and it saves the look into /sys. */
  mi_option_set(mi_option_use_numa_nodes, 1);
  /* Other code runs after the last destructor, and frees. */
  mi_option_set(mi_option_destroy_on_exit, 0);
  mi_option_set(mi_option_show_errors, 0);
  mi_option_set(mi_option_show_stats, 0);
  mi_option_set(mi_option_verbose, 0);

  _mi_auto_process_init();
}
