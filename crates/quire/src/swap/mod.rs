//! Where the bytes of evicted pages rest: packed in memory, or in the swap file.
//!
//! Owns the packing of single pages ([`compress`]), the pool of packed pages in memory
//! ([`zpool`]), the swap file ([`file`]), its encryption (`cipher`) and the way to read and write it ([`io`]). Leaves to the
//! engine which page goes where and when, the page words, and the page locks: a blob belongs to
//! the page whose number its header has, and is loaded, moved and freed under that page's lock.
//!
//! Everything here runs on handler threads: no allocation, no libc, no panic on bad bytes.
//!
//! Three tiers: a page of one 32-bit pattern keeps no data; a page that saves at least a quarter is packed into the
//! pool, and goes on to the file when it has been there for long; any other goes to the file at once, or stays
//! in limbo where there is none.

pub mod blob;
mod cipher;
pub mod compress;
mod far;
pub mod file;
pub mod io;
mod tiers;
pub mod zpool;

pub use self::cipher::SwapCipher;
pub use self::far::FarTier;
pub use self::io::SwapRead;
pub use self::tiers::{Swap, Writing};
pub use self::zpool::Payer;
