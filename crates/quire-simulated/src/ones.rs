//! A store for tests and simulations that look at pages and not at their bytes.

use quire::object::BackingStore;
use quire::sys::Errno;

/// A store of ones, of which reads and writes take no time.
#[derive(Debug)]
pub struct Ones;

impl BackingStore for Ones {
    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), Errno> {
        into.fill(1);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn sync(&self) -> Result<(), Errno> {
        Ok(())
    }
}
