//! Everything that a crash could leave in a store.
//!
//! The model: a write or `set_len` is durable when a sync that began after it has returned. Until
//! then the device may have done each of them or not, whatever came before or after it; so between
//! two syncs a crash leaves any subset, done in order. With [`Sectors::Torn`] each sector of 512
//! bytes of a write is done or not, as disks promise no more.
//!
//! A disk allows less than that (a file system orders some of it), so a program that survives this
//! model survives the disk.

use core::mem;
use std::sync::Mutex;

use quire::store::{Store, StoreError};

use super::lock;
use super::vec::{read_from, write_to};

const SECTOR_BYTES: u64 = 512;

/// Something that a crash may undo.
#[derive(Clone, Debug)]
enum Change {
    Write { offset: u64, bytes: Vec<u8> },
    SetLen(u64),
}

impl Change {
    fn apply(&self, image: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes } => write_to(image, *offset, bytes),
            Change::SetLen(bytes) => image.resize(*bytes as usize, 0),
        }
    }

    /// The parts that a crash may take apart.
    fn torn(&self) -> Vec<Change> {
        let Change::Write { offset, bytes } = self else { return Vec::from([self.clone()]) };
        let mut parts = Vec::new();
        let (mut at, mut rest) = (*offset, &bytes[..]);
        while !rest.is_empty() {
            let sector = (SECTOR_BYTES - at % SECTOR_BYTES).min(rest.len() as u64);
            let (part, later) = rest.split_at(sector as usize);
            parts.push(Change::Write { offset: at, bytes: part.into() });
            (at, rest) = (at + sector, later);
        }
        parts
    }
}

struct State {
    now: Vec<u8>,
    /// What was changed between two syncs, for each pair; the last is not synced.
    epochs: Vec<Vec<Change>>,
}

/// Bytes in memory, and the memory of how they came to be.
pub struct CrashStore {
    before: Vec<u8>,
    state: Mutex<State>,
}

/// Whether a write may be torn by a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sectors {
    /// A write is there or not.
    #[default]
    Whole,
    /// Each 512 bytes of it are there or not.
    Torn,
}

/// How images are enumerated.
#[derive(Clone, Copy, Debug)]
pub struct CrashOptions {
    /// Whether writes may be torn.
    pub sectors: Sectors,
    /// Of the changes between two syncs, up to so many subsets are all tried; where there are more,
    /// all prefixes and so many samples.
    pub images_max: usize,
    /// Chooses the samples.
    pub seed: u64,
}

impl Default for CrashOptions {
    fn default() -> CrashOptions {
        CrashOptions { sectors: Sectors::Whole, images_max: 1 << 10, seed: 1 }
    }
}

/// What one crash leaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CrashImage {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Syncs that had returned: `bytes` has what was written before the last of them, unless it was
    /// overwritten later.
    pub syncs: usize,
    /// Which of the changes after that sync were done, in order: with torn writes, their sectors.
    pub done: Vec<bool>,
}

impl CrashStore {
    /// A store that begins with these bytes, which are durable.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> CrashStore {
        let state = State { now: bytes.clone(), epochs: Vec::from([Vec::new()]) };
        CrashStore { before: bytes, state: Mutex::new(state) }
    }

    /// What is in it without a crash.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        lock(&self.state).now.clone()
    }

    /// Syncs so far.
    #[must_use]
    pub fn syncs(&self) -> usize {
        lock(&self.state).epochs.len() - 1
    }

    /// The images that a crash at any moment until now could leave, the earliest moments first.
    #[must_use]
    pub fn images(&self, options: CrashOptions) -> CrashImages {
        let mut epochs = lock(&self.state).epochs.clone();
        if options.sectors == Sectors::Torn {
            for epoch in &mut epochs {
                *epoch = mem::take(epoch).iter().flat_map(Change::torn).collect();
            }
        }
        CrashImages {
            durable: self.before.clone(),
            epochs,
            epoch: 0,
            next: 0,
            options,
            random: options.seed | 1,
        }
    }

    fn change(&self, change: Change) {
        let mut state = lock(&self.state);
        change.apply(&mut state.now);
        state.epochs.last_mut().expect("there is always one that is not synced").push(change);
    }
}

impl Store for CrashStore {
    fn name(&self) -> &str {
        "memory that crashes"
    }

    fn len(&self) -> Result<u64, StoreError> {
        Ok(lock(&self.state).now.len() as u64)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        read_from(&lock(&self.state).now, offset, into);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.change(Change::Write { offset, bytes: from.into() });
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.change(Change::SetLen(bytes));
        Ok(())
    }

    fn sync(&self) -> Result<(), StoreError> {
        lock(&self.state).epochs.push(Vec::new());
        Ok(())
    }
}

/// Enumerates images ([`CrashStore::images`]).
pub struct CrashImages {
    /// What the syncs before `epoch` made durable.
    durable: Vec<u8>,
    epochs: Vec<Vec<Change>>,
    epoch: usize,
    /// How many images of this epoch were returned.
    next: usize,
    options: CrashOptions,
    random: u64,
}

impl CrashImages {
    /// Which changes of an epoch the next image has. None where the epoch has no more images.
    fn choose(&mut self, changes: usize) -> Option<Vec<bool>> {
        let number = self.next;
        self.next += 1;
        let subsets = 1_usize.checked_shl(changes as u32).filter(|_| changes < 32);
        if let Some(subsets) = subsets.filter(|subsets| *subsets <= self.options.images_max) {
            return (number < subsets)
                .then(|| (0..changes).map(|bit| number >> bit & 1 == 1).collect());
        }
        if number <= changes {
            return Some((0..changes).map(|change| change < number).collect());
        }
        (number - changes <= self.options.images_max)
            .then(|| (0..changes).map(|_| self.flip()).collect())
    }

    fn flip(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 40 & 1 == 1
    }
}

impl Iterator for CrashImages {
    type Item = CrashImage;

    fn next(&mut self) -> Option<CrashImage> {
        loop {
            let changes = self.epochs.get(self.epoch)?.len();
            let Some(done) = self.choose(changes) else {
                for change in &self.epochs[self.epoch] {
                    change.apply(&mut self.durable);
                }
                self.epoch += 1;
                self.next = 0;
                continue;
            };
            let mut bytes = self.durable.clone();
            for (change, _) in self.epochs[self.epoch].iter().zip(&done).filter(|(_, done)| **done)
            {
                change.apply(&mut bytes);
            }
            return Some(CrashImage { bytes, syncs: self.epoch, done });
        }
    }
}
