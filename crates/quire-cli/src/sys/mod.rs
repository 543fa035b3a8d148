//! The ring with `unsafe`: what the supervisor and the doctor need of the kernel beyond what
//! rustix offers as safe calls. Nothing above this module contains `unsafe`.

pub(crate) mod control;
pub(crate) mod kcmp;
pub(crate) mod mapped;
pub(crate) mod memfd;
pub(crate) mod peer;
pub(crate) mod pidfd;
pub(crate) mod pool;
pub(crate) mod probe;
pub(crate) mod signals;
pub(crate) mod spawn;
pub(crate) mod uffd;
