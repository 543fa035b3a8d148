//! How figures are printed.

use crate::samples::Samples;

use super::machine::Machine;

/// Prints what the figures hold for.
pub(crate) fn print_machine(machine: &Machine) {
    for (name, value) in &machine.facts {
        println!("{name:>24}: {value}");
    }
}

/// `0.43x (0.40..0.51)`
pub(crate) fn ratio(samples: &Samples) -> String {
    if samples.is_empty() {
        return "-".into();
    }
    format!("{:.2}x ({:.2}..{:.2})", samples.median(), samples.min(), samples.max())
}
