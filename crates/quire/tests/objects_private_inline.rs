//! Private mappings once more, each behaviour of [`objects_private`](behaviours), in address spaces
//! whose threads serve their own faults: which it is, is asked of the crate's name.

#[path = "objects_private.rs"]
mod behaviours;
