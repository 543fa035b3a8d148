#![no_std]
//! placeholder
pub mod control;
pub mod units;
