//! The ring with `unsafe`: what the supervisor and the doctor need of the kernel beyond what
//! rustix offers as safe calls. Nothing above this module contains `unsafe`.

pub mod control;
pub mod kcmp;
pub mod mapped;
pub mod peer;
pub mod pidfd;
pub mod pool;
pub mod probe;
pub mod signals;
pub mod spawn;
pub mod uffd;
