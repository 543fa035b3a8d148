/*
 * Quire's C library: files mapped under a bound on memory. quire(3) is the overview.
 *
 * Made from the source by `cargo test -p quire-c`; do not edit.
 *
 * Calls that can fail return 0 or a number, or a pointer; on error -1 or NULL, with errno set and
 * quire_last_error() saying more. NULL for a handle is EINVAL, a handle that was inherited by a
 * fork ECHILD. A handle may be used by several threads at once, but not while or after it is closed.
 */

#ifndef QUIRE_H
#define QUIRE_H

#include <stddef.h>
#include <stdint.h>

/* As a length: all there is from the offset on. */
#define QUIRE_TO_END SIZE_MAX

// quire_open: for writing as well.
#define QUIRE_WRITE 1

// quire_open: makes the file where there is none. Needs QUIRE_WRITE.
#define QUIRE_CREATE 2

// quire_open: reads and writes pass the kernel's page cache by, or the file is not opened. By
// default they do where they can and little of the file is in it.
#define QUIRE_DIRECT_ON 4

// quire_open: reads and writes go through the kernel's page cache.
#define QUIRE_DIRECT_OFF 8

// quire_open: takes a file as it is even where its name ends in .zst.
#define QUIRE_PLAIN 16

// quire_map: writable.
#define QUIRE_MAP_WRITE 1

// quire_map: reads and maps all of it before returning, as far as memory goes.
#define QUIRE_MAP_POPULATE 2

// quire_map: may reach behind the object's end, as far as it may grow. An access there is a SIGBUS
// until it has grown.
#define QUIRE_MAP_BEYOND_END 4

// quire_map: a private copy, as of mmap's MAP_PRIVATE: what is written (with QUIRE_MAP_WRITE) is
// seen in this mapping alone, and never reaches the file, which may be read-only. Later changes of
// the file may be seen in it or not.
#define QUIRE_MAP_PRIVATE 8

// Fault-around: as many cached pages as the faults of the mapping suggest.
#define QUIRE_FAULT_AROUND_AUTO -1

// Fault-around: exactly the page.
#define QUIRE_FAULT_AROUND_OFF -2

// quire_advise: nothing in particular.
#define QUIRE_NORMAL 0

// quire_advise: in order.
#define QUIRE_SEQUENTIAL 1

// quire_advise: in no order.
#define QUIRE_RANDOM 2

// quire_advise: soon; begins to read it.
#define QUIRE_WILLNEED 3

// quire_advise: not soon; drops it from the cache, except for what is dirty.
#define QUIRE_DONTNEED 4

// quire_remap: it may go to another address.
#define QUIRE_MAY_MOVE 1

// quire_pin: for bytes that may be written at any time, for example by the kernel.
#define QUIRE_PIN_WRITE 1

// Ends calls that wait, from any thread.
struct quire_cancel_token;

// A mapping: some of an object's bytes as memory.
struct quire_mapping;

// An object: a file, an object of a server, or what is packed in an archive, with its cached pages.
struct quire_object;

// A range of a mapping that stays in memory and mapped.
struct quire_pinned;

// An address space: a bound on memory, the threads that keep it, and the objects mapped under it.
struct quire_space;

// How an address space is made. A member that is 0 stands for its default: zero the whole
// structure, and set what matters.
struct quire_space_options {
    // Bytes that may be held: cached pages, and the tables that go with them. 256 MiB by default,
    // 1 MiB at least.
    size_t memory;
    // Threads that serve faults. By default one per CPU, four at most.
    size_t handlers;
    // Threads that read and write files, and so how many reads are in flight. Four by default.
    size_t workers;
    // The folder in which a swap file without a name is made, for compressed pages of memory objects
    // that take too much memory; NULL is no swap file.
    const char *swap_folder;
    // How long the swap file may become, in bytes: 256 KiB at least, where there is a folder.
    uint64_t swap_bytes;
    // 1: a thread that faults serves itself, in a handler of SIGBUS. That is faster, but a system call
    // that is given a page which is not mapped fails with EFAULT.
    uint32_t is_inline;
    // For members to come: must be 0.
    uint32_t reserved[5];
};

