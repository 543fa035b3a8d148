//! The C library: what `quire.h` declares, over the engine's Rust library.
//!
//! Owns handles, and the translation: of arguments, all of which are checked before anything is
//! done; of errors, each an errno and a message kept for the thread that got it; of forks, after
//! which what was inherited is refused. Leaves everything else to [`engine::library`].
//!
//! | file | what is there |
//! |---|---|
//! | `space` | address spaces and their counters |
//! | `object` | objects: files, and what is packed in archives |
//! | `mapping` | an object's bytes as memory |
//! | `pin` | ranges of mappings that stay in memory and mapped |
//! | `cancel` | how long the calls of a thread wait |
//! | `handle` | what a handle is, and whether it may be used |
//! | `fork` | in which process of a line of forks this is |
//! | `failure` | why a call failed |
//!
//! A handle is a box. Using one from several threads at once is fine, as the Rust types are `Sync`;
//! closing it ends it, as `free` does. Nothing here takes a lock; the engine takes its own.
//!
//! The names in `quire.h` come from `cbindgen.toml`; the header is kept in the tree, and
//! `tests/header.rs` holds it against this code.

mod cancel;
mod failure;
mod fork;
mod handle;
mod mapping;
mod object;
mod pin;
mod space;
