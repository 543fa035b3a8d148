//! Looks at the run from within its supervisor: what `quire stat` and `quire trace` do.
//!
//! Owns when the next look is due. Leaves to the supervisor's loop to ask, and to the looker what it
//! sees: the control page, which it reads as any other process could.

use std::time::{Duration, Instant};

use quire::control::Control;

use super::SAMPLE_PERIOD;

/// When a look is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    Period,
    End,
}

/// Looks at the run now and then, and at its end.
pub(crate) struct Looker<'a> {
    pub(super) look: &'a mut dyn FnMut(&Control, Moment),
    /// From one look to the next; `None`: only at the end.
    period: Option<Duration>,
    next: Instant,
}

impl<'a> Looker<'a> {
    /// Takes its first look after a period from now.
    pub(crate) fn new(
        period: Option<Duration>,
        look: &'a mut dyn FnMut(&Control, Moment),
    ) -> Looker<'a> {
        Looker { look, period, next: Instant::now() + period.unwrap_or_default() }
    }

    /// How long the supervisor may sleep: it has samples of its own to take.
    pub(super) fn timeout(&self) -> Duration {
        match self.period {
            None => SAMPLE_PERIOD,
            Some(_) => self.next.saturating_duration_since(Instant::now()).min(SAMPLE_PERIOD),
        }
    }

    pub(super) fn look_if_due(&mut self, control: &Control) {
        let Some(period) = self.period else { return };
        let now = Instant::now();
        if now < self.next {
            return;
        }
        (self.look)(control, Moment::Period);
        self.next += period;
        if self.next < now {
            // Looks that were missed, because the machine slept, are not made up for.
            self.next = now + period;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::control::ControlMap;

    #[test]
    fn looks_come_when_they_are_due_and_are_not_made_up_for() {
        let control = ControlMap::create().unwrap();
        let period = Duration::from_secs(1000);
        let mut looks = 0;
        let mut look = |_: &Control, moment| {
            assert_eq!(moment, Moment::Period);
            looks += 1;
        };
        let mut looker = Looker::new(Some(period), &mut look);
        assert_eq!(looker.timeout(), SAMPLE_PERIOD, "the supervisor has its own looks");
        looker.look_if_due(&control);
        // As if ten periods had passed without one.
        looker.next -= period * 11;
        assert_eq!(looker.timeout(), Duration::ZERO);
        looker.look_if_due(&control);
        looker.look_if_due(&control);
        assert!(looker.next > Instant::now());
        assert_eq!(looks, 1);
    }

    #[test]
    fn a_look_at_the_end_alone_is_never_due() {
        let control = ControlMap::create().unwrap();
        let mut look = |_: &Control, _| unreachable!("nothing is due");
        let mut looker = Looker::new(None, &mut look);
        assert_eq!(looker.timeout(), SAMPLE_PERIOD);
        looker.look_if_due(&control);
    }
}
