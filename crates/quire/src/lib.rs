//! Quire's engine: a virtual-memory manager in user space.
//!
//! See ARCHITECTURE.md for the map, docs/tour.md for one fault through the code. [`process::Process`] is
//! the engine of a real process, [`space::VmSpace`] the engine itself, generic over its [`mmu::Mmu`].
#![no_std]

#[cfg(any(test, feature = "simulated", feature = "library"))]
extern crate std;

pub mod budget;
pub mod control;
pub mod failpoint;
pub mod fault;
pub mod frames;
#[cfg(feature = "library")]
pub mod library;
mod mean;
pub mod mmu;
mod named;
pub mod object;
pub mod page;
pub mod process;
mod proxy;
pub mod reclaim;
pub mod scratch;
pub mod space;
pub mod steps;
#[cfg(feature = "library")]
pub mod store;
pub mod swap;
pub mod sys;
pub mod units;
