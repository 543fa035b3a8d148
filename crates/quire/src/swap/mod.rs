//! Where the bytes of evicted pages rest: packed in memory, or in the swap file.
//!
//! Owns the packing of single pages ([`compress`]), the pool of packed pages in memory
//! ([`zpool`]), the swap file ([`file`]) and the way to read and write it ([`io`]). Leaves to the
//! engine which page goes where and when, the page words, and the page locks: a blob belongs to
//! the page whose number its header has, and is loaded, moved and freed under that page's lock.
//!
//! Everything here runs on handler threads: no allocation, no libc, no panic on bad bytes.
//!
//! Three tiers, each behind the one before: a page of one 32-bit pattern keeps no data; LZ4 in the pool, where
//! it saves at least a quarter (a page that saves less goes there as it is, if there is a swap file, and else
//! stays in limbo); the file.

pub mod blob;
pub mod compress;
pub mod file;
pub mod io;
mod tiers;
pub mod zpool;

pub use self::io::SwapRead;
pub use self::tiers::{Swap, Writing};
pub use self::zpool::Payer;
