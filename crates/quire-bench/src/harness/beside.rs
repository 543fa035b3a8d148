//! Looks that are taken again and again, in a thread each, while something else goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// What is done every so often.
pub(crate) type Look<'a> = Box<dyn FnMut() + Send + 'a>;

/// Ends the looks, however the work ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        // Relaxed: the join of the threads hands over what they found.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does the work, and takes each of the looks when it begins and every `pause`.
pub(crate) fn beside<T>(pause: Duration, looks: Vec<Look<'_>>, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for mut look in looks {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    look();
                    thread::sleep(pause);
                }
            });
        }
        let _stop = Stop(&stop);
        work()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_taken_while_the_work_goes_on() {
        let (mut few, mut many) = (0, 0);
        let looks: Vec<Look<'_>> = vec![Box::new(|| few += 1), Box::new(|| many += 2)];
        let work = || thread::sleep(Duration::from_millis(50));
        beside(Duration::from_millis(1), looks, work);
        assert!(few > 1 && many > 2, "{few}, {many}");
    }
}
