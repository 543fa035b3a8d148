//! The tests of [`objects_private`](behaviours) once more, in address spaces with inline delivery: the
//! tests look at the crate's name for which one it is.

#[path = "objects_private.rs"]
mod behaviours;