// Says whether the `len` bytes at `offset` may be written to the file now: not 0 is yes.
typedef int (*quire_barrier)(uint64_t offset, size_t len, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of the last call of this thread that failed: what was tried, on which file and at which
// offset, why it failed and what to do. An empty string where none has failed. It stays until the
// thread's next call that fails, or the thread's end.
const char *quire_last_error(void);

// Makes an address space and starts its threads. `options` may be NULL.
//
// Returns NULL on error. errno is EPERM, EACCES or ENOSYS where the process cannot get a userfaultfd.
struct quire_space *quire_space_open(const struct quire_space_options *options);

// Ends a handle. The address space itself ends with the last of its handle, its objects and its
// mappings, in whatever order they are closed.
int quire_space_close(struct quire_space *space);

// Returns 1 where faults that system calls take are served, or 0 where the process may serve its own
// accesses only. A system call that is given a page which is not mapped fails with EFAULT then: call
// quire_populate before. -1 on error.
int quire_serves_system_calls(const struct quire_space *space);

// One counter, by its name; -1 on error, with ENOENT for a name that is not known.
//
// Beside those that quire_counter_name lists there are memory_bytes, the bound; held_bytes, held
// just now; and held_bytes_max, held at most so far.
int64_t quire_counter(const struct quire_space *space, const char *name);

// The name of the counter of a number, from 0 on; NULL behind the last one, which is no error.
const char *quire_counter_name(size_t index);

// Opens a regular file or a block device. If its name ends in .zst, and it is opened for reading
// without QUIRE_PLAIN, the object is the file that is packed in it.
//
// `len_max` is how long the object may become by quire_set_len, in bytes; 0 stands for 64 GiB more
// than it has. Returns NULL on error.
struct quire_object *quire_open(const struct quire_space *space,
                                const char *path,
                                uint32_t flags,
                                uint64_t len_max);

// Opens an object of a server, read-only: `s3://BUCKET/KEY`, `https://HOST/PATH`. Of the flags
// QUIRE_PLAIN has a meaning, and QUIRE_WRITE is an error. Where `cache` is a folder and not NULL, what
// was fetched is kept in it, in `cache_max` bytes at most (0 stands for 4 GiB), for whoever opens the
// object next. An object that is replaced on the server is ESTALE from then on.
//
// Returns NULL on error.
struct quire_object *quire_open_url(const struct quire_space *space,
                                    const char *url,
                                    uint32_t flags,
                                    const char *cache,
                                    uint64_t cache_max);

// Makes an object of `len` zeros that no file is behind. Its pages count against the memory of the
// address space as any object's; what has to go is compressed, and goes to the swap file where the
// address space has one. It can be written, and there is nothing to flush: quire_flush and
// quire_sync succeed and do nothing. Its bytes end with it.
//
// `len_max` is how long it may become by quire_set_len, in bytes; 0 stands for 64 GiB more than
// `len`. Returns NULL on error.
struct quire_object *quire_open_memory(const struct quire_space *space,
                                       uint64_t len,
                                       uint64_t len_max);

// Ends a handle. The object itself ends with the last of its handle and its mappings. What is dirty
// is written then; to learn of an error, call quire_sync before.
int quire_close(struct quire_object *object);

// How long an object is, in bytes; -1 on error.
int64_t quire_len(const struct quire_object *object);

// Changes the length, the file's as well. Mappings stay; an access behind the end is a SIGBUS.
int quire_set_len(const struct quire_object *object, uint64_t len);

// Follows a change of the file's length that another program made, and returns it; -1 on error.
int64_t quire_refresh(const struct quire_object *object);

// Writes what is dirty in a range to the file and makes it durable. `len` may be QUIRE_TO_END.
//
// On error what could not be written is still dirty. EAGAIN: the barrier holds pages back, and all
// others are written.
int quire_flush(const struct quire_object *object, uint64_t offset, size_t len);

// Writes everything dirty to the file and makes it durable. Errors are those of quire_flush.
int quire_sync(const struct quire_object *object);

// Reads bytes through the cache, with an error instead of a SIGBUS. Returns how many there were
// before the object's end; -1 on error. `into` must not be memory that the address space has
// mapped.
int64_t quire_read_at(const struct quire_object *object, uint64_t offset, void *into, size_t len);

// Begins to read a range into the cache. `len` may be QUIRE_TO_END. Returns how many bytes are
// under way; -1 on error.
int64_t quire_prefetch(const struct quire_object *object, uint64_t offset, size_t len);

// Sets the write barrier: no page is written to the file, by any way, unless `may_write` says yes for
// its bytes. A page that it holds back stays dirty, and is asked about again. NULL takes the barrier
// away.
//
// `may_write` is called from any thread, from several at once, and with pages locked: it must
// neither touch a mapping of the address space nor call this library. A barrier that was replaced
// is not called any more when this returns; one that was not is called until the object's handle
// and its mappings are closed.
int quire_set_barrier(const struct quire_object *object,
                      quire_barrier may_write,
                      void *user);

// Maps `len` bytes of an object from `offset` on, any byte. `len` may be QUIRE_TO_END.
// `fault_around` is how many pages a read fault maps, of those that are cached:
// QUIRE_FAULT_AROUND_AUTO, QUIRE_FAULT_AROUND_OFF, or an order from 0 to 9 for the aligned block
// of 2^order pages.
//
// Returns NULL on error. An access to a page that cannot be read is a SIGBUS.
struct quire_mapping *quire_map(const struct quire_object *object,
                                uint64_t offset,
                                size_t len,
                                uint32_t flags,
                                int fault_around);

// Unmaps, and ends the handle. What was written reaches the file some time later; quire_sync waits
// for it. Fails with EBUSY, and changes nothing, while a range of the mapping is pinned.
int quire_unmap(struct quire_mapping *mapping);

// The address of a mapping's first byte; NULL on error.
void *quire_base(const struct quire_mapping *mapping);

// How many bytes a mapping has; -1 on error.
int64_t quire_mapping_len(const struct quire_mapping *mapping);

// Reads and maps a range of a mapping, as far as memory goes; fails where it cannot be read. Pages
// that failed before can be accessed again if they can be read now. `len` may be QUIRE_TO_END, here
// and below; `offset` is from the mapping's first byte.
int quire_populate(const struct quire_mapping *mapping, size_t offset, size_t len);

// Maps what is in memory already of a range, without waiting for anything. Returns how many pages
// of it are mapped then; -1 on error.
int64_t quire_populate_cached(const struct quire_mapping *mapping, size_t offset, size_t len);

// Says how a range of a mapping will be used: QUIRE_NORMAL, QUIRE_SEQUENTIAL, QUIRE_RANDOM,
// QUIRE_WILLNEED or QUIRE_DONTNEED.
int quire_advise(const struct quire_mapping *mapping, size_t offset, size_t len, int advice);

// Writes what is dirty in a range of a mapping to the file and makes it durable. Errors are those
// of quire_flush. Does nothing for a private copy, of which nothing is ever written.
int quire_flush_mapping(const struct quire_mapping *mapping, size_t offset, size_t len);

// Makes a mapping `len` bytes long: in its place, or, with QUIRE_MAY_MOVE, at another address, which
// quire_base returns. On error nothing has changed: EBUSY while a range of it is pinned.
int quire_remap(struct quire_mapping *mapping,
                size_t len,
                uint32_t flags);

// Makes a mapping writable, or read-only where `is_writable` is 0. A private copy stays one. On error
// nothing has changed: EACCES where the object is read-only, EBUSY while a range is pinned.
int quire_protect(struct quire_mapping *mapping,
                  int is_writable);

// Reads and maps a range of a mapping, and keeps it so until quire_unpin, whatever else needs memory:
// a system call can be given these bytes, and the kernel may hold them so long, as for direct I/O,
// vmsplice or io_uring. With QUIRE_PIN_WRITE, for a writable mapping, the kernel may also write them
// at any time. Until quire_unpin they count as dirty then, and a flush writes what it finds there.
// Pins nest. `len` may be QUIRE_TO_END.
//
// Returns NULL on error. ENOMEM: more than half of the memory would be pinned. quire_set_len fails
// with EBUSY where a pinned page would go or be cut into; so do quire_unmap, quire_remap and
// quire_protect of the mapping.
struct quire_pinned *quire_pin(const struct quire_mapping *mapping,
                               size_t offset,
                               size_t len,
                               uint32_t flags);

// Unpins the range, and ends the handle.
int quire_unpin(struct quire_pinned *pin);

// Makes a token, for quire_set_patience. Returns NULL on error.
struct quire_cancel_token *quire_cancel_new(void);

// Ends all calls that wait with this token, now and later: they fail with EINTR.
int quire_cancel(const struct quire_cancel_token *cancel);

// Ends the handle. Calls that have the token still wait.
int quire_cancel_free(struct quire_cancel_token *cancel);

// Sets how long the calls that this thread makes from now on wait: until the token is cancelled, or
// `timeout_ms` milliseconds from now (not from a call's beginning) have passed. NULL is no token, -1
// no timeout; with both, as at first, they wait as long as it takes. A call that stops waiting fails
// with EINTR, and what it has begun goes on: a read leaves its pages in the cache, a flush or a change
// of length is made, nothing stays pinned.
//
// What needs no wait is done all the same. quire_close and quire_unmap wait as long as it takes, and
// so do accesses to a mapping.
int quire_set_patience(const struct quire_cancel_token *cancel,
                       int64_t timeout_ms);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QUIRE_H */
