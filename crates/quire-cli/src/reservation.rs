//! A run inside a run: its budget is a part of the outer one's.
//!
//! `quire run` that finds itself in a run asks that one's supervisor for as much as its own budget,
//! before it starts anything. A slot of the outer tree then holds it, whole, as long as the
//! connection is open: until this process ends, however it ends.
//!
//! Such a slot (a [`Hello`] with [`RESERVATION`] for a parent) has no engine, gives no memory to others, and
//! counts as no process. The outer supervisor refuses what its budget has not left, less what reclaim keeps.
//! Processes of the inner run know the inner run's socket only.

use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result, bail};
use quire::control::{Hello, JoinRefusal, RESERVATION, SOCKET_VARIABLE, WELCOME_REFUSED};
use quire::units::PAGE_SIZE;
use rustix::io::Errno;

use crate::size::Human;
use crate::supervisor::wire;

/// The outer run, as this process finds it.
pub(crate) enum Outer {
    None,
    /// One whose supervisor has ended: its budget is not counted any more.
    Ended,
    /// One that keeps a part of its budget for this process, while the connection is open.
    Around {
        _connection: OwnedFd,
    },
}

/// Takes `budget_pages` out of the budget of the run that this process is in, if it is in one. An error where
/// that has not as much left, or its supervisor cannot be asked.
pub(crate) fn reserve(budget_pages: u64) -> Result<Outer> {
    let name = std::env::var(SOCKET_VARIABLE).unwrap_or_default();
    if name.is_empty() {
        return Ok(Outer::None);
    }
    let connection = match wire::connect(&name) {
        Ok(connection) => connection,
        Err(Errno::CONNREFUSED) => return Ok(Outer::Ended),
        Err(errno) => return Err(errno).context("cannot reach the supervisor of the outer run"),
    };
    let hello = Hello { parent_slot: RESERVATION, held_pages: budget_pages, ..Hello::OF_PROGRAM };
    let welcome = match wire::ask(&connection, &hello) {
        Ok(welcome) => welcome,
        Err(Errno::CONNRESET) => return Ok(Outer::Ended),
        Err(errno) => return Err(errno).context("the supervisor of the outer run does not answer"),
    };
    if welcome.flags & WELCOME_REFUSED == 0 {
        return Ok(Outer::Around { _connection: connection });
    }
    let wanted = Human(budget_pages.saturating_mul(PAGE_SIZE as u64));
    match JoinRefusal::from_number(welcome.refusal) {
        Some(JoinRefusal::NoRoom) => bail!(
            "this run is inside another one, which has {} of its budget left: {wanted} do not fit; \
             lower --memory, or raise that of the outer run",
            Human(welcome.detail * PAGE_SIZE as u64)
        ),
        Some(JoinRefusal::Full) => bail!(
            "this run is inside another one, which has all the processes that it may have ({}); wait \
             until one has ended",
            welcome.detail
        ),
        _ => bail!(
            "this run is inside a run of another version of quire; use the same version, or unset \
             {SOCKET_VARIABLE}"
        ),
    }
}
