//! Objects: what is mapped at several places.

pub mod i_mmap;
